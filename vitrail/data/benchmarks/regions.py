"""Parts of splits, as TensorFlow Datasets writes them: `train[:800]`, `train[90%:]`, `train[:800]+validation[:200]`.

What it cannot write, and VTAB-1k needs, is a part of a part: `train[90%:][:200]`. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vitrail.errors import DataError, UsageError, did_you_mean

_PART = re.compile(r"(?P<split>\w+)(?P<slices>(?:\[[^\[\]]*\])*)")
_SLICE = re.compile(r"\[(-?\d+%?)?:(-?\d+%?)?\]")


@dataclass(frozen=True)
class Range:
    """Images number `start` to `stop` - 1 of a split."""

    split: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def ranges(region: str, counts: Mapping[str, int]) -> list[Range]:
    """Return the images of a region; `counts` are those of the splits there are.

    A percentage is rounded to the nearest image, ties to even, as `tfds.core.ReadInstruction` does by default.
    Raises UsageError for text that is no region or a split that is not there, DataError for more images than there
    are: a data set that small is not the one the region was written for.
    """
    return [_range(part.strip(), counts, region) for part in region.split("+")]


def _range(part: str, counts: Mapping[str, int], region: str) -> Range:
    match = _PART.fullmatch(part)
    if not match or len(_SLICE.findall(match["slices"])) != match["slices"].count("["):
        raise UsageError(f"{part!r} in {region!r} is no part of a split: write train, train[:800] or train[90%:]")
    split = match["split"]
    if split not in counts:
        known = ", ".join(counts)
        raise UsageError(f"no split {split!r} for {region!r}: there are {known}.{did_you_mean(split, counts)}")
    start, stop = 0, counts[split]
    for begin, end in _SLICE.findall(match["slices"]):
        count = stop - start
        first, last = (_bound(text, count, default) for text, default in ((begin, 0), (end, count)))
        if not (0 <= first <= count and 0 <= last <= count):
            raise DataError(f"{region!r} needs more images than split {split!r} has: [{begin}:{end}] of {count:,}")
        start, stop = start + first, start + max(first, last)
    return Range(split, start, stop)


def _bound(text: str, count: int, default: int) -> int:
    if not text:
        return default
    value = round(int(text[:-1]) * count / 100) if text.endswith("%") else int(text)
    return value + count if value < 0 else value
