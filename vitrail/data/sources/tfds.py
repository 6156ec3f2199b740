"""Folders prepared by TensorFlow Datasets, read without TensorFlow.

`NAME[/CONFIG]/VERSION/` holds `NAME-SPLIT.tfrecord-00000-of-00005`, `dataset_info.json`, `features.json` and
`FEATURE.labels.txt`. Every record is checked once, when the folder is first opened; the position of
each image is then stored in the cache folder, so that any image takes a single read.

The records of TFRecord files, and the `tf.train.Example` in each, are read here, because TensorFlow is a dependency of
gigabytes and no small library reports where each image lies in the file. A record is its length (8 bytes), the masked
CRC-32C of the length, the data, and the masked CRC-32C of the data. An Example maps names to lists of bytes, floats or
integers, in the protocol buffers' wire format. A size in a file is trusted only up to the file's length, so a hostile
size is refused and not allocated.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.benchmarks.vtab_tasks import TaskLabel
from vitrail.data.cache import cached_table, pa
from vitrail.data.item import UNKNOWN, DataSet, Findings
from vitrail.data.labels.sets import order_classes
from vitrail.data.settings import Columns
from vitrail.data.sources.shard_files import LocalFiles
from vitrail.data.sources.shards import ShardSource, index_schema, index_table
from vitrail.data.sources.table import IMAGE_COLUMNS, LABEL_COLUMNS, find_column
from vitrail.errors import DataError
from vitrail.files import read_text, regular_descriptor

_LENGTH, _CHECK = 8, 4  # bytes
_HEADER = _LENGTH + _CHECK
_MASK_DELTA = 0xA282EAD8  # of the file format, against checksums of checksums
_BLOCK = 8 << 20  # bytes read from the disk at a time
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5  # wire types
BYTES, FLOATS, INTEGERS = 1, 2, 3
"""The kinds of a feature's list: their field numbers in the message `Feature`."""


class Record(NamedTuple):
    """One record of a file."""

    offset: int
    """Where its data begin in the file."""
    data: memoryview


class Feature(NamedTuple):
    """One named list of an Example."""

    kind: int
    """BYTES, FLOATS or INTEGERS; 0 for an empty one without a kind."""
    spans: list[tuple[int, int]]
    """BYTES: begin and end of each value in the data that were parsed."""
    numbers: np.ndarray
    """FLOATS: float32 [N]; INTEGERS: int64 [N]; else empty."""


