"""Images of a group stay on one side of every split, and what happens otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
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
from vitrail.data.settings import Data
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.sources.open import open_data, open_split
from vitrail.errors import DataError, UsageError

PATIENTS, EACH = 24, 6


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
@given(grouped(), st.floats(0.05, 0.6), st.integers(0, 2**32))
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
    source = open_split(listed)
    by_column = groups_of(source, Data(str(listed), group="patient")).tolist()
    assert by_column == [Path(name).name[:3] for name in ids(source, np.arange(len(source)))]
    folders = groups_of(open_split(folder), Data(str(folder), group="folder")).tolist()
    assert set(folders) == {"sick", "well"}


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        ("patient", UsageError, "a column, and .* is no .csv or .tsv table"),
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
