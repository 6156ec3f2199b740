"""Which image stands where in an epoch, and which random numbers it gets: arithmetic without state.

The order is a function of (seed, epoch) and an augmentation a function of (seed, epoch, index). Both are therefore the
same with any number of threads or processes, in any order, and after any resume.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from vitrail.errors import UsageError

# the purpose of a stream; each purpose has its own random numbers
AUGMENT, MIX = range(2)

_WORD = (1 << 64) - 1


def stream(seed: int, epoch: int, index: int, purpose: int = AUGMENT) -> np.random.Generator:
    """Return the generator of one (seed, epoch, index, purpose), each any integer, taken modulo 2^64.

    Philox is a block cipher in counter mode: the seed is its key, the other three are the upper words of its
    256-bit counter. Two tuples of one seed therefore share no number before 2^66 draws, and making a generator
    costs microseconds, since there is no state to warm up (Salmon et al. 2011, "Parallel random numbers: as
    easy as 1, 2, 3").
    """
    counter = np.array((0, index & _WORD, epoch & _WORD, purpose & _WORD), dtype=np.uint64)
    key = np.array((seed & _WORD, 0), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


ORDER = 2
"""Purpose of the stream that shuffles (the others are in `vitrail.data.loading.order`)."""


class Permutation(Protocol):
    """The order of the images in an epoch."""

    def __getitem__(self, place: int, /) -> int: ...


class Order:
    """The order of an epoch over `count` images, as process `rank` of `world` sees it.

    Position p of the order shows image `permutation[p // repeats]`: copies of an image are neighbours and
    meet in one batch. An epoch shows as many images as there are, hence `repeats` copies each of a part of
    them (Hoffer et al. 2020, as DeiT counts it). Batch b of all processes together is positions [b G, (b + 1)
    G), G = world * batch_size, and each process takes every world-th of them: what is in the batch does not
    depend on `world` as long as G stays the same.

    Training (`shuffle` or `drop_last`): as many batches in every process. Without `drop_last` the last batch
    is short, and the order wraps around to fill up the processes; with it the rest is dropped, but a set
    smaller than G gives one smaller batch. Evaluation (neither): every position once over all processes.

    Shuffling moves single images, or runs of `together` neighbours, which then meet in one batch and one process,
    so that they can be read in one piece; where the runs begin changes from epoch to epoch. Raises UsageError where
    G images (copies counted once) are not whole runs."""

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
        together: int = 1,
    ) -> None:
        if together != 1 and (together < 1 or batch_size * world % (repeats * together)):
            raise UsageError(
                f"together is {together}: it must be at least 1, and a batch of {batch_size * world} images must hold "
                f"a whole number of runs of {together}" + (f", each shown {repeats} times" if repeats > 1 else "")
            )
        self._count = count
        self._together = together
        self._different = batch_size * world // repeats
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

    def permutation(self, seed: int, epoch: int) -> Permutation:
        """Return the images of an epoch in order: a function of (seed, epoch)."""
        if not self._shuffle:
            return range(self._count)
        random = stream(seed, epoch, 0, ORDER)
        if self._together == 1:
            return random.permutation(self._count)  # type: ignore[no-any-return]
        return Runs(self._count, self._together, self._different, random)

    def image(self, permutation: Permutation, position: int, attempt: int = 0) -> tuple[int, int]:
        """Return (index of the image at a position, number of the copy it is).

        `attempt` counts the unreadable images there so far: each moves on to the next image of the order, as
        a copy that no other position shows."""
        place, copy = divmod(position % self._count, self._repeats)
        return int(permutation[(place + attempt) % self._count]), copy + attempt * self._repeats


class Runs:
    """`count` images in order, runs of `size` neighbours at random, each run within one batch of `batch` places.

    The runs of a batch are dealt to its places in turn, so that each of n processes, which take every n-th place,
    gets whole runs wherever n divides their number. A run is kept as one number: an order of 300 million images in
    runs of 64 takes 38 MB. Images left over when the last batch or run is not full come last.
    """

    def __init__(self, count: int, size: int, batch: int, random: np.random.Generator) -> None:
        self._count = count
        self._size = size
        self._batch = batch
        self._runs = random.permutation(count // size)
        self._shift = int(random.integers(count))
        self._dealt = count // size * size // batch * batch

    def __getitem__(self, place: int) -> int:
        if place < self._dealt:
            batch, within = divmod(place, self._batch)
            offset, lane = divmod(within, self._batch // self._size)
            run = batch * (self._batch // self._size) + lane
        else:
            run, offset = divmod(place, self._size)
        first = int(self._runs[run]) if run < len(self._runs) else run
        return (first * self._size + offset + self._shift) % self._count
