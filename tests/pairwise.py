"""Few combinations of many options in place of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any


def pairwise(*axes: Iterable[Any], valid: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Return valid combinations of one value of each axis in which every two values of two axes meet that ever do."""
    every = [row for row in itertools.product(*axes) if valid(*row)]
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in every}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(every, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen
