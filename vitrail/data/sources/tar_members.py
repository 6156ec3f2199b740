"""What is in a tar of images, named as webdataset does: `key.jpg` beside `key.cls` or `key.json`."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from vitrail.data.sources.folder import is_image_name, is_junk
from vitrail.errors import DataError

_LABEL_KEYS = ("label", "class", "cls", "class_name", "label_name")


def members(stream: BinaryIO, length: int, name: str, where: str) -> Iterator[dict[str, Any]]:
    """Yield {offset, size, label, id} for each image of the tar `name`; a damaged place is a row of size -1.

    `length` is the file's, `where` its place for messages. Raises DataError for a file that is no tar.
    """
    images: dict[str, tuple[int, int, str]] = {}
    labels: dict[str, str] = {}
    cut = False
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                if not member.isreg() or is_junk(base):
                    continue
                if member.offset_data + member.size > length:
                    cut = True
                    break
                key, _, suffix = base.partition(".")
                key = f"{folder}/{key}"
                if is_image_name(base) or suffix == "npy":
                    images[key] = (member.offset_data, member.size, member.name)
                elif (label := _label(tar, member, suffix)) is not None:
                    labels[key] = label
    except tarfile.TarError as error:
        if not images:
            raise DataError(
                f"{where} cannot be read as an uncompressed tar: {error}; compressed shards have "
                "no random access, unpack them with gunzip or zstd first"
            ) from error
        cut = True
    for key, (offset, size, member_name) in images.items():
        yield {"offset": offset, "size": size, "label": labels.get(key), "id": f"{name}/{member_name}"}
    if cut:
        yield {"offset": 0, "size": -1, "label": None, "id": name}


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> str | None:
    """Return the class a .cls or .json member states, else None."""
    if suffix not in ("cls", "json") or member.size > 1 << 20:
        return None
    stream = tar.extractfile(member)
    text = stream.read().decode("utf-8", errors="replace").strip() if stream else ""
    if suffix == "cls":
        return text or None
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        return None
    found = [record[key] for key in _LABEL_KEYS if key in record] if isinstance(record, dict) else []
    return str(found[0]) if found and isinstance(found[0], str | int) else None
