"""Write a data set as packed shards: small JPEGs (or raw pixels) in tars of about equal size, with an index.

Images of other bands than RGB with 8 bits are stored without loss of bits, as arrays of their own type.

Packed shards are read sequentially, and decoding takes a quarter of the time: training needs 224 pixels, cameras store
4,000. Each shard and the index get their names only when they are complete, the index last. An interrupted pack
therefore continues where it stopped, and a pack with an index is complete.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import simplejpeg

from vitrail.data.cache import pa, read_arrow, refuse_within, write_arrow
from vitrail.data.check import OnProgress
from vitrail.data.images.bands import bands_to_keep, layouts
from vitrail.data.images.decode import decode
from vitrail.data.images.geometry import resize
from vitrail.data.images.pixels import check_finite
from vitrail.data.images.stored import read_stored
from vitrail.data.item import IndexedSource, Rejected, Subset
from vitrail.data.labels.masks import Masks
from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import Answers, label_at, stored_texts
from vitrail.data.loading.order import ORDER, stream
from vitrail.data.loading.prefetch import LostImages, each_image, threads
from vitrail.data.settings import Bits, Data
from vitrail.data.sources.open import open_and_warn
from vitrail.data.sources.shards import INDEX, index_schema, index_table, packed_manifest, understood
from vitrail.data.split import fingerprint
from vitrail.errors import DataError, DecodeError, UsageError
from vitrail.files import LOCK, check_writable, locked_folder, refuse_other_files, replacing
from vitrail.words import as_text, one_line

EncodedImage = tuple[int, tuple[str, bytes] | DecodeError]
"""Index of an image, and (suffix, bytes) of its file in a shard or the error from reading it."""

_BLOCK = 512  # bytes per block of a tar
_UNFINISHED = re.compile(rf"\.(shard-\d{{5}}\.(tar|part)|{re.escape(INDEX)})(\.tmp)?-")
"""Beginning of the names of temporary files, which a call that was killed leaves."""


@one_line
@dataclass(frozen=True)
class PackResult:
    """Result of packing one split."""

    folder: Path
    count: int
    """Number of packed images."""
    shards: int
    """Number of shards."""
    bytes: int
    """Size of all shards."""
    bad: list[Rejected]
    """Images that were left out because they cannot be decoded."""


def pack_data(data: Data | str, folder: str | Path, *, outside: bool = False, **choices: Any) -> dict[str, PackResult]:
    """Pack every split of the data into `folder/<split>`, or into `folder` if there is only one split.

    `choices` are those of `pack`. Raises DataError if `folder` lies within the data or holds other files, and unless
    `outside` if images lie outside the folder of the data, through links or paths: packing would copy them.
    """
    data = data if isinstance(data, Data) else Data(path=data)
    target = refuse_within(folder, data.path)
    check_writable(target, folder=True)
    found = open_and_warn(data)
    if any(isinstance(source.labels, Answers) for source in found.splits.values()):
        raise UsageError("data pack stores one label for an image. Leave data.answers out, and keep the CSV")
    if any(isinstance(source.labels, Masks) for source in found.splits.values()):
        raise UsageError(f"data pack stores no masks, and {data.path} has them. Keep its folders as they are")
    if found.findings.outside and not outside:
        raise DataError(
            f"{found.findings.outside:,} images lie outside {data.path}, the first {found.findings.first_outside}, and "
            "packing copies them. Remove the links or rows, or copy them knowingly with --outside"
        )
    first = next(iter(found.splits.values()))
    bands = bands_to_keep(data, layouts(first, data.channels))
    for name in found.splits:  # all of them before the first is written
        _check_place(target / name)
    if "" not in found.splits:
        refuse_other_files(target, found.splits.__contains__, DataError)
    return {name: pack(source, target / name, bands=bands, **choices) for name, source in found.splits.items()}


def pack(
    source: IndexedSource,
    folder: str | Path,
    *,
    bands: tuple[int, Bits] | None = None,
    short_side: int = 256,
    quality: int | None = 90,
    shard_bytes: int = 1 << 28,
    shuffle: bool = False,
    workers: int = 0,
    progress: OnProgress | None = None,
) -> PackResult:
    """Write the images of `source` to shards in `folder`, resized so that no shorter side exceeds `short_side` pixels.

    Images are stored as JPEGs of `quality` 1..100 (4:2:0), or without loss as uint8 arrays if `quality` is None. A JPEG
    that is small enough is copied unchanged. `bands` are number and depth of other bands than RGB with 8 bits, which
    are stored as arrays [H, W, bands] of their own type, whatever `quality`. A shard ends with the image that reaches
    `shard_bytes`. With `shuffle` the images are in a fixed random order, so that neighbours can be shown together
    (`Data.together`). A second call with the same source and choices continues the pack; the result has the same bits
    as that of one call. Raises DataError for a folder that holds something else or that another process packs into,
    and UsageError for impossible choices.
    """
    if short_side < 1 or shard_bytes < 1 or not (quality is None or 1 <= quality <= 100):
        raise UsageError(
            f"short_side is {short_side} and shard_bytes {shard_bytes}; both must be at least 1. quality is {quality}; "
            "it must be in 1..100, or None"
        )
    folder = Path(folder)
    _check_place(folder)
    settings: dict[str, Any] = {
        "short_side": short_side,
        "quality": quality,
        "shard_bytes": shard_bytes,
        "source": fingerprint({"": source}),
        "version": 1,
    }
    if bands is not None:
        settings["bands"] = list(bands)
    if shuffle:
        settings["shuffle"] = True
        source = Subset(source, stream(0, 0, 0, ORDER).permutation(len(source)))
    with locked_folder(folder, DataError):
        if not (folder / INDEX).is_file():
            records = _resume(folder, settings)
            first = records[-1]["next"] if records else 0
            with threads(workers) as pool:
                encode = partial(_encode, short_side, quality) if bands is None else partial(_kept, short_side, bands)
                encoded = each_image(pool, encode, source, range(first, len(source)))
                images = _reported(enumerate(encoded, start=first), source, progress)
                while first < len(source):
                    records.append(_write_shard(folder, len(records), images, source, settings))
                    first = records[-1]["next"]
            _write_index(folder, records, source, settings)
        return _finished(folder, settings)


def _reported(
    images: Iterator[EncodedImage], source: IndexedSource, progress: OnProgress | None
) -> Iterator[EncodedImage]:
    lost = LostImages(len(source))
    for index, encoded in images:
        lost.see(source.id(index), encoded.reason if isinstance(encoded, DecodeError) else None)
        if progress is not None:
            progress(index + 1, len(source))
        yield index, encoded


def _encode(short_side: int, quality: int | None, source: IndexedSource, index: int) -> tuple[str, bytes] | DecodeError:
    """Return (suffix, bytes) of one image, or the error from reading it."""
    try:
        data = source[index].image
        # twice the final size is enough, because the remaining reduction is antialiased
        image = decode(data, short_side=2 * short_side) if isinstance(data, bytes) else data
    except DecodeError as error:
        return error
    small = _shrunk(image, short_side)
    if small is image and isinstance(data, bytes) and data.startswith(b"\xff\xd8") and quality is not None:
        return "jpg", data
    image = small
    if quality is None:
        return "npy", _array(image)
    return "jpg", simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality, "RGB", "420")


def _kept(
    short_side: int, bands: tuple[int, Bits], source: IndexedSource, index: int
) -> tuple[str, bytes] | DecodeError:
    """Return (suffix, bytes) of one image of other bands, in its own type, or the error from reading it."""
    try:
        values = read_stored(source[index].image, *bands)
        if bands[1] == "32f":
            check_finite(values)  # a resized image would have more of them
    except DecodeError as error:
        return error
    small = _shrunk(values, short_side)
    if small is not values and np.issubdtype(values.dtype, np.integer):
        small = np.rint(small)  # an average of values lies within their range
    return "npy", _array(small.astype(values.dtype, copy=False))


def _shrunk(image: np.ndarray, short_side: int) -> np.ndarray:
    """Return an image [H, W, channels] whose shorter side is at most `short_side`; of other types than uint8 float."""
    height, width = image.shape[:2]
    shorter = min(height, width)
    if shorter <= short_side:
        return image
    image = image if image.shape[2] == 3 and image.dtype == np.uint8 else image.astype(np.float32)
    return resize(image, max(1, round(height * short_side / shorter)), max(1, round(width * short_side / shorter)))


def _array(image: np.ndarray) -> bytes:
    """Return the bytes of an .npy file."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(image))
    return file.getvalue()


