"""Every form of several labels for an image gives the same labels; a bad one is an error that names its place."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from label_files import NAMES, SETS, images, names_of, only, picture, table, tar

from vitrail.data.check import stats
from vitrail.data.item import Subset
from vitrail.data.labels.sets import LabelSets
from vitrail.data.loading.loader import Loader
from vitrail.data.loading.pack import pack_data
from vitrail.data.settings import Columns, Data
from vitrail.data.sources.indexed import data_set
from vitrail.data.sources.lists import write_list
from vitrail.data.sources.open import open_data, open_path, open_split
from vitrail.errors import DataError, UsageError

CLASSES = ["cat", "dog", "tree"]


def marks_of(sets: Sequence[Sequence[str]]) -> list[list[int]]:
    return [[int(name in one) for name in CLASSES] for one in sets]


def parquet(path: Path, column: pa.Array | dict[str, pa.Array]) -> Path:
    """A parquet file with images beside one column of labels or several columns."""
    columns = column if isinstance(column, dict) else {"labels": column}
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"image": [picture(number) for number in range(len(SETS))], **columns}), path)
    return path


def csv_with(folder: Path, cells: list[str]) -> Path:
    images(folder)
    return table(folder / "labels.csv", [("path", "label"), *zip(NAMES, cells, strict=True)])


def written(kind: str, folder: Path, sets: Sequence[Sequence[str]] = SETS) -> Path:
    """The same six images and labels in one of the forms."""
    images(folder)
    marks = np.array(marks_of(sets))
    if kind == "separator":
        return csv_with(folder, ["|".join(one) for one in sets])
    if kind == "semicolon":
        return csv_with(folder, ["; ".join(one) for one in sets])
    if kind == "json cells":
        return csv_with(folder, [json.dumps(one) for one in sets])
    if kind == "python cells":
        return csv_with(folder, [str(list(one)) for one in sets])
    if kind == "class columns":
        rows = [(name, *row) for name, row in zip(NAMES, marks.tolist(), strict=True)]
        return table(folder / "labels.csv", [("path", *CLASSES), *rows])
    if kind == "parquet lists":
        return parquet(folder / "a.parquet", pa.array([list(one) for one in sets]))
    if kind == "parquet text":
        return parquet(folder / "a.parquet", pa.array(["|".join(one) or None for one in sets]))
    if kind == "parquet columns":
        return parquet(folder / "a.parquet", {name: pa.array(marks[:, k] == 1) for k, name in enumerate(CLASSES)})
    if kind == "hub":
        feature = datasets.Sequence(datasets.ClassLabel(names=CLASSES))
        features = datasets.Features({"image": datasets.Image(), "labels": feature})
        rows = {"image": [{"bytes": picture(number), "path": None} for number in range(len(sets))]}
        rows["labels"] = [[CLASSES.index(name) for name in one] for one in sets]
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder / "saved"))
        return folder / "saved"
    assert kind == "shards"
    return tar(folder / "a.tar", [{"labels": list(one)} for one in sets])


KINDS = ("separator", "semicolon", "json cells", "python cells", "class columns", "parquet lists", "parquet text",
         "parquet columns", "hub", "shards")  # fmt: skip


MARKS = marks_of(SETS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_gives_the_same_labels(kind: str, tmp_path: Path) -> None:
    source = only(open_path(str(written(kind, tmp_path / "d"))))
    assert source.class_names == CLASSES
    assert names_of(source) == SETS
    label = source[4].label
    assert isinstance(label, np.ndarray) and label.tolist() == [0, 1, 2]


def test_marks_in_arrays(tmp_path: Path) -> None:
    """As in ChestMNIST of MedMNIST: labels [N, classes] of zeros and ones."""
    pixels = np.zeros((6, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", train_images=pixels, train_labels=np.array(MARKS, dtype=np.uint8))
    source = only(open_path(str(tmp_path / "a.npz")))
    assert names_of(source) == [tuple(str(CLASSES.index(name)) for name in one) for one in SETS]
    np.savez(tmp_path / "b.npz", train_images=pixels, train_labels=2 * np.array(MARKS, dtype=np.uint8))
    with pytest.raises(DataError, match=r"train_labels has shape \(6, 3\)"):
        open_path(str(tmp_path / "b.npz"))


def test_lists_of_marks_in_a_column(tmp_path: Path) -> None:
    source = only(open_path(str(parquet(tmp_path / "a.parquet", pa.array(MARKS)))))
    assert names_of(source) == [tuple(str(CLASSES.index(name)) for name in one) for one in SETS]
    ragged = [*MARKS[:3], [1, 0], *MARKS[4:]]
    with pytest.raises(DataError, match=r"row 4: 2 values, and the first row has 3"):
        open_path(str(parquet(tmp_path / "b.parquet", pa.array(ragged))))


def test_data_sets_of_torchs_kind() -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    by_name = [(pixels, list(one)) for one in SETS]
    by_mark = [(pixels, np.array(marks)) for marks in MARKS]
    assert names_of(only(data_set(by_name))) == SETS
    assert names_of(only(data_set(by_mark))) == [tuple(str(CLASSES.index(name)) for name in one) for one in SETS]
    with pytest.raises(DataError, match="a label is"):
        data_set([(pixels, [0, [1]])])


def test_links_in_several_class_folders_are_one_image(tmp_path: Path) -> None:
    root = images(tmp_path / "d", ["cat/1.png", "cat/2.png", "dog/3.png", "tree/4.png"])
    (root / "dog" / "one.png").symlink_to(root / "cat" / "1.png")
    os.link(root / "cat" / "1.png", root / "tree" / "one.png")
    source = only(open_path(str(root)))
    found = {source.id(row): names for row, names in enumerate(names_of(source))}
    assert found == {
        "cat/1.png": ("cat", "dog", "tree"),
        "cat/2.png": ("cat",),
        "dog/3.png": ("dog",),
        "tree/4.png": ("tree",),
    }
    one = open_path(str(root), Columns(per_image="one"))
    assert len(only(one)) == 6 and isinstance(only(one).labels, np.ndarray)


def test_few_links_are_copies_and_not_labels(tmp_path: Path) -> None:
    """Programs that replace copies by links make a few; the data keep one label for each image, with a warning."""
    root = images(tmp_path / "d", [f"{'cat' if number % 2 else 'dog'}/{number}.png" for number in range(120)])
    os.link(root / "cat" / "1.png", root / "dog" / "one.png")
    found = open_path(str(root))
    assert isinstance(only(found).labels, np.ndarray) and len(only(found)) == 121
    assert any("1 images lie in several class folders" in line for line in found.findings.warnings)
    assert names_of(only(open_path(str(root), Columns(per_image="several")))).count(("cat", "dog")) == 1


def test_names_that_contain_a_separator_stay_names(tmp_path: Path) -> None:
    """A taxonomy: its parts are more than its leaves."""
    leaves = ["life|cat", "life|dog", "life|tree|oak"]
    file = csv_with(tmp_path / "d", [leaves[number % 3] for number in range(6)])
    found = open_path(str(file))
    assert only(found).class_names == leaves and isinstance(only(found).labels, np.ndarray)
    assert any("names of classes contain '|'" in line for line in found.findings.warnings)
    split = only(open_path(str(file), Columns(separator="|")))
    assert split.class_names == ["cat", "dog", "life", "oak", "tree"]


@pytest.mark.parametrize("kind", ["class columns", "parquet lists", "shards"])
def test_exactly_one_label_each_is_one_label(kind: str, tmp_path: Path) -> None:
    """One-hot columns, as ISIC publishes them, and lists of one name are labels of the ordinary kind."""
    sets = [("cat",), ("dog",), ("tree",), ("cat",), ("dog",), ("tree",)]
    path = str(written(kind, tmp_path / "d", sets))
    found = open_path(path)
    assert only(found).labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert any("used as one label per image" in line for line in found.findings.warnings)
    assert names_of(only(open_path(path, Columns(per_image="several")))) == sets


def test_labels_per_image_one_is_checked(tmp_path: Path) -> None:
    file = written("json cells", tmp_path / "d")
    with pytest.raises(DataError, match=r"image '1.png' has 2 labels, and data.labels_per_image is 'one'"):
        open_path(str(file), Columns(per_image="one"))


def test_with_one_label_per_image_no_separator_is_looked_for(tmp_path: Path) -> None:
    file = csv_with(tmp_path / "d", cells := ["cat", "dog", "cat|dog", "dog|cat", "cat", "dog"])
    assert [len(one) for one in names_of(only(open_path(str(file))))] == [1, 1, 2, 2, 1, 1]
    found = open_path(str(file), Columns(per_image="one"))
    assert [only(found).class_names[label] for label in only(found).labels] == cells
    with pytest.raises(DataError, match=r"image '2.png' has 2 labels"):
        open_path(str(file), Columns(separator="|", per_image="one"))


def test_with_several_labels_per_image_a_cell_may_be_empty(tmp_path: Path) -> None:
    file = csv_with(tmp_path / "d", ["cat", "", "dog", "cat", "dog", ""])
    with pytest.raises(DataError, match=r"row 3: no label for '1.png'.*set data.labels_per_image to 'several'"):
        open_path(str(file))
    expected = [("cat",), (), ("dog",), ("cat",), ("dog",), ()]
    assert names_of(only(open_path(str(file), Columns(per_image="several")))) == expected
    texts = parquet(tmp_path / "a.parquet", pa.array([one[0] if one else None for one in expected]))
    assert names_of(only(open_path(str(texts), Columns(per_image="several")))) == expected


def test_predictions_are_labels_even_if_no_image_has_two(tmp_path: Path) -> None:
    images(tmp_path / "d")
    rows = [("0.png", "cat", "0.9"), ("1.png", "", ""), ("2.png", "dog", "0.8")]
    file = table(tmp_path / "d" / "p.csv", [("path", "labels", "probabilities"), *rows])
    assert names_of(only(open_path(str(file)))) == [("cat",), (), ("dog",)]


@pytest.mark.parametrize(
    ("cells", "warned"),
    [
        (["cat, dog", "dog", "cat", "dog, tree", "tree", "cat, tree"], True),
        (["tench, Tinca tinca", "goldfish, Carassius", "cock", "hen", "cock", "hen"], False),
    ],
)
def test_sets_with_commas_are_noticed(cells: list[str], warned: bool, tmp_path: Path) -> None:
    """A comma is part of many names, so it has to be named; names that look like sets are warned of."""
    found = open_path(str(csv_with(tmp_path / "d", cells)))
    assert isinstance(only(found).labels, np.ndarray)
    assert any("set data.label_separator to ','" in line for line in found.findings.warnings) is warned


def test_cells_without_names_are_names(tmp_path: Path) -> None:
    """A class may be called ';': a separator stands between names."""
    file = csv_with(tmp_path / "d", cells := [";", ";;", "a", "a;", ";", "a"])
    source = only(open_path(str(file)))
    assert [source.class_names[label] for label in source.labels] == cells


@pytest.mark.parametrize(
    ("cells", "error"),
    [
        (["['cat'", "['dog']"], "no"),
        (["['cat', ['dog']]", "['dog']"], r"row 2.*a label in the list .* is \['dog'\]"),
        (["['cat', 1.5]", "['dog']"], r"row 2.*is 1.5"),
        (['["cat\\ud800"]', "['dog']"], r"row 2.*a label in the list .* is 'cat\\ud800'"),
        (['["cat\\u0000"]', "['dog']"], r"row 2.*a label in the list .* is 'cat\\x00'"),
        (["[cat, dog]", "['dog']"], r"row 2: the list of labels '\[cat, dog\]' cannot be read"),
    ],
)
def test_lists_that_cannot_be_read(cells: list[str], error: str, tmp_path: Path) -> None:
    images(tmp_path / "d")
    file = table(tmp_path / "d" / "labels.csv", [("path", "label"), *zip(NAMES, cells, strict=False)])
    if error == "no":
        assert only(open_path(str(file))).class_names == ["['cat'", "['dog']"]  # not all are lists: names
        return
    with pytest.raises(DataError, match=error):
        open_path(str(file))


def test_a_separator_alone_is_a_name(tmp_path: Path) -> None:
    file = csv_with(tmp_path / "d", [";", "|"] * 3)
    assert only(open_path(str(file))).class_names == [";", "|"]


def test_labels_of_one_image_each_cannot_be_held_out(tmp_path: Path) -> None:
    file = csv_with(tmp_path / "d", [f"['a{number}', 'b{number}']" for number in range(len(NAMES))])
    with pytest.raises(DataError, match=r"no image of .* can be held out .* data.holdout to 0"):
        open_data(Data(path=str(file)))
    assert open_data(Data(path=str(file), holdout=0)).validation is None


def test_ragged_rows_and_other_values_in_columns_of_classes(tmp_path: Path) -> None:
    images(tmp_path / "d")
    header = ("path", *CLASSES)
    rows = [(name, *marks) for name, marks in zip(NAMES, MARKS, strict=True)]
    file = table(tmp_path / "d" / "labels.csv", [header, *rows[:3], rows[3][:3], *rows[4:]])
    with pytest.raises(DataError, match=r"row 5: 3 cells, and the header has 4"):
        open_path(str(file))
    file = table(tmp_path / "d" / "labels.csv", [header, *rows[:3], (*rows[3], 1), *rows[4:]])
    with pytest.raises(DataError, match=r"row 5: 5 cells, and the header has 4"):
        open_path(str(file))
    file = table(tmp_path / "d" / "labels.csv", [header, *rows[:3], (NAMES[3], 1, 7, 0), *rows[4:]])
    with pytest.raises(DataError, match=r"row 5: '7' in the column of class 'dog'"):
        open_path(str(file), Columns(classes=("cat", "dog", "tree")))
    with pytest.raises(UsageError, match="no column 'bird'"):
        open_path(str(file), Columns(classes=("cat", "bird")))


def test_a_missing_label_in_a_list(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 2: a label in the list is missing"):
        open_path(str(parquet(tmp_path / "a.parquet", pa.array([["cat"], ["dog", None], ["cat", "dog"], [], [], []]))))
    with pytest.raises(DataError, match="lists of list"):
        open_path(str(parquet(tmp_path / "b.parquet", pa.array([[["cat"]], [["dog"]], [], [], [], []]))))
    with pytest.raises(DataError, match=r"000\.json"):
        open_path(str(tar(tmp_path / "a.tar", [{"labels": [["cat"]]}, {"labels": ["dog"]}])))


def test_splits_with_unknown_labels_or_none_at_all(tmp_path: Path) -> None:
    """A label that training lacks leaves a split out, or is an error if the split was named; so is no label."""
    folder = images(tmp_path / "d")
    cells = ["|".join(one) for one in SETS]
    table(folder / "train.csv", [("path", "labels"), *zip(NAMES, cells, strict=True)])
    table(folder / "test.csv", [("path", "labels"), (NAMES[0], "cat|bird"), (NAMES[1], "bird"), (NAMES[2], "cat")])
    opened = open_data(str(folder))
    assert opened.test is None
    assert any("split 'test' left out: it has classes" in line for line in opened.report.warnings)
    with pytest.raises(DataError, match="split 'test' has classes that are not among the 3 known ones: 'bird'"):
        open_data(Data(path=str(folder), test="test"))
    (folder / "test.csv").unlink()
    table(folder / "val.csv", [("path", "labels"), (NAMES[0], ""), (NAMES[1], "")])
    opened = open_data(str(folder))
    assert opened.held_out["from"] == "train"
    assert any("no image of split 'val' has a label" in line for line in opened.report.warnings)
    table(folder / "train.csv", [("path", *CLASSES), *((name, 0, 0, 0) for name in NAMES)])
    (folder / "val.csv").unlink()
    with pytest.raises(DataError, match=r"none of the 6 images of .*d \(csv\) has any of its 3 labels"):
        open_data(Data(path=str(folder), label_columns=("cat", "dog", "tree")))


def test_a_label_no_training_image_has_is_said(tmp_path: Path) -> None:
    folder = images(tmp_path / "d")
    rows = [(name, *marks, 0) for name, marks in zip(NAMES, MARKS, strict=True)]
    file = table(folder / "train.csv", [("path", *CLASSES, "bird"), *rows])
    opened = open_data(Data(path=str(file), label_columns=(*CLASSES, "bird"), holdout=0.2))
    assert any("has the labels 'bird'" in line for line in opened.report.warnings)


def test_the_loader_marks_the_labels_of_a_batch(tmp_path: Path) -> None:
    source = only(open_path(str(csv_with(tmp_path / "d", ["|".join(one) for one in SETS]))))
    loader = Loader(source, transform=lambda image, random: image, image_size=8, batch_size=4, shuffle=False,
                    drop_last=False, cache=True)  # fmt: skip
    for _ in range(2):  # the second time from the cache
        batches = list(loader.epoch(0))
        assert np.concatenate([batch.labels.numpy() for batch in batches]).tolist() == MARKS
    assert batches[0].labels.dtype.itemsize == 1
    loader.close()


def test_packs_and_lists_keep_the_labels(tmp_path: Path) -> None:
    file = csv_with(tmp_path / "d", ["|".join(one) for one in SETS])
    pack_data(str(file), tmp_path / "packed")
    packed = only(open_path(str(tmp_path / "packed")))
    assert names_of(packed) == SETS and packed.class_names == CLASSES
    found = open_path(str(file))
    write_list(tmp_path / "list.csv", str(file), found, {"train": Subset(only(found), np.array([1, 3, 4]))})
    assert names_of(only(open_path(str(tmp_path / "list.csv")))) == [SETS[1], SETS[3], SETS[4]]


def test_statistics_count_an_image_for_each_label(tmp_path: Path) -> None:
    (split,) = stats(csv_with(tmp_path / "d", ["|".join(one) for one in SETS])).splits
    assert split.classes == {"cat": 3, "dog": 3, "tree": 3} and split.unlabelled == 0
    assert split.several == "1.5 labels per image of 3 classes, 1 image without a label"


def test_labels_are_matched_by_name(tmp_path: Path) -> None:
    source = open_split(csv_with(tmp_path / "d", ["|".join(one) for one in SETS]), class_names=["dog", "tree", "cat"])
    assert [sorted(one) for one in names_of(source)] == [list(one) for one in SETS]
    assert isinstance(source.labels, LabelSets) and source.labels.marks()[1].tolist() == [1, 0, 1]
