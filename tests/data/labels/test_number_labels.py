"""Numbers as labels: every form gives the same, and what is wrong is said."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.item import Concatenated, DataSet, Findings, Subset, Unlabelled
from vitrail.data.labels.kind import of_one_kind
from vitrail.data.labels.numbers import Numbers, parse_numbers
from vitrail.data.labels.sets import class_counts, known, label_text
from vitrail.data.loading.loader import Loader
from vitrail.data.loading.pack import pack_data
from vitrail.data.settings import Columns, Data
from vitrail.data.sources.open import open_data, open_path
from vitrail.errors import DataError

ONE = np.array([3.5, -0.25, 1e9, 0.1])
TWO = np.stack([ONE, [1.0, 2.0, 3.0, 4.0]], axis=1)


def images(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    names = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(names):
        Image.fromarray(np.full((4, 4, 3), 50 * number, np.uint8)).save(folder / name)
    return names


def written(folder: Path, lines: list[str]) -> str:
    file = folder / "t.csv"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def csv_cell(folder: Path, values: np.ndarray) -> str:
    rows = zip(images(folder), values, strict=True)
    return written(folder, ["path,label", *(f"{n},{'|'.join(map(repr, np.atleast_1d(v).tolist()))}" for n, v in rows)])


def csv_list(folder: Path, values: np.ndarray) -> str:
    rows = zip(images(folder), values, strict=True)
    return written(folder, ["path,label", *(f'{n},"{np.atleast_1d(v).tolist()}"' for n, v in rows)])


def csv_columns(folder: Path, values: np.ndarray) -> str:
    rows = zip(images(folder), values, strict=True)
    names = ",".join("ab"[: values[:1].size])
    return written(
        folder, [f"path,{names}", *(f"{n},{','.join(map(repr, np.atleast_1d(v).tolist()))}" for n, v in rows)]
    )


def parquet(folder: Path, **columns: object) -> str:
    pq.write_table(pa.table(columns), folder / "t.parquet")
    return str(folder / "t.parquet")


def parquet_bytes(folder: Path, values: np.ndarray) -> str:
    return parquet(folder, image=[(folder / name).read_bytes() for name in images(folder)], label=values.tolist())


def parquet_paths(folder: Path, values: np.ndarray) -> str:
    return parquet(folder, path=images(folder), label=values.tolist())


def parquet_columns(folder: Path, values: np.ndarray) -> str:
    columns = dict(zip("ab", values.reshape(4, -1).T.tolist(), strict=False))
    return parquet(folder, path=images(folder), **columns)


@pytest.mark.parametrize("values", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize(
    "write", [csv_cell, csv_list, csv_columns, parquet_bytes, parquet_paths, parquet_columns], ids=lambda f: f.__name__
)
def test_every_form_gives_the_same_numbers(
    write: Callable[[Path, np.ndarray], str], values: np.ndarray, tmp_path: Path
) -> None:
    named = tuple("ab"[: values[:1].size]) if write in (csv_columns, parquet_columns) else None
    found = open_path(write(tmp_path, values), Columns(per_image="numbers", classes=named))
    (source,) = found.splits.values()
    assert isinstance(source.labels, Numbers)
    assert np.array_equal(source.labels.values, values.reshape(4, -1))
    assert len(source.class_names) == values[:1].size
    if named:
        assert source.class_names == list(named)
    assert np.array_equal(source[2].label, np.atleast_1d(values[2]))


@pytest.mark.parametrize("values", [ONE, TWO])
def test_packed_numbers_are_read_back_exactly(tmp_path: Path, values: np.ndarray) -> None:
    columns = Columns(classes=("a", "b")[: values[:1].size], per_image="numbers")
    data = Data(csv_columns(tmp_path, values), label_columns=columns.classes, labels_per_image="numbers")
    pack_data(data, tmp_path / "packed")
    found = open_path(str(tmp_path / "packed")).splits[""]
    assert found.labels.values.tolist() == values.reshape(4, -1).tolist() and found.class_names == [*columns.classes]
    (tmp_path / "packed" / "index.arrow").unlink()  # another program reads the shards alone
    alone = open_path(str(tmp_path / "packed"), columns).splits[""]
    assert alone.labels.values.tolist() == values.reshape(4, -1).tolist()


@pytest.mark.parametrize("values", [ONE, TWO, TWO.astype(np.int64)])
def test_numbers_in_json(tmp_path: Path, values: np.ndarray) -> None:
    texts = [json.dumps({"label": value}) for value in values.tolist()]
    for name, text in zip(images(tmp_path / "d"), texts, strict=True):
        (tmp_path / "d" / name).with_suffix(".json").write_text(text)
    columns = Columns(label_from="json: label", per_image="numbers")
    found = open_path(str(tmp_path / "d"), columns).splits[""]
    assert found.labels.values.tolist() == values.reshape(4, -1).tolist()
    if values.dtype == np.float64:  # in shards a list of whole numbers is one of classes
        with tarfile.open(tmp_path / "0.tar", "w") as tar:
            for file in sorted((tmp_path / "d").iterdir()):
                tar.add(file, file.name)
        found = open_path(str(tmp_path / "0.tar"), Columns(per_image="numbers")).splits[""]
        assert found.labels.values.tolist() == values.reshape(4, -1).tolist()


@pytest.mark.parametrize("text", ["NaN", "[1.5, Infinity]", "true", '"x"'])
def test_what_is_no_finite_number_in_json(text: str, tmp_path: Path) -> None:
    for name in images(tmp_path / "d"):
        (tmp_path / "d" / name).with_suffix(".json").write_text(f'{{"label": {text}}}')
    with pytest.raises(DataError, match=r"a label is|a label in the list|needs finite numbers"):
        open_path(str(tmp_path / "d"), Columns(label_from="json: label", per_image="numbers"))


def test_a_number_in_the_name_of_a_file_and_class_folders(tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for number in (10, 20, 35):
        Image.new("RGB", (4, 4)).save(tmp_path / f"flat/face_{number}_x.png")
        (tmp_path / f"tree/{number}").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / f"tree/{number}/1.png")
    flat = open_path(str(tmp_path / "flat"), Columns(per_image="numbers", label_from=r"name: _([0-9]+)_")).splits[""]
    tree = open_path(str(tmp_path / "tree"), Columns(per_image="numbers")).splits[""]
    for source in (flat, tree):
        assert isinstance(source.labels, Numbers)
        assert source.labels.values[:, 0].tolist() == [10, 20, 35]
        assert source.class_names == ["target"]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4))
def test_texts_are_read_back_exactly(values: list[float]) -> None:
    (text,) = Numbers(np.array([values])).texts()
    assert list(parse_numbers(text)) == values


BAD = {
    "text": ("3,blue", "'1.png' has the label 'blue', and objective regression needs finite numbers"),
    "decimal comma": ('3,"3,5"', "'1.png' has the label '3,5'"),
    "infinity": ("3,inf", "'1.png' has the label 'inf'"),
    "NaN": ("3,NaN", "row 3: no label for '1.png'"),
    "missing": ("3,", "row 3: no label for '1.png'"),
    "another width": ("3,4|5", "'1.png' has the label '4|5': 2 numbers, and others have 1"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_number_is_an_error_that_names_the_image(kind: str, tmp_path: Path) -> None:
    cells, said = BAD[kind]
    images(tmp_path)
    first, second = cells.split(",", 1)
    table = written(tmp_path, ["path,label", f"0.png,{first}", f"1.png,{second}"])
    with pytest.raises(DataError) as error:
        open_path(table, Columns(per_image="numbers"))
    assert said in str(error.value)


def test_numbers_that_parquet_lacks(tmp_path: Path) -> None:
    table = parquet(tmp_path, path=images(tmp_path), label=[1.0, None, 3.0, float("nan")])
    with pytest.raises(DataError, match="row 2: no finite number; 2 rows lack one"):
        open_path(table, Columns(per_image="numbers"))
    table = parquet(tmp_path, path=images(tmp_path), label=[[1.0, 2], [1.0], [3.0, 1], [1.0, 1]])
    with pytest.raises(DataError, match="row 2: 1 numbers, and the first row has 2"):
        open_path(table, Columns(per_image="numbers"))
    table = parquet(tmp_path, path=images(tmp_path), label=pa.array([[]] * 4, pa.list_(pa.float64())))
    with pytest.raises(DataError, match="at least one"):
        open_path(table, Columns(per_image="numbers"))
    table = parquet(tmp_path, path=images(tmp_path), a=[1.0] * 4, b=["x"] * 4)
    with pytest.raises(DataError, match="not numbers"):
        open_path(table, Columns(per_image="numbers", classes=("a", "b")))


def test_a_split_without_labels_has_unknown_numbers(tmp_path: Path) -> None:
    table = csv_cell(tmp_path, TWO)
    labelled = open_path(table, Columns(per_image="numbers")).splits[""]
    classes = open_path(table, Columns(per_image="one")).splits[""]
    both = DataSet({"train": classes, "test": Unlabelled(classes, [])}, Findings("csv"))
    found = of_one_kind(both, Columns(per_image="numbers")).splits
    assert isinstance(found["train"].labels, Numbers) and isinstance(labelled.labels, Numbers)
    assert np.array_equal(found["train"].labels.values, labelled.labels.values)
    assert found["test"].labels[:].width == 2  # type: ignore[union-attr]
    assert not known(found["test"].labels).any()


def test_splits_views_and_batches_of_numbers(tmp_path: Path) -> None:
    splits = open_data(Data(csv_cell(tmp_path, TWO), holdout=0.5, labels_per_image="numbers"))
    assert splits.validation is not None
    both = Concatenated({"a": splits.train, "b": splits.validation})
    assert sorted(map(tuple, both.labels.values.tolist())) == sorted(map(tuple, TWO.tolist()))  # type: ignore[union-attr]
    turned = Subset(both, class_names=both.class_names[::-1])
    assert np.array_equal(turned.labels.values, both.labels.values[:, ::-1])  # type: ignore[union-attr]
    with pytest.raises(DataError, match="Name their columns"):
        Subset(both, class_names=["other", "target 1"])
    assert class_counts(both.labels, 2).tolist() == [4, 4]
    assert label_text(Numbers(ONE[:, None]), 2, ["x"]) == "1e+09"
    loader = Loader(
        both, transform=lambda image, rng: image, image_size=4, batch_size=3, shuffle=False, drop_last=False
    )
    batches = list(loader.epoch(0))
    assert np.array_equal(np.concatenate([one.labels.numpy() for one in batches]), both.labels.values)  # type: ignore[union-attr]


@pytest.mark.parametrize("values", [ONE, ONE[:, None], TWO, TWO.astype(np.float32), np.arange(4)])
def test_arrays_of_numbers_beside_arrays_of_images(tmp_path: Path, values: np.ndarray) -> None:
    file = str(tmp_path / "a.npz")
    pixels = np.zeros((4, 8, 8, 5), np.uint16)
    np.savez(file, x_train=pixels, y_train=values, x_test=pixels[:2], y_test=values[:2])
    found = open_path(file, Columns(per_image="numbers")).splits
    assert np.array_equal(found["train"].labels.values, values.reshape(4, -1))  # type: ignore[union-attr]
    assert np.array_equal(found["test"].labels.values, values[:2].reshape(2, -1))  # type: ignore[union-attr]
    names = ["target"] if values.size == 4 else ["target 1", "target 2"]
    assert found["train"].class_names == found["test"].class_names == names


@pytest.mark.parametrize(
    ("train", "test", "text"),
    [
        (ONE, TWO, r"shape \(4,\)"),
        (TWO[None], ONE, r"shape \(1, 4, 2\)"),
        (np.where(ONE == 1e9, np.nan, ONE), ONE, r"y_train\[2\] has no finite number; 1 rows lack one"),
    ],
)
def test_arrays_that_are_no_targets(tmp_path: Path, train: np.ndarray, test: np.ndarray, text: str) -> None:
    file = str(tmp_path / "a.npz")
    np.savez(file, x_train=np.zeros((4, 8, 8), np.uint8), y_train=train, x_test=np.zeros((4, 8, 8)), y_test=test)
    with pytest.raises(DataError, match=text):
        open_path(file, Columns(per_image="numbers"))
    with pytest.raises(DataError, match=r"for numbers to predict, add --data.labels-per-image numbers"):
        open_path(file)
