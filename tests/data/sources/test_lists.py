from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vitrail.data.item import Concatenated, IndexedSource, Subset
from vitrail.data.labels.masks import Masks
from vitrail.data.loading.pack import pack_data
from vitrail.data.settings import Columns, Data
from vitrail.data.sources.lists import COLUMNS, read_list, refers_to, without, write_list
from vitrail.data.sources.open import open_data, open_path
from vitrail.data.split import hold_out, subset
from vitrail.errors import DataError, UsageError


def photos(root: Path, classes: tuple[str, ...] = ("2", "10", "é"), count: int = 6) -> Path:
    for split in ("train", "test"):
        for number, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                image = Image.new("RGB", (4, 4), (20 * number, 9 * index, 100 * (split == "test")))
                image.save(root / split / name / f"{index}.png")
    return root


def made(kind: str, tmp_path: Path) -> str:
    """A data set of some kind, of images that are all different."""
    if kind == "digits":
        return kind
    tree = photos(tmp_path / "photos")
    if kind == "folder":
        return str(tree)
    if kind == "packed":
        pack_data(str(tree), tmp_path / "packed", quality=None)
        return str(tmp_path / "packed")
    files = sorted(tree.rglob("*.png"))
    if kind == "csv":
        with open(tmp_path / "all.csv", "w", newline="") as file:
            rows = [(path.relative_to(tmp_path), path.parent.name, path.parent.parent.name) for path in files]
            csv.writer(file).writerows([("image", "label", "split"), *rows])
        return str(tmp_path / "all.csv")
    for split in ("train", "test"):
        some = [path for path in files if path.parent.parent.name == split]
        if kind == "parquet":
            columns = {"image": [path.read_bytes() for path in some], "label": [path.parent.name for path in some]}
            (tmp_path / "rows").mkdir(exist_ok=True)
            pq.write_table(pa.table(columns), tmp_path / "rows" / f"{split}.parquet")
    if kind == "parquet":
        return str(tmp_path / "rows")
    images = np.stack([np.asarray(Image.open(path)) for path in files])
    labels = np.array([path.parent.name for path in files])
    train = np.array([path.parent.parent.name == "train" for path in files])
    np.savez(
        tmp_path / "a.npz", x_train=images[train], y_train=labels[train], x_test=images[~train], y_test=labels[~train]
    )
    return str(tmp_path / "a.npz")


KINDS = ("folder", "csv", "parquet", "packed", "arrays", "digits")


def everything(source: IndexedSource) -> list[tuple[object, ...]]:
    rows = []
    for index in range(len(source)):
        item = source[index]
        image = item.image if isinstance(item.image, bytes) else item.image.tobytes()
        rows.append((item.id, source.id(index), item.label, int(source.labels[index]), image))
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_is_the_images_it_was_written_from(kind: str, tmp_path: Path) -> None:
    data = made(kind, tmp_path)
    found = open_path(data)
    train = found.splits["train"]
    kept, out = hold_out(train, 0.4, 1)
    splits = {"train": Subset(train, kept[::-1]), "validation": Subset(train, out), "test": found.splits["test"]}
    write_list(tmp_path / "lists" / "some.csv", data, found, splits)
    read = open_path(str(tmp_path / "lists" / "some.csv"))
    assert list(read.splits) == ["train", "validation", "test"] and read.findings.kind == "list"
    for name, source in splits.items():
        assert everything(read.splits[name]) == everything(source)
        assert read.splits[name].class_names == source.class_names
    opened = open_data(str(tmp_path / "lists" / "some.csv"))
    assert opened.held_out == {"validation": "validation"} and len(opened.test or ()) == len(splits["test"])


