"""Recipes on other data than they were published with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitrail
from vitrail.config import Epochs, Percent, Steps, from_yaml
from vitrail.recipes.by_data import Facts, fitted
from vitrail.recipes.registry import RECIPES, recipe
from vitrail.training import batch_size
from vitrail.training.loop import fit
from vitrail.training.plan import Plan
from vitrail.training.run import Run, Schedule
from vitrail.verbs.flags.settings import Asked, plan
from vitrail.verbs.train import Preview

SIZES = (30, 1_000, 50_000, 1_281_167, 303_000_000)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 images of 8 x 8 pixels and 3 classes, as arrays."""
    path = tmp_path_factory.mktemp("data") / "small.npz"
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 3
    pictures = rng.integers(0, 60, (300, 8, 8, 3), np.uint8) + (60 * labels).astype(np.uint8)[:, None, None, None]
    np.savez(path, x_train=pictures, y_train=labels)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("images", SIZES)
def test_every_recipe_makes_a_plan_for_any_number_of_images(name: str, images: int) -> None:
    run, _ = fitted(recipe(name), Facts(images, side=224))
    batch = min(run.batch_size or 512, images)
    made = Plan.of(replace(run, batch_size=batch), per_epoch=max(images // batch, 1))
    assert made.warmup <= 0.21 * made.total + 1
    assert made.learning_rate(made.warmup, 0.0) == pytest.approx(run.optim.lr)


@pytest.mark.parametrize(
    ("name", "images"),
    [
        ("paper/vit-b16-imagenet", 1_281_167),
        ("paper/vit-b16-imagenet21k", 14_197_122),
        ("paper/vit-b16-jft", 303_000_000),
        ("augreg/vit-b16-imagenet", 1_281_167),
        ("deit/vit-s16", 1_281_167),
        ("bit/r50x1-imagenet", 1_281_167),
        ("paper/finetune-flowers", 2_040),
    ],
)
def test_on_their_own_data_recipes_are_as_published(name: str, images: int) -> None:
    assert fitted(recipe(name), Facts(images, side=500)) == (recipe(name), "")


def test_a_warmup_longer_than_the_run_becomes_a_tenth_of_it() -> None:
    run, change = fitted(recipe("paper/vit-b16-imagenet"), Facts(images=3_000, side=500))
    assert run.schedule.warmup == Percent(10)
    assert change == "warmup: 10 % of the run, as it has 300 steps here, not 10000 steps"


def test_a_share_is_left_alone() -> None:
    run = replace(recipe("digits"), schedule=Schedule(warmup=Percent(90)))
    assert fitted(run, Facts(30, 8)) == (run, "")


def test_the_command_line_fits_a_recipe_to_the_data_and_says_so(small: Path) -> None:
    run, why = plan(Asked(small, "paper/vit-b16-imagenet"))
    assert run.schedule.warmup == Percent(10)
    assert why.startswith("recipe paper/vit-b16-imagenet; warmup: 10 % of the run")


def test_a_warmup_that_was_asked_for_is_left_alone(small: Path) -> None:
    asked = Asked(small, "paper/vit-b16-imagenet", settings={"schedule": {"warmup": Steps(77)}})
    assert plan(asked)[0].schedule.warmup == Steps(77)


def test_the_hyperrule_looks_at_the_data(small: Path) -> None:
    preview = vitrail.finetune(small, weights="runs/x", recipe="bit/hyperrule", print_config=True)
    assert isinstance(preview, Preview)
    run = preview.run
    assert (run.duration, run.image_size, run.augment.mixup) == (Steps(500), 128, 0.0)
    assert (run.name, run.weights) == ("bit-hyperrule", "runs/x")
    preview = vitrail.finetune(small, weights="runs/x", recipe="bit/hyperrule", epochs=2, print_config=True)
    assert preview.run.duration == Epochs(2) and preview.run.schedule.warmup == Percent(10)


NARROW = {"width": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
SIZE = {"image_size": 32, "vit": {**NARROW, "patch": 16}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("paper/vit-b16-imagenet", {**SIZE, "vit": {**SIZE["vit"], "pre_logits": 16}}),
        ("three-things/vit-s16-400-ls", SIZE),
        ("augreg/strong1", SIZE),
    ],
)
def test_a_recipe_trains_on_any_data_with_its_batch_kept(
    name: str, settings: dict[str, Any], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_size, "free_memory", lambda device: 9 * 2**20)  # too little for the whole batch
    short = {"duration": Steps(2), "device": "cpu", "precision": "float32", "workers": 0, "out": str(tmp_path)}
    result = fit(plan(Asked(small, name, settings={**short, **settings}))[0])
    run = from_yaml(result.folder / "config.yaml", Run())
    assert result.steps == 2
    assert run.batch_size == 270  # all there are, a tenth of them held out
    assert run.accumulate is not None and run.accumulate > 1
