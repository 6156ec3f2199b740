"""Few-shot accuracy inside training: the number one gets outside, and nothing of the training changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from references import once
from safetensors.torch import load_file
from tiny_runs import lines, tiny_run

from vitrail.config import from_yaml
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.durations import Steps
from vitrail.errors import UsageError
from vitrail.evaluation.features import extract
from vitrail.evaluation.fewshot import ShotSelection, fewshot
from vitrail.reports.curves import training_curves
from vitrail.reports.run_record import read_run
from vitrail.tasks.catalog import TASKS
from vitrail.training.batches import evaluation_loader
from vitrail.training.loop import fit
from vitrail.training.optim.average import Averager
from vitrail.training.run import Average, Model, Run
from vitrail.training.validation import Validation, evaluation_in_words
from vitrail.weights.load import load


def tiny(out: Path, **changes: Any) -> Run:
    """Eight steps with two evaluations, in which the student's noise would tell what else was drawn."""
    plan = dict(duration=Steps(8), evaluate_every=Steps(4), checkpoint_every=Steps(8), accumulate=1)
    return tiny_run(out, **{**plan, "vit": Model(width=16, depth=1, heads=2, mlp_dim=32, dropout=0.1), **changes})


@pytest.fixture(scope="module")
def trained() -> Path:
    """A run that measures; a reference, which no test changes."""
    return next(once("fewshot-run", lambda place: fit(tiny(place, fewshot=(5, 1)))).iterdir())


@pytest.mark.train
def test_measuring_it_changes_no_bit(trained: Path, tmp_path: Path) -> None:
    without = fit(tiny(tmp_path)).folder
    for kept in ("last", "best"):
        ours, theirs = (load_file(folder / f"model/{kept}/model.safetensors") for folder in (trained, without))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    keys = ("step", "loss", "lr")
    logged, plain = ([[line[key] for key in keys] for line in lines(folder, "train")] for folder in (trained, without))
    assert logged == plain and not lines(without, "fewshot")
    assert [line["top1"] for line in lines(trained, "validation")] == [
        line["top1"] for line in lines(without, "validation")
    ]


@pytest.mark.train
def test_the_number_is_that_of_the_kept_weights(trained: Path) -> None:
    """All training images' features, from the last model in the folder, give what was logged at the last step."""
    logged = lines(trained, "fewshot")
    assert [line["step"] for line in logged] == [4, 8]
    run = from_yaml(trained / "config.yaml", Run())
    assert run.fewshot == (5, 1)
    splits = open_data(run.data, seed=run.seed)
    assert splits.validation is not None
    model = load(trained / "model" / "last")
    train, validation = (
        extract(model, evaluation_loader(run, source), splits.class_names, precision="float32")
        for source in (splits.train, splits.validation)
    )
    found = fewshot(ShotSelection(splits.train.labels, splits.class_names, shots=(1, 5)), train, validation)
    for row, shots in enumerate((1, 5)):
        assert logged[-1][f"{shots}-shot"] == pytest.approx(found.mean[row, 0], abs=1e-9)
        assert logged[-1][f"{shots}-shot std"] == pytest.approx(found.std[row, 0], abs=1e-9)
    assert logged[-1]["5-shot"] > 0.2  # ten classes


@pytest.mark.train
def test_the_report_draws_it(trained: Path) -> None:
    drawn = "".join(training_curves(read_run(trained)))
    assert "Linear 5-shot accuracy" in drawn and "5-shot accuracy over steps: validation from" in drawn


def validation(tmp_path: Path, run: Run, model: torch.nn.Module, **changes: Any) -> Validation:
    splits = open_data(run.data, seed=run.seed)
    resolved = from_yaml(tmp_path / "config.yaml", Run())
    held_out = None if splits.validation is None else evaluation_loader(resolved, splits.validation)
    average = Averager(model, Average())
    return Validation(model, average, held_out, model.card, replace(resolved, **changes), None, splits.train)


@pytest.mark.train
def test_weights_that_give_no_numbers_are_logged_and_no_reason_to_stop(trained: Path, tmp_path: Path) -> None:
    class Folder:
        logged: list[Any] = []  # noqa: RUF012

        def log(self, kind: str, step: int, **values: Any) -> None:
            self.logged.append((kind, step, values))

    model: Any = load(trained)
    run = from_yaml(trained / "config.yaml", Run())
    looking = validation(trained, run, model)
    with torch.no_grad():
        model.norm.bias.fill_(np.nan)

    class RunStatus:
        step = 7

    assert looking._probed(lambda: None, RunStatus(), Folder()) == {}  # type: ignore[arg-type]
    ((kind, step, values),) = Folder.logged
    assert (kind, step) == ("fewshot", 7) and "are not finite" in values["error"]
    looking.close()


def test_it_needs_validation_images_and_sensible_shots(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fewshot is measured on validation images"):
        fit(tiny(tmp_path, fewshot=(5,), data=Data(path="digits", holdout=0.0)))
    with pytest.raises(UsageError, match=r"fewshot is \(0,\); it must be from 1 to 100,000"):
        fit(tiny(tmp_path, fewshot=(0,)))
    assert not list(tmp_path.glob("train-*"))  # said before anything is written


def test_it_is_told_with_the_other_numbers() -> None:
    numbers = {"top1": 0.5, "top5": 0.9, "nll": 1.0, "count": 10.0, "5-shot": 0.25, "5-shot std": 0.01}
    assert evaluation_in_words(numbers, TASKS["classes"], 10).endswith("on 10 images, 5-shot 25.00%")


def test_top5_is_told_only_where_it_can_be_wrong() -> None:
    """Of five classes, the five best are all: their top-5 is 100 % whatever the network computes."""
    numbers = {"top1": 0.5, "top5": 1.0, "nll": 1.0, "count": 10.0}
    assert "top-1 50.00%, top-5 100.00%, loss" in evaluation_in_words(numbers, TASKS["classes"], 6)
    assert "top-1 50.00%, loss" in evaluation_in_words(numbers, TASKS["classes"], 5)
