"""Images of a group stay on one side of every split, and what happens otherwise."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from random_inputs import QUIETLY
from sklearn.neighbors import KNeighborsClassifier

import vitrail
from vitrail.data.check import check
from vitrail.data.groups import grouped_folds, groups_of, hold_out_groups, series_advice
from vitrail.data.item import ids
from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import LabelSets
from vitrail.data.settings import Data, Preprocess
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.sources.open import open_data, open_split
from vitrail.errors import DataError, UsageError
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.transfer.protocol import arrange
from vitrail.verbs.data.audit import audit
from vitrail.verbs.features import open_images, open_train_and_test
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

pytestmark = pytest.mark.filterwarnings("error:The least populated class")

PATIENTS, EACH = 24, 6
NETWORK = ViTConfig(width=64, depth=1, heads=2, mlp_dim=64, patch=2, image_size=(8, 8), classes=2)


def images_of(labels: object) -> ArraySource:
    return ArraySource("x", np.zeros((len(labels), 2, 2, 3), np.uint8), labels, [str(name) for name in range(4)])  # type: ignore


@st.composite
def grouped(draw: st.DrawFn) -> tuple[ArraySource, np.ndarray]:
    count, groups = draw(st.integers(12, 80)), draw(st.integers(4, 10))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    number = np.concatenate([np.arange(groups), rng.integers(0, groups, count - groups)])
    classes = rng.integers(0, 4, count)
    kind = draw(st.sampled_from(["one", "several", "numbers"]))
    labels = {
        "one": classes,
        "several": LabelSets.of([[0, 2][: 1 + row % 2] if row % 5 else [] for row in classes.tolist()], 4),
        "numbers": Numbers(rng.normal(size=(count, 2))),
    }[kind]
    return images_of(labels), np.array([f"p{one}" for one in number])


@QUIETLY
@given(grouped(), st.integers(2, 4), st.integers(0, 2**64))
def test_each_group_is_in_one_fold(images: tuple[ArraySource, np.ndarray], count: int, seed: int) -> None:
    source, groups = images
    fold = grouped_folds(source, groups, count, seed)
    assert set(fold.tolist()) == set(range(count))
    assert all(len(set(fold[groups == group].tolist())) == 1 for group in set(groups.tolist()))
    assert np.array_equal(fold, grouped_folds(source, groups, count, seed))


@QUIETLY
@given(grouped(), st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_a_part_that_is_held_out_has_whole_groups(
    images: tuple[ArraySource, np.ndarray], share: float, seed: int
) -> None:
    source, groups = images
    rest, held = hold_out_groups(source, groups, share, seed)
    assert sorted([*rest.tolist(), *held.tolist()]) == list(range(len(groups))) and len(rest) and len(held)
    assert not {*groups[rest].tolist()} & {*groups[held].tolist()}


def test_the_share_and_the_classes_are_about_those_asked_for() -> None:
    labels = np.repeat(np.arange(40) % 4, 10)
    _, held = hold_out_groups(images_of(labels), np.repeat(np.arange(40).astype(str), 10), 0.2, 0)
    assert len(held) == 80 and np.bincount(labels[held]).tolist() == [20, 20, 20, 20]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 0.8, 0.9])
def test_a_share_of_many_groups_is_held_out(share: float) -> None:
    labels = np.repeat(np.arange(120) % 4, 10)
    _, held = hold_out_groups(images_of(labels), np.repeat(np.arange(120).astype(str), 10), share, 0)
    assert abs(len(held) / len(labels) - share) < 0.02


@QUIETLY
@given(grouped(), st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_small_classes_are_held_out_in_groups(images: tuple[ArraySource, np.ndarray], share: float, seed: int) -> None:
    """Classes of three images, or fewer: the usual tenth would be no image of any class."""
    groups = images[1]
    rest, held = hold_out_groups(images_of(np.arange(len(groups)) // 3), groups, share, seed)
    assert len(rest) and len(held) and not {*groups[rest].tolist()} & {*groups[held].tolist()}


def test_parts_without_an_image_of_any_class_are_refused() -> None:
    source, groups = images_of(np.arange(12) // 3), np.arange(12).astype(str)
    with pytest.raises(UsageError, match="12 groups, and no class has more than 3 images, too few for 4 parts"):
        grouped_folds(source, groups, 4, 0)
    with pytest.raises(UsageError, match="no class has more than 1 image, too few for 2 parts"):
        hold_out_groups(images_of(np.arange(4)), groups[:4], 0.1, 0)


def patients(folder: Path, *, splits: bool = False) -> Path:
    """Each patient has a picture of its own, which its images show with little noise, and a class by chance."""
    rng = np.random.default_rng(0)
    for patient in range(PATIENTS):
        picture, label = rng.integers(0, 256, (8, 8, 3)), "sick" if patient % 2 else "well"
        for number in range(EACH):
            seen = np.clip(picture + rng.normal(0, 8, picture.shape), 0, 255).astype(np.uint8)
            split = ("val" if number == 0 else "train") if splits else ""
            file = folder / split / label / f"p{patient:02}_{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(seen).save(file)
    return folder


def pixels_of(data: bytes) -> bytes:
    return np.asarray(Image.open(io.BytesIO(data))).tobytes()


def pixels(source: object) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)).ravel() for path in (source.id(i) for i in range(len(source)))])  # type: ignore


def test_a_random_split_leaks_and_a_grouped_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of new patients cannot be known: only the patients of a random split are recognised."""
    folder = patients(tmp_path / "photos")
    monkeypatch.chdir(folder)
    found = {}
    for group in (None, "name: ^(p[0-9]+)_"):
        right = []
        for seed in range(5):
            splits = open_data(Data(str(folder), holdout=0.25, group=group), seed=seed)
            assert splits.validation is not None
            nearest = KNeighborsClassifier(1).fit(pixels(splits.train), splits.train.labels)
            right.append(nearest.score(pixels(splits.validation), splits.validation.labels))
        found[group] = float(np.mean(right))
    assert found[None] > 0.99 and 0.3 < found["name: ^(p[0-9]+)_"] < 0.7


