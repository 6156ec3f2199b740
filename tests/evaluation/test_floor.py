"""What a classifier must beat: features and classifier against other implementations, and when it is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import answers, run_folder
from sklearn.linear_model import Ridge

from benchmarks.first_run import hog
from vitrail.data.item import IndexedSource
from vitrail.data.settings import Data
from vitrail.data.sources.arrays import read_digits
from vitrail.training import floor
from vitrail.training.checkpoints.state import RunStatus
from vitrail.training.floor import FREQUENT, LINEAR, floors, floors_in_words, shortfall, unbeaten
from vitrail.training.result import Result
from vitrail.verbs.train.train import show

pytestmark = pytest.mark.page


def digits() -> tuple[IndexedSource, IndexedSource]:
    splits = read_digits().splits
    return splits["train"], splits["test"]


def test_the_features_are_those_of_another_implementation() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    grey = torch.from_numpy(np.asarray(Image.fromarray(pixels).convert("L"), dtype=np.float32) / 255)
    ours = floor.gradients(grey[None])[0].reshape(36, 49)
    theirs = hog(Image.fromarray(pixels)).reshape(36, 49)
    order = [9 * corner + number for corner in range(4) for number in range(9)]
    assert np.abs(ours.numpy() - theirs[order]).max() < 5e-3


@pytest.mark.parametrize("width", [50, 300])
def test_the_classifier_is_ridge_regression(width: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(2, 3, (200, width)).astype(np.float32), rng.integers(0, 3, 200)
    weight = floor._LeastSquares(torch.from_numpy(x), y, 3).solved(0.1).double().numpy()
    scaled = (x - x.mean(0)) / x.std(0)
    expected = Ridge(alpha=0.1 * 200).fit(scaled, np.eye(3)[y]).predict(scaled)
    assert np.allclose(x @ weight[:-1] + weight[-1], expected, atol=1e-3)


@pytest.mark.full_size
def test_digits_have_a_high_floor() -> None:
    train, test = digits()
    found, skipped = floors(train, test, seconds=3600)
    counts = np.bincount(test.labels)
    assert skipped == "" and found[LINEAR]["train"] == found[LINEAR]["of"] == len(train)
    assert found[FREQUENT] == {"top1": counts.max() / counts.sum()}
    assert 0.9 < found[LINEAR]["top1"] < 1 and "balanced_accuracy" not in found[LINEAR]


def test_there_is_no_linear_classifier_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "SECONDS", 1e-5)
    monkeypatch.setattr(floor, "SHARE", 1e-5)
    found, skipped = floors(*digits(), seconds=10)
    assert list(found) == [FREQUENT] and skipped.startswith("it would take more than")


def result(top1: float, balanced: float, floors: dict[str, dict[str, float]], **more: Any) -> Result:
    best = {"top1": top1, "balanced_accuracy": balanced, "count": 372.0}
    found = Result.of(RunStatus(step=3, ended="time limit", best=best), Path("runs/x"), 1)
    return replace(found, floors=floors, **more)


CLOTHING = {FREQUENT: {"top1": 0.196}, LINEAR: {"top1": 0.672, "train": 3068.0}}


def test_a_run_below_a_floor_says_so_first_and_last() -> None:
    lines = show(result(0.532, 0.5, CLOTHING, test={"top1": 0.532, "balanced_accuracy": 0.5, "count": 372.0})).split(
        "\n"
    )
    assert lines[0].startswith("top-1 53.20% on 372 test images (95 % confidence: ")
    floors = "a linear classifier reaches 67.20%, the most frequent class 19.60%"
    assert lines[0].endswith(f"; {floors}: this network has not learned enough")
    assert lines[-1] == "This network has not learned enough (see the first line)."  # there is no report


@pytest.mark.parametrize(("top1", "advice"), [(1.0, False), (0.5, True)])
def test_the_report_is_named_only_for_its_advice(top1: float, advice: bool, tmp_path: Path) -> None:
    """A network without mistakes on 8 images is no better than a linear classifier without mistakes: no advice."""
    best, floors = {"top1": top1, "count": 8.0}, {LINEAR: {"top1": 1.0}}
    facts = {"steps": 60, "ended": "all steps done", "best": best, "test": best, "floors": floors}
    folder = run_folder(tmp_path / "run", Data("photos"), answers(["a", "b"], 8), result=facts)
    (folder / "report.html").touch()
    found = Result.of(RunStatus(step=60, ended="all steps done", best=best), folder, 1)
    last = show(replace(found, floors=floors))
    assert "is not better than" in last if top1 == 1 else "has not learned enough" in last
    assert ("The report says what to do next." in last) == advice


def test_within_the_error_of_the_floor_a_network_is_as_good() -> None:
    close = {LINEAR: {"top1": 0.9916}}
    assert shortfall({"top1": 0.975, "count": 359.0}, close) == "has not learned enough"
    assert shortfall({"top1": 0.9861, "count": 359.0}, close) == "is not better than a linear classifier"
    assert shortfall({"top1": 0.9917, "count": 359.0}, close) == ""
    assert shortfall({"top1": 0.7, "count": 50.0}, {FREQUENT: {"top1": 0.7}}) == "has not learned enough"


def test_a_run_above_its_floors() -> None:
    lines = show(result(0.75, 0.7, CLOTHING)).split("\n")
    assert "top-1 75.00% on 372 validation images" in lines[0] and "not learned" not in "".join(lines)
    short = result(0.75, 0.7, {FREQUENT: {"top1": 0.196}}, no_floor="it would take more than 2 s")
    assert short.verdict.endswith("19.60% (without a linear classifier: it would take more than 2 s)")
    assert result(0.75, 0.7, {}).verdict == ""


def test_test_images_of_another_kind_are_named() -> None:
    """The brain scans of `benchmarks.first_run`: of their test images 75 %, of the validation images 95 % are right."""
    scans = result(0.9479, 0.95, {}, test={"top1": 0.7487, "balanced_accuracy": 0.73, "count": 394.0})
    assert "of 372 validation images 94.79% are right" in scans.gap and "vitrail evaluate runs/x" in scans.gap
    assert scans.gap in show(scans).split("\n")
    for top1, count in ((0.90, 394.0), (0.99, 394.0), (0.7, 10.0)):
        assert result(0.9479, 0.95, {}, test={"top1": top1, "count": count}).gap == ""
    assert result(0.9479, 0.95, {}).gap == ""


def test_skewed_classes_are_compared_by_both_accuracies() -> None:
    tiles = {FREQUENT: {"top1": 0.709, "balanced_accuracy": 1 / 6}}
    assert unbeaten({"top1": 0.75, "balanced_accuracy": 0.16}, tiles) == FREQUENT
    assert unbeaten({"top1": 0.75, "balanced_accuracy": 0.3}, tiles) is None
    assert unbeaten({"top1": 0.709, "balanced_accuracy": 0.3}, tiles) == FREQUENT
    few = {LINEAR: {"top1": 0.5, "train": 900.0, "of": 3068.0}}
    assert floors_in_words(few) == "a linear classifier of 900 training images reaches 50.00%"
    assert floors_in_words(tiles) == "the most frequent class reaches 70.90% (balanced accuracy 16.67%)"
    assert "top-1 75.00%, balanced accuracy 30.00% on 372" in result(0.75, 0.3, tiles).verdict
