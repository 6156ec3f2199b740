"""Cross-validation: each training image is validated once, each fold has its share of each class; runs are joined."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import numpy as np
import pytest
from run_folders import Page, answers, run_folder

from vitrail import report
from vitrail.config import to_yaml
from vitrail.data.item import IndexedSource, Subset
from vitrail.data.labels.sets import LabelSets
from vitrail.data.roles import Splits
from vitrail.data.settings import Data
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.sources.open import open_data
from vitrail.data.split import folds
from vitrail.errors import UsageError
from vitrail.reports.compare import compare_runs
from vitrail.training.run import Run
from vitrail.verbs.report import as_json, show


def source(labels: np.ndarray | LabelSets, classes: int) -> ArraySource:
    return ArraySource("s", np.zeros((len(labels), 1, 1, 3), np.uint8), labels, [str(k) for k in range(classes)])


@pytest.mark.parametrize("count", [2, 5, 7])
def test_folds_differ_by_one_image_at_most(count: int) -> None:
    """In all, and in each class, however rare: 7 images of class 0, 2 of class 1, 100 of class 2."""
    labels = np.repeat([2, 0, 1], [100, 7, 2])
    found = folds(source(labels, 3), count, seed=0)
    sizes = [np.bincount(found[labels == label], minlength=count) for label in range(3)]
    assert all(np.ptp(one) <= 1 for one in [*sizes, sum(sizes)])


def test_folds_depend_on_ids_and_seed_not_on_order() -> None:
    images = source(np.arange(60) % 3, 3)
    backwards = Subset(images, np.arange(60)[::-1])
    first = folds(images, 4, seed=1)
    assert np.array_equal(folds(backwards, 4, seed=1)[::-1], first)
    assert not np.array_equal(folds(images, 4, seed=2), first)


def test_folds_of_several_labels_share_each_label() -> None:
    marks = np.random.default_rng(0).random((200, 6)) < [0.5, 0.3, 0.2, 0.1, 0.1, 0.05]
    found = folds(source(LabelSets.of_marks(marks), 6), 5, seed=0)
    assert np.bincount(found).tolist() == [40] * 5
    each = np.array([marks[found == fold].sum(0) for fold in range(5)])
    assert np.ptp(each, axis=0).max() <= 3  # random folds: up to 15


def opened(fold: str, path: str = "digits", **settings: str) -> Splits:
    return open_data(Data(path=path, fold=fold, **settings))  # type: ignore[arg-type]


def ids(images: IndexedSource | None) -> list[str]:
    assert images is not None
    return [images.id(number) for number in range(len(images))]


def test_every_training_image_is_validated_once(tmp_path: Path) -> None:
    labels = np.arange(31) % 3
    arrays = {"x_train": np.zeros((31, 1, 1, 3), np.uint8), "y_train": labels}
    np.savez(tmp_path / "d.npz", **arrays, x_test=arrays["x_train"], y_test=labels)
    path = str(tmp_path / "d.npz")
    whole = open_data(Data(path=path, holdout=0.0))
    parts = [opened(f"{number}/3", path=path) for number in (1, 2, 3)]
    validated = [name for part in parts for name in ids(part.validation)]
    assert sorted(validated) == sorted(ids(whole.train))
    for part in parts:
        assert not set(ids(part.train)) & set(ids(part.validation)) and part.fingerprint == whole.fingerprint
        assert len(part.train) + len(part.validation or ()) == 31 and ids(part.test) == ids(whole.test)
    assert parts[1].held_out["fold"] == "2/3" and parts[1].held_out["ids"] == ids(parts[1].validation)


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "2", "a/b", "1/5/5", "-1/5", "02/5", "²/5"])
def test_what_is_no_fold(fold: str) -> None:
    with pytest.raises(UsageError, match="fold K of N folds"):
        Data(fold=fold)


def test_folds_that_cannot_be_made(tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((5, 1, 1, 3), np.uint8), "y_train": np.array([0, 0, 0, 1, 1])}
    np.savez(tmp_path / "d.npz", **arrays, x_val=arrays["x_train"], y_val=arrays["y_train"])
    with pytest.raises(UsageError, match="both choose the validation images"):
        opened("1/5", path=str(tmp_path / "d.npz"), validation="validation")
    with pytest.raises(UsageError, match="5 training images into 6 folds"):
        opened("1/6", path=str(tmp_path / "d.npz"))
    warnings = open_data(Data(path=str(tmp_path / "d.npz"), fold="1/3")).report.warnings
    assert any("split 'validation' is not used" in line and "'train+validation'" in line for line in warnings)
    assert any("fewer images than the 3 folds are missing from some of them: '1'" in line for line in warnings)
    joined = open_data(Data(path=str(tmp_path / "d.npz"), train="train+validation", fold="1/2"))
    assert len(joined.train) == 5 and not joined.report.warnings


def test_held_out_images_of_splits_have_paths_that_open(tmp_path: Path) -> None:
    for name in ("training_set/x/a", "training_set/x/b", "test_set/a", "test_set/b"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(2):
            (tmp_path / name / f"{number}.png").write_bytes(b"image")
    held = open_data(Data(path=str(tmp_path), fold="1/2")).held_out
    assert held["from"] == "training_set" and len(held["paths"]) == len(held["ids"]) == 2
    assert all((tmp_path / path).is_file() for path in held["paths"])


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """The runs of three folds of the digits, with made-up answers."""
    folders = []
    for number in (1, 2, 3):
        splits = opened(f"{number}/3")
        assert splits.validation is not None
        found = answers(splits.class_names, len(splits.validation), seed=number, labels=splits.validation.labels)
        run = Run(data=Data("digits", fold=f"{number}/3"), model="Ti/2")
        data = {"path": "digits", "fingerprint": splits.fingerprint}
        folders.append(run_folder(tmp_path / f"r-{number}", run.data, found, run=run, data=data))
        (folders[-1] / "split.json").write_text(json.dumps(splits.held_out))
    return folders


def test_the_report_joins_the_folds(runs: list[Path], tmp_path: Path) -> None:
    result = report(*runs, out=tmp_path / "cv.html")
    found = as_json(result)["folds"]
    each = [run["validation"]["top1"] for run in as_json(result)["runs"]]
    assert found["numbers"]["top-1"] == {
        "mean": pytest.approx(statistics.mean(each)),
        "deviation": pytest.approx(statistics.stdev(each)),
    }
    shown = show(result)
    assert f"top-1 {statistics.mean(each):.2%} ± {statistics.stdev(each):.2%}" in shown
    assert "nll" not in shown and "top5" not in shown
    assert "3 of 3 folds" in Page((tmp_path / "cv.html").read_text()).text

    whole = open_data(Data(path="digits", holdout=0.0))
    paths = [f"train/{name}" for name in ids(whole.train)]  # as predict and embed name them
    right = dict(zip(paths, whole.train.labels.tolist(), strict=True))
    with (tmp_path / "cv-predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["path"]: int(row["label"]) for row in rows} == right and len(rows) == len(right)
    assert {row["split"] for row in rows} == {"train"}
    correct = np.mean([row["label"] == row["prediction"] for row in rows])
    sizes = [sum(row["run"] == run.name for row in rows) for run in runs]
    assert correct == pytest.approx(np.average(each, weights=sizes))


def test_runs_that_are_no_folds_of_one_division(runs: list[Path], tmp_path: Path) -> None:
    """They are compared as other runs are, and a note says why they are not joined."""

    def change(number: int, **data: str) -> list[str]:
        run = Run(data=Data("digits", **data), model="Ti/2")  # type: ignore[arg-type]
        (runs[number] / "config.yaml").write_text(to_yaml(run))
        found = compare_runs(runs)
        assert found.folds is None
        return found.notes

    assert any("fold 1/3 is there twice" in note for note in change(1, fold="1/3"))
    assert any("folds of different divisions" in note for note in change(1, fold="2/4"))
    assert not any("folds" in note for note in change(1))
    (runs[1] / "split.json").write_text("{}")
    assert any("does not name the images of the fold" in note for note in change(1, fold="2/3"))
    (runs[1] / "evaluation.npz").unlink()
    assert any("r-2 has no evaluation" in note for note in compare_runs(runs).notes)
