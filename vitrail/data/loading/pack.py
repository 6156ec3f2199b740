"""Write a data set as packed shards: small JPEGs (or raw pixels) in tars of equal size, with an index.

Reading is sequential and needs a quarter of the decoding: training wants 224 pixels, cameras store 4,000.
Every shard and the index appear under their names only when complete, the index last, so an
interrupted pack continues where it stopped, and a pack with an index is complete."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import simplejpeg

from vitrail.data.cache import read_table, refuse_within, write_table
from vitrail.data.images.decode import decode
from vitrail.data.images.ops import resize
from vitrail.data.item import Listed, Rejected, View
from vitrail.data.loading.order import ORDER, stream
from vitrail.data.loading.prefetch import ordered, stuck, threads
from vitrail.data.sources.open import find
from vitrail.data.sources.shards import INDEX, SCHEMA, index_table
from vitrail.data.split import fingerprint
from vitrail.errors import DataError, DecodeError, UsageError

Progress = Callable[[int, int], None]
"""Called with (images done, images in all)."""

_BLOCK = 512  # of a tar


@dataclass(frozen=True)
class Packed:
    """Result of packing one split."""

    folder: Path
    count: int
    """Images packed."""
    shards: int
    bytes: int
    bad: list[Rejected]
    """Images that were left out because they cannot be decoded."""


def pack_data(path: str, folder: str | Path, **choices: Any) -> dict[str, Packed]:
    """Pack every split of the data at `path` into `folder/<split>` (`folder` itself if there is one split).

    `choices` are those of `pack`. Raises DataError for a `folder` within the data.
    """
    target = refuse_within(folder, path)
    found = find(path)
    return {name: pack(source, target / name, **choices) for name, source in found.splits.items()}


def _shuffled(source: Listed) -> Listed:
    """Return the images in a fixed random order, independent of their classes."""
    return View(source, stream(0, 0, 0, ORDER).permutation(len(source)))


def pack(
    source: Listed,
    folder: str | Path,
    *,
    short_side: int = 256,
    quality: int | None = 90,
    shard_bytes: int = 1 << 28,
    shuffle: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> Packed:
    """Write the images of `source`, none with a shorter side above `short_side` pixels, to shards in
    `folder`.

    Images are JPEGs of `quality` 1..100 (4:2:0), or uint8 arrays without loss for None; a JPEG that is small
    enough is copied as it is. A shard ends with the image that reaches `shard_bytes`. With `shuffle` the images are
    in random order, so that neighbours can be shown together (`Data.together`). Called again with the
    same source and choices it continues or finds everything done; the result is the same to the bit. Raises DataError
    for a folder that holds something else and UsageError for impossible choices."""
    if short_side < 1 or shard_bytes < 1 or not (quality is None or 1 <= quality <= 100):
        raise UsageError(
            f"short_side {short_side} and shard_bytes {shard_bytes} must be positive, quality "
            f"{quality} in 1..100 or None"
        )
    folder = Path(folder)
    settings = {
        "short_side": short_side,
        "quality": quality,
        "shard_bytes": shard_bytes,
        "source": fingerprint({"": source}),
        "version": 1,
    }
    if shuffle:
        settings["shuffle"] = True
        source = _shuffled(source)
    if (folder / INDEX).is_file():
        return _finished(folder, settings)
    parts = _resume(folder, settings)
    first = parts[-1]["next"] if parts else 0
    with threads(workers) as pool:
        encode = partial(_encode, source, short_side, quality)
        ahead, todo = 4 * max(1, workers), range(first, len(source))
        images = ordered(pool, encode, todo, ahead=ahead, hung=lambda index: stuck(source.id(index)))
        while first < len(source):
            parts.append(_write_shard(folder, len(parts), images, source, first, settings, progress))
            first = parts[-1]["next"]
    _write_index(folder, parts, source, settings)
    return _finished(folder, settings)


def _encode(source: Listed, short_side: int, quality: int | None, index: int) -> tuple[str, bytes] | DecodeError:
    """Return (suffix, bytes) of one image, or the error of reading it."""
    try:
        data = source[index].image
        # twice the size is enough: the rest of the way down is antialiased
        image = decode(data, short_side=2 * short_side) if isinstance(data, bytes) else data
    except DecodeError as error:
        return error
    height, width = image.shape[:2]
    shorter = min(height, width)
    if shorter > short_side:
        image = resize(image, max(1, round(height * short_side / shorter)), max(1, round(width * short_side / shorter)))
    elif isinstance(data, bytes) and data.startswith(b"\xff\xd8") and quality is not None:
        return "jpg", data
    if quality is None:
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(image))
        return "npy", stream.getvalue()
    return "jpg", simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality, "RGB", "420")


def _write_shard(
    folder: Path,
    number: int,
    images: Iterator[tuple[str, bytes] | DecodeError],
    source: Listed,
    first: int,
    settings: dict[str, Any],
    progress: Progress | None,
) -> dict[str, Any]:
    """Write one shard and the part of the index that belongs to it; return that part's record."""
    name = f"shard-{number:05d}.tar"
    rows: list[dict[str, Any]] = []
    bad: list[tuple[str, str]] = []
    temporary = folder / f".{name}.tmp"
    with open(temporary, "wb") as file:
        following = first
        for index, encoded in enumerate(images, start=first):
            following = index + 1
            if progress is not None:
                progress(following, len(source))
            if isinstance(encoded, DecodeError):
                bad.append((source.id(index), encoded.reason))
                continue
            suffix, data = encoded
            offset = _add(file, f"{index:09d}.{suffix}", data)
            label = int(source.labels[index])
            if label >= 0:
                _add(file, f"{index:09d}.cls", str(label).encode())
            names = source.class_names[label] if label >= 0 else None
            rows.append({"shard": number, "offset": offset, "size": len(data), "label": names, "id": source.id(index)})
            if file.tell() >= settings["shard_bytes"]:
                break
        file.write(bytes(2 * _BLOCK))  # how a tar ends
        length = file.tell()
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / name)
    record = {"name": name, "bytes": length, "next": following, "bad": bad, "settings": settings}
    table = index_table(rows).replace_schema_metadata({"vitrail": json.dumps(record)})
    write_table(_part(folder, number), table.schema, lambda writer: writer.write_table(table))
    return record


