"""Progressive resizing: sizes over a run, pixels, and training through it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from vitrail.data.loading.loader import Batch
from vitrail.durations import Epochs, Percent
from vitrail.errors import UsageError
from vitrail.model.variants import ViTConfig
from vitrail.recipes.registry import recipe
from vitrail.training.batches import Sizes
from vitrail.training.loop import fit
from vitrail.training.run import Progressive, Run
from vitrail.training.timetable import Timetable


@given(
    start=st.floats(0.01, 1.0), rows=st.integers(1, 6), columns=st.integers(1, 6), patch=st.sampled_from([1, 4, 7]),
    growths=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)  # fmt: skip
def test_sizes_are_whole_patches_that_only_grow(
    start: float, rows: int, columns: int, patch: int, growths: tuple[float, float]
) -> None:
    full = (rows * patch, columns * patch)
    sizes = Sizes(Progressive(start), ViTConfig(width=8, heads=1, patch=patch, image_size=full))
    early, late = (sizes.size(growth) for growth in sorted(growths))
    for side, later, whole in zip(early, late, full, strict=True):
        assert side % patch == 0 and patch <= side <= later <= whole
    assert sizes.size(1.0) == full


def test_images_are_resized_as_pillow_does() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    batch = Batch(torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor([0, 1]), torch.tensor([5, 6]))
    sizes = Sizes(Progressive(0.5), ViTConfig(width=8, heads=1, patch=4, image_size=32))
    small = sizes(batch, 0.0)
    assert small.images.shape == (2, 3, 16, 16) and small.images.dtype == torch.uint8
    assert torch.equal(small.labels, batch.labels) and torch.equal(small.index, batch.index)
    for ours, theirs in zip(small.images, images, strict=True):
        expected = np.asarray(Image.fromarray(theirs).resize((16, 16), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(ours.permute(1, 2, 0).numpy() - expected).max() <= 1
    assert sizes(batch, 1.0) is batch


def test_growth_follows_the_plan() -> None:
    run = replace(Run(), batch_size=10, duration=Epochs(10), progressive=Progressive(0.5, Percent(50)))
    plan = Timetable(run, per_epoch=10)
    assert [plan.growth(step, 0.0) for step in (0, 25, 50, 99)] == [0.0, 0.5, 1.0, 1.0]
    timed = Timetable(replace(run, time_limit=1.0), per_epoch=10)
    assert timed.growth(0, 15.0) == pytest.approx(0.5)


@pytest.mark.train
def test_a_run_that_grows_is_the_same_twice(tmp_path: Path) -> None:
    run = replace(recipe("smoke"), out=str(tmp_path), progressive=Progressive(0.5), seed=3)
    folders = [fit(run).folder for _ in range(2)]
    first, second = (load_file(folder / "model" / "last" / "model.safetensors") for folder in folders)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_start_that_is_no_share_is_refused() -> None:
    for start in (0.0, 1.5, -1.0):
        with pytest.raises(UsageError, match=r"progressive\.start"):
            Sizes(Progressive(start), ViTConfig())
