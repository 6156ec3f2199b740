"""Small real files of images with several labels, in every form in which people have them."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.item import DataSet, IndexedSource
from vitrail.data.labels.sets import LabelSets, label_names

SETS: list[tuple[str, ...]] = [("cat",), ("cat", "dog"), ("dog", "tree"), (), ("cat", "dog", "tree"), ("tree",)]
"""Labels of the images 0.png, 1.png and so on."""
NAMES = [f"{number}.png" for number in range(len(SETS))]


def picture(seed: int, side: int = 8) -> bytes:
    """The bytes of a PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def images(folder: Path, names: Iterable[str] = NAMES) -> Path:
    """A folder with these images."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(picture(number))
    return folder


def table(file: Path, rows: Iterable[Sequence[Any]]) -> Path:
    """A CSV with these rows, the header first."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)
    return file


def tar(file: Path, records: Sequence[dict[str, Any] | None]) -> Path:
    """A WebDataset shard: an image for each record, which stands beside it as JSON."""
    with tarfile.open(file, "w") as stream:
        for number, record in enumerate(records):
            members = {f"{number:03d}.png": picture(number)}
            members |= {} if record is None else {f"{number:03d}.json": json.dumps(record).encode()}
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                stream.addfile(info, io.BytesIO(data))
    return file


def names_of(source: IndexedSource) -> list[tuple[str, ...]]:
    """The names of the labels of each image."""
    assert isinstance(source.labels, LabelSets)
    return [tuple(label_names(source.labels, row, source.class_names)) for row in range(len(source))]


def only(found: DataSet) -> IndexedSource:
    """The single split of a data set."""
    (source,) = found.splits.values()
    return source
