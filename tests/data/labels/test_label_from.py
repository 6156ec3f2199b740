"""Labels in names, lists, tables and JSON files beside real photographs; what is wrong is said, with its place."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from vitrail.data.item import DataSet, IndexedSource
from vitrail.data.labels.sets import LabelSets, label_names
from vitrail.data.settings import Columns, Data
from vitrail.data.sources.lists import write_list
from vitrail.data.sources.open import open_data, open_path, open_split
from vitrail.data.split import fingerprint
from vitrail.errors import DataError, UsageError

KINDS = ("bluebell", "daisy", "lily-valley")
EACH = 4


@pytest.fixture(scope="module")
def photographs(shared_data: Path) -> list[tuple[str, Path]]:
    """Four photographs of each of three flowers with their class; the order mixes the classes."""
    by_kind = [
        [(kind, file) for file in sorted((shared_data / "flowers12" / "test" / kind).iterdir())] for kind in KINDS
    ]
    return [pair for row in zip(*(files[:EACH] for files in by_kind), strict=True) for pair in row]


@pytest.fixture
def place(tmp_path: Path, photographs: list[tuple[str, Path]]) -> Callable[[str], list[str]]:
    """Function that puts the photographs at "folder/{kind}_{number}.jpg", and returns their classes."""

    def put(form: str) -> list[str]:
        for number, (kind, file) in enumerate(photographs):
            target = tmp_path / form.format(kind=kind, number=number, half="train" if number % 6 < 3 else "val")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        return [kind for kind, _ in photographs]

    return put


def write(file: Path, rows: Iterable[tuple[object, ...]], delimiter: str = ",") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter=delimiter).writerows(rows)
    return file


def opened(path: Path, label_from: str | None = None, **settings: str) -> DataSet:
    data = Data(path=str(path), label_from=label_from, **settings)  # type: ignore[arg-type]
    return open_path(data.path, data.columns)


def by_id(source: IndexedSource) -> dict[str, list[str]]:
    return {source.id(k): label_names(source.labels, k, source.class_names) for k in range(len(source))}


def classes(source: IndexedSource) -> dict[str, str]:
    return {name: label for name, (label,) in by_id(source).items()}


def test_the_name_of_a_file(tmp_path: Path, place) -> None:
    kinds = place("flat/{kind}_{number:03d}.jpg")
    found = opened(tmp_path / "flat", "name: ^(.+)_[0-9]+")
    assert classes(found.splits[""]) == {f"{kind}_{number:03d}.jpg": kind for number, kind in enumerate(kinds)}
    assert found.splits[""][0].image[:2] == b"\xff\xd8"  # the photograph itself
    assert found.findings.lines() == []


def test_a_class_may_be_called_none(tmp_path: Path, place) -> None:
    """In a table that is a missing label; in a name it is the name of a class."""
    place("d/none_{number}.jpg")
    place("d/{kind}_{number}.jpg")
    assert opened(tmp_path / "d", "name: ^(.+)_").splits[""].class_names == ["bluebell", "daisy", "lily-valley", "none"]


def test_labels_in_two_splits_without_class_folders(tmp_path: Path, place) -> None:
    kinds = place("d/{half}/{kind}-{number}.jpg")
    splits = open_data(Data(path=str(tmp_path / "d"), label_from=r"name: ^(.+)-\d+"))
    assert splits.class_names == list(KINDS) and splits.held_out == {"validation": "val"}
    assert splits.validation is not None and len(splits.train) + len(splits.validation) == len(kinds)
    named = Data(path=str(tmp_path / "d"), label_from=r"name: ^(.+)-\d+")
    assert open_split(named, "val").class_names == list(KINDS)


@pytest.mark.parametrize(
    ("line", "spell"),
    [
        ("{path} {label}", "d/val/{number}.jpg"),
        ("{path}\t{label}", "d/val/a photograph, {number}.jpg"),
        ("{path} {label}", "d/val/a photograph {number}.jpg"),
        ("{path},{label}", "d/val/{number}.jpg"),
        ('"{path}",{label}', "d/val/a, {number}.jpg"),
        ("./{path} {label}", "d/val/{number}.jpg"),
    ],
    ids=["spaces", "tabs", "spaces in names", "commas", "quoted", "dot"],
)
def test_a_list(tmp_path: Path, place, line: str, spell: str) -> None:
    """Relative to the folder, to a folder above it, by names alone; and the list itself in place of the folder."""
    kinds = place(spell)
    paths = [spell.removeprefix("d/").format(number=number) for number in range(len(kinds))]
    for name, cut in {"whole": "", "names": "val/"}.items():
        text = "\n".join(line.format(path=path.removeprefix(cut), label=kinds[k]) for k, path in enumerate(paths))
        (tmp_path / "d" / f"{name}.txt").write_text(text + "\n")
        found = opened(tmp_path / "d" / "val", f"list: ../{name}.txt")
        assert classes(found.splits["val" if "val" in found.splits else ""]) == dict(
            zip([path.removeprefix("val/") for path in paths], kinds, strict=True)
        )
    assert classes(opened(tmp_path / "d" / "whole.txt").splits[""]) == dict(zip(paths, kinds, strict=True))


def test_numbers_in_a_list_as_that_of_imagenet(tmp_path: Path, shared_data: Path) -> None:
    """Class 10 comes after class 2: numbers are sorted as numbers."""
    files = sorted((shared_data / "imagenet-samples").glob("*.JPEG"))[:12]
    (tmp_path / "val").mkdir()
    for number, file in enumerate(files):
        (tmp_path / "val" / f"ILSVRC2012_val_{number + 1:08d}.JPEG").symlink_to(file)
    rows = [f"val/ILSVRC2012_val_{number + 1:08d}.JPEG {number}" for number in range(12)]
    (tmp_path / "val.txt").write_text("\n".join(rows))
    found = opened(tmp_path / "val", "list: ../val.txt").splits[""]
    assert found.class_names == [str(number) for number in range(12)] and found.labels.tolist() == list(range(12))


def test_a_table_of_ids_without_extension(tmp_path: Path, place) -> None:
    """Kaggle's dog breeds and APTOS: a folder of images beside a table; a table for training alone."""
    kinds = place("dogs/images/{number:04x}.jpg")
    rows = [(f"{number:04x}", kind, number) for number, kind in enumerate(kinds)]
    write(tmp_path / "dogs" / "labels.csv", [("id", "breed", "age"), *rows])
    expected = {f"{number:04x}.jpg": kind for number, kind in enumerate(kinds)}
    assert classes(opened(tmp_path / "dogs", "table: labels.csv id -> breed").splits[""]) == expected
    assert classes(opened(tmp_path / "dogs" / "images", "table: ../labels.csv id -> breed").splits[""]) == expected
    assert classes(opened(tmp_path / "dogs", "table: labels.csv", label_column="breed").splits[""]) == expected

    write(tmp_path / "dogs" / "parts.csv", [("id", "breed", "split"), *((*row[:2], "train") for row in rows)])
    warnings = opened(tmp_path / "dogs", "table: parts.csv id -> breed").findings.warnings
    assert any("column 'split' of parts.csv is not used" in line for line in warnings)

    place("eyes/train_images/{number:04x}.jpg")
    place("eyes/test_images/t{number:04x}.jpg")
    write(tmp_path / "eyes" / "train.csv", [("id_code", "diagnosis"), *(row[:2] for row in rows)])
    found = opened(tmp_path / "eyes", "table: train.csv id_code -> diagnosis")
    assert classes(found.splits["train"]) == expected and list(found.splits) == ["train"]
    assert "no image of split 'test' has a label: left out" in found.findings.warnings


