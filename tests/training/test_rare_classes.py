"""Training on imbalanced classes: it is noticed, the settings act, and a run with them is resumed exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import lines, tiny_run

from vitrail.config import plain
from vitrail.data.check import check
from vitrail.data.settings import Data
from vitrail.durations import Steps
from vitrail.errors import UsageError
from vitrail.evaluation.metric import Metric
from vitrail.objective.settings import Supervised
from vitrail.training import loop
from vitrail.training.checkpoints.state import defaults, differing, identity, with_defaults
from vitrail.training.run import Run


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Two classes, of 60 and 4 training images, as arrays."""
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], [60, 4])
    images = rng.integers(0, 100, (64, 8, 8, 3), dtype=np.uint8) + 100 * labels[:, None, None, None].astype(np.uint8)
    path = tmp_path_factory.mktemp("skewed") / "skewed.npz"
    np.savez(path, x_train=images, y_train=labels, x_val=images[::3], y_val=labels[::3])
    return Data(path=str(path))


@pytest.mark.train
def test_imbalance_is_noticed_unless_a_setting_regards_it(skewed: Data, tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path, data=skewed, duration=Steps(2), evaluate_every=Steps(1), metric=Metric("balanced_accuracy")
    )
    result = loop.fit(run)
    (validation, *_) = lines(result.folder, "validation")
    assert 0 <= validation["balanced_accuracy"] <= 1 and result.best.keys() >= {"balanced_accuracy", "macro_f1"}
    assert result.best["balanced_accuracy"] == max(
        line["balanced_accuracy"] for line in lines(result.folder, "validation")
    )

    def notes(folder: Path) -> str:
        return str(json.loads((folder / "run.json").read_text())["data"]["notes"])

    assert "15 times the images" in notes(result.folder)
    assert "--objective.logit-adjustment" not in notes(result.folder)  # too few images and steps for it
    for changes in (dict(data=replace(skewed, sampler="sqrt")), dict(objective=Supervised(logit_adjustment=1.0))):
        folder = loop.fit(replace(run, duration=Steps(1), **changes)).folder  # type: ignore[arg-type]
        assert "times the images" not in notes(folder)


def test_the_command_for_rare_classes_opens_the_data_as_the_check_did(skewed: Data) -> None:
    warnings = check(replace(skewed, exclude=("nothing*",))).warnings
    (line,) = [one for one in warnings if "For rare classes" in one]
    assert f"vitrail train {skewed.path} --data.exclude 'nothing*' --" in line


@pytest.mark.train
def test_class_weights_regard_what_the_sampler_shows(skewed: Data, tmp_path: Path) -> None:
    weighted = Supervised(class_weights="balanced")
    run = tiny_run(tmp_path, data=skewed, duration=Steps(2), objective=weighted)
    losses = {}
    for name, one in {
        "weighted": run,
        "plain": replace(run, objective=Supervised()),
        "sampled and weighted": replace(run, data=replace(skewed, sampler="balanced")),
        "sampled": replace(run, data=replace(skewed, sampler="balanced"), objective=Supervised()),
    }.items():
        losses[name] = [line["loss"] for line in lines(loop.fit(one).folder, "train")]
    assert losses["weighted"] != losses["plain"]
    assert losses["sampled and weighted"] == losses["sampled"]  # all classes are shown equally often already


def test_a_checkpoint_from_before_a_setting_existed_has_its_default() -> None:
    run = Run()
    now = identity(run, Supervised(), ["a", "b"], "mark")  # any dataclass serves as the network's config
    before = json.loads(json.dumps(now))
    for section, name in (("objective", "class_weights"), ("splits", "sampler"), ("model", "logit_adjustment")):
        del before[section][name]
    assert differing(before, plain(now)) and not differing(with_defaults(before, defaults(run, Supervised())), now)
    other = replace(run, data=replace(run.data, sampler="sqrt"))
    filled = with_defaults(before, defaults(other, Supervised()))
    assert differing(filled, identity(other, Supervised(), ["a", "b"], "mark")) == [
        "splits.sampler: 'uniform' there, 'sqrt' here"
    ]


def test_a_resumed_run_has_the_same_groups() -> None:
    """They decide which images are held out."""
    now, other = (
        identity(replace(Run(), data=Data(group=group)), Supervised(), ["a", "b"], "mark") for group in (None, "day")
    )
    assert differing(now, other) == ["splits.group: None there, 'day' here"]


def test_logit_adjustment_of_another_loss_is_refused_before_anything_is_written(skewed: Data, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="logit_adjustment"):
        loop.fit(tiny_run(out, data=skewed, objective=Supervised(loss="sigmoid", logit_adjustment=1.0)))
    assert not out.exists()
