"""Prediction of numbers: loss, standardised targets, mixing, and a run from a table to predictions in its units."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitrail.cli import main
from vitrail.data.labels.numbers import Numbers, TargetScale
from vitrail.data.loading.loader import Batch
from vitrail.data.settings import Augment, Data
from vitrail.errors import DataError, UsageError, WeightsError
from vitrail.evaluation.metric import Metric
from vitrail.evaluation.number_scores import predicted_numbers
from vitrail.model.variants import ViTConfig
from vitrail.objective.base import RunFacts
from vitrail.objective.settings import Regression
from vitrail.reports.page import write_report
from vitrail.tasks.catalog import task_for
from vitrail.training.run import Run
from vitrail.weights.card import Card


class Fixed(nn.Module):
    """A network that outputs the same numbers for every image."""

    def __init__(self, outputs: list[float]) -> None:
        super().__init__()
        self.outputs = nn.Parameter(torch.tensor(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.outputs.expand(len(images), -1)


def batch(labels: list[list[float]]) -> Batch:
    count = len(labels)
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 4)
    return Batch(images.clone(), torch.tensor(labels, dtype=torch.float64), torch.arange(count))


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_the_loss_is_that_of_targets_in_deviations_from_their_mean(loss: str) -> None:
    scale = TargetScale((10.0, 2000.0), (2.0, 500.0))
    objective = Regression(loss=loss, huber_delta=0.5).build(Fixed([0.0, 1.0]), RunFacts(scale=scale))
    total, count, metrics = objective(batch([[10, 2500], [14, 2000]]), step=0)
    # by hand: errors are (0, 0) and (-2, 1); Huber with delta d is d (|e| - d / 2) above d
    each = {"mse": [(4 + 1) / 2], "huber": [(0.5 * (2 - 0.25) + 0.5 * (1 - 0.25)) / 2]}[loss]
    assert count == 2
    assert total.item() == pytest.approx(sum(each))
    assert metrics["error"].item() == pytest.approx((2 + 1) / 2)


def test_mixup_blends_targets_as_images() -> None:
    scale = TargetScale((1.0,), (4.0,))
    objective = Regression().build(Fixed([0.0]), RunFacts(seed=3, scale=scale, augment=Augment(mixup=0.8)))
    whole = batch([[0.0], [1.0], [2.0], [30.0]])
    images = whole.images.float() * 80
    mixed = objective.prepare(Batch(images, whole.labels, whole.index), step=5)
    share = ((mixed.images[0] - images[2]) / (images[0] - images[2])).mean().item()
    assert 0.5 <= share < 1
    expected = [share * 0 + (1 - share) * 2, share * 1 + (1 - share) * 30, share * 2, share * 30 + (1 - share) * 1]
    assert scale.original(mixed.targets)[:, 0].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_mean_far_larger_than_the_deviation_loses_no_digits() -> None:
    """Seconds since 1970 differ in the eighth digit, which float32 has not."""
    seconds = np.array([[1.7e9], [1.7e9 + 30], [1.7e9 + 60]])
    scale = TargetScale.of(Numbers(seconds), ["time"])
    labels = Regression().build(Fixed([0.0]), RunFacts(scale=scale)).prepare(batch(seconds.tolist()), step=0).labels
    assert predicted_numbers(labels, scale)[:, 0] == pytest.approx(seconds[:, 0], abs=0.01)


def test_a_constant_target_is_an_error() -> None:
    with pytest.raises(DataError, match="'angle' is 3 in all 4 training images"):
        TargetScale.of(Numbers(np.array([[1.0, 3], [2, 3], [1, 3], [2, 3]])), ["size", "angle"])


def test_a_card_holds_the_scale_and_refuses_another_width() -> None:
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=16, patch=8, image_size=(8, 8), classes=2)
    card = Card(config, ["x", "y"], scale=TargetScale((1.5, -2.0), (0.5, 1e-3)))
    assert Card.from_dict(json.loads(json.dumps(card.to_dict()))).scale == card.scale
    assert "scale" not in Card(config).to_dict()  # earlier versions read the card
    with pytest.raises(WeightsError, match="1 targets for a model with 2 outputs"):
        Card(config, scale=TargetScale())
    with pytest.raises(WeightsError, match="deviations above 0"):
        Card.from_dict({**card.to_dict(), "scale": {"mean": [1.0, 2.0], "deviation": [1.0, 0.0]}})


def test_a_run_says_how_labels_are_read() -> None:
    assert Run(objective=Regression()).data.labels_per_image == "numbers"
    assert Run().data.labels_per_image == "auto"


def brightness(folder: Path, count: int = 96) -> Path:
    """A table of noisy grey images with their mean level, and that of the red channel in other units."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    rows = [("path", "level", "red", "split")]
    for number in range(count):
        level, red = rng.integers(60, 180), rng.integers(0, 60)
        pixels = np.full((8, 8, 3), level, np.uint8)
        pixels[..., 0] += np.uint8(red)
        Image.fromarray(pixels).save(folder / f"images/{number}.png")
        rows.append((f"images/{number}.png", str(level), str(1000 + 10 * red), "train" if number < 72 else "test"))
    table = folder / "levels.csv"
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return table


