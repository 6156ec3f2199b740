"""The order of the images in an epoch and the random numbers of each image, computed without state.

The order depends only on (seed, epoch), and an augmentation only on (seed, epoch, index). Both are therefore the same
with any number of threads or processes, in any order, and after any resume.

A sampler shows each class as often as it occurs, equally often, or in between. An epoch has as many places as there are
images. `uniform` shows every image once. The others give each class a number of places that is proportional to its
number of images to the power `POWER`: the square root of it (Mahajan et al. 2018, "Exploring the limits of weakly
supervised pretraining"), or the same for all classes (Kang et al. 2020, "Decoupling representation and classifier",
class-balanced sampling).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from vitrail.errors import UsageError

Sampling = Literal["uniform", "balanced", "sqrt"]
POWER: dict[Sampling, float] = {"uniform": 1.0, "sqrt": 0.5, "balanced": 0.0}
"""Exponent of the number of images of a class in its share of an epoch."""


def class_shares(counts: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the share of an epoch that each class gets, float64 [classes]; 0 for a class without images."""
    weights = np.where(counts > 0, np.asarray(counts, dtype=np.float64) ** POWER[sampling], 0.0)
    return weights / max(weights.sum(), 1.0)


def places_per_class(labels: np.ndarray, classes: int, sampling: Sampling) -> np.ndarray:
    """Return the mean number of places that each class gets in an epoch, float64 [classes].

    labels: int64 [images], below 0 for an unknown class.
    """
    known = labels[labels >= 0]
    return class_shares(np.bincount(known, minlength=classes), sampling) * len(known)


