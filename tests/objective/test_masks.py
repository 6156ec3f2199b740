from __future__ import annotations

import numpy as np
import pytest

from vitrail.errors import UsageError
from vitrail.objective.config import MaskedPatch
from vitrail.objective.masks import corruption, hidden_count

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


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed, step, index: corruption(seed, step, index, 64, MaskedPatch()),
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
        corruption(0, 0, [0], 1, MaskedPatch())