@pytest.mark.train
def test_an_audit_does_not_know_the_patient(tmp_path: Path) -> None:
    """With a class by chance, a probe predicts the labels only if its other images of the patient have told it."""
    torch.manual_seed(0)
    save_model(tmp_path / "network", ViT(NETWORK), Card(NETWORK, ["a", "b"], Preprocess((8, 8))))
    folder, group = patients(tmp_path / "photos"), "name: ^(p[0-9]+)_"
    asked = {"weights": tmp_path / "network", "device": "cpu", "workers": 1, "seed": 3}
    assert audit(folder, **asked).accuracy > 0.9
    assert audit(folder, group=group, **asked).accuracy < 0.7
    with pytest.raises(UsageError, match="into 24 groups, too few for 25 parts"):
        audit(folder, group=group, folds=25, **asked)


def table(folder: Path) -> Path:
    files = sorted(folder.glob("*/*.png"))
    rows = [f"{file.relative_to(folder)},{file.parent.name},{file.name[:3]}" for file in files]
    (folder / "patients.csv").write_text("\n".join(["image,label,patient", *rows]))
    return folder / "patients.csv"


def test_every_form_says_the_same(tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos")
    listed = table(folder)
    by_name = groups_of(open_split(folder), Data(str(folder), group="name: ^(p[0-9]+)_")).tolist()
    assert len(set(by_name)) == PATIENTS
    by_table = groups_of(open_split(folder), Data(str(folder), group="table: patients.csv image -> patient"))
    assert by_table.tolist() == by_name
    source = open_split(Data(str(listed), group="patient"))
    by_column = groups_of(source, Data(str(listed), group="patient")).tolist()
    assert by_column == [Path(name).name[:3] for name in ids(source, np.arange(len(source)))]
    folders = groups_of(open_split(folder), Data(str(folder), group="folder")).tolist()
    assert set(folders) == {"sick", "well"}


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        ("patient", UsageError, "a column, and the images of .* have none"),
        ("nam: x", UsageError, "valid are 'folder', 'name: PATTERN'"),
        ("name: p[0-9]+", UsageError, "exactly one must stand around"),
        ("name: (p[0-9", UsageError, "not a regular expression"),
        ("name: ^(q[0-9]+)_", DataError, "144 of 144 images belong to no group"),
        ("table: none.csv", DataError, "there is no table 'none.csv' .data.group"),
        ("name: ^(p)", UsageError, "into 1 group, too few for 2 parts"),
    ],
)
def test_what_does_not_fit_is_said(group: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos")
    with pytest.raises(error, match=message):
        open_data(Data(str(folder), group=group))
    listed = table(folder)
    with pytest.raises(UsageError, match=r"has no column 'patiend'.*Did you mean 'patient'"):
        open_data(Data(str(listed), group="patiend"))


@pytest.mark.parametrize("splits", [False, True])
def test_a_command_that_divides_nothing_says_that_groups_have_no_effect(
    splits: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = patients(tmp_path / "photos", splits=splits)
    open_images("m", (folder,), None, {"group": "name: ^(p[0-9]+)_", "include": ("*.png",)})
    assert ("data.group has no effect in this command" in caplog.text) == (not splits)
    assert "data.include has no effect" not in caplog.text


def columns_of(folder: Path, kind: str, number: bool = False) -> Path:
    """The images of `patients` with a column "patient" in another kind of table, or in the JSON of tar shards."""
    files = sorted(folder.glob("*/*.png"), key=lambda file: file.name[::-1])  # each half has both classes
    names = [file.parent.name for file in files]
    groups = [int(file.name[1:3]) if number else file.name[:3] for file in files]
    pixels: list[object] = [file.read_bytes() for file in files]
    if kind == "shards":
        with tarfile.open(folder.parent / "a.tar", "w") as tar:
            for file, label, patient in zip(files, names, groups, strict=True):
                record = json.dumps({"label": label, "patient": patient}).encode()
                for name, data in ((file.name, file.read_bytes()), (f"{file.stem}.json", record)):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        return folder.parent / "a.tar"
    if kind == "paths":
        pixels = [str(file.relative_to(folder)) for file in files]
    columns = {"image": pixels, "label": names, "patient": groups}
    if kind == "hub":
        Dataset.from_dict(columns).save_to_disk(folder.parent / "saved")
        return folder.parent / "saved"
    if kind == "paths":
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "paths.parquet")
        return folder / "paths.parquet"
    place = folder.parent / "parts"  # two files make one data set
    place.mkdir()
    for part, rows in (("a", slice(0, 72)), ("b", slice(72, None))):
        table = pyarrow.table({name: values[rows] for name, values in columns.items()})
        pyarrow.parquet.write_table(table, place / f"{part}.parquet", row_group_size=7)
    return place


@pytest.mark.parametrize("kind", ["bytes", "paths", "hub"])
@pytest.mark.parametrize("number", [False, True])
def test_a_column_of_parquet_and_of_the_hub(kind: str, number: bool, tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos")
    data = Data(str(columns_of(folder, kind, number)), group="patient")
    report = open_data(data).report
    assert "data.group 'patient' divides 144 images into 24 groups of 6 to 6" in report.warnings
    assert not any("patient" in name for names in report.examples.values() for name in names), "the column is used"
    source = open_split(data)
    pictures = {pixels_of(file.read_bytes()): file.name[:3] for file in folder.glob("*/*.png")}
    for row, group in enumerate(groups_of(source, data).tolist()):
        image = source[row].image
        assert isinstance(image, bytes)
        assert pictures[pixels_of(image)] == (f"p{int(group):02}" if number else group)
    with pytest.raises(UsageError, match=r"has no column 'patiend'.*Did you mean 'patient'"):
        open_data(Data(data.path, group="patiend"))


def test_cells_that_are_no_group(tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos")
    file = columns_of(folder, "bytes") / "a.parquet"
    whole = pyarrow.parquet.read_table(file)
    lists = pyarrow.array([[one] for one in whole["patient"].to_pylist()])
    some = pyarrow.array([None, " ", *whole["patient"].to_pylist()[2:]])
    for column, said in ((lists, "'patient' .data.group. holds list<"), (some, "2 of 72 images belong to no group")):
        pyarrow.parquet.write_table(whole.set_column(2, "patient", column), tmp_path / "one.parquet")
        with pytest.raises(DataError, match=said):
            open_data(Data(str(tmp_path / "one.parquet"), group="patient"))


def test_shards_have_no_columns(tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos")
    tar = columns_of(folder, "shards")
    with pytest.raises(UsageError, match=r"a column, and the images of .*a.tar have none.*'name: PATTERN'"):
        open_data(Data(str(tar), group="patient"))
    rows = [f"{file.name},{file.name[:3]}" for file in folder.glob("*/*.png")]
    (tmp_path / "patients.csv").write_text("\n".join(["image,patient", *rows]))
    for group in ("name: ^(p[0-9]+)_", "table: patients.csv image -> patient"):
        splits = open_data(Data(str(tar), group=group))
        assert splits.held_out["groups"] == sorted({Path(name).name[:3] for name in splits.held_out["ids"]})
        assert "divides 144 images into 24 groups of 6 to 6" in str(splits.report.warnings)


def test_splits_that_are_joined_have_one_name_for_a_group(tmp_path: Path) -> None:
    """Ids of images of joined splits begin with the name of the split, and groups do not."""
    folder = patients(tmp_path / "photos", splits=True)
    joined = Data(str(folder), train="train+val", group="folder", holdout=0.0, validation="none")
    assert set(groups_of(open_data(joined).train, joined).tolist()) == {"sick", "well"}


def test_groups_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = patients(tmp_path / "photos"), list[int]()

    def counted(source: Any, data: Data) -> np.ndarray:
        read.append(len(source))
        return groups_of(source, data)

    monkeypatch.setattr("vitrail.data.roles.groups_of", counted)
    for settings in ({}, {"fold": "1/3"}, {"holdout": 0.0}):
        read.clear()
        open_data(Data(str(folder), group="name: ^(p[0-9]+)_", **settings))  # type: ignore[arg-type]
        assert read == ([] if "holdout" in settings else [PATIENTS * EACH])


def test_a_sweep_chooses_on_other_groups(tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos")
    split = arrange(Data(str(folder), group="name: ^(p[0-9]+)_"), 0.25, seed=1)
    splits = open_data(split.search, seed=1)
    assert splits.validation is not None
    sides = [
        {Path(name).name[:3] for name in ids(part, np.arange(len(part)))} for part in (splits.train, splits.validation)
    ]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == PATIENTS


def test_masks_of_a_group_are_held_out_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng, rows = np.random.default_rng(0), ["image,patient"]
    for split in ("all", "given"):
        for number in range(24):
            place = ("val" if number % 4 == 0 else "train") if split == "given" else ""
            name = f"p{number // 4}_{number}"
            for kind, shape in (("images", (4, 4, 3)), ("masks", (4, 4))):
                file = tmp_path / split / kind / place / f"{name}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 2, shape, np.uint8)).save(file)
            rows.append(f"{name}.png,{name[:2]}")
    (tmp_path / "all" / "patients.csv").write_text("\n".join(rows[:25]))
    for group in ("name: ^(p[0-9]+)_", "table: patients.csv image -> patient"):
        for seed in range(3):
            found = open_train_and_test("", tmp_path / "all", None, reading={"group": group}, seed=seed)
            sides = [[part.id(row)[:2] for row in range(len(part))] for part in (found.train, found.test)]
            assert (
                "17% held out" in found.name
                and not {*sides[0]} & {*sides[1]}
                and sorted(sides[0] + sides[1])[::4] == [f"p{number}" for number in range(6)]
            )
            assert len(found.test) == 4 and found.test.labels.path(0).name[:2] == sides[1][0]
    assert "divides 24 images into 6 groups of 4 to 4" in caplog.text
    caplog.clear()
    open_train_and_test("", tmp_path / "given", None, reading={"group": "name: ^(p[0-9]+)_"})
    assert "6 groups of data.group 'name: ^(p[0-9]+)_' are in split 'training' and in split 'validation'" in caplog.text
    with pytest.raises(UsageError, match="a column, and"):
        open_train_and_test("", tmp_path / "all", None, reading={"group": "patient"})


def test_check_and_training_say_what_the_groups_are(tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos")
    listed = table(folder)
    said = "data.group 'patient' divides 144 images into 24 groups of 6 to 6"
    report = check(Data(str(listed), group="patient"))
    assert said in report.warnings and not any("patient" in one for one in report.stats.findings.ignored)
    splits = open_data(Data(str(listed), group="patient"))
    assert said in splits.report.warnings and len(splits.held_out["groups"]) * EACH == len(splits.held_out["ids"])
    (line,) = (one for one in check(Data(str(folder), group="folder")).warnings if "data.group" in one)
    assert "2 groups of 72 to 72: each class is in one group alone" in line
    (line,) = (one for one in check(Data(str(folder), group="name: ^(p)")).warnings if "data.group" in one)
    assert line.endswith("1 group of 144 to 144: no group can be held out")


def test_folds_and_few_shots_have_whole_groups(tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos")
    held = []
    for fold in range(1, 4):
        splits = open_data(Data(str(folder), group="name: ^(p[0-9]+)_", fold=f"{fold}/3"))
        mine, theirs = (
            {Path(part.id(i)).name[:3] for i in range(len(part))} for part in (splits.train, splits.validation)
        )
        assert not mine & theirs and splits.held_out["group"] == "name: ^(p[0-9]+)_"
        held += sorted(theirs)
    assert sorted(held) == [f"p{number:02}" for number in range(PATIENTS)]
    from vitrail.verbs.features import open_train_and_test

    images = open_train_and_test("m", folder, None, reading={"group": "name: ^(p[0-9]+)_"})
    sides = [{Path(part.id(i)).name[:3] for i in range(len(part))} for part in (images.train, images.test)]
    assert not sides[0] & sides[1]


def test_given_splits_that_share_groups_are_named(tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos", splits=True)
    data = Data(str(folder), group="name: ^(p[0-9]+)_")
    expected = "24 groups of data.group 'name: ^(p[0-9]+)_' are in split 'train' and in split 'val' (24 images there)"
    assert any(
        line.startswith(expected.replace("'val'", "'validation'").replace("'train'", "'training'"))
        for line in open_data(data).report.warnings
    )
    assert any(line.startswith(expected) for line in check(data).warnings)
    assert not any("groups of data.group" in line for line in check(Data(str(folder))).warnings)


def test_the_folder_of_a_class_is_no_leak_and_one_below_it_is(tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos", splits=True)
    data = Data(str(folder), group="folder")
    for warnings in (open_data(data).report.warnings, check(data).warnings):
        assert not any("groups of data.group" in line for line in warnings)
    for split in ("train", "val"):
        for number in range(2):
            (folder / split / "sick" / "p99").mkdir(exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / split / "sick" / "p99" / f"{split}{number}.png")
    for warnings in (open_data(data).report.warnings, check(data).warnings):
        assert any("groups of data.group 'folder' are in" in line and "sick/p99" in line for line in warnings)


def test_check_says_that_names_look_like_series(tmp_path: Path, shared_data: Path) -> None:
    folder = patients(tmp_path / "photos")
    (advice,) = (line for line in check(Data(str(folder))).warnings if "series" in line)
    assert "24 names such as 'p01' stand before numbers, each of 6.0 images on average" in advice
    pattern = advice.partition("--data.group '")[2].rstrip("'")
    assert len(set(groups_of(open_split(folder), Data(str(folder), group=pattern)).tolist())) == PATIENTS
    assert series_advice((file.name for file in shared_data.glob("flowers12/*/*/*.jpg")), 12) == ""
    assert series_advice((f"{name}_{number}.jpg" for name in ("cat", "dog") for number in range(99)), 2) == ""
    assert series_advice((f"IMG_{number}.jpg" for number in range(99)), 3) == ""


@pytest.mark.train
def test_a_run_records_its_groups(tmp_path: Path) -> None:
    folder = patients(tmp_path / "photos")
    done = vitrail.train(
        folder, model="Ti/16", image_size=16, duration="1 steps", data={"group": "name: ^(p[0-9]+)_"}, out=tmp_path,
        device="cpu", workers=0,
    )  # type: ignore[call-arg]  # fmt: skip
    split = json.loads((Path(done.folder) / "split.json").read_text())
    held = {Path(name).name[:3] for name in split["ids"]}
    assert split["group"] == "name: ^(p[0-9]+)_" and len(split["ids"]) == EACH * len(held)