class ClassSampler:
    """Draws the images of an epoch by their classes. Images without a known class are not drawn.

    Within a class the numbers of times that images are shown differ by at most one. An epoch is a function of the
    random generator alone. labels: int64 [images]. Raises UsageError if no image has a label.
    """

    def __init__(self, labels: np.ndarray, sampling: Sampling) -> None:
        self._labels = labels
        self._known = np.flatnonzero(labels >= 0)
        if not len(self._known):
            raise UsageError(
                f"data.sampler {sampling} counts the images of each class, and these images have no labels"
            )
        self._counts = np.bincount(labels[self._known])
        self._shares = class_shares(self._counts, sampling)

    @cached_property
    def most(self) -> int:
        """Largest number of times that an image can be shown in an epoch."""
        places = np.ceil(self._shares * len(self._labels)) + 1
        return int(np.ceil(places / np.maximum(self._counts, 1)).max())

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Return the images of an epoch in order, int64 [images]: index + images * (how often it came before)."""
        images = len(self._labels)
        quota = self._quota(images, random)
        mixed = self._known[random.permutation(len(self._known))]
        mixed = mixed[np.argsort(self._labels[mixed], kind="stable")]  # by class, in random order within a class
        first = np.cumsum(self._counts) - self._counts
        of_class = np.repeat(np.arange(len(quota)), quota)
        number = np.arange(images) - np.repeat(np.cumsum(quota) - quota, quota)
        before, place = np.divmod(number, self._counts[of_class])
        shown = mixed[first[of_class] + place] + images * before
        return random.permutation(shown)  # type: ignore[no-any-return]

    def _quota(self, images: int, random: np.random.Generator) -> np.ndarray:
        """Return the number of places of each class: its share, rounded up or down at random, `images` in all."""
        ends = np.floor(np.cumsum(self._shares) * images + random.random()).astype(np.int64)
        ends[np.flatnonzero(self._counts)[-1] :] = images  # whatever the rounding of the sum
        return np.diff(ends, prepend=0)


AUGMENT, MIX, ORDER = range(3)
"""Purposes of streams; each purpose has its own random numbers."""

_WORD = (1 << 64) - 1


def stream(seed: int, epoch: int, index: int, purpose: int = AUGMENT) -> np.random.Generator:
    """Return the random generator of one (seed, epoch, index, purpose), four integers taken modulo 2^64.

    Philox is a block cipher in counter mode. The seed is its key, and the other three are the upper words of its
    256-bit counter. Two streams of one seed therefore have no number in common before 2^66 draws. A generator is made
    in microseconds, because it has no state to initialise (Salmon et al. 2011, "Parallel random numbers: as easy as 1,
    2, 3").
    """
    counter = np.array((0, index & _WORD, epoch & _WORD, purpose & _WORD), dtype=np.uint64)
    key = np.array((seed & _WORD, 0), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


class Permutation(Protocol):
    """The order of the images in an epoch: place -> index of the image, plus `count` for each earlier showing of it."""

    def __getitem__(self, place: int, /) -> int: ...


@dataclass(frozen=True)
class EpochOrder:
    """The positions of an epoch over `count` images, as process `rank` of `world` sees them.

    Position p shows image `permutation[p // repeats]`, so the copies of an image are neighbours in one batch. An epoch
    has `count` positions, and therefore shows `repeats` copies of a part of the images (Hoffer et al. 2020, counted as
    in DeiT). Batch b of all processes together consists of the positions b G to (b + 1) G - 1, where G = world *
    batch_size. Each process takes every world-th of them, so the batch does not depend on `world` if G is the same.

    Training (`shuffle` or `drop_last`) has the same number of batches in every process. Without `drop_last` the last
    batch is smaller, and the order wraps around so that all processes get the same number of images. With `drop_last`
    the rest is left out, but a data set smaller than G gives one smaller batch. Evaluation (neither) shows every
    position once over all processes.

    With a `sampler` an epoch shows images of some classes several times and others not at all, each time as another
    copy. Shuffling moves single images, or runs of `together` neighbours. A run lies in one batch and one process, so
    that it can be read in one piece. The runs begin at other images in each epoch. Raises UsageError if G images
    (copies counted once) are not a whole number of runs, or for runs with a `sampler`.
    """

    count: int
    batch_size: int
    _: KW_ONLY
    shuffle: bool
    drop_last: bool
    repeats: int = 1
    rank: int = 0
    world: int = 1
    together: int = 1
    sampler: ClassSampler | None = None

    def __post_init__(self) -> None:
        if self.sampler is not None and self.together != 1:
            raise UsageError(
                f"data.together is {self.together}, which keeps neighbouring images together, and data.sampler draws "
                "single images by their class. Use one of them"
            )
        batch = self.batch_size * self.world
        if self.together != 1 and (self.together < 1 or batch % (self.repeats * self.together)):
            raise UsageError(
                f"together is {self.together}; it must be at least 1, and a batch of {batch} images must hold a whole "
                f"number of runs of {self.together}"
                + (f", each shown {self.repeats} times" if self.repeats > 1 else "")
            )

    @cached_property
    def positions_here(self) -> int:
        """Number of positions of an epoch that this process shows."""
        batch = self.batch_size * self.world
        if not self.shuffle and not self.drop_last:
            return len(range(self.rank, self.count, self.world))
        if not self.drop_last:
            return -(-self.count // self.world)
        if self.count < batch:
            return max(1, self.count // self.world)
        return self.count // batch * self.batch_size

    def __len__(self) -> int:
        """Return the number of batches of this process."""
        return -(-self.positions_here // self.batch_size)

    def positions(self, batch: int) -> np.ndarray:
        """Return the positions, int64, in batch number `batch` of this process."""
        begin = batch * self.batch_size
        local = np.arange(begin, min(begin + self.batch_size, self.positions_here), dtype=np.int64)
        return local * self.world + self.rank

    def permutation(self, seed: int, epoch: int) -> Permutation:
        """Return the order of the images in an epoch, which depends only on (seed, epoch)."""
        if not self.shuffle:
            return range(self.count)
        random = stream(seed, epoch, 0, ORDER)
        if self.sampler is not None:
            return self.sampler.draw(random)
        if self.together == 1:
            return random.permutation(self.count)  # type: ignore[no-any-return]
        return Runs(self.count, self.together, self.batch_size * self.world // self.repeats, random)

    def image(self, permutation: Permutation, position: int, attempt: int = 0) -> tuple[int, int]:
        """Return (index of the image at a position, number of the copy).

        `attempt` is the number of unreadable images found at this position. Each attempt takes the next image of the
        order, as a copy that no other position shows.
        """
        place, copy = divmod(position % self.count, self.repeats)
        before, index = divmod(int(permutation[(place + attempt) % self.count]), self.count)
        most = 1 if self.sampler is None else self.sampler.most
        return index, copy + self.repeats * (before + most * attempt)


class Runs:
    """A random order of runs of `size` neighbours among `count` images; each run lies in one batch of `batch` places.

    The first places of a batch show the first image of each run, the next places the second ones, and so on. Each of n
    processes takes every n-th place, and so gets whole runs if n divides the number of runs in the batch. A run is
    stored as one number: an order of 300 million images in runs of 64 takes 38 MB. The images of an incomplete last
    batch or run come last.
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
