"""The 1,000 classes of ILSVRC2012: WordNet ids in the order of their numbers, which is that of the ids. Torch-free."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import numpy as np


@cache
def _marked() -> tuple[tuple[str, str], ...]:
    lines = files("vitrail.data.benchmarks").joinpath("imagenet.txt").read_text(encoding="utf-8").splitlines()
    return tuple((line[:9], line[10:]) for line in lines if not line.startswith("#"))


@cache
def wnids() -> tuple[str, ...]:
    """Return the WordNet id of each class, such as n01440764, in the order of their numbers 0 to 999."""
    return tuple(wnid for wnid, _ in _marked())


def part(mark: str) -> np.ndarray:
    """Return the numbers, int64 [200], of the classes of ImageNet-A ("a") or ImageNet-R ("r")."""
    return np.array([number for number, (_, marks) in enumerate(_marked()) if mark in marks], dtype=np.int64)
