"""Batches of images: the order depends on (seed, epoch), the augmentation on (seed, epoch, index), not on the threads.

A batch depends only on its number. An epoch can therefore begin at any batch without decoding earlier images.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from vitrail.data.images.geometry import Op
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels
from vitrail.data.images.work import within_memory
from vitrail.data.item import IndexedSource, Item, is_remote
from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import Label, LabelSets, label_at, one_label
from vitrail.data.loading.order import ClassSampler, EpochOrder, Permutation, Sampling, stream
from vitrail.data.loading.prefetch import TIMEOUT, ThreadPool, ordered, queued, stuck
from vitrail.errors import DataError, DecodeError, UsageError, VitrailError

FetchedImages = dict[int, bytes | np.ndarray | DecodeError]
"""Index -> the image that a remote source returned for it, or the error."""


@dataclass(frozen=True)
class Batch:
    """Images ready for the network. The caller may keep and change the tensors."""

    images: torch.Tensor
    """uint8 [B, 3, H, W], or float32 [B, bands, H, W]; channels are innermost in memory (channels_last), as decoders
    write them."""
    labels: torch.Tensor
    """int64 [B]; with several labels int8 [B, classes]: 1 for a label, 0 for none, -1 in a whole row if unknown; of
    numbers float64 [B, targets]."""
    index: torch.Tensor
    """int64 [B]: the index of each image in the source."""


@dataclass
class Slots:
    """The memory of one batch, which several threads fill."""

    images: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    """int64 [B]: index of the image in the source; -1 for an empty slot."""
    fetched: Future[FetchedImages] | None = None
    """Images requested ahead of time from a remote source."""

    def batch(self) -> Batch:
        """Return the filled batch as tensors, without a copy unless a slot is empty."""
        arrays = [self.images, self.labels, self.index]
        good = self.index >= 0
        if not good.all():
            arrays = [array[good] for array in arrays]
        images, labels, index = map(torch.from_numpy, arrays)
        return Batch(images.permute(0, 3, 1, 2), labels, index)


@dataclass
class BatchPart:
    """Some slots of a batch, filled by one thread."""

    slots: Slots
    begin: int
    positions: np.ndarray
    permutation: Permutation
    epoch: int
    bad: list[tuple[int, str]] = field(default_factory=list)
    """(index, reason) of each image that could not be read."""
    reading: int = -1
    """Index of the image that is being read; -1 before the first."""
    steps: int = 0
    """Number of reads begun."""
    steps_seen: int = -1
    """Value of `steps` at the last timeout of the consumer."""

    @property
    def last(self) -> bool:
        """Whether this is the last part of the batch."""
        return self.begin + len(self.positions) == len(self.slots.index)


Transform = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Function of (image uint8 [H, W, 3], random numbers) that returns uint8 [*image_size, 3]. See `Op` for other bands."""

ATTEMPTS = 100
"""Number of consecutive unreadable images, in training order, after which loading fails."""
_BATCHES_AHEAD = 3
_ON_THE_WAY = 512
"""Number of images requested ahead from a remote source: 10,000 images/s at 50 ms per round trip."""
_ASKING = 4
"""Number of batches requested from a remote source at the same time, each in one request."""


def check_batch_size(batch_size: int) -> None:
    """Raise UsageError for a batch of no images."""
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}; it must be at least 1")


