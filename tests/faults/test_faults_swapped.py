"""Fault 70: something that is no file takes the place of a file of data after the data were listed."""

from __future__ import annotations

import os
import resource
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import prepared
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run, start
from random_inputs import MANY
from scenes import draw

KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless": lambda file: file.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}
MOST = 3 << 30
"""Bytes of memory, of which the libraries take a part."""


def table(place: Path) -> Path:
    draw(place / "images")
    rows = [f"images/{name}/{i}.png,{name}\n" for name in ("blue", "red") for i in range(8)]
    (place / "table.csv").write_text("path,label\n" + "".join(rows))
    return place / "table.csv"


def index_list(place: Path) -> Path:
    draw(place / "images")
    rows = [f"images/{name}/{i}.png {name}\n" for name in ("blue", "red") for i in range(8)]
    (place / "train.txt").write_text("".join(rows))
    return place / "train.txt"


def image_list(place: Path) -> Path:
    draw(place / "images")
    assert run("data", "dedup", place / "images", "--keep-list", place / "list.csv", cwd=place).process.exitcode == 0
    return place / "list.csv"


def tar(place: Path) -> Path:
    photos = draw(place.parent / "photos")
    with tarfile.open(place / "photos.tar", "w") as file:
        for image in sorted(photos.rglob("*.png")):
            file.add(image, f"{image.parent.name}-{image.name}")
    return place / "photos.tar"


def parquet(place: Path) -> Path:
    photos = sorted(draw(place.parent / "photos").rglob("*.png"))
    columns = {"image": [file.read_bytes() for file in photos], "label": [file.parent.name for file in photos]}
    pq.write_table(pa.table(columns), place / "train.parquet")
    return place / "train.parquet"


def parquet_of_paths(place: Path) -> Path:
    photos = sorted(draw(place / "images").rglob("*.png"))
    columns = {"path": [str(p.relative_to(place)) for p in photos], "label": [p.parent.name for p in photos]}
    pq.write_table(pa.table(columns), place / "train.parquet")
    return place / "train.parquet"


def arrays(place: Path) -> Path:
    np.savez(place / "a.npz", images=np.zeros((8, 4, 4), np.uint8), labels=np.arange(8) % 2)
    return place / "a.npz"


def index(place: Path) -> Path:
    photos = draw(place.parent / "photos")
    assert run("data", "pack", photos, place / "packed", cwd=place.parent).process.exitcode == 0
    return place / "packed" / "index.arrow"


def records(place: Path) -> Path:
    photos = sorted(draw(place.parent / "photos").rglob("*.png"))
    rows = [{"image": file.read_bytes(), "label": int(file.parent.name == "red")} for file in photos]
    return next(
        prepared.prepare(place / "toy" / "1.0.0", "toy", {"train": rows}, labels={"label": ["blue", "red"]}).glob(
            "*.tfrecord*"
        )
    )


def description(place: Path) -> Path:
    return records(place).with_name("features.json")


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Path]]] = {
    "a table": (table, lambda file: file),
    "a table in a folder": (table, lambda file: file.parent),
    "a list of images": (image_list, lambda file: file),
    "an index list": (index_list, lambda file: file.parent),
    "a tar": (tar, lambda file: file),
    "a tar in a folder": (tar, lambda file: file.parent),
    "parquet": (parquet, lambda file: file),
    "parquet in a folder": (parquet, lambda file: file.parent),
    "parquet of paths": (parquet_of_paths, lambda file: file),
    "arrays": (arrays, lambda file: file),
    "an index of shards": (index, lambda file: file.parent),
    "records": (records, lambda file: file.parent),
    "a description of records": (description, lambda file: file.parent),
}
"""Kind of data -> (function that writes it and returns the file that is replaced, path that the user gives)."""


def swapping(kind: str, file: str) -> None:
    """The file is replaced when the layout of the data is known and nothing of them has been read."""
    from vitrail.data.sources import layouts
    from vitrail.data.sources import open as opener

    resource.setrlimit(resource.RLIMIT_DATA, (MOST, MOST))
    listed, read_file = layouts._layouts, opener._read_file
    left = [Path(file)]

    def swap() -> None:
        while left:
            left[0].unlink()
            KINDS[kind](left.pop())

    def layouts_then_swap(*arguments: Any) -> Any:
        found = list(listed(*arguments))
        swap()
        return iter(found)

    def swap_then_read(*arguments: Any) -> Any:
        swap()
        return read_file(*arguments)

    layouts._layouts, opener._read_file = layouts_then_swap, swap_then_read


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a kind of data, written once."""
    written: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in written:
            place = tmp_path_factory.mktemp("data") / "place"
            place.mkdir()
            file = READERS[name][0](place)
            found = run("data", "stats", READERS[name][1](file), cwd=place)
            assert found.process.exitcode == 0, found.err
            written[name] = file
        return written[name]

    return of


BY_TURNS = [
    (name, kind)
    for place, name in enumerate(READERS)
    for number, kind in enumerate(KINDS)
    if MANY or place % len(KINDS) == number
]
"""Each kind of data with one of what takes the place of its file, and with each if a long run is asked for."""


@pytest.mark.processes
@pytest.mark.parametrize(("name", "kind"), BY_TURNS)
def test_70_what_took_the_place_of_a_file_is_refused(
    name: str, kind: str, data: Callable[[str], Path], tmp_path: Path
) -> None:
    original = data(name)
    place = next(folder for folder in original.parents if folder.name == "place")
    shutil.copytree(place, tmp_path / "place")
    file = tmp_path / "place" / original.relative_to(place)
    if name == "a list of images":
        file.write_text(file.read_text().replace(str(place), str(tmp_path / "place")))
    env = {"VITRAIL_CACHE": str(tmp_path / "cache")}
    before = {"before": swapping, "given": (kind, str(file))}
    command = start("data", "stats", READERS[name][1](file), cwd=tmp_path, env=env, **before)
    # shards can be read without their index
    assert command.wait(30) == int(name != "an index of shards"), command.err
    said = "".join((command.err + command.out).split())  # a table breaks lines
    assert "Traceback" not in said and str(file) in said and "itisnotaregularfile" in said, command.err + command.out