def test_a_list_of_images_with_masks_has_their_masks(tmp_path: Path) -> None:
    for number in range(4):
        for folder, value in (("images", 9 * number), ("masks", number // 2)):  # each mask is of one class
            pixels = np.full((8, 8), value, dtype=np.uint8)
            (tmp_path / "d" / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / "d" / folder / f"{number}.png")
    found = open_path(str(tmp_path / "d"))
    write_list(tmp_path / "a.csv", str(tmp_path / "d"), found, {"": Subset(found.splits[""], np.array([0, 2]))})
    labels = open_path(str(tmp_path / "a.csv")).splits[""].labels
    assert isinstance(labels, Masks)
    assert [labels.path(row) for row in range(2)] == [tmp_path / "d" / "masks" / f"{number}.png" for number in (0, 2)]


@pytest.mark.parametrize("answers", [("species",), ("species", "weight")])
def test_a_list_of_answers_is_read_with_the_columns_named_again(answers: tuple[str, ...], tmp_path: Path) -> None:
    tree, file = photos(tmp_path / "photos"), tmp_path / "all.csv"
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tree.rglob("*.png"))
    rows = [f"{name},{['Cod', 'cod', 'EEL'][k % 3]},{k / 7},{'ab'[k % 2]}\n" for k, name in enumerate(names)]
    file.write_text("image,species,weight,other\n" + "".join(rows))
    found = open_path(str(file), Columns(answers=answers))
    write_list(tmp_path / "a.csv", str(file), found, dict(found.splits))
    read = open_path(str(tmp_path / "a.csv"), Columns(answers=answers))
    assert read.splits[""].class_names == found.splits[""].class_names
    indices = range(len(names))
    assert [str(read.splits[""][k].label) for k in indices] == [str(found.splits[""][k].label) for k in indices]
    assert read.findings.warnings == found.findings.warnings and found.findings.warnings
    with pytest.raises(
        DataError, match=r"If these were read from other columns .data\.label_column, .*name them again"
    ):
        open_path(str(tmp_path / "a.csv"), Columns(label="other"))


def test_paths_and_labels_are_there_for_others(tmp_path: Path) -> None:
    data = made("folder", tmp_path)
    found = open_path(data)
    write_list(tmp_path / "a.csv", data, found, {"": Subset(found.splits["train"], np.array([0, 7]))})
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [Path(row["path"]).read_bytes() for row in rows] == [found.splits["train"][index].image for index in (0, 7)]
    assert [row["label"] for row in rows] == [Path(row["path"]).parent.name for row in rows]
    assert {row["data"] for row in rows} == {str((tmp_path / "photos").resolve())}


@pytest.mark.parametrize("raw", [False, True])
def test_names_that_are_not_utf8(raw: bool, tmp_path: Path) -> None:
    """A list is UTF-8 text for all programs, and leads back to the images; so does one that leaves images out."""
    bytes_ = os.fsdecode(b"caf\xe9")
    data = str(photos(tmp_path / bytes_, (bytes_, "plain"), count=2))
    found = open_path(data)
    write_list(tmp_path / "a.csv", data, found, {"": Subset(found.splits["train"], np.array([0, 3]))}, raw=raw)
    text = (tmp_path / "a.csv").read_text(encoding="utf-8")
    assert "caf\\xe9/train/caf\\xe9/0.png" in text
    read = open_path(str(tmp_path / "a.csv")).splits[""]
    assert everything(read) == [everything(found.splits["train"])[row] for row in (0, 3)]
    (tmp_path / "out.csv").write_text("split,id\ntrain,caf\\xe9/1.png\n", encoding="utf-8")
    assert len(without(found, tmp_path / "out.csv").splits["train"]) == 3


def test_classes_without_an_image_in_the_list_stay_classes(tmp_path: Path) -> None:
    data = made("folder", tmp_path)
    found = open_path(data)
    train = found.splits["train"]
    few = Subset(train, np.flatnonzero(train.labels < 2))
    write_list(tmp_path / "few.csv", data, found, {"train": few, "test": found.splits["test"]})
    splits = open_data(Data(str(tmp_path / "few.csv"), holdout=0.0))
    assert len(splits.class_names) == 3 and np.unique(splits.train.labels).tolist() == [0, 1]
    assert splits.test is not None and np.unique(splits.test.labels).tolist() == [0, 1, 2]


def test_lists_of_lists_and_of_joined_splits(tmp_path: Path) -> None:
    data = made("folder", tmp_path)
    found = open_path(data)
    write_list(tmp_path / "one.csv", data, found, {"train": Subset(found.splits["train"], np.arange(3, 15))})
    first = open_path(str(tmp_path / "one.csv"))
    write_list(
        tmp_path / "two.csv", str(tmp_path / "one.csv"), first, {"x": Subset(first.splits["train"], np.arange(4))}
    )
    assert everything(open_path(str(tmp_path / "two.csv")).splits["x"]) == everything(found.splits["train"])[3:7]
    both = Concatenated(found.splits)
    first_six = Subset(both, np.arange(6))
    write_list(tmp_path / "joined.csv", data, found, {"train": first_six})
    again = open_path(str(tmp_path / "joined.csv")).splits["train"]
    assert [row[-1] for row in everything(again)] == [row[-1] for row in everything(first_six)]


def test_what_is_gone_is_dropped_and_said(tmp_path: Path) -> None:
    data = made("folder", tmp_path)
    found = open_path(data)
    write_list(tmp_path / "a.csv", data, found, dict(found.splits))
    (tmp_path / "photos" / "train" / "2" / "3.png").unlink()
    read = open_path(str(tmp_path / "a.csv"))
    assert len(read.splits["train"]) == 17
    assert any("2/3.png" in line and "no such image in split 'train'" in line for line in read.findings.lines())
    shutil.rmtree(tmp_path / "photos" / "train" / "é")
    (tmp_path / "photos" / "train" / "2").rename(tmp_path / "photos" / "train" / "3")
    (tmp_path / "photos" / "train" / "10").rename(tmp_path / "photos" / "train" / "11")
    with pytest.raises(DataError, match="none of the 18 images it lists is there"):
        open_path(str(tmp_path / "a.csv"))
    shutil.rmtree(tmp_path / "photos")
    with pytest.raises(DataError, match=r"a\.csv lists images of .*photos, which cannot be opened: no data at"):
        open_path(str(tmp_path / "a.csv"))


def test_a_list_that_was_changed_by_hand(tmp_path: Path) -> None:
    data = made("folder", tmp_path)
    found = open_path(data)
    file = tmp_path / "a.csv"
    write_list(file, data, found, dict(found.splits))
    text = file.read_text()
    for old, new, message in (
        (",2,train,2/0.png,", ",10,train,2/0.png,", r"row \d+: '2/0.png' is '10' here and '2' in the data"),
        (
            ",train,2/1.png,train,",
            ",train,2/1.png,test,",
            r"row \d+: split 'train' of the list is from split 'train' and from split 'test'",
        ),
        (",2/1.png,train,", ",2/1.png,", r"row \d+: not path, label"),
        (",train,", ",trian,", "refers to split 'trian' of its data set, which has split 'test', split 'train'"),
    ):
        changed = text.replace(old, new)
        assert changed != text
        file.write_text(changed)
        with pytest.raises(DataError, match=message):
            open_path(str(file))
    file.write_text(f"{','.join(COLUMNS)}\n,a,train,x,train,{file}\n")
    with pytest.raises(DataError, match="refers to itself"):
        open_path(str(file))


def test_other_tables_are_no_lists(tmp_path: Path) -> None:
    photos(tmp_path / "d")
    for header, row in (("path,label,data", "d/train/2/0.png,x,somewhere"), ("path,label", "d/train/2/0.png,x")):
        (tmp_path / "a.csv").write_text(f"{header}\n{row}\n")
        assert refers_to(tmp_path / "a.csv") is None
        assert len(open_path(str(tmp_path / "a.csv")).splits[""]) == 1
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    assert refers_to(tmp_path / "a.csv") is None
    with pytest.raises(DataError):
        open_path(str(tmp_path / "a.csv"))


# subsets


@pytest.mark.parametrize("kind", KINDS)
def test_subsets_of_every_kind_of_data_are_nested_in_proportion_and_keep_what_is_held_out(
    kind: str, tmp_path: Path
) -> None:
    data = made(kind, tmp_path)
    whole = open_data(Data(data, holdout=0.3), seed=4)
    count = len(whole.train)
    ids: list[set[str]] = []
    for size in (3, count // 2, 0.75, 1.0):
        splits = open_data(Data(data, holdout=0.3, subset=size), seed=4)
        assert len(splits.train) == (size if isinstance(size, int) else round(size * count))
        assert splits.class_names == whole.class_names
        assert splits.validation is not None and whole.validation is not None
        assert everything(splits.validation) == everything(whole.validation)
        ids.append({splits.train.id(index) for index in range(len(splits.train))})
        shares = np.bincount(splits.train.labels, minlength=len(whole.class_names)) / len(splits.train)
        expected = np.bincount(whole.train.labels, minlength=len(whole.class_names)) / count
        np.testing.assert_allclose(shares, expected, atol=1 / len(splits.train))
    assert ids[0] < ids[1] < ids[2] < ids[3]
    other = open_data(Data(data, holdout=0.3, subset=count // 2), seed=5)
    assert {other.train.id(index) for index in range(len(other.train))} != ids[1]


@pytest.mark.parametrize("size", [0, -1, 19, 0.0, 1.5, float("nan")])
def test_impossible_sizes_are_refused(size: float, tmp_path: Path) -> None:
    source = open_path(made("folder", tmp_path)).splits["train"]
    with pytest.raises(UsageError, match=r"valid are 1\.\.18, or a share above 0"):
        subset(source, size, 0)


def test_read_list_needs_the_data_it_was_written_for(tmp_path: Path) -> None:
    data = made("folder", tmp_path)
    found = open_path(data)
    write_list(tmp_path / "a.csv", data, found, {"train": found.splits["train"]})
    with pytest.raises(DataError, match="refers to split 'train' of its data set, which has split 'other'"):
        read_list(tmp_path / "a.csv", type(found)({"other": found.splits["test"]}, found.findings))
