"""Columns of a CSV that are several answers for an image."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from references import write_table

from vitrail.data.check import check
from vitrail.data.labels.answers import with_kind
from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import Answers, LabelSets
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data, open_split
from vitrail.errors import DataError, UsageError

ROWS = [
    ("cod", "ok|young", "812.5", "3", "train"),
    ("cod", "", "790", "10", "train"),
    ("herring", "ill", "", "3", "train"),
    ("", "nan", "", "", "train"),
    ("herring", "ok", "120", "10", "train"),
    ("cod", "ill|young", "300", "3", "val"),
    ("cod", "ok", "800", "3", "val"),
]
NAMES = ("species", "tags", "weight", "code")


def table(folder: Path, rows: list[tuple[str, ...]] = ROWS) -> Path:
    for number in range(len(rows)):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")
    named = [(f"{number}.png", *row) for number, row in enumerate(rows)]
    return write_table(folder / "list.csv", [("image", *NAMES, "split"), *named])


def parts(path: Path, *names: str, **changes: Any) -> Answers:
    labels = open_data(Data(str(path), answers=names, **changes)).train.labels
    assert isinstance(labels, Answers)
    return labels


def test_the_kind_of_each_column_is_recognised(tmp_path: Path) -> None:
    found = parts(table(tmp_path), *NAMES).parts
    species, tags, weight, code = found.values()
    assert species.class_names == ["cod", "herring"] and species.labels.tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]
    assert isinstance(tags.labels, LabelSets) and tags.class_names == ["ill", "ok", "young"]
    assert isinstance(weight.labels, Numbers) and weight.class_names == ["weight"]
    assert code.class_names == ["3", "10"]  # whole numbers, few of them, are names


def test_a_kind_behind_the_name_decides(tmp_path: Path) -> None:
    assert with_kind("a:b:numbers") == ("a:b", "numbers") and with_kind("a:b") == ("a:b", None)
    found = parts(table(tmp_path, [*ROWS[:5], ROWS[6]]), "code:numbers", "tags:classes").parts
    assert isinstance(found["code"].labels, Numbers)
    assert found["tags"].class_names == ["ill", "ok", "ok|young"]


def test_empty_cells_are_unknown_and_empty_rows_left_out(tmp_path: Path) -> None:
    splits = open_data(Data(str(table(tmp_path)), answers=NAMES))
    assert [one.id for one in splits.report.dropped] == ["3.png"]
    assert "row 5: no cell of 'species', 'tags', 'weight', 'code' is filled" in splits.report.dropped[0].reason
    labels = splits.train.labels
    assert isinstance(labels, Answers) and len(labels) == 4 and labels.known.all()
    rows = [splits.train[index].label.tolist() for index in range(4)]  # type: ignore[union-attr]
    # species; ill, ok, young; weight; code
    assert rows[0] == [0, 0, 1, 1, 812.5, 0]
    assert rows[1] == [0, -1, -1, -1, 790, 1]
    assert rows[2][:4] == [1, 1, 0, 0] and rows[2][4] != rows[2][4] and rows[2][5] == 0


def test_labels_of_another_split_have_the_classes_of_the_training_images(tmp_path: Path) -> None:
    rows = [*ROWS[:5], ("perch", "ill|young", "300", "3", "val"), ROWS[6]]
    with pytest.raises(DataError, match="classes that are not among the 2 known ones: 'perch'"):
        open_data(Data(str(table(tmp_path, rows)), answers=("species", "weight")))
    names = ["weight", "species: perch", "species: cod"]
    found = open_split(Data(str(table(tmp_path, rows)), answers=("species", "weight:numbers")), "val", names)
    assert found.class_names == names and [found[index].label.tolist() for index in (0, 1)] == [[300, 0], [800, 1]]  # type: ignore[union-attr]
    with pytest.raises(DataError, match="'length' is needed, too"):
        open_split(Data(str(table(tmp_path)), answers=("species", "weight")), "val", [*names, "length"])


def test_held_out_images_have_all_classes_of_all_answers(tmp_path: Path) -> None:
    rows = [(f"k{n % 2}", "", "1.5", f"c{n % 5}", "train") for n in range(40)]
    splits = open_data(Data(str(table(tmp_path, rows)), answers=("species", "code"), holdout=0.25))
    assert splits.validation is not None and len(splits.validation) == 10
    counts = np.unique([splits.validation[index].label[1] for index in range(10)], return_counts=True)[1]  # type: ignore[index]
    assert counts.tolist() == [2] * 5


@pytest.mark.parametrize(
    ("answers", "changes", "said"),
    [
        (("species", "wieght"), {}, r"has no column 'wieght'.* Did you mean 'weight'\?"),
        (("species", "weight:number"), {}, r"Kinds of an answer, behind a colon, are classes, labels, numbers\."),
        (("species", "species"), {}, r"names 2 columns, 1 of them different"),
        (("species", "weight"), {"label_column": "code"}, r"leave out data\.label_column"),
        (("species", "weight"), {"labels_per_image": "several"}, r"leave out data\.labels_per_image"),
        (("species", "weight"), {"label_columns": ("code",)}, r"leave out data\.label_columns"),
    ],
)
def test_columns_that_do_not_go_together(
    tmp_path: Path, answers: tuple[str, ...], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        open_data(Data(str(table(tmp_path)), answers=answers, **changes))


@pytest.mark.parametrize("column", ["code", "code:numbers"])
def test_a_single_answer_of_numbers_is_called_as_its_column(tmp_path: Path, column: str) -> None:
    rows = [row for row in ROWS if row[0]]
    by_label = open_data(Data(str(table(tmp_path, rows)), label_column="code", labels_per_image="numbers"))
    by_answer = open_data(Data(str(tmp_path / "list.csv"), answers=(column,), labels_per_image="numbers"))
    assert by_answer.class_names == by_label.class_names == ["code"]
    assert by_answer.train.labels.values.tolist() == by_label.train.labels.values.tolist()


def test_a_check_does_not_compare_the_classes_of_different_answers(tmp_path: Path) -> None:
    rows = [("cod", "", str(number + 0.5), str(number // 11), "train") for number in range(12)]
    found = check(Data(str(table(tmp_path, rows)), answers=("weight", "code")), workers=1)
    assert not any("imbalanced" in line for line in found.warnings)
    assert found.stats.splits[0].several == "2 answers per image: weight, code"


def test_a_cell_that_is_no_number(tmp_path: Path) -> None:
    rows = [*ROWS]
    rows[1] = ("cod", "", "heavy", "10", "train")
    with pytest.raises(DataError, match=r"the answer 'weight' of image '1\.png' is 'heavy'.*holds numbers"):
        open_data(Data(str(table(tmp_path, rows)), answers=("species", "weight:numbers")))
    with pytest.raises(DataError, match="names columns of a CSV file"):
        open_data(Data("digits", answers=("species", "weight")))


def test_the_name_of_a_column_with_the_text_between_answers_and_classes(tmp_path: Path) -> None:
    path = table(tmp_path)
    text = path.read_text().replace("species", "fish: species")
    path.write_text(text)
    with pytest.raises(UsageError, match="'fish: species' is no valid name of an answer"):
        open_data(Data(str(path), answers=("fish: species", "weight")))
    assert next(csv.reader(text.splitlines()))[1] == "fish: species"