def _write_shard(
    folder: Path, number: int, images: Iterator[EncodedImage], source: IndexedSource, settings: dict[str, Any]
) -> dict[str, Any]:
    """Write one shard and its part of the index from the next images, and return the record of the part.

    The part is complete before the shard gets its name: a shard without a part is not ours.
    """
    name = f"shard-{number:05d}.tar"
    rows: list[dict[str, Any]] = []
    bad: list[tuple[str, str]] = []
    index = -1
    with replacing(folder / name) as temporary:
        with temporary.open("wb") as file:
            for index, encoded in images:
                if isinstance(encoded, DecodeError):
                    bad.append((source.id(index), encoded.reason))
                    continue
                suffix, data = encoded
                offset = _add(file, f"{index:09d}.{suffix}", data)
                for kind, label in _label_member(source, index):
                    _add(file, f"{index:09d}.{kind}", label)
                (text,) = stored_texts(source.labels[index : index + 1], source.class_names)
                row = {"shard": number, "offset": offset, "size": len(data), "label": text or None}
                rows.append({**row, "id": source.id(index)})
                if file.tell() >= settings["shard_bytes"]:
                    break
            file.write(bytes(2 * _BLOCK))  # the end of a tar
            length = file.tell()
        record = {"name": name, "bytes": length, "next": index + 1, "bad": bad, "settings": settings}
        table = index_table(rows).replace_schema_metadata({"vitrail": json.dumps(record)})
        write_arrow(_part(folder, number), table.schema, lambda writer: writer.write_table(table))
    return record


