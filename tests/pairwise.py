"""Few combinations of many options in place of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any


def pairwise(*axes: Iterable[Any], valid: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Return valid combinations of one value of each axis in which every two values of two axes meet that ever do."""
    values = [list(axis) for axis in axes]
    rows = itertools.product(*(range(len(axis)) for axis in values))
    every = {row: tuple(axis[i] for axis, i in zip(values, row, strict=True)) for row in rows}
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in every if valid(*every[row])}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.append(every[best])
    return chosen