def _add(file: io.BufferedWriter, name: str, data: bytes) -> int:
    """Append one member, without owner or date, and return where its bytes begin."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    file.write(info.tobuf(tarfile.USTAR_FORMAT))
    offset = file.tell()
    file.write(data)
    file.write(bytes(-len(data) % _BLOCK))
    return offset


def _part(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.part"


def _resume(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of the shards that are complete; make the folder if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    while (part := _part(folder, len(records))).is_file():
        record = json.loads(read_table(part).schema.metadata[b"vitrail"])
        _same(folder, record["settings"], settings)
        shard = folder / record["name"]
        if not shard.is_file() or shard.stat().st_size != record["bytes"]:
            break
        records.append(record)
    strangers = [file.name for file in folder.iterdir() if not file.name.startswith(("shard-", ".shard-"))]
    if strangers:
        raise DataError(f"{folder} holds other files ({', '.join(sorted(strangers)[:3])}): choose a new folder")
    return records


def _same(folder: Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = [
        f"{key} {there.get(key)!r} instead of {wanted.get(key)!r}"
        for key in {**wanted, **there}
        if there.get(key) != wanted.get(key)
    ]
    if different:
        raise DataError(f"{folder} holds shards of another pack ({', '.join(different)}): choose a new folder")


def _write_index(folder: Path, parts: list[dict[str, Any]], source: Listed, settings: dict[str, Any]) -> None:
    manifest = {
        "settings": settings,
        "class_names": source.class_names,
        "shards": [{"name": part["name"], "bytes": part["bytes"]} for part in parts],
        "bad": [row for part in parts for row in part["bad"]],
    }

    def copy(writer: pa.RecordBatchWriter) -> None:
        for number in range(len(parts)):
            writer.write_table(read_table(_part(folder, number)))

    write_table(folder / INDEX, SCHEMA.with_metadata({"vitrail": json.dumps(manifest)}), copy)


def _finished(folder: Path, settings: dict[str, Any]) -> Packed:
    """Describe a complete pack; raises DataError if it was made from other data or with other choices."""
    table = read_table(folder / INDEX)
    manifest = json.loads(table.schema.metadata[b"vitrail"])
    _same(folder, manifest["settings"], settings)
    for part in folder.glob("shard-*.part"):
        part.unlink()
    shards = manifest["shards"]
    bad = [Rejected(*row) for row in manifest["bad"]]
    return Packed(folder, len(table), len(shards), sum(shard["bytes"] for shard in shards), bad)