def _label_member(source: IndexedSource, index: int) -> Iterator[tuple[str, bytes]]:
    """Yield suffix and bytes of the member with the label of an image; nothing if it is not known."""
    label = label_at(source.labels, index)
    if isinstance(label, int):
        if label >= 0:
            yield "cls", str(label).encode()
    elif not isinstance(source.labels, Numbers):
        names = [as_text(source.class_names[one]) for one in label.tolist()]
        yield "json", json.dumps({"labels": names}).encode()
    elif np.isfinite(label).all():
        yield "json", json.dumps({"label": label.tolist()}).encode()


def _add(file: BinaryIO, name: str, data: bytes) -> int:
    """Append one member without owner and date, and return the offset of its bytes."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    file.write(info.tobuf(tarfile.USTAR_FORMAT))
    offset = file.tell()
    file.write(data)
    file.write(bytes(-len(data) % _BLOCK))
    return offset


def _part(folder: Path, number: int) -> Path:
    """Return the path of the part of the index that belongs to a shard."""
    return folder / f"shard-{number:05d}.part"


def _check_place(folder: Path) -> None:
    """Raise DataError if `folder` holds anything that `pack` did not write, such as the shards of another program.

    Each of our shards has a part of the index, written before the shard, or is listed in the finished index.
    """
    parts = {file.stem for file in folder.glob("shard-*.part")} if folder.is_dir() else set()
    finished = folder / INDEX
    if finished.is_file():
        with understood(str(finished)):
            parts |= {Path(shard["name"]).stem for shard in packed_manifest(read_arrow(finished))["shards"]}
    names = {INDEX, LOCK, *(f"{stem}{suffix}" for stem in parts for suffix in (".part", ".tar"))}
    refuse_other_files(folder, lambda name: name in names or _UNFINISHED.match(name) is not None, DataError)


def _resume(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of the complete shards. Remove what an interrupted call left in the folder."""
    records: list[dict[str, Any]] = []
    while (part := _part(folder, len(records))).is_file():
        record = json.loads(read_arrow(part).schema.metadata[b"vitrail"])
        _same(folder, record["settings"], settings)
        shard = folder / record["name"]
        if not shard.is_file() or shard.stat().st_size != record["bytes"]:
            break
        records.append(record)
    for file in folder.iterdir():
        if _UNFINISHED.match(file.name):
            file.unlink()
    return records


def _same(folder: Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise DataError unless both settings are equal."""
    different = [
        f"{key} {there.get(key)!r} instead of {wanted.get(key)!r}"
        for key in {**wanted, **there}
        if there.get(key) != wanted.get(key)
    ]
    if different:
        raise DataError(f"{folder} contains shards of another pack ({', '.join(different)}). Choose a new folder")


def _write_index(folder: Path, records: list[dict[str, Any]], source: IndexedSource, settings: dict[str, Any]) -> None:
    manifest: dict[str, Any] = {
        "settings": settings,
        "class_names": [as_text(name) for name in source.class_names],
        "shards": [{"name": record["name"], "bytes": record["bytes"]} for record in records],
        "bad": [row for record in records for row in record["bad"]],
    }
    if isinstance(source.labels, Numbers):
        manifest["numbers"] = True

    def copy(writer: pa.RecordBatchWriter) -> None:
        for number in range(len(records)):
            writer.write_table(read_arrow(_part(folder, number)))

    write_arrow(folder / INDEX, index_schema().with_metadata({"vitrail": json.dumps(manifest)}), copy)


def _finished(folder: Path, settings: dict[str, Any]) -> PackResult:
    """Return the description of a complete pack. Raises DataError if its data or its choices are not these."""
    table = read_arrow(folder / INDEX)
    manifest = json.loads(table.schema.metadata[b"vitrail"])
    _same(folder, manifest["settings"], settings)
    for part in folder.glob("shard-*.part"):
        part.unlink()
    shards = manifest["shards"]
    bad = [Rejected(*row) for row in manifest["bad"]]
    return PackResult(folder, len(table), len(shards), sum(shard["bytes"] for shard in shards), bad)