def test_json_beside_each_image(tmp_path: Path, place) -> None:
    kinds = place("d/{number}.jpg")
    for number, kind in enumerate(kinds):
        name = f"{number}.json" if number % 2 else f"{number}.jpg.json"  # both are in use
        (tmp_path / "d" / name).write_text(
            json.dumps({"about": {"species": kind, "a.b": kind}, "tags": [kind, "plant"]})
        )
    expected = {f"{number}.jpg": kind for number, kind in enumerate(kinds)}
    assert classes(opened(tmp_path / "d", "json: about.species").splits[""]) == expected
    assert classes(opened(tmp_path / "d", "json: about.a.b").splits[""]) == expected
    several = opened(tmp_path / "d", "json: tags").splits[""]
    assert by_id(several) == {name: sorted([kind, "plant"]) for name, kind in expected.items()}


def test_several_labels_wherever_they_stand(tmp_path: Path, place) -> None:
    """A list of shapes as LabelMe writes, lists in cells, columns of classes, a row for each label, "+" in names."""
    place("d/{number}.jpg")
    sets = [["cat"], ["cat", "dog"], ["dog", "tree"], [], ["cat", "dog", "tree"], ["tree"], *[["dog"]] * 6]
    expected = {f"{number}.jpg": names for number, names in enumerate(sets)}
    for number, names in enumerate(sets):
        shapes = {"shapes": [{"label": name, "points": [[1, 2]]} for name in names]}
        (tmp_path / "d" / f"{number}.json").write_text(json.dumps(shapes))
    assert by_id(opened(tmp_path / "d", "json: shapes.label").splits[""]) == expected

    marks = [(number, *(int(name in names) for name in ("cat", "dog", "tree"))) for number, names in enumerate(sets)]
    write(tmp_path / "marks.csv", [("image_id", "cat", "dog", "tree"), *marks])
    assert by_id(opened(tmp_path / "d", "table: ../marks.csv").splits[""]) == expected

    write(tmp_path / "cells.csv", [("id", "what"), *((number, "|".join(names)) for number, names in enumerate(sets))])
    found = opened(tmp_path / "d", "table: ../cells.csv id -> what", labels_per_image="several")
    assert by_id(found.splits[""]) == expected

    rows = [(f"{number}.jpg", name) for number, names in enumerate(sets) for name in names]
    write(tmp_path / "rows.csv", rows)
    found = opened(tmp_path / "d", "list: ../rows.csv", labels_per_image="several")
    assert by_id(found.splits[""]) == {name: names for name, names in expected.items() if names}  # 3 is in no row
    assert any(
        "1 of 12 images of the data have no label: left out, such as '3.jpg'" in x for x in found.findings.warnings
    )

    for number, names in enumerate(sets):
        (tmp_path / "d" / f"{number}.jpg").rename(tmp_path / "d" / f"{'+'.join(names or ['cat'])}_{number}.jpg")
    found = opened(tmp_path / "d", "name: ^(.+)_", label_separator="+")
    assert isinstance(found.splits[""].labels, LabelSets) and found.splits[""].class_names == ["cat", "dog", "tree"]


