"""Folders prepared by TensorFlow Datasets, read without TensorFlow.

`NAME[/CONFIG]/VERSION/` holds `NAME-SPLIT.tfrecord-00000-of-00005`, `dataset_info.json`, `features.json` and
`FEATURE.labels.txt`. Every record is checked once, when the folder is first opened; the position of
each image is then stored in the cache folder, so that any image takes a single read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vitrail.data.arrow_package import pa
from vitrail.data.benchmarks.vtab_tasks import TaskLabel
from vitrail.data.cache import cached_table
from vitrail.data.item import UNKNOWN, DataSet, Findings, Listed
from vitrail.data.labels.sets import order_classes
from vitrail.data.settings import Columns
from vitrail.data.sources.shard_files import LocalFiles
from vitrail.data.sources.shards import ShardSource, index_schema, index_table
from vitrail.data.sources.table import IMAGE_COLUMNS, LABEL_COLUMNS, find_column
from vitrail.data.sources.tfrecord import BYTES, Feature, example, records
from vitrail.errors import DataError
from vitrail.files import read_text

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
    tables = {split: _index(files, image, wanted, names) for split, files in prepared.splits.items()}
    for split, table in tables.items():
        if counts[split] not in (None, len(table)):
            raise DataError(
                f"{prepared.folder}: split {split!r} has {len(table):,} records, and dataset_info.json says "
                f"{counts[split]:,}: copy it or prepare it again"
            )
    seen = {name for table in tables.values() for name in table["label"].unique().drop_null().to_pylist()}
    names = names or order_classes(seen)
    splits: dict[str, Listed] = {
        split: ShardSource(LocalFiles(prepared.splits[split]), table, names) for split, table in tables.items()
    }
    return DataSet(splits, Findings("tfds"))


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
    for files in prepared.splits.values():
        for file in files:
            for record in records(file):
                return sorted(example(record.data))
    return []


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


def _index(files: list[Path], image: str, label: TaskLabel, names: list[str]) -> pa.Table:
    maker = _Index(files, image, label, names)
    settings: dict[str, object] = {"format": "tfds 2", "image": image, "label": maker.settings}
    return cached_table(files, settings, index_schema(), maker.write)


@dataclass(frozen=True)
class _Index:
    """Makes the index of a split: where each image lies, and its class."""

    files: list[Path]
    image: str
    label: TaskLabel
    names: list[str]

    @property
    def settings(self) -> list[object]:
        """What the index depends on, besides the files."""
        return [list(self.label.keys), getattr(self.label.compute, "__qualname__", ""), self.names]

    def write(self, writer: pa.RecordBatchWriter) -> None:
        rows = self._rows()
        while some := list(islice(rows, _ROWS)):
            writer.write_table(index_table(some))

    def _rows(self) -> Iterator[dict[str, Any]]:
        wanted = {self.image, *self.label.keys}
        for shard, file in enumerate(self.files):
            for number, record in enumerate(records(file)):
                place = f"{file}, record {number} (from 0)"
                try:
                    found = example(record.data, wanted)
                    begin, end = _image_span(found, self.image)
                    name = self._name(found, record.data)
                except DataError as error:
                    raise DataError(f"{place}: {error}") from error
                id = f"{file.name}[{number}]"
                yield {
                    "shard": shard,
                    "offset": record.offset + begin,
                    "size": end - begin,
                    "label": name,
                    "id": id,
                }

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


def _image_span(found: Mapping[str, Feature], key: str) -> tuple[int, int]:
    feature = found.get(key)
    if feature is None or feature.kind != BYTES or len(feature.spans) != 1:
        raise DataError(f"its feature {key!r} is not one image")
    return feature.spans[0]
