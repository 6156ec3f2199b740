"""Batches of images: the order depends on (seed, epoch), the augmentation on (seed, epoch, index), not on the threads.

A batch depends only on its number. An epoch can therefore begin at any batch without decoding earlier images.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from vitrail.data.images.batched import Augmentation, Plan
from vitrail.data.images.geometry import Op
from vitrail.data.images.masked import MaskTransform
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels
from vitrail.data.item import IndexedSource, is_remote
from vitrail.data.labels.masks import Masks
from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import Answers, Label, LabelSets, one_label
from vitrail.data.loading.order import ClassSampler, EpochOrder, Permutation, Sampling
from vitrail.data.loading.prefetch import TIMEOUT, ThreadPool, ordered, queued, stuck
from vitrail.data.loading.processes import ReaderProcesses, Ring
from vitrail.data.loading.reading import BatchPart, FetchedImages, ImageReader, Read, Slots, Transform, Wanted
from vitrail.errors import DataError, DecodeError, UsageError

WorkerKind = Literal["threads", "processes"]


@dataclass(frozen=True)
class Batch:
    """Images ready for the network. The caller may keep and change the tensors."""

    images: torch.Tensor
    """uint8 [B, 3, H, W], or float32 [B, bands, H, W]; channels are innermost in memory (channels_last), as decoders
    write them. With crops in the plan uint8 [B, bytes] (`vitrail.data.images.device_crop`)."""
    labels: torch.Tensor
    """int64 [B]; with several labels int8 [B, classes]: 1 for a label, 0 for none, -1 in a whole row if unknown; of
    numbers float64 [B, targets]; of masks uint8 [B, H, W], 255 for a pixel that does not count."""
    index: torch.Tensor
    """int64 [B]: the index of each image in the source."""
    plan: Plan | None = None
    """What is left of the augmentation, for the device of the network."""


ATTEMPTS = 100
"""Number of consecutive unreadable images, in training order, after which loading fails."""
_BATCHES_AHEAD = 3
_KEPT = 3
"""Number of batches that the caller may keep at a time in memory that processes share. Further ones are copied."""
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
    requested while earlier ones are decoded. `rest` comes after `transform`: only its random numbers are drawn, and the
    batch has them as a plan.

    `workers` threads or processes (`worker_kind`) read the images; 0 for the thread that iterates. Batches are the same
    with any of them. Processes write into shared memory, which is free for another batch when nothing refers to the
    `images` of a batch any more. A CUDA device `pinned_for` copies from this memory in the background. If it does so on
    another stream than the current one, the current one must wait for the copy before the caller drops the batch.

    Raises UsageError unless batch_size >= 1 and workers >= 0, for processes with `cache`, and for a source or transform
    that cannot be sent to a process; DataError for an empty source. `epoch` raises DataError, which names the image,
    when a read in a thread or process takes longer than `timeout` seconds (None: `prefetch.TIMEOUT`), when `ATTEMPTS`
    consecutive images are unreadable, for an error in `transform`, and if a process dies.
    """

    def __init__(
        self,
        source: IndexedSource,
        *,
        transform: Transform,
        rest: Augmentation | None = None,
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
        worker_kind: WorkerKind = "threads",
        pinned_for: torch.device | None = None,
        timeout: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        check_batch_size(batch_size)
        if cache and worker_kind == "processes":
            raise UsageError("cached images are in the memory of this process: use threads, or no cache")
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
        self.pixels: Pixels = getattr(transform, "pixels", EIGHT_BIT_RGB)
        """How stored images become the input of `transform`."""
        height, width = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        self._size = height, width
        self._crop = None if rest is None else rest.crop
        shape = (height, width, self.pixels.channels) if self._crop is None else (self._crop.room,)
        of_masks = MaskTransform(transform) if isinstance(source.labels, Masks) and isinstance(transform, Op) else None
        self._reader = ImageReader(source, transform, shape, seed, {} if cache else None, rest, of_masks)
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
        self._ring, self._processes = None, None
        if workers and worker_kind == "processes":
            self._ring = Ring(_BATCHES_AHEAD + 2 + _KEPT, len(self._order.positions(0)), self._reader)
            if pinned_for is not None:
                self._ring.pin(pinned_for)
            self._processes = ReaderProcesses(workers, self._reader, self._ring)

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this process."""
        return len(self._order)

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes that read images."""
        return [] if self._processes is None else self._processes.pids

    @property
    def share(self) -> int:
        """Number of images of the source per process, rounded up."""
        return -(-len(self.source) // self._world)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch from number `start` on."""
        permutation = self._order.permutation(self._seed, epoch)
        batches = (self._parts(epoch, permutation, number) for number in range(start, len(self)))
        parts = (part for batch in self._asked(batches) for part in self._with_memory(batch))
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
                    return self._batch(part.slots)
            return None
        finally:
            self.wait_seconds += time.perf_counter() - began

    def _batch(self, slots: Slots) -> Batch:
        """Return a filled batch as tensors, without a copy unless a slot is empty."""
        arrays = [slots.images, slots.labels, slots.index]
        good = slots.index >= 0
        if not good.all():
            arrays = [array[good] for array in arrays]
        images, labels, index = map(torch.from_numpy, arrays)
        if not slots.rows:
            return Batch(images.permute(0, 3, 1, 2), labels, index)
        rows, numbers = [slots.rows[slot] for slot in sorted(slots.rows)], index.tolist()
        plan = Plan.of(rows, self._size, self._crop, lambda place: self.source.id(numbers[place]))
        return Batch(images if plan.crops else images.permute(0, 3, 1, 2), labels, index, plan)

    def close(self) -> None:
        """End the threads and processes. The loader cannot be used afterwards; it may be closed twice."""
        if self._processes is not None:
            self._processes.close()
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
        cached = self._reader.cache or {}
        wanted = sorted(index for index in images if index not in cached)
        return dict(zip(wanted, self.source.fetch(np.array(wanted, dtype=np.int64)), strict=True))

    def _parts(self, epoch: int, permutation: Permutation, number: int) -> list[BatchPart]:
        """Cut a batch into parts."""
        positions = self._order.positions(number)
        count = len(positions)
        slots = Slots(self._no_labels(count), np.full(count, -1, dtype=np.int64))
        return [
            BatchPart(slots, begin, positions[begin : begin + self._part], permutation, epoch)
            for begin in range(0, count, self._part)
        ]

    def _with_memory(self, parts: list[BatchPart]) -> list[BatchPart]:
        """Give a batch, cut into parts, its memory."""
        slots, count = parts[0].slots, len(parts[0].slots.index)
        if self._ring is None:
            # every batch has its own memory, because the caller may keep it; the page faults cost 1 % of decoding
            slots.images = np.empty((count, *self._reader.shape), dtype=self.pixels.dtype)
        else:
            slots.images, slots.number = self._ring.take(count)
        return parts

    def _no_labels(self, count: int) -> np.ndarray:
        """Return the memory of the labels of a batch, to be filled."""
        if self._reader.of_masks is not None:
            return np.empty((count, *self._size), dtype=np.uint8)
        if isinstance(self._labels, LabelSets):
            return np.zeros((count, self._labels.width), dtype=np.int8)
        if isinstance(self._labels, Numbers | Answers):
            return np.empty((count, self._labels.width), dtype=np.float64)
        return np.empty(count, dtype=np.int64)

    def _fill(self, part: BatchPart) -> BatchPart:
        """Read, decode and transform every image of a part into its slot."""
        wanted = [self._wanted(part, place) for place in range(len(part.positions))]
        for place, read in enumerate(self._read(part, wanted)):
            image = wanted[place]
            for attempt in range(1, ATTEMPTS + 1):
                if not isinstance(read, DecodeError):
                    self._keep(part.slots, image, *read)
                    break
                part.bad.append((image.index, read.reason))
                if self._evaluation:
                    break
                if attempt == ATTEMPTS:
                    raise self._unreadable(part, image.index, read)
                image = self._wanted(part, place, attempt)
                (read,) = self._read(part, [image])
        return part

    def _wanted(self, part: BatchPart, place: int, attempt: int = 0) -> Wanted:
        """Return the image at a place of a part, or the `attempt`-th one after it in the order."""
        index, copy = self._order.image(part.permutation, int(part.positions[place]), attempt)
        return Wanted(part.begin + place, index, index + copy * len(self.source))

    def _read(self, part: BatchPart, wanted: list[Wanted]) -> list[Read | DecodeError]:
        """Fill the slots of the wanted images, here or in a process. See `ImageReader.read`."""
        fetched = None if part.slots.fetched is None else part.slots.fetched.result
        if self._processes is None:
            return self._reader.read(part.epoch, wanted, part.slots.images, part.progress, fetched)
        return self._processes.read(part, wanted, fetched)

    def _keep(self, slots: Slots, image: Wanted, label: Label, row: np.ndarray | None) -> None:
        """Store what belongs to an image that was read."""
        slots.index[image.slot] = image.index
        if row is not None:
            slots.rows[image.slot] = row
        if isinstance(label, np.ndarray) and label.ndim == 1 and isinstance(self._labels, LabelSets):
            slots.labels[image.slot, label] = 1
        else:
            slots.labels[image.slot] = label

    def _unreadable(self, part: BatchPart, index: int, last: DecodeError) -> DataError:
        """Return the error after `ATTEMPTS` consecutive unreadable images, of which the image `index` is the last."""
        reasons = dict(part.bad[-ATTEMPTS:])
        kinds = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons.values()).most_common())
        all_bad = len(reasons) == len(self.source)
        what = f"none of the {len(reasons):,} images" if all_bad else f"none of {ATTEMPTS} consecutive images"
        return DataError(
            f"{what} can be read ({kinds}); the last is {self.source.id(index)}: {last.reason} ({last}). "
            "`vitrail data check` lists all bad images"
        )

    def _hung(self, part: BatchPart) -> Exception | None:
        """Return the error for a part that is late; None if it has begun another read since the last timeout."""
        if self._processes is not None and self._processes.starting:
            return None
        reading, steps = part.progress.tolist()
        if part.steps_seen < steps:
            part.steps_seen = steps
            return None
        name = f"image {self.source.id(reading)} (index {reading})" if reading >= 0 else "the first image"
        return stuck(name, self._timeout)

    def _record(self, part: BatchPart) -> None:
        """Add the unreadable images of a part to the lists, each once."""
        for index, reason in part.bad:
            if index not in self._seen_bad:
                self._seen_bad.add(index)
                self.bad.append((self.source.id(index), reason))
                self.bad_index.append(index)
