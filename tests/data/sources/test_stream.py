from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.loading.order import AUGMENT, MIX, stream

WORDS = st.integers(-(2**63), 2**64 - 1)


@given(WORDS, WORDS, WORDS, st.integers(0, 5))
def test_the_same_tuple_gives_the_same_numbers(seed, epoch, index, purpose):
    first = stream(seed, epoch, index, purpose)
    first.random(100)
    again = stream(seed, epoch, index, purpose)
    assert (again.random(100) == stream(seed, epoch, index, purpose).random(100)).all()


def test_each_part_of_the_tuple_matters():
    tuples = itertools.product((0, 1, -1), (0, 1, 7), (0, 1, 50_000), (AUGMENT, MIX, 2))
    draws = {tuple(stream(*t).integers(0, 2**63, 4)) for t in tuples}
    assert len(draws) == 81


def test_neighbouring_streams_are_uniform_and_uncorrelated():
    """What an epoch of augmentations sees: the first numbers of consecutive indices."""
    draws = np.array([stream(3, 1, index).random(4) for index in range(20_000)])
    counts = np.histogram(draws[:, 0], bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-squared, 19 degrees of freedom, p = 0.001
    pairs = np.column_stack([draws[:-1], draws[1:]])
    correlation = np.corrcoef(pairs, rowvar=False)
    assert abs(correlation - np.eye(8)).max() < 4.5 / np.sqrt(20_000)


def test_numbers_never_change():
    """The counter layout is part of what a seed means; Philox itself is checked against its test vectors by numpy."""
    expected = np.random.Generator(np.random.Philox(key=5, counter=(7 << 64) | (3 << 128) | (1 << 192)))
    assert (stream(5, 3, 7, MIX).random(10) == expected.random(10)).all()


@pytest.mark.parametrize("long", [0, 2**20])
def test_long_streams_do_not_run_into_their_neighbours(long):
    ahead = stream(0, 0, 0)
    ahead.bit_generator.advance(long)
    seen = set(ahead.integers(0, 2**63, 1000).tolist())
    assert seen.isdisjoint(stream(0, 0, 1).integers(0, 2**63, 1000).tolist())
