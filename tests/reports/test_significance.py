"""McNemar's test, intervals of paired differences, Holm's correction: against SciPy and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from run_folders import answers

from vitrail.errors import DataError
from vitrail.reports.significance import holm, mcnemar, pair_predictions, paired_interval

CLASSES = ["a", "b", "c", "d"]


@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_the_exact_binomial_test(only_first: int, only_second: int) -> None:
    count = only_first + only_second
    expected = scipy.stats.binomtest(only_first, count).pvalue if count else 1.0
    assert mcnemar(only_first, only_second) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(only_first, only_second) == mcnemar(only_second, only_first)


def test_mcnemar_of_many_images_and_of_few() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(0, 5) == 2 / 32  # five coins, all heads or all tails
    chi = (2_200 - 1_800) ** 2 / 4_000  # the approximation that the exact test replaces
    assert mcnemar(1_800, 2_200) == pytest.approx(scipy.stats.chi2.sf(chi, 1), rel=0.1)
    assert mcnemar(0, 5_000) == 0.0  # below the smallest number, and no error


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 1000))
def test_the_interval_of_a_difference_turns_with_its_sign(only_first: int, only_second: int, both: int) -> None:
    count = max(only_first + only_second + both, 1)
    low, high = paired_interval(only_first, only_second, count)
    difference = (only_second - only_first) / count
    assert -1 <= low <= difference + 1e-12 and difference - 1e-12 <= high <= 1
    assert paired_interval(only_second, only_first, count) == pytest.approx((-high, -low))


def test_the_interval_is_that_of_the_mean_where_images_are_many() -> None:
    each = np.r_[np.ones(3_000), -np.ones(2_000), np.zeros(95_000)]  # +1: only the second is right
    half = 1.959964 * each.std() / np.sqrt(len(each))
    low, high = paired_interval(2_000, 3_000, len(each))
    assert (low, high) == pytest.approx((each.mean() - half, each.mean() + half), abs=2e-6)


def test_the_interval_covers_what_it_says() -> None:
    rng = np.random.default_rng(0)
    chance = [0.06, 0.14, 0.8]  # only the first, only the second, equal
    drawn = rng.multinomial(150, chance, size=2_000)
    held = [low <= 0.08 <= high for low, high in (paired_interval(a, b, 150) for a, b, _ in drawn.tolist())]
    assert 0.935 < np.mean(held) < 0.975


def test_holms_correction() -> None:
    # by hand: 3 x 0.01, 2 x 0.03, and 0.04 is not to be below that
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == [] and holm([0.2]) == [0.2]


def test_images_are_matched_by_their_number() -> None:
    first, second = answers(CLASSES, 300, 1), answers(CLASSES, 300, 2, labels=answers(CLASSES, 300, 1).label)
    keep = np.setdiff1d(np.arange(300), [0, 7, 299])  # the second could not read three of them
    for name in ("index", "label", "top", "probability", "loss", "brier"):
        object.__setattr__(second, name, getattr(second, name)[keep])
    found = pair_predictions(first, second)
    assert found.count == 297
    expected = first.correct[keep], second.correct
    assert (found.first_right == expected[0]).all() and (found.second_right == expected[1]).all()
    assert found.only_first == (expected[0] & ~expected[1]).sum() > 0
    assert found.only_second == (~expected[0] & expected[1]).sum() > 0
    assert (found.first_right & found.second_right).sum() == (expected[0] & expected[1]).sum()
    assert found.difference == pytest.approx(expected[1].mean() - expected[0].mean())
    assert (first.index[found.first_rows] == second.index[found.second_rows]).all()


def test_what_cannot_be_paired_is_refused() -> None:
    first = answers(CLASSES, 50, 1)
    with pytest.raises(DataError, match="have different classes"):
        pair_predictions(first, answers([*CLASSES[:3], "e"], 50, 1))
    with pytest.raises(DataError, match="same image has different classes"):
        pair_predictions(first, answers(CLASSES, 50, 2))
    other = answers(CLASSES, 50, 1)
    object.__setattr__(other, "index", other.index + 50)
    with pytest.raises(DataError, match="no image in common"):
        pair_predictions(first, other)
