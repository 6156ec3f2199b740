"""Count copies and look-alikes by pairs of splits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.data.copies.dedup import HashedImages, Pairs


@dataclass(frozen=True)
class Shared:
    """Number of images of one split that have a copy in another split, or an earlier copy in the same split."""

    data: str
    split: str
    other_data: str
    other_split: str
    exact: int
    """Number of images of the split with the same bytes as one of the other split."""
    near: int
    """Number of other images of the split with a near copy in the other split."""
    others: int
    """Number of images of the other split that have such a copy."""
    alike: int
    """Number of images of the split that are no copies, but look like one of the other split."""


def shared(left: HashedImages, right: HashedImages | None, pairs: Pairs) -> list[Shared]:
    """Count the pairs for each pair of splits. Within one data set, pairs of splits without copies are left out."""
    ours, theirs = (pairs.left, pairs.right) if right is not None else (pairs.right, pairs.left)
    other = left if right is None else right
    places = left.part_of(ours) * len(other.parts) + other.part_of(theirs)
    counts = []
    for place in range(len(left.parts) * len(other.parts)):
        here = places == place
        if right is None and not here.any():
            continue
        one, two = left.parts[place // len(other.parts)], other.parts[place % len(other.parts)]
        exact, copied, every = (np.unique(ours[here & kind]) for kind in (pairs.copy & pairs.exact, pairs.copy, True))
        names = one.data, one.split, two.data, two.split
        others = len(np.unique(theirs[here & pairs.copy]))
        counts.append(Shared(*names, len(exact), len(copied) - len(exact), others, len(every) - len(copied)))
    return counts
