"""Which image stands where in an epoch, for which process: arithmetic, no state."""

from __future__ import annotations

import numpy as np

from vitrail.data.stream import stream

ORDER = 2
"""Purpose of the stream that shuffles (the others are in `vitrail.data.stream`)."""


class Order:
    """The order of an epoch over `count` images, as process `rank` of `world` sees it.

    Position p of the order shows image `permutation[p // repeats]`: copies of an image are neighbours and
    meet in one batch. An epoch shows as many images as there are, hence `repeats` copies each of a part of
    them (Hoffer et al. 2020, as DeiT counts it). Batch b of all processes together is positions [b G, (b + 1)
    G), G = world * batch_size, and each process takes every world-th of them: what is in the batch does not
    depend on `world` as long as G stays the same.

    Training (`shuffle` or `drop_last`): as many batches in every process. Without `drop_last` the last batch
    is short, and the order wraps around to fill up the processes; with it the rest is dropped, but a set
    smaller than G gives one smaller batch. Evaluation (neither): every position once over all processes."""

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        repeats: int = 1,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._count = count
        self._shuffle = shuffle
        self._repeats = repeats
        self._rank = rank
        self._world = world
        self._batch = batch_size
        if not shuffle and not drop_last:
            self._mine = len(range(rank, count, world))
        elif drop_last and count >= batch_size * world:
            self._mine = count // (batch_size * world) * batch_size
        elif drop_last:
            self._mine = max(1, count // world)
        else:
            self._mine = -(-count // world)

    def __len__(self) -> int:
        """Batches of this process."""
        return -(-self._mine // self._batch)

    def positions(self, batch: int) -> np.ndarray:
        """Positions, int64, in batch number `batch` of this process."""
        local = np.arange(batch * self._batch, min((batch + 1) * self._batch, self._mine), dtype=np.int64)
        return local * self._world + self._rank

    def permutation(self, seed: int, epoch: int) -> np.ndarray:
        """Return the images of an epoch in order, int64 [count]: a function of (seed, epoch)."""
        if not self._shuffle:
            return np.arange(self._count, dtype=np.int64)
        return stream(seed, epoch, 0, ORDER).permutation(self._count)

    def image(self, permutation: np.ndarray, position: int, attempt: int = 0) -> tuple[int, int]:
        """Return (index of the image at a position, number of the copy it is).

        `attempt` counts the unreadable images there so far: each moves on to the next image of the order, as
        a copy that no other position shows."""
        place, copy = divmod(position % self._count, self._repeats)
        return int(permutation[(place + attempt) % self._count]), copy + attempt * self._repeats
