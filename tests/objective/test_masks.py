from __future__ import annotations

import numpy as np
import pytest

from vitrail.errors import UsageError
from vitrail.objective.masks import blocks, corruption, hidden_count, visible
from vitrail.objective.settings import MAE, BEiT, MaskedPatch

PATCHES = 196
MANY = range(1500)


def test_half_are_corrupted_and_split_80_10_10() -> None:
    drawn = corruption(0, 0, MANY, PATCHES, MaskedPatch())
    places, shown = drawn[:, 0], drawn[:, 1]
    assert drawn.shape == (len(MANY), 2, 98)
    assert all(len(set(row)) == 98 for row in places)
    total = places.size
    masked, kept = (shown == PATCHES).sum(), (shown == places).sum()
    for found, share in ((masked, 0.8), (kept, 0.1), (total - masked - kept, 0.1)):
        assert abs(found / total - share) < 4.5 * np.sqrt(share * (1 - share) / total)  # binomial


def test_every_patch_is_corrupted_and_shown_equally_often() -> None:
    drawn = corruption(1, 7, MANY, 16, MaskedPatch(mask=0.0, other=1.0))
    assert (drawn[:, 0] != drawn[:, 1]).all()  # another patch is never the patch itself
    for row in (drawn[:, 0], drawn[:, 1]):
        counts = np.bincount(row.ravel(), minlength=16)
        assert len(counts) == 16
        expected = row.size / 16
        assert ((counts - expected) ** 2 / expected).sum() < 50  # chi-squared with 15 degrees: p < 1e-5


@pytest.mark.parametrize(("share", "patches", "count"), [(0.15, 196, 29), (0.5, 49, 24), (0.01, 4, 1), (0.99, 4, 3)])
def test_counts(share: float, patches: int, count: int) -> None:
    assert hidden_count(patches, share) == count
    assert corruption(0, 0, [3], patches, MaskedPatch(corrupt=share)).shape == (1, 2, count)


def test_mae_keeps_49_of_196_in_raster_order() -> None:
    keep = visible(0, 0, MANY, PATCHES, MAE().ratio)
    assert keep.shape == (len(MANY), 49)
    assert (np.diff(keep, axis=1) > 0).all()
    counts = np.bincount(keep.ravel(), minlength=PATCHES)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 195 + 6 * np.sqrt(2 * 195)


def test_beit_masks_75_of_196_in_blocks() -> None:
    masked = blocks(0, 0, range(300), (14, 14), BEiT()).reshape(-1, 14, 14)
    assert (masked.sum((1, 2)) == 75).all()
    # in blocks, a masked patch's right neighbour is masked far more often than the share of masked patches
    pairs = masked[:, :, :-1]
    together = (pairs & masked[:, :, 1:]).sum() / pairs.sum()
    assert together > 0.65 > 75 / 196
    assert masked.any(axis=0).all()  # no place is never masked


def test_blocks_fit_a_grid_smaller_than_a_block() -> None:
    assert (blocks(0, 0, range(50), (2, 3), BEiT(ratio=0.5)).sum(1) == 3).all()


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed, step, index: corruption(seed, step, index, 64, MaskedPatch()),
        lambda seed, step, index: visible(seed, step, index, 64, 0.75),
        lambda seed, step, index: blocks(seed, step, index, (8, 8), BEiT()),
    ],
)
def test_masks_are_a_function_of_seed_step_and_example(draw) -> None:  # type: ignore[no-untyped-def]
    whole = draw(3, 5, range(12))
    np.random.seed(1)  # no global generator has a say
    for world in (2, 3):  # each process draws its share alone, and in any order
        for rank in range(world):
            mine = list(range(rank, 12, world))[::-1]
            np.testing.assert_array_equal(draw(3, 5, mine), whole[mine])
    for other in (draw(4, 5, range(12)), draw(3, 6, range(12)), draw(3, 5, range(12, 24))):
        assert (other != whole).any()


def test_an_image_of_one_patch_is_refused() -> None:
    with pytest.raises(UsageError, match="one patch"):
        visible(0, 0, [0], 1, 0.75)
