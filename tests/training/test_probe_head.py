"""A fine-tuning whose classifier begins as a linear probe (`Run.probe_head`)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from tiny_runs import still_run
from torch import nn

from vitrail.data.settings import Data
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.objective.settings import Regression
from vitrail.recipes.known import Known
from vitrail.training.assemble import set_up
from vitrail.training.loop import fit
from vitrail.training.probe_head import ROUND, SMOOTHING, _scale, start_as_probe
from vitrail.training.run import Optim, Run
from vitrail.weights.save import save

CONFIG = ViTConfig(width=32, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=7, pool="gap")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return save(build(CONFIG), tmp_path_factory.mktemp("base") / "base").path


def run_of(base: Path, out: Path, **changes: object) -> Run:
    return still_run(out, Data(path="digits"), base, **{"probe_head": True, "batch_size": 64, **changes})


@pytest.mark.full_size
@pytest.mark.parametrize("distilled", [False, True])
def test_the_classifier_is_that_of_scikit_learn(tmp_path: Path, distilled: bool) -> None:
    """Its predictions agree with logistic regression on the same standardised features, for one of the strengths."""
    config = CONFIG.changed(distilled=True, pool="cls") if distilled else CONFIG
    torch.manual_seed(0)
    start = save(build(config), tmp_path / "base").path
    run = run_of(start, tmp_path)
    splits = Known().splits_of(run)
    with set_up(run, splits) as setup:
        start_as_probe(setup)
        model = setup.objective.model.eval()
        pixels = torch.from_numpy(np.stack([np.asarray(splits.train[i].image) for i in range(len(splits.train))]))
        pixels = pixels[..., None].expand(-1, -1, -1, 3) if pixels.ndim == 3 else pixels
        images = pixels.permute(0, 3, 1, 2)
        with torch.no_grad():
            features, logits = model.features(images), model(images)
    x, y = StandardScaler().fit_transform(features.numpy()), splits.train.labels
    agreements = []
    for l2 in (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5):
        theirs = LogisticRegression(C=1 / (len(y) * l2), max_iter=2000).fit(x, y)
        agreements.append((theirs.predict(x) == logits.argmax(1).numpy()).mean())
    assert max(agreements) > 0.99
    assert (logits.argmax(1).numpy() == y).mean() > 0.5  # and not a classifier of zeros


@pytest.mark.train
def test_the_probe_is_evaluated_first_and_kept_where_training_does_not_help(base: Path, tmp_path: Path) -> None:
    harmful = run_of(base, tmp_path, optim=Optim(lr=10.0, clip=None))
    result = fit(harmful)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["top1"] for line in lines if line.get("kind", line.get("event")) == "validation"}
    assert min(found) == 0 and found[0] > found[2]
    assert result.best["step"] == 0


@pytest.mark.parametrize("probe_head", [True, False])
def test_the_statistics_of_batchnorm_are_kept_with_a_probe_alone(tmp_path: Path, probe_head: bool) -> None:
    start = save(build(replace(CONFIG, stem="hmlp", patch=4)), tmp_path / "base").path
    run = run_of(start, tmp_path, probe_head=probe_head)
    with set_up(run, Known().splits_of(run)) as setup:
        norms = [part for part in setup.objective.modules() if isinstance(part, nn.BatchNorm2d)]
        before = [norm.running_mean.clone() for norm in norms]
        setup.objective.model.train()(torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8))
        kept = [torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True)]
    assert kept and set(kept) == {probe_head}
    assert all(norm.weight.requires_grad for norm in norms)


@pytest.mark.full_size
def test_without_time_a_part_of_the_images_is_read(base: Path, tmp_path: Path) -> None:
    run = run_of(base, tmp_path)
    with set_up(run, Known().splits_of(run)) as setup:
        assert f"of {ROUND} training images" in start_as_probe(setup, 0.0)
        assert setup.objective.model.head.weight.any()
        assert "of 1,295 training images" in start_as_probe(setup, 60.0)


def test_a_certain_probe_is_made_less_certain() -> None:
    logits, labels = torch.tensor([[50.0, -50.0], [-50.0, 50.0]]), torch.tensor([0, 1])
    factor = _scale(logits, labels)
    best = math.log((1 - SMOOTHING / 2) / (SMOOTHING / 2)) / 100  # softmax equals the smoothed target
    assert best / 2**0.25 <= factor <= best * 2**0.25
    assert _scale(logits / 1e4, labels) == 1.0  # an uncertain one stays as it is


@pytest.mark.train
def test_a_run_without_such_a_classifier_is_refused(base: Path, tmp_path: Path) -> None:
    for changes in (dict(objective=Regression()), dict(keep_head=True, weights=str(ten(tmp_path)))):
        with pytest.raises(UsageError, match="--no-probe-head"):
            fit(run_of(base, tmp_path, **changes))


def ten(folder: Path) -> Path:
    """A network with as many classes as the data."""
    return save(build(replace(CONFIG, classes=10)), folder / "ten").path
