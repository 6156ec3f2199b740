"""Folders that no one made: whatever layout is opened, it is a valid data set or an error that names the path."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from random_inputs import QUIETLY
from scenes import snapshot

from vitrail.data.check import check, stats
from vitrail.data.item import DataSet
from vitrail.data.sources.open import open_data, open_path
from vitrail.errors import DecodeError, VitrailError

pytestmark = pytest.mark.fuzz

Writer = Callable[[Path], None]
"""Writes one file at a path."""


def picture(seed: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((3, 3, 3), 40 * seed, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


IMAGES = [picture(seed) for seed in range(6)]
contents = st.sampled_from([*IMAGES, b"", b"text"])
labels = st.sampled_from(["", "0", "1", "-1", "cat", "dog", "99999999999999999999", "nan", "\udc80", "a/b", "\0"])
values = st.one_of(
    labels, st.integers(-(2**70), 2**70), st.floats(), st.none(), st.booleans(), st.just([1]), st.just({})
)
names = st.sampled_from(
    [
        "train",
        "val",
        "test",
        "cat",
        "dog",
        "red.d",
        "1.0.0",
        "images",
        ".hid",
        "__MACOSX",
        "a b",
        "ä\n",
        "x.png",
        "y.tar",
    ]
)
keys = st.sampled_from(["0", "1", "2", "train/0", "../0", "/abs/0", ".h", "a.b", "", "0" * 120, "ü\udc80"])


def _bytes(content: bytes) -> Writer:
    return lambda path: path.write_bytes(content) and None


@st.composite
def tars(draw: st.DrawFn) -> bytes:
    """Members with and without labels in any order, links among them, with bytes changed or cut at the end."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=draw(st.sampled_from([0, 1, 2]))) as out:
        for key in draw(st.lists(keys, max_size=6)):
            suffix = draw(st.sampled_from([".png", ".jpg", ".cls", ".json", ".npy", ".seg.png", ".txt", "/"]))
            record = {draw(st.sampled_from(["label", "class", "cls", "x"])): draw(values)}
            data = {".cls": draw(labels).encode("utf-8", "surrogateescape"), ".json": _json(record)}.get(suffix)
            data = draw(contents) if data is None else data
            info = tarfile.TarInfo(key + suffix)
            info.type = draw(
                st.sampled_from([tarfile.REGTYPE] * 6 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
            )
            info.size = len(data) if info.isreg() else 0
            info.linkname = "0.png" if not info.isreg() else ""
            with suppress(ValueError):  # a name that this format of tar cannot hold
                out.addfile(info, io.BytesIO(data))
    content = bytearray(stream.getvalue())
    for place, value in draw(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=2)):
        content[place % len(content)] = value
    return bytes(content[: draw(st.sampled_from([len(content), len(content) // 2, 700, 1, 0]))])


def _json(record: Any) -> bytes:
    return json.dumps(record).encode()


KINDS = [pa.binary(), pa.string(), pa.int64(), pa.float32(), pa.bool_(), pa.list_(pa.int8()), pa.null()]
KINDS += [
    pa.dictionary(pa.int8(), pa.string()),
    pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    pa.timestamp("s"),
]
KINDS += [pa.struct({"x": pa.int8()}), pa.large_string(), pa.uint8(), pa.decimal128(5)]


@st.composite
def parquets(draw: st.DrawFn) -> Writer:
    """Tables of any schema, with nulls, without rows, and with what the hub writes into the metadata, or not."""
    rows = draw(st.integers(0, 4))
    columns: dict[str, pa.Array] = {}
    for name in draw(st.lists(st.sampled_from(["image", "label", "path", "Image", "x", "class"]), max_size=4)):
        kind = draw(st.sampled_from(KINDS))
        columns[name] = pa.array([draw(_cell(kind)) for _ in range(rows)], kind)
    feature = draw(st.sampled_from([{"_type": "ClassLabel", "names": ["a", "b"]}, {"_type": "ClassLabel"}, [], {}]))
    about = {"info": {"features": {"label": feature, "class": feature}}}
    metadata = draw(st.sampled_from([None, _json(about), b"{", b"[]", _json({"info": None})]))
    table = pa.table(columns)
    table = table if metadata is None else table.replace_schema_metadata({"huggingface": metadata})
    damage = draw(st.sampled_from([0, 0, 0, 1, 40]))

    def write(path: Path) -> None:
        pq.write_table(table, path)
        os.truncate(path, max(0, path.stat().st_size - damage))

    return write


def _cell(kind: pa.DataType) -> st.SearchStrategy[Any]:
    given_kind: dict[Any, st.SearchStrategy[Any]] = {
        pa.binary(): st.sampled_from(IMAGES),
        pa.string(): st.sampled_from(["0.png", "cat/0.png", "cat", "", "../x"]),
        pa.large_string(): st.sampled_from(["a", "b", ""]),
        pa.int64(): st.sampled_from([0, 1, -1, 7, -(2**63)]),
        pa.uint8(): st.integers(0, 3),
        pa.float32(): st.sampled_from([0.0, 1.0, float("nan")]),
        pa.bool_(): st.booleans(),
        pa.list_(pa.int8()): st.just([1]),
        KINDS[7]: st.sampled_from(["a", "b"]),
        KINDS[8]: st.fixed_dictionaries({"bytes": st.sampled_from([IMAGES[0], None]), "path": st.just("0.png")}),
    }
    cell = given_kind.get(kind, st.none())
    return cell if kind in (pa.binary(), pa.int64()) else st.one_of(cell, st.none())


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """Rows of any columns, with any delimiter."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=draw(st.sampled_from([",", ";", "\t"])))
    column = st.sampled_from(["path", "label", "split", "image", "class", "", "id", "from", "data", "Path "])
    writer.writerow(draw(st.lists(column, max_size=6)))
    cell = st.sampled_from(
        ["cat/0.png", "dog/1.png", "0.png", "train", "val", "a", "", "nan", "../0.png", "x" * 300, "\0"]
    )
    for row in draw(st.lists(st.lists(cell, max_size=6), max_size=5)):
        writer.writerow(row)
    return text.getvalue().encode() + draw(st.sampled_from([b"", b'"', b"\xff"]))


@st.composite
def lists(draw: st.DrawFn) -> bytes:
    line = st.sampled_from(
        ["cat/0.png 0", "dog/1.png 1", "0.png", "../0.png 1", "", "cat/9.png 1", "a b.png c", "\xa0"]
    )
    return "\n".join(draw(st.lists(line, max_size=4))).encode()


@st.composite
def arrows(draw: st.DrawFn) -> Writer:
    """Indexes of packed shards that do not fit what is there."""
    shards = draw(st.sampled_from([None, [], [{"name": "y.tar", "bytes": 10240}], [{"name": 3}], "x"]))
    about = {"shards": shards, "class_names": draw(st.sampled_from([["a", "b"], None, [], "ab"]))}
    metadata = draw(st.sampled_from([None, b"{", b"[]", _json(about), _json(about), _json(about)]))
    number = st.sampled_from([0, 1, -1, 512, 2**40])
    count = draw(st.integers(0, 2))
    columns: dict[str, Any] = {name: [draw(number) for _ in range(count)] for name in ("shard", "offset", "size")}
    columns |= {name: [draw(st.sampled_from(["a", "z", None]))] * count for name in ("label", "id")}
    for name in draw(st.lists(st.sampled_from(sorted(columns)), max_size=1)):
        del columns[name]
    table = pa.table(columns)
    table = table if metadata is None else table.replace_schema_metadata({"vitrail": metadata})

    def write(path: Path) -> None:
        with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)

    return write


@st.composite
def files(draw: st.DrawFn) -> tuple[str, Writer]:
    """One file: its name and content."""
    kind = draw(st.sampled_from(["image"] * 6 + ["tar", "tar", "parquet", "parquet", "csv", "list", "index", "other"]))
    stem = draw(st.sampled_from(["0", "1", "train", "val", "m"]))
    if kind == "image":
        return f"{stem}{draw(st.sampled_from(['.png', '.JPG', '.gif']))}", _bytes(draw(contents))
    if kind == "tar":
        return f"{stem}.tar", _bytes(draw(tars()))
    if kind == "parquet":
        return f"{stem}.parquet", draw(parquets())
    if kind == "csv":
        return f"{stem}{draw(st.sampled_from(['.csv', '.tsv']))}", _bytes(draw(tables()))
    if kind == "list":
        return f"{draw(st.sampled_from(['train', 'val', 'test']))}.txt", _bytes(draw(lists()))
    if kind == "index":
        return "index.arrow", draw(arrows())
    odd = ["state.json", "dataset_dict.json", "dataset_info.json", "features.json", "a.npz", "._0.png", "Thumbs.db"]
    odd += ["a-train.tfrecord-00000-of-00001", "a-train.tfrecord-00001-of-00002"]
    text = st.sampled_from(
        [b"", b"{}", b"[]", b'{"splits": ["train"]}', b'{"_data_files": [{"filename": "x"}]}', bytes(40)]
    )
    return draw(st.sampled_from(odd)), _bytes(draw(text))


trees = st.recursive(
    st.tuples(st.lists(files(), max_size=4), st.just({})),
    lambda below: st.tuples(st.lists(files(), max_size=3), st.dictionaries(names, below, max_size=3)),
    max_leaves=6,
)


def plant(folder: Path, tree: Any) -> Path:
    """Write a tree of files and folders."""
    shutil.rmtree(folder, ignore_errors=True)
    here, below = tree
    folder.mkdir(parents=True)
    for name, write in here:
        write(folder / name)
    for name, branch in below.items():
        plant(folder / name, branch)
    return folder


def whole(found: DataSet) -> None:
    """Assert that every listed image has a valid label and can be reached, or is said to be damaged."""
    assert found.splits
    for source in found.splits.values():
        assert len(source) == len(source.labels) == len(source.sizes) > 0
        assert np.all((source.labels >= -1) & (source.labels < len(source.class_names)))
        for index in range(len(source)):
            assert source.id(index)
            try:
                item = source[index]
            except DecodeError:
                continue
            assert isinstance(item.image, bytes | np.ndarray) and item.label == source.labels[index]


def _opened(path: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except VitrailError as error:
        assert path in str(error), f"an error that does not name {path}: {error}"
        return None


@QUIETLY
@given(tree=trees)
def test_58_any_folder_is_a_data_set_or_refused(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    folder = plant(tmp_path_factory.getbasetemp() / "fuzz-sources", tree)
    path, before = str(folder), snapshot(folder)
    found = _opened(path, lambda: open_path(path))
    if found is not None:
        whole(found)
        counted = stats(path)
        assert counted.count == sum(map(len, found.splits.values()))
        assert set(found.findings.warnings) <= set(check(path).warnings)
    for labels in (True, False):
        opened = _opened(path, lambda labels=labels: open_data(path, labels=labels))
        if opened is not None and labels:
            assert len(opened.class_names) > 1 and np.all(opened.train.labels >= 0)
    assert snapshot(folder) == before
