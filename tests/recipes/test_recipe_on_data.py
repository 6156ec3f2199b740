"""Recipes on other data than they were published with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gathered import failures

import vitrail
from vitrail.config import from_yaml
from vitrail.durations import Epochs, Percent, Steps
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig, variant
from vitrail.recipes.asked import Asked
from vitrail.recipes.by_data import LABEL_FREE, TrainingSet, fit_warmup
from vitrail.recipes.decide import decide as choose_run
from vitrail.recipes.known import Known
from vitrail.recipes.registry import RECIPES, recipe
from vitrail.training import batch_size
from vitrail.training.decide import decide
from vitrail.training.facts import Facts
from vitrail.training.loop import fit
from vitrail.training.run import Run, Schedule
from vitrail.training.timetable import Timetable
from vitrail.verbs.train.train import Preview

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


@pytest.mark.parametrize("images", SIZES)
def test_every_recipe_makes_a_plan_for_any_number_of_images(images: int) -> None:
    def planned(name: str) -> None:
        run, _ = fit_warmup(recipe(name), TrainingSet(images, side=224))
        batch = min(run.batch_size or 512, images)
        made = Timetable(replace(run, batch_size=batch), per_epoch=max(images // batch, 1))
        assert made.warmup <= 0.21 * made.total + 1
        assert made.learning_rate(made.warmup, 0.0) == pytest.approx(run.optim.lr)

    assert failures(RECIPES, planned) == []


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
    assert fit_warmup(recipe(name), TrainingSet(images, side=500)) == (recipe(name), "")


def test_a_warmup_longer_than_the_run_becomes_a_tenth_of_it() -> None:
    run, change = fit_warmup(recipe("paper/vit-b16-imagenet"), TrainingSet(images=3_000, side=500))
    assert run.schedule.warmup == Percent(10)
    assert change == "warmup: 10 % of the run, not 10000 steps, because it has 300 steps here"


def test_a_share_is_left_alone() -> None:
    run = replace(recipe("digits"), schedule=Schedule(warmup=Percent(90)))
    assert fit_warmup(run, TrainingSet(30, 8)) == (run, "")


def test_the_command_line_fits_a_recipe_to_the_data_and_says_so(small: Path) -> None:
    choice = choose_run(Asked(small, "paper/vit-b16-imagenet"), Known())
    run, why = choice.run, str(choice)
    assert run.schedule.warmup == Percent(10)
    assert why.startswith("recipe paper/vit-b16-imagenet; warmup: 10 % of the run")


def test_a_warmup_that_was_asked_for_is_left_alone(small: Path) -> None:
    asked = Asked(small, "paper/vit-b16-imagenet", settings={"schedule": {"warmup": Steps(77)}})
    assert choose_run(asked, Known()).run.schedule.warmup == Steps(77)


@pytest.mark.parametrize("kind", LABEL_FREE)
@pytest.mark.parametrize(("side", "model", "size"), [(8, "narrow/4", None), (97, "narrow/8", 96)])
def test_an_objective_without_labels_has_a_recipe_of_its_own(
    kind: str, side: int, model: str, size: int | None, tmp_path: Path
) -> None:
    np.savez(tmp_path / "images.npz", x_train=np.zeros((20, side, side, 3), np.uint8), y_train=np.arange(20) % 2)
    choice = choose_run(Asked(tmp_path / "images.npz", settings={"objective": {"kind": kind}}), Known())
    run, why = choice.run, str(choice)
    own = recipe(f"{kind}-small")
    assert (run.model, run.image_size, run.name) == (model, size, own.name)
    assert (run.objective, run.optim, run.augment) == (own.objective, own.optim, own.augment)
    assert why.startswith(f"recipe {kind}-small, because of the objective {kind}")


@pytest.mark.parametrize("tunes", [False, True])
@pytest.mark.parametrize("side", [8, 97])
def test_an_objective_without_labels_continues_from_weights_at_their_size(
    side: int, tunes: bool, tmp_path: Path
) -> None:
    np.savez(tmp_path / "images.npz", x_train=np.zeros((20, side, side, 3), np.uint8), y_train=np.arange(20) % 2)
    asked = Asked(tmp_path / "images.npz", weights="vitrail/tiny", settings={"objective": {"kind": "dinov2"}})
    run = choose_run(asked, Known(), tunes=tunes).run
    assert (run.model, run.image_size, run.weights, run.name) == (None, None, "vitrail/tiny", "dinov2-small")
    assert (run.optim, run.schedule) == (recipe("dinov2-small").optim, recipe("dinov2-small").schedule)


@pytest.mark.parametrize(("asked", "size"), [({}, None), ({"image_size": 64}, 64)])
def test_weights_are_trained_at_their_size_and_finetune_is_named(
    asked: dict[str, Any], size: int | None, tmp_path: Path
) -> None:
    """Also on photographs, for which the recipe has a size of its own."""
    np.savez(tmp_path / "im ages.npz", x_train=np.zeros((20, 97, 97, 3), np.uint8), y_train=np.arange(20) % 2)
    choice = choose_run(Asked(tmp_path / "im ages.npz", weights="vitrail/tiny", settings=asked), Known())
    assert (choice.run.image_size, choice.run.model) == (size, None)
    (said,) = choice.warnings
    assert f"vitrail finetune '{tmp_path / 'im ages.npz'}' --from vitrail/tiny" in said
    assert not choose_run(Asked(tmp_path / "im ages.npz"), Known()).warnings


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


@pytest.mark.train
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
    result = fit(choose_run(Asked(small, name, settings={**short, **settings}), Known()).run)
    run = from_yaml(result.folder / "config.yaml", Run())
    assert result.steps == 2
    assert run.batch_size == 270  # all there are, a tenth of them held out
    assert run.accumulate is not None and run.accumulate > 1


# recipes on other networks than they were published with


@pytest.mark.parametrize(("model", "width"), [("B/16", 768), ("H/14", 1280), ("Ti/16", 192)])
def test_pre_logits_are_as_wide_as_the_network_that_is_trained(model: str, width: int) -> None:
    run = replace(recipe("paper/vit-b16-imagenet"), model=model)
    config = variant(run.model, **run.vit.changes())
    assert isinstance(config, ViTConfig)
    assert (config.width, config.pre_logits) == (width, width)


@pytest.mark.parametrize(
    ("name", "model", "lr", "warned"),
    [
        ("paper/vit-b16-jft", "H/14", None, "Use --recipe paper/vit-h14-jft or paper/vit-h14-imagenet21k, or give"),
        ("paper/vit-b16-jft", "Ti/16", None, "To change it, give --lr"),
        ("paper/vit-b16-jft", "H/14", 1e-4, ""),
        ("paper/vit-b16-jft", "B/16", None, ""),
        ("scratch-photos", "Ti/16", None, ""),
    ],
)
def test_a_rate_of_another_network_is_warned_of(
    name: str, model: str, lr: float | None, warned: str, small: Path
) -> None:
    messages = choose_run(Asked(small, name, lr=lr, settings={"model": model, "image_size": 224}), Known()).warnings
    assert len(messages) == bool(warned)
    assert all(warned in message and f"but the network is {model}" in message for message in messages)


@pytest.mark.parametrize(
    ("patch", "recipe_name", "asked", "side"),
    [
        (14, "paper/finetune-cifar100", None, 392),
        (14, "paper/finetune-cifar100-big-vision", None, 392),
        (14, "paper/finetune-imagenet-518", None, 518),
        (16, "paper/finetune-cifar100", None, 384),
        (14, "paper/finetune-cifar100", 28, 28),
    ],
)
def test_the_papers_384_pixels_are_392_for_a_patch_of_14(
    patch: int, recipe_name: str, asked: int | None, side: int, small: Path, tmp_path: Path
) -> None:
    config = ViTConfig.of(**NARROW, patch=patch, image_size=(2 * patch, 2 * patch), classes=3)
    vitrail.save(build(config), tmp_path / "x")
    settings = {} if asked is None else {"image_size": asked}
    run = choose_run(Asked(small, recipe_name, weights=tmp_path / "x", settings=settings), Known(), tunes=True).run
    splits = Known().splits_of(run)
    decision = decide(run, Facts.of(run, splits.train, splits.class_names))
    assert decision.config.image_size == decision.preprocess.image_size == (side, side)
    assert decision.run.image_size == side
    said = "392 px, not 384: the next multiple of the patch, 14 px"
    assert decision.why.get("image_size") == (said if side == 392 else None)