class Loader:
    """Batches of one process's share of a source.

    `batch_size` is the number of images per batch of this process. The batch of all processes is `world` times as
    large, and its images do not depend on the number of processes. Training (`shuffle` or `drop_last`) takes the same
    number of steps in every process; the order wraps around if necessary, and a data set smaller than a batch gives
    one smaller batch. Evaluation (neither `shuffle` nor `drop_last`) shows every image exactly once over all processes.

    An image that cannot be decoded is listed in `bad`. Training shows the next image of the order instead; evaluation
    leaves the image out. With `cache` decoded images stay in memory, which is for data sets of small images. `together`
    is the number of neighbours shown in one batch (see `EpochOrder`). `sampler` says how often each class is shown in
    training (`vitrail.data.loading.order`). The next batches of a remote source (`vitrail.data.item.RemoteSource`) are
    requested while earlier ones are decoded.

    Raises UsageError unless batch_size >= 1 and workers >= 0, and DataError for an empty source. `epoch` raises
    DataError, which names the image, when a read in a thread takes longer than `timeout` seconds (None:
    `prefetch.TIMEOUT`), when `ATTEMPTS` consecutive images are unreadable, and for an error in `transform`.
    """

    def __init__(
        self,
        source: IndexedSource,
        *,
        transform: Transform,
        image_size: int | tuple[int, int],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 0,
        drop_last: bool = True,
        repeats: int = 1,
        rank: int = 0,
        world: int = 1,
        together: int = 1,
        sampler: Sampling = "uniform",
        cache: bool = False,
        timeout: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        check_batch_size(batch_size)
        if not len(source):
            raise DataError("there are no images to load")
        self.source = source
        self.wait_seconds = 0.0
        """Seconds that the consumer has waited for batches."""
        self.bad: list[tuple[str, str]] = []
        """(id, reason) of each image that could not be read."""
        self.bad_index: list[int] = []
        """Index in the source of each image in `bad`."""
        self._seen_bad: set[int] = set()
        self._transform = transform
        self.pixels: Pixels = getattr(transform, "pixels", EIGHT_BIT_RGB)
        """How stored images become the input of `transform`."""
        size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        self._shape = (*size, self.pixels.channels)
        self._seed = seed
        self._batch_size = batch_size
        self._evaluation = not shuffle and not drop_last
        self._timeout = TIMEOUT if timeout is None else timeout
        self._world = world
        self._progress = progress
        self._order = EpochOrder(
            len(source),
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            repeats=repeats,
            rank=rank,
            world=world,
            together=together,
            sampler=None if sampler == "uniform" else ClassSampler(one_label(source.labels, "data.sampler"), sampler),
        )
        # twice as many parts as threads: they finish a batch at about the same time
        self._part = batch_size if not workers else math.ceil(batch_size / (2 * workers))
        self._pool = ThreadPool(workers) if workers else None
        self._asking = ThreadPool(_ASKING) if is_remote(source) else None
        self._labels = source.labels
        self._cache: dict[int, tuple[np.ndarray, Label]] | None = {} if cache else None
        """Index -> (decoded image, label)."""
        self._together = cache and isinstance(transform, Op)
        """Are the images of a part transformed in one call?"""

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this process."""
        return len(self._order)

    @property
    def share(self) -> int:
        """Number of images of the source per process, rounded up."""
        return -(-len(self.source) // self._world)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch from number `start` on."""
        permutation = self._order.permutation(self._seed, epoch)
        batches = (self._parts(epoch, permutation, number) for number in range(start, len(self)))
        parts = (part for batch in self._asked(batches) for part in batch)
        ahead = _BATCHES_AHEAD * math.ceil(self._batch_size / self._part)
        filled = ordered(self._pool, self._fill, parts, ahead=ahead, timeout=self._timeout, hung=self._hung)
        done = start * self._batch_size
        try:
            while (batch := self._next(filled)) is not None:
                if len(batch.labels):
                    yield batch
                if self._progress is not None:
                    done = min(done + self._batch_size, self.share)
                    self._progress(done, self.share)
        finally:
            filled.close()

    def _next(self, filled: Iterator[BatchPart]) -> Batch | None:
        """Wait for all parts of the next batch and return it; return None at the end of the epoch."""
        began = time.perf_counter()
        try:
            for part in filled:
                self._record(part)
                if part.last:
                    return part.slots.batch()
            return None
        finally:
            self.wait_seconds += time.perf_counter() - began

    def close(self) -> None:
        """End the threads. The loader cannot be used afterwards; it may be closed twice."""
        for pool in (self._pool, self._asking):
            if pool is not None:
                pool.close()

    def _asked(self, batches: Iterator[list[BatchPart]]) -> Iterator[list[BatchPart]]:
        """Ask a remote source for every batch some batches before it is yielded."""
        if self._asking is None:
            yield from batches
            return
        for parts, fetched in queued(self._asking, self._ask, batches, math.ceil(_ON_THE_WAY / self._batch_size)):
            parts[0].slots.fetched = fetched
            yield parts

    def _ask(self, parts: list[BatchPart]) -> FetchedImages:
        """Request the images of a batch that are not in memory from a remote source."""
        assert is_remote(self.source)
        images = {self._order.image(part.permutation, place)[0] for part in parts for place in part.positions.tolist()}
        cached = self._cache or {}
        wanted = sorted(index for index in images if index not in cached)
        return dict(zip(wanted, self.source.fetch(np.array(wanted, dtype=np.int64)), strict=True))

    def _parts(self, epoch: int, permutation: Permutation, number: int) -> list[BatchPart]:
        """Lay out a batch in memory and cut it into parts."""
        positions = self._order.positions(number)
        count = len(positions)
        # every batch has its own memory, because the caller may keep it; the page faults cost 1 % of decoding
        images = np.empty((count, *self._shape), dtype=self.pixels.dtype)
        slots = Slots(images, self._no_labels(count), np.full(count, -1, dtype=np.int64))
        return [
            BatchPart(slots, begin, positions[begin : begin + self._part], permutation, epoch)
            for begin in range(0, count, self._part)
        ]

    def _no_labels(self, count: int) -> np.ndarray:
        """Return the memory of the labels of a batch, to be filled."""
        if isinstance(self._labels, LabelSets):
            return np.zeros((count, self._labels.width), dtype=np.int8)
        if isinstance(self._labels, Numbers):
            return np.empty((count, self._labels.width), dtype=np.float64)
        return np.empty(count, dtype=np.int64)

    def _fill(self, part: BatchPart) -> BatchPart:
        """Read, decode and transform every image of a part into its slot."""
        images = self._images(part)
        if self._together and isinstance(self._transform, Op):
            # small images are transformed all at once, with the same bits as one by one
            decoded = list(images)
            if decoded and len({image.shape for _, image, _, _ in decoded}) == 1:
                slots = [slot for slot, _, _, _ in decoded]
                stack = np.stack([image for _, image, _, _ in decoded])
                part.slots.images[slots] = self._transform.batch(stack, [random for *_, random in decoded])
                return part
            images = iter(
                (slot, self._transformed(image, random, index), index, random) for slot, image, index, random in decoded
            )
        for slot, image, _, _ in images:
            part.slots.images[slot] = image
        return part

    def _images(self, part: BatchPart) -> Iterator[tuple[int, np.ndarray, int, np.random.Generator]]:
        """Yield (slot, image, index, random numbers) of each image, and store its label and index.

        The image is transformed, or decoded if images are transformed together.
        """
        for slot, position in enumerate(part.positions.tolist(), start=part.begin):
            found = self._readable(part, position)
            if found is None:
                continue
            image, label, index, random = found
            part.slots.index[slot] = index
            if isinstance(label, np.ndarray) and isinstance(self._labels, LabelSets):
                part.slots.labels[slot, label] = 1
            else:
                part.slots.labels[slot] = label
            yield slot, image, index, random

    def _readable(self, part: BatchPart, position: int) -> tuple[np.ndarray, Label, int, np.random.Generator] | None:
        """Return (image, label, index, random numbers) for a position; None for an unreadable image in evaluation."""
        for attempt in range(1 if self._evaluation else ATTEMPTS):
            index, copy = self._order.image(part.permutation, position, attempt)
            part.reading, part.steps = index, part.steps + 1
            try:
                image, label = self._read(index, part.slots.fetched)
                random = stream(self._seed, part.epoch, index + copy * len(self.source))
                if not self._together:
                    image = self._transformed(image, random, index)
                return image, label, index, random
            except DecodeError as error:
                part.bad.append((index, error.reason))
                last = error
        if self._evaluation:
            return None
        reasons = dict(part.bad[-ATTEMPTS:])
        kinds = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons.values()).most_common())
        all_bad = len(reasons) == len(self.source)
        what = f"none of the {len(reasons):,} images" if all_bad else f"none of {ATTEMPTS} consecutive images"
        raise DataError(
            f"{what} can be read ({kinds}); the last is {self.source.id(index)}: {last.reason} ({last}). "
            "`vitrail data check` lists all bad images"
        )

    def _read(self, index: int, fetched: Future[FetchedImages] | None) -> tuple[np.ndarray, Label]:
        """Return (pixels [H, W, channels], label) from the cache, from the fetched images, or from the source."""
        if self._cache is not None and (cached := self._cache.get(index)) is not None:
            return cached
        try:
            with within_memory():
                item = self._item(index, fetched)
                image = self.pixels.read(item.image)
        except VitrailError:
            raise
        except Exception as error:
            raise DataError(f"image {self.source.id(index)} could not be read: {error!r}") from error
        if self._cache is not None:
            self._cache[index] = image, item.label
        return image, item.label

    def _item(self, index: int, fetched: Future[FetchedImages] | None) -> Item:
        """Return an image as it is stored, from the fetched images or else from the source."""
        image = None if fetched is None else fetched.result().get(index)
        if image is None or not is_remote(self.source):
            return self.source[index]
        if isinstance(image, DecodeError):
            raise image
        return Item(image, label_at(self.source.labels, index), "")

    def _transformed(self, image: np.ndarray, random: np.random.Generator, index: int) -> np.ndarray:
        """Return the transformed image. Raises DataError, which names the image, for any error of the transform.

        Too little memory is a DecodeError.
        """
        try:
            with within_memory():
                result = self._transform(image, random)
        except DecodeError:
            raise
        except Exception as error:
            raise DataError(f"image {self.source.id(index)} could not be transformed: {error!r}") from error
        if result.shape != self._shape:
            raise DataError(f"image {self.source.id(index)} became {result.shape}, expected {self._shape}")
        return result

    def _hung(self, part: BatchPart) -> Exception | None:
        """Return the error for a part that is late; None if it has begun another read since the last timeout."""
        if part.steps_seen < part.steps:
            part.steps_seen = part.steps
            return None
        return stuck(f"image {self.source.id(part.reading)} (index {part.reading})", self._timeout)

    def _record(self, part: BatchPart) -> None:
        """Add the unreadable images of a part to the lists, each once."""
        for index, reason in part.bad:
            if index not in self._seen_bad:
                self._seen_bad.add(index)
                self.bad.append((self.source.id(index), reason))
                self.bad_index.append(index)