TINY = "--model Ti/8 --vit.width 32 --vit.depth 1 --vit.heads 2 --vit.mlp-dim 32 --vit.patch 8 --augment.crop center"


@pytest.mark.train
def test_a_run_from_a_table_to_predictions_in_its_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = brightness(tmp_path)
    flags = f"{TINY} --epochs 25 --evaluate-every 25ep --checkpoint-every 25ep --batch-size 24 --lr 0.01"
    flags += " --objective.kind regression --data.label-columns level red"
    assert (
        main(["train", str(table), *flags.split(), "--name", "r", "--augment.no-flip", "--precision", "float32"]) == 0
    )
    capsys.readouterr()

    assert main(["evaluate", "runs/r-1", str(table), "--split", "test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    truth = {row["path"]: row for row in csv.DictReader(table.open())}
    test = np.array([[float(row["level"]), float(row["red"])] for row in truth.values() if row["split"] == "test"])
    train = np.array([[float(row["level"]), float(row["red"])] for row in truth.values() if row["split"] == "train"])
    assert [one["name"] for one in found["targets"]] == ["level", "red"]
    assert found["r2"] > 0.5
    # the mean of the training images, some of which were held out
    mean = np.array(json.loads(Path("runs/r-1/model/best/card.json").read_text())["scale"]["mean"])
    assert mean == pytest.approx(train.mean(axis=0), rel=0.05)
    assert [one["mae_of_the_mean"] for one in found["targets"]] == pytest.approx(np.abs(test - mean).mean(axis=0))

    assert main(["predict", "runs/r-1", "images/90.png", "images/91.png"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert list(rows[0]) == ["path", "level", "red"]
    assert main(["predict", "runs/r-1", *(f"images/{number}.png" for number in range(72, 96)), "--out", "p.csv"]) == 0
    predicted = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    errors = [abs(float(row["level"]) - float(truth[row["path"]]["level"])) for row in predicted]
    assert np.mean(errors) == pytest.approx(found["targets"][0]["mae"], rel=1e-4)

    page = write_report("runs/r-1").read_text()
    assert "Predicted against true values of level" in page
    assert "of 2 targets" in page
    capsys.readouterr()
    assert main(["predict", "runs/r-1", "images/90.png", "--reject", "0.5"]) == 2
    assert "predicts numbers" in capsys.readouterr().err


WRONG = {
    "sampler": (Run(objective=Regression(), data=Data(sampler="balanced")), "data.sampler: needs images with classes"),
    "knn": (Run(objective=Regression(), knn=3), "knn: needs images with classes"),
    "supervised": (
        Run(data=Data(labels_per_image="numbers")),
        "which objective supervised cannot learn. Set objective.kind to regression, or data.labels_per_image to auto",
    ),
    "answer": (Run(data=Data(answers=("x",))), "Set objective.kind to regression, or name the column with its kind"),
}


def adapted(run: Run, labels: Any) -> tuple[Run, dict[str, str]]:
    return task_for(labels).adapt(run, labels)


@pytest.mark.parametrize("setting", WRONG)
def test_settings_that_need_classes(setting: str) -> None:
    run, said = WRONG[setting]
    with pytest.raises(UsageError, match=said):
        adapted(run, Numbers(np.zeros((3, 1))))


def test_settings_that_need_numbers() -> None:
    run = Run(objective=Regression(), data=Data(labels_per_image="one"))
    with pytest.raises(UsageError, match="needs numbers as labels"):
        adapted(run, np.zeros(3, dtype=np.int64))
    with pytest.raises(UsageError, match="which needs images with other labels"):
        adapted(Run(metric=Metric(name="r2")), np.zeros(3, dtype=np.int64))


def test_metric_and_calibration_of_numbers() -> None:
    run, why = adapted(Run(objective=Regression()), Numbers(np.zeros((3, 1))))
    assert (run.metric.name, run.calibrate) == ("r2", False)
    assert {"metric.name", "calibrate"} <= why.keys()
    assert adapted(replace(run, metric=Metric(name="mae")), Numbers(np.zeros((3, 1))))[0].metric.name == "mae"


def test_a_scale_of_unequal_length() -> None:
    with pytest.raises(UsageError, match="equally many"):
        TargetScale((1.0,), (1.0, 2.0))