def records(path: Path) -> Iterator[Record]:
    """Yield the records of a file in their order; each is checked before it is yielded.

    Raises DataError, naming file and record, for a wrong checksum, or a file that ends within a record.
    """
    position = 0
    with open(regular_descriptor(path), "rb", buffering=_BLOCK) as file:
        length = os.fstat(file.fileno()).st_size
        for number in count():
            if position >= length:
                return
            header, size = file.read(_HEADER), 0
            if len(header) == _HEADER:
                _check(header[:_LENGTH], header[_LENGTH:], f"{path}, record {number}", "length")
                size = int.from_bytes(header[:_LENGTH], "little")
            needed = _HEADER + size + _CHECK
            if position + needed > length:
                raise DataError(
                    f"{path} ends within record {number}: it needs {needed:,} bytes from byte {position:,} on, and "
                    f"{length - position:,} are there. Copy or prepare the file again"
                )
            data = file.read(size)
            _check(data, file.read(_CHECK), f"{path}, record {number}", "data")
            yield Record(position + _HEADER, memoryview(data))
            position += needed


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data` as TFRecord files store it: rotated by 15 bits, plus a constant."""
    import google_crc32c  # of the extra train; this module is imported to open any folder

    checksum = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _check(data: bytes, stored: bytes, where: str, what: str) -> None:
    if masked_crc32c(data) != int.from_bytes(stored, "little"):
        raise DataError(
            f"{where} (from 0): the checksum of its {what} is wrong. The file is damaged, or is not a TFRecord file. "
            "Copy or prepare it again"
        )


def example(data: bytes | memoryview, wanted: Collection[str] | None = None) -> dict[str, Feature]:
    """Return the features of a serialised `tf.train.Example`, or those that are `wanted`.

    Raises DataError where the bytes are not one.
    """
    buffer, found = memoryview(data), dict[str, Feature]()
    for number, features in _messages(buffer, 0, len(buffer)):
        for entry_number, entry in _messages(buffer, *features) if number == 1 else ():
            if entry_number == 1:
                name, value = _entry(buffer, *entry)
                if wanted is None or name in wanted:
                    found[name] = _feature(buffer, *value)
    return found


def _entry(buffer: memoryview, begin: int, end: int) -> tuple[str, tuple[int, int]]:
    """Return the key of a map's entry, and where its value is."""
    parts = dict(_messages(buffer, begin, end))
    key = parts.get(1, (begin, begin))
    try:
        return bytes(buffer[key[0] : key[1]]).decode(), parts.get(2, (begin, begin))
    except UnicodeDecodeError as error:
        raise _no_example("a name that is not UTF-8") from error


def _feature(buffer: memoryview, begin: int, end: int) -> Feature:
    kind, spans, numbers = 0, list[tuple[int, int]](), list[np.ndarray]()
    for number, content in _messages(buffer, begin, end):
        if number not in (BYTES, FLOATS, INTEGERS):
            continue
        if number != kind:  # one of three: the last one counts
            kind, spans, numbers = number, [], []
        for field, wire, start, stop in _fields(buffer, *content):
            if field != 1:
                continue
            if kind == BYTES and wire == _DELIMITED:
                spans.append((start, stop))
            elif kind == FLOATS and wire in (_DELIMITED, _FIXED32):
                numbers.append(_floats(buffer, start, stop))
            elif kind == INTEGERS and wire in (_DELIMITED, _VARINT):
                numbers.append(_integers(buffer, start, stop))
            else:
                raise _no_example(f"a value of wire type {wire} in a list of kind {kind}")
    dtype = np.float32 if kind == FLOATS else np.int64
    return Feature(kind, spans, np.concatenate(numbers) if numbers else np.zeros(0, dtype))


def _floats(buffer: memoryview, begin: int, end: int) -> np.ndarray:
    if (end - begin) % 4:
        raise _no_example("floats that are not 4 bytes each")
    return np.frombuffer(buffer[begin:end], dtype="<f4").astype(np.float32)


def _integers(buffer: memoryview, begin: int, end: int) -> np.ndarray:
    values = []
    while begin < end:
        value, begin = _varint(buffer, begin, end)
        values.append(value - (1 << 64) if value >> 63 else value)
    return np.array(values, dtype=np.int64)


def _messages(buffer: memoryview, begin: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (field number, (begin, end)) of the fields with a length: messages, text and bytes."""
    for number, wire, start, stop in _fields(buffer, begin, end):
        if wire == _DELIMITED:
            yield number, (start, stop)


def _fields(buffer: memoryview, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, begin and end of the value) of every field of a message."""
    while begin < end:
        tag, begin = _varint(buffer, begin, end)
        wire = tag & 7
        if wire == _VARINT:
            stop = _varint(buffer, begin, end)[1]
        elif wire == _DELIMITED:
            size, begin = _varint(buffer, begin, end)
            stop = begin + size
        elif wire in (_FIXED64, _FIXED32):
            stop = begin + (8 if wire == _FIXED64 else 4)
        else:
            raise _no_example(f"a field of wire type {wire}")
        if stop > end:
            raise _no_example("a value that is longer than what holds it")
        yield tag >> 3, wire, begin, stop
        begin = stop


def _varint(buffer: memoryview, begin: int, end: int) -> tuple[int, int]:
    """Return the number of variable length at `begin`, modulo 2^64, and where it ends."""
    if begin < end and buffer[begin] < 0x80:  # most of them are one byte
        return buffer[begin], begin + 1
    value = shift = 0
    for place in range(begin, min(end, begin + 10)):
        byte = buffer[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, place + 1
        shift += 7
    raise _no_example("a number that does not end")


def _no_example(what: str) -> DataError:
    return DataError(f"not a tf.train.Example: {what}")


_SHARD = re.compile(r"(?P<name>.+)-(?P<split>\w+)\.tfrecord-(?P<shard>\d{5,})-of-(?P<shards>\d{5,})")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_ROWS = 4096  # rows of the index in memory while it is written
_MOST_CLASSES = 1_000_000  # more than any data set has: a number in a file is not believed beyond it


@dataclass(frozen=True)
class PreparedData:
    """Description of a prepared folder."""

    folder: Path
    splits: dict[str, list[Path]]
    """Split -> its files, in order, none missing."""
    info: Mapping[str, Any]
    features: Mapping[str, Any]
    """Name as in the files -> description; {} where features.json is missing."""


def prepared_folders(path: Path) -> list[Path]:
    """Return `path` itself if it was prepared by TensorFlow Datasets, else the versions right below it."""
    if _has_shards(path):
        return [path]
    below = (child for child in path.iterdir() if _VERSION.fullmatch(child.name))
    return sorted((child for child in below if _has_shards(child)), key=version_of)


def version_of(folder: Path) -> tuple[int, ...]:
    """Return the version that a folder is named after, as numbers."""
    return tuple(map(int, folder.name.split(".")))


def _has_shards(path: Path) -> bool:
    return path.is_dir() and any(_SHARD.fullmatch(file.name) for file in path.glob("*.tfrecord-*-of-*"))


def read_tfds(path: Path, columns: Columns = Columns(), label: TaskLabel | None = None) -> DataSet:
    """Open a folder that TensorFlow Datasets prepared. The columns are names of features; `label` computes one.

    Raises DataError (several versions, missing or damaged files, another format, no labels) and UsageError.
    """
    versions = prepared_folders(path)
    if len(versions) > 1:
        listing = ", ".join(folder.name for folder in versions)
        raise DataError(f"{path} holds the versions {listing}: give the folder of one of them")
    with _understood(versions[0]):
        prepared = _describe(versions[0])
        image, default = _keys(prepared, columns, computed=label is not None)
        wanted = label or TaskLabel((default,))
        names = list(wanted.names) or _class_names(prepared, wanted.keys[0])
        counts = {split: _stated_count(prepared, split) for split in prepared.splits}
    tables = {split: _Index(files, image, wanted, names).table() for split, files in prepared.splits.items()}
    for split, table in tables.items():
        if counts[split] not in (None, len(table)):
            raise DataError(
                f"{prepared.folder}: split {split!r} has {len(table):,} records, and dataset_info.json says "
                f"{counts[split]:,}: copy it or prepare it again"
            )
    seen = {name for table in tables.values() for name in table["label"].unique().drop_null().to_pylist()}
    names = names or order_classes(seen)
    splits = {split: ShardSource(LocalFiles(prepared.splits[split]), table, names) for split, table in tables.items()}
    return DataSet(dict(splits), Findings("tfds"))


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """Context that raises DataError for JSON that TensorFlow Datasets would not write."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the .json files in {folder} are not as TensorFlow Datasets writes them: {error}; prepare it again"
        ) from error


def _describe(folder: Path) -> PreparedData:
    info = _json(folder / "dataset_info.json")
    kind = str(info.get("fileFormat") or info.get("file_format") or "tfrecord").lower()
    if kind != "tfrecord":
        raise DataError(f"{folder} holds {kind} files: prepare it with file_format tfrecord")
    groups: dict[str, list[tuple[int, int, Path]]] = {}
    for file in folder.glob("*.tfrecord-*-of-*"):
        if match := _SHARD.fullmatch(file.name):
            groups.setdefault(match["split"], []).append((int(match["shard"]), int(match["shards"]), file))
    listed = [str(split.get("name")) for split in info.get("splits", [])]
    if missing := [name for name in listed if name not in groups]:
        raise DataError(f"{folder} lacks all files of split {missing[0]!r}: copy it or prepare it again")
    splits = {}
    for name in sorted(groups, key=lambda name: (listed.index(name) if name in listed else len(listed), name)):
        shards = sorted(groups[name])
        count = shards[0][1]
        wrong = next((place for place, shard in enumerate(shards) if shard[:2] != (place, count)), len(shards))
        if len(shards) != count or wrong < count:
            raise DataError(
                f"{folder}: split {name!r} is in {count} files, and number {wrong:05d} is missing or there twice: copy "
                "or prepare it again"
            )
        splits[name] = [file for _, _, file in shards]
    return PreparedData(folder, splits, info, _flatten(_json(folder / "features.json")))


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path, DataError))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}; prepare the data set again") from error
    return value if isinstance(value, dict) else {}


def _flatten(feature: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return name -> description of the features in features.json, of both generations of that file."""
    below = feature.get("featuresDict", {}).get("features")
    if below is None and "sequence" in feature:
        below = {"": feature["sequence"].get("feature", {})}
    if below is None and isinstance(content := feature.get("content"), dict) and "type" in feature:
        kind = str(feature["type"]).rpartition(".")[2]
        below = content if kind == "FeaturesDict" else {"": content["feature"]} if "feature" in content else None
    if not below:
        return {prefix: feature} if prefix else {}
    flat: dict[str, Any] = {}
    for name, inner in below.items():
        flat |= _flatten(inner, "/".join(filter(None, (prefix, name))))
    return flat


def _kind(feature: Mapping[str, Any]) -> str:
    return str(feature.get("pythonClassName") or feature.get("type") or "").rpartition(".")[2]


def _keys(prepared: PreparedData, columns: Columns, *, computed: bool) -> tuple[str, str]:
    """Return the names of the features that are the image and the label."""
    names = list(prepared.features) or _first_names(prepared)
    where = str(prepared.folder)
    usual_image, usual_label = _supervised(prepared.info)
    if columns.image is None and usual_image not in names:
        images = [name for name, feature in prepared.features.items() if _kind(feature) == "Image"]
        usual_image = images[0] if images else None
    chosen = find_column(names, columns.image or usual_image, IMAGE_COLUMNS, "image", where)
    if computed:
        return chosen, ""
    usual_label = usual_label if usual_label in names else None
    return chosen, find_column(names, columns.label or usual_label, LABEL_COLUMNS, "label", where)


def _supervised(info: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the features that the data set is usually trained with, (input, target), where it says."""
    keys = info.get("supervisedKeys") or {}
    pair = [item.get("featureKey") for item in keys.get("tuple", {}).get("items", [])]
    pair = pair or [keys.get("input"), keys.get("output")]
    return (pair[0], pair[1]) if len(pair) == 2 else (None, None)


def _first_names(prepared: PreparedData) -> list[str]:
    found = (record for files in prepared.splits.values() for file in files for record in records(file))
    return next((sorted(example(record.data)) for record in found), [])


def _class_names(prepared: PreparedData, key: str) -> list[str]:
    """Return the names of a ClassLabel, its numbers where they have none; [] where the label is no ClassLabel."""
    file = prepared.folder / f"{key.replace('/', '-')}.labels.txt"
    if file.exists():
        names = read_text(file, DataError).splitlines()
        names = names[:-1] if names and not names[-1] else names
        if len(set(names)) != len(names):  # two classes of one name stay two
            names = [f"{name} ({number})" for number, name in enumerate(names)]
        return names
    feature = prepared.features.get(key, {})
    content = feature.get("classLabel") or feature.get("content") or {}
    count = content.get("numClasses") or content.get("num_classes") or 0
    if not 0 <= int(count) <= _MOST_CLASSES:
        raise ValueError(f"{key} has {count} classes")
    return [str(number) for number in range(int(count))]


def _stated_count(prepared: PreparedData, split: str) -> int | None:
    """Return how many records dataset_info.json says a split has, None where it says nothing."""
    stated: Mapping[str, Any] = next((s for s in prepared.info.get("splits", []) if s.get("name") == split), {})
    if lengths := stated.get("shardLengths"):
        return sum(map(int, lengths))
    count = stated.get("statistics", {}).get("numExamples")
    return None if count is None else int(count)


@dataclass(frozen=True)
class _Index:
    """Makes the index of a split: where each image lies, and its class."""

    files: list[Path]
    image: str
    label: TaskLabel
    names: list[str]

    def table(self) -> pa.Table:
        """Return the index, from the cache or made."""
        label = [list(self.label.keys), getattr(self.label.compute, "__qualname__", ""), self.names]
        settings: dict[str, object] = {"format": "tfds 2", "image": self.image, "label": label}
        return cached_table(self.files, settings, index_schema(), self._write)

    def _write(self, writer: pa.RecordBatchWriter) -> None:
        rows = self._rows()
        while some := list(islice(rows, _ROWS)):
            writer.write_table(index_table(some))

    def _rows(self) -> Iterator[dict[str, Any]]:
        wanted = {self.image, *self.label.keys}
        for shard, file in enumerate(self.files):
            for number, record in enumerate(records(file)):
                try:
                    found = example(record.data, wanted)
                    image = found.get(self.image)
                    if image is None or image.kind != BYTES or len(image.spans) != 1:
                        raise DataError(f"its feature {self.image!r} is not one image")
                    ((begin, end),) = image.spans
                    name = self._name(found, record.data)
                except DataError as error:
                    raise DataError(f"{file}, record {number} (from 0): {error}") from error
                row = {"shard": shard, "offset": record.offset + begin, "size": end - begin, "label": name}
                yield {**row, "id": f"{file.name}[{number}]"}

    def _name(self, found: Mapping[str, Feature], data: memoryview) -> str | None:
        """Return the name of a record's class, None where it is not known."""
        if missing := [key for key in self.label.keys if key not in found]:
            raise DataError(f"it has no feature {missing[0]!r}")
        first = found[self.label.keys[0]]
        if self.label.compute is None and first.kind == BYTES:
            begin, end = first.spans[0] if first.spans else (0, 0)
            return str(data[begin:end], "utf-8", "replace") or None
        numbers = {key: found[key].numbers for key in self.label.keys}
        try:
            value = int(first.numbers[0]) if self.label.compute is None else self.label.compute(numbers)
        except (ValueError, IndexError) as error:
            raise DataError(f"no label can be made of its {' and '.join(self.label.keys)}") from error
        if value == UNKNOWN and self.label.compute is None:
            return None
        if not self.names:
            return str(value)
        if not 0 <= value < len(self.names):
            raise DataError(f"label {value} is not one of the {len(self.names)} classes 0..{len(self.names) - 1}")
        return self.names[value]
