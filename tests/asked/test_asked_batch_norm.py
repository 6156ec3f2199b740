"""BatchNorm needs two values per channel: other runs are refused, and no automatic choice leads to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitrail
from vitrail.errors import UsageError
from vitrail.recipes.asked import Asked
from vitrail.recipes.decide import decide
from vitrail.recipes.known import Known
from vitrail.training import batch_size
from vitrail.training.assemble import set_up
from vitrail.training.guard import FiniteGuard
from vitrail.training.step import TrainingStep


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 images of 32 x 32 pixels and 2 classes, as arrays."""
    path = tmp_path_factory.mktemp("data") / "images.npz"
    rng = np.random.default_rng(0)
    np.savez(path, x_train=rng.integers(0, 255, (80, 32, 32, 3), np.uint8), y_train=np.arange(80) % 2)
    return path


NARROW = {"width": 16, "depth": 1, "heads": 1, "mlp_dim": 16}


@pytest.mark.train
@pytest.mark.parametrize(
    "settings",
    [
        {"image_size": 16, "batch_size": 1},  # the first images have 4 pixels: one patch
        {"vit": {**NARROW, "patch": 8}, "batch_size": 7, "accumulate": 4},  # micro-batches of 2, 2, 2 and 1
        {
            "vit": {**NARROW, "patch": 16, "stem": "hmlp"},
            "image_size": 16,
            "batch_size": 1,
            "progressive": {"start": 1.0},
        },
    ],
)
def test_a_single_value_per_channel_is_refused_before_the_run(
    settings: dict[str, Any], images: Path, tmp_path: Path
) -> None:
    few = {"device": "cpu", "workers": 0, "precision": "float32", "out": str(tmp_path / "runs")}
    with pytest.raises(
        UsageError, match=r"batch_size is \d.*one value per channel.*--batch-size.*--vit.stem-norm layer"
    ):
        vitrail.train(images, **few, **settings)
    assert not (tmp_path / "runs").exists()
    if settings.get("accumulate"):
        assert vitrail.train(images, **few, **{**settings, "accumulate": 3, "duration": "1 step"}).steps == 1
    else:
        assert vitrail.train(images, **few, **{**settings, "batch_size": 2, "duration": "1 step"}).steps == 1


@pytest.mark.train
def test_several_positions_of_one_image_are_enough(images: Path, tmp_path: Path) -> None:
    few = {"device": "cpu", "workers": 0, "precision": "float32", "out": str(tmp_path), "duration": "1 step"}
    one = vitrail.train(images, **few, vit=NARROW, batch_size=1, progressive={"start": 1.0})
    assert one.steps == 1


@pytest.mark.parametrize(("batch", "parts"), [(8, 4), (7, 3), (3, 1)])
def test_micro_batches_chosen_for_lack_of_memory_have_two_images(
    batch: int, parts: int, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_size, "free_memory", lambda device: 0)
    settings = {
        "batch_size": batch,
        "device": "cpu",
        "workers": 0,
        "precision": "float32",
        "vit": {**NARROW, "patch": 8},
    }
    given = Asked(images, settings=settings)
    run = decide(given, Known()).run
    with set_up(run, Known().splits_of(run)) as setup:
        assert setup.run.accumulate == parts  # the largest number of parts of at least two images
        guard = FiniteGuard(setup.objective, 3)
        calls: dict[str, Any] = dict(on_memory=lambda *now: None, on_done=lambda done: None, own=dict)
        step = TrainingStep(setup.run, setup.network, setup.optimizer, setup.average, guard, **calls)
        assert step._most_parts == parts  # also after memory runs out in a step
