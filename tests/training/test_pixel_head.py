"""A fine-tuning with masks whose head begins as one that was fitted to the frozen network (`Run.probe_head`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import still_run

import vitrail
from vitrail.data.settings import Data
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.head import build_heads
from vitrail.model.variants import ViTConfig
from vitrail.objective.settings import Segmentation
from vitrail.recipes.known import Known
from vitrail.training.assemble import set_up
from vitrail.training.loop import fit
from vitrail.training.pixel_head import OnTokens, start_fitted
from vitrail.training.run import Model, Optim, Run
from vitrail.weights.save import save

CONFIG = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=2)
HEADS = ("linear", "layers")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return save(build(CONFIG), tmp_path_factory.mktemp("base") / "base").path


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures whose patches are bright or dark, which is their class; a third of the patches is bright."""
    root, rng = tmp_path_factory.mktemp("data") / "scenes", np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for folder in ("images", "masks"):
            (root / folder / split).mkdir(parents=True)
        for number in range(count):
            mask = (rng.random((4, 4)) < 1 / 3).astype(np.uint8).repeat(4, 0).repeat(4, 1)
            pixels = (60 + 120 * mask + rng.integers(-30, 30, mask.shape)).astype(np.uint8)
            Image.fromarray(pixels).convert("RGB").save(root / "images" / split / f"{number}.png")
            Image.fromarray(mask).save(root / "masks" / split / f"{number}.png")
    return root


def run_of(scenes: Path, base: Path, out: Path, head: Any, **changes: Any) -> Run:
    vit = {"vit": Model(segmentation=head)}
    run = still_run(out, Data(path=str(scenes), test="none"), base, probe_head=True, batch_size=8, **{**vit, **changes})
    return replace(run, objective=Segmentation())


def evaluated(folder: Path) -> dict[int, float]:
    """Step -> mIoU."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["miou"] for line in lines if "miou" in line}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_with_the_batchnorm_inside_computes_the_same(kind: Any) -> None:
    torch.manual_seed(0)
    head: Any = build_heads(CONFIG.changed(segmentation=kind))[0]
    width = head.first.weight.shape[1]
    model = OnTokens(head, width)
    for tensor in (*model.parameters(), *model.norm.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    tokens = torch.randn(3, 4, 5, width)
    with torch.no_grad():
        expected = model.eval()(tokens)
        found = model.joined().classify(tokens.movedim(-1, 1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.train
@pytest.mark.parametrize("kind", HEADS)
def test_what_the_frozen_tokens_tell_is_known_before_the_first_step(
    scenes: Path, base: Path, tmp_path: Path, kind: Any
) -> None:
    harmful = run_of(scenes, base, tmp_path, kind, optim=Optim(lr=10.0, clip=None))
    result = fit(harmful)
    scores = evaluated(result.folder)
    assert scores[0] > 0.7  # a head of zeros: about a third
    assert result.best["step"] == 0
    theirs, ours = vitrail.load(base), vitrail.load(result.folder)
    for name, tensor in ours.state_dict().items():
        assert name.startswith("head.") or torch.equal(tensor, theirs.state_dict()[name]), name


@pytest.mark.train
def test_it_draws_no_random_number_of_the_steps(scenes: Path, base: Path, tmp_path: Path) -> None:
    run = run_of(scenes, base, tmp_path, "layers")
    with set_up(run, Known().splits_of(run)) as setup:
        before = torch.get_rng_state()
        start_fitted(setup)
        assert torch.equal(torch.get_rng_state(), before)
        assert setup.objective.model.head.linear.weight.any()


@pytest.mark.train
@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_without_time_the_head_learns_less(scenes: Path, base: Path, tmp_path: Path, seconds: float) -> None:
    run = run_of(scenes, base, tmp_path, "linear")
    said: list[str] = []
    with set_up(run, Known().splits_of(run)) as setup:
        assert "training images" in start_fitted(setup, seconds, said.append)
        assert setup.objective.model.head.linear.weight.any() == bool(seconds)
    assert not seconds or "of 24 images" in said[0]


@pytest.mark.train
def test_a_head_that_cannot_be_fitted_is_refused(scenes: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"vit\.segmentation.*--no-probe-head"):
        fit(run_of(scenes, base, tmp_path, "queries"))
    again = fit(run_of(scenes, base, tmp_path / "first", "linear")).folder
    with pytest.raises(UsageError, match="--no-keep-head"):
        fit(run_of(scenes, again, tmp_path, "linear", keep_head=True))