@pytest.mark.parametrize(
    ("label_from", "error", "message"),
    [
        ("name: ^.+_[0-9]+", UsageError, "has 0 groups .* exactly one"),
        ("name: ^(.)(.)", UsageError, "has 2 groups"),
        ("name: (", UsageError, "is not a regular expression"),
        (
            "name: ^(b.+)_",
            DataError,
            r"finds no label in 8 of 12 names .*'daisy_1.jpg'.* and 5 more.*\^\(\.\+\)_\[0-9\]\+",
        ),
        ("nane: (.+)_", UsageError, "Did you mean 'name'"),
        ("labels.csv", UsageError, "valid are 'name: PATTERN', 'list: FILE', 'table: FILE ID -> LABEL', 'json: KEY'"),
        ("table: labels.csv id -> bred", UsageError, "no column 'bred'.*Did you mean 'breed'"),
        ("table: labels.cvs id -> breed", UsageError, r"'labels.cvs id -> breed' is not a .csv or .tsv file"),
        ("table: label.csv id -> breed", DataError, "no table 'label.csv' .*Did you mean 'labels.csv'"),
        (
            "table: twice.csv id -> breed",
            DataError,
            "row 3: 'daisy_1' has the label 'lily', and 'daisy' in row 2.*several",
        ),
        (
            "table: others.csv id -> breed",
            DataError,
            "names none of the 12 images .*its ids are 'x1'.*'bluebell_0.jpg'",
        ),
        ("table: empty.csv id -> breed", DataError, "names none of the 12 images .*it has no rows"),
        ("table: no-id.csv id -> breed", DataError, "row 3: no id, for the label 'daisy'"),
        ("table: no-label.csv id -> breed", DataError, "row 3: no label"),
        ("table: photograph.csv id -> breed", DataError, "photograph.csv is not UTF-8 text"),
        ("list: photograph.csv", DataError, "photograph.csv is not UTF-8 text"),
        ("list: words.txt", DataError, "line 2: expected a path and a label, found 'daisy_1.jpg'"),
        ("list: folder", DataError, "there is no list 'folder'"),
        ("json: species", DataError, "none of the 12 images .* would stand in bluebell_0.json"),
        ("json:", UsageError, "names no key"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, place, label_from: str, error: type[Exception], message: str) -> None:
    place("d/{kind}_{number}.jpg")
    d, header = tmp_path / "d", ("id", "breed")
    write(d / "labels.csv", [header, ("daisy_1", "daisy")])
    write(d / "twice.csv", [header, ("daisy_1", "daisy"), ("daisy_1", "lily")])
    write(d / "others.csv", [header, ("x1", "daisy")])
    write(d / "empty.csv", [header])
    write(d / "no-id.csv", [header, ("daisy_1", "daisy"), ("", "daisy")])
    write(d / "no-label.csv", [header, ("daisy_1", "daisy"), ("bluebell_0", "")])
    (d / "photograph.csv").write_bytes((d / "daisy_1.jpg").read_bytes())
    (d / "words.txt").write_text("bluebell_0.jpg 3\ndaisy_1.jpg\n")
    (d / "folder").mkdir()
    before = sorted(file.name for file in d.iterdir())
    with pytest.raises(error, match=f"(?s){message}"):
        open_data(Data(path=str(d), label_from=label_from))
    assert sorted(file.name for file in d.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "5.json cannot be read"),
        (b"\xff\xd8\xff", "5.json cannot be read"),
        (b"[" * 100_000, "5.json cannot be read: .*nested"),
        (b'{"specie": "daisy"}', "5.json has no key 'species' .*its keys are 'specie'. Did you mean 'specie'"),
        (b"3", "has no key 'species' .*: there is 3"),
        (b'{"species": null}', "5.json: no label"),
        (b'{"species": ""}', "5.json: no label"),
        (b'{"species": 0.5}', "a label is 0.5; valid are names, whole numbers, and lists"),
        (b'{"species": true}', "a label is True"),
        (b'{"species": {"name": "daisy"}}', "a label is {'name': 'daisy'}"),
        (b'{"species": ["daisy", null]}', "a label in the list .* is None"),
    ],
)
def test_json_that_cannot_be_read(tmp_path: Path, place, content: bytes, message: str) -> None:
    for number, kind in enumerate(place("d/{number}.jpg")):
        (tmp_path / "d" / f"{number}.json").write_text(json.dumps({"species": kind}))
    (tmp_path / "d" / "5.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "d", "json: species")


def test_rows_and_images_without_each_other_are_listed(tmp_path: Path, place) -> None:
    kinds = place("d/{number}.jpg")
    rows = [(f"{number}.jpg", kind) for number, kind in enumerate(kinds)]
    write(tmp_path / "d" / "labels.csv", [("id", "kind"), *rows[:-2], ("gone.jpg", "daisy"), rows[0]])
    found = opened(tmp_path / "d", "table: labels.csv id -> kind")
    assert set(classes(found.splits[""])) == {name for name, _ in rows[:-2]}
    assert found.findings.lines() == [
        "2 of 12 images of the data have no label: left out, such as '10.jpg', '11.jpg'",
        "ignored 1 x not an image (.csv): labels.csv",
        f"left out gone.jpg: labels.csv, row 12: no such image in {tmp_path / 'd'}",
        "left out 0.jpg: labels.csv, row 13: listed before, in row 2",
    ]
    with pytest.raises(DataError, match=r"data\.strict"):
        open_data(Data(path=str(tmp_path / "d"), label_from="table: labels.csv id -> kind", strict=True))
    unlabelled = open_path(str(tmp_path / "d"), Columns(label_from="table: labels.csv id -> kind"), labels=False)
    assert np.count_nonzero(unlabelled.splits[""].labels == -1) == 2  # they stay where no labels are needed


def test_an_id_that_fits_several_images(tmp_path: Path, place) -> None:
    """An id is the end of one path: another folder's image of the same name never gets its label."""
    place("d/a/{number}.jpg"), place("d/b/{number}.jpg")
    write(tmp_path / "d" / "labels.csv", [("id", "kind"), ("3", "daisy")])
    with pytest.raises(DataError, match=r"row 2: '3' fits 2 images: 'a/3.jpg', 'b/3.jpg'. Write the path below"):
        opened(tmp_path / "d", "table: labels.csv id -> kind")
    rows = [("a/3", "daisy"), ("b\\4.jpg", "lily"), ("d/b/5", "lily"), (str(tmp_path / "d" / "a" / "6.jpg"), "daisy")]
    write(tmp_path / "d" / "labels.csv", [("id", "kind"), *rows, ("c/7", "lily"), ("x/a/8", "lily")])
    found = opened(tmp_path / "d", "table: labels.csv id -> kind")
    assert classes(found.splits[""]) == {"a/3.jpg": "daisy", "a/6.jpg": "daisy", "b/4.jpg": "lily", "b/5.jpg": "lily"}
    assert [rejected.id for rejected in found.findings.dropped] == ["c/7", "x/a/8"]


@pytest.mark.parametrize(
    ("form", "advice"),
    [
        ("d/{kind}_{number:03d}.jpg", r"name: ^(.+)_[0-9]+\."),
        ("d/{kind}.{number}.jpg", r"name: ^(.+)\.[0-9]+\."),
        ("d/{kind} ({number}).jpg", r"name: ^(.+) \([0-9]+\)\."),
        ("d/{kind}{number}.jpg", r"name: ^(.*[^0-9 ]) ?[0-9]+\."),
        ("d/{number:03d}-{kind}.jpg", r"name: ^[0-9]+[-_. ](.+)\."),
        ("d/{kind}_a{number}b.jpg", "name: ^([^_]+)_"),
        ("d/{half}/{kind}_{number}.jpg", r"name: ^(.+)_[0-9]+\."),
        ("d/images/{kind}_{number}.jpg", r"name: ^(.+)_[0-9]+\."),
    ],
)
def test_the_error_for_a_flat_folder_gives_the_flag(tmp_path: Path, place, form: str, advice: str) -> None:
    kinds = place(form)
    with pytest.raises(DataError) as error:
        open_data(str(tmp_path / "d"))
    assert f"add --data.label-from '{advice}' (3 classes: 'bluebell', 'daisy', 'lily-valley')" in str(error.value)
    splits = open_data(Data(path=str(tmp_path / "d"), label_from=advice))
    assert splits.class_names == list(KINDS) and splits.validation is not None
    assert len(splits.train) + len(splits.validation) == len(kinds)


@pytest.mark.parametrize("kind", ["table", "list", "json", "guesses", "none"])
def test_the_error_finds_labels_beside_the_images(tmp_path: Path, place, kind: str) -> None:
    kinds = place("d/images/{number}.jpg")
    d = tmp_path / "d"
    if kind == "table":
        write(d / "labels.csv", [("id", "score", "breed"), *((k, k / 7, name) for k, name in enumerate(kinds))])
    elif kind == "list":
        (d / "all.txt").write_text("".join(f"images/{k}.jpg {name}\n" for k, name in enumerate(kinds)))
    elif kind == "json":
        for k, name in enumerate(kinds):
            (d / "images" / f"{k}.json").write_text(json.dumps({"id": k, "about": {"species": name}}))
    elif kind == "guesses":  # what `vitrail predict --out` wrote
        header = ("path", "class", "probability", "class_2", "probability_2")
        write(
            tmp_path / "answers.csv",
            [header, *((f"images/{k}.jpg", n, 0.9, "bluebell", 0.1) for k, n in enumerate(kinds))],
        )
    flag = {
        "table": "add --data.label-from 'table: labels.csv id -> breed' (3 classes",
        "list": "add --data.label-from 'list: all.txt' (3 classes",
        "json": "add --data.label-from 'json: about.species' (3 classes",
        "guesses": "If the labels are in the names of the images",
        "none": "If the labels are in the names of the images",
    }[kind]
    with pytest.raises(DataError) as error:
        open_data(str(d))
    assert flag in str(error.value)


def test_folders_for_training_and_test_are_no_classes(tmp_path: Path, place) -> None:
    """A table that cannot be read beside train_images/ and test_images/ does not make two classes of these."""
    kinds = place("eyes/train_images/{number}.jpg")
    place("eyes/test_images/t{number}.jpg")
    write(tmp_path / "eyes" / "train.csv", [("id_code", "diagnosis"), *enumerate(kinds)])
    with pytest.raises(DataError, match=r"'table: train.csv id_code -> diagnosis' \(3 classes"):
        open_data(str(tmp_path / "eyes"))
    assert open_path(str(tmp_path / "eyes"), labels=False).splits  # which need not be classes then


def test_a_folder_one_or_two_levels_too_high(tmp_path: Path, place) -> None:
    place("down/photos/{half}/{kind}/{number}.jpg")
    place("deep/a/photos/{kind}/{number}.jpg")
    (tmp_path / "down" / "__MACOSX" / "photos" / "train").mkdir(parents=True)
    (tmp_path / "down" / "README.txt").write_text("photographs")
    for name, meant in {"down": "down/photos", "deep": "deep/a/photos"}.items():
        there, direct = open_data(str(tmp_path / name)), open_data(str(tmp_path / meant))
        assert there.fingerprint == direct.fingerprint and there.class_names == list(KINDS)
        said = f"{tmp_path / name} holds no data set itself: the one in {tmp_path / meant} is used"
        assert said in there.report.warnings
    place("two/first/a/{half}/{kind}/{number}.jpg")
    place("two/second/a/{kind}/{number}.jpg")
    with pytest.raises(DataError, match=r"2 of the folders below it do: \S*first/a, \S*second/a. Give one"):
        open_data(str(tmp_path / "two"))
    labelled = opened(tmp_path / "down", r"name: ^(\d)")
    assert set(labelled.splits) == {"train", "val"}


def test_only_a_folder_of_images_has_labels_elsewhere(tmp_path: Path, place) -> None:
    kinds = place("d/{number}.jpg")
    write(tmp_path / "d" / "labels.csv", [("path", "label"), *((f"{k}.jpg", name) for k, name in enumerate(kinds))])
    for path in (tmp_path / "d" / "labels.csv", "digits", "s3://bucket/train.tar"):
        with pytest.raises(DataError, match="valid for a folder of images only"):
            open_path(str(path), Columns(label_from="name: ^(.)"))
    with pytest.raises(DataError, match="looked for"):
        open_path(str(tmp_path / "gone"), Columns(label_from="name: ^(.)"))


def test_a_list_of_images_keeps_where_the_labels_are(tmp_path: Path, place) -> None:
    place("d/{kind}_{number}.jpg")
    found = opened(tmp_path / "d", "name: ^(.+)_")
    write_list(
        tmp_path / "list.csv", str(tmp_path / "d"), found, {"train": found.splits[""]}, label_from="name: ^(.+)_"
    )
    again = opened(tmp_path / "list.csv")
    assert classes(again.splits["train"]) == classes(found.splits[""])


def test_another_label_is_another_fingerprint(tmp_path: Path, place) -> None:
    """By which a run knows that it is resumed with other labels."""
    place("d/{kind}_{number}.jpg")
    whole, letter = opened(tmp_path / "d", "name: ^(.+)_"), opened(tmp_path / "d", "name: ^(.)")
    assert fingerprint(whole.splits) != fingerprint(letter.splits)
