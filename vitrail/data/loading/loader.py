"""Images to batches: order = f(seed, epoch), augmentation = f(seed, epoch, index), whatever the number of
threads.

A batch is a function of its number alone, so an epoch can begin at any batch without decoding what came
before."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from vitrail.data.images.decode import decode
from vitrail.data.images.ops import Op, transform_batch
from vitrail.data.item import Item, Listed, Source, is_distant
from vitrail.data.loading.order import Order, Permutation, stream
from vitrail.data.loading.prefetch import TIMEOUT, Pool, ahead, ordered
from vitrail.errors import DataError, DecodeError, VitrailError

FetchedImages = dict[int, bytes | np.ndarray | DecodeError]
"""Index -> what a distant source gave for it."""


@dataclass(frozen=True)
class Batch:
    """Images ready for the network. The tensors are the caller's to keep and to change."""

    images: torch.Tensor
    """uint8 [B, 3, H, W]; channels lie innermost in memory (channels_last), as decoders write them."""
    labels: torch.Tensor
    """int64 [B]."""
    index: torch.Tensor
    """int64 [B]: where in the source each image is."""


@dataclass
class Slots:
    """The memory of one batch, which several threads fill."""

    images: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    good: np.ndarray
    """bool [B]: whether the slot holds an image."""
    fetched: Future[FetchedImages] | None = None
    """Images requested ahead of time from a distant source."""

    def batch(self) -> Batch:
        """Return the filled batch as tensors, without a copy unless a slot is empty."""
        arrays = (self.images, self.labels, self.index)
        if not self.good.all():
            arrays = tuple(array[self.good] for array in arrays)
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
    last: bool
    """Is it the batch's last part?"""
    bad: list[tuple[int, str]] = field(default_factory=list)
    """(index, reason) of each image that could not be read."""
    reading: int = -1
    """The image being read, -1 before the first."""
    steps: int = 0
    """Reads begun so far."""
    steps_seen: int = -1
    """Value of `steps` at the last timeout of the consumer."""


class DecodedImages:
    """Decoded images and labels in memory, by index, so that small data sets are read and decoded once.

    Images of the most common size share one array; images of other sizes are stored separately. Several threads may
    put and get.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._images: np.ndarray | None = None
        self._others: dict[int, np.ndarray] = {}
        self._labels = np.zeros(count, dtype=np.int64)
        self._there = np.zeros(count, dtype=bool)

    def get(self, index: int) -> tuple[np.ndarray, int] | None:
        """Return (image uint8 [H, W, 3], label), or None if the image is not in memory yet."""
        if not self._there[index] or self._images is None:
            return None
        image = self._others.get(index)
        return (self._images[index] if image is None else image), int(self._labels[index])

    def put(self, index: int, image: np.ndarray, label: int) -> None:
        """Store an image: a copy if it has the common size, else the array itself."""
        with self._lock:
            if self._images is None:  # the first image decides what the common size is
                self._images = np.empty((self._count, *image.shape), dtype=np.uint8)
        if image.shape == self._images.shape[1:]:
            self._images[index] = image
        else:
            self._others[index] = image
        self._labels[index] = label
        self._there[index] = True  # last: another thread may look at any moment


Transform = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""uint8 [H, W, 3], random numbers -> uint8 [*image_size, 3]."""

ATTEMPTS = 100
"""Number of consecutive unreadable images, in training order, after which loading fails."""
_BATCHES_AHEAD = 3
_ON_THE_WAY = 512
"""Number of images requested ahead from a distant source: 10,000 images/s at 50 ms per round trip."""
_ASKING = 4
"""Number of batches requested from a distant source at the same time, each in one request."""


class Loader:
    """Batches of one process's share of a source.

    `batch_size` counts this process's images; the batch of all processes is `world` times as large, and its
    images do not depend on the number of processes. Training (`shuffle` or `drop_last`) takes the same number
    of steps in every process, wrapping around where needed; a data set smaller than a batch gives one smaller
    batch. Evaluation (neither) gives every image exactly once over all processes.

    An image that cannot be decoded is listed in `bad`; training takes the next one of the order in its place,
    evaluation leaves it out. `cache` keeps decoded images in memory: for data sets of small images. `together`
    neighbours are shown in one batch (see `Order`). Of a distant source (`vitrail.data.item.Distant`) the next
    batches are asked for while earlier ones are decoded.

    Raises DataError for an empty source, and from `epoch`: when a read takes longer than `timeout` seconds (None:
    `prefetch.TIMEOUT`; without threads it is waited for), when `ATTEMPTS` images in a row are unreadable, and for an
    error in `transform`, each naming the image.
    """

    def __init__(
        self,
        source: Source,
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
        cache: bool = False,
        timeout: float | None = None,
    ) -> None:
        if not len(source):
            raise DataError("there are no images to load")
        self.source = source
        self.wait_seconds = 0.0
        self.bad: list[tuple[str, str]] = []
        self.bad_index: list[int] = []
        """Index in the source of each image in `bad`."""
        self._seen_bad: set[int] = set()
        self._transform = transform
        self._size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        self._seed = seed
        self._batch_size = batch_size
        self._evaluation = not shuffle and not drop_last
        self._timeout = TIMEOUT if timeout is None else timeout
        self._world = world
        self._order = Order(
            len(source),
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            repeats=repeats,
            rank=rank,
            world=world,
            together=together,
        )
        # twice as many parts as threads: they finish a batch at about the same time
        self._part = batch_size if not workers else math.ceil(batch_size / (2 * workers))
        self._pool = Pool(workers) if workers else None
        self._asking = Pool(_ASKING) if is_distant(source) else None
        self._cache = DecodedImages(len(source)) if cache else None

    def __len__(self) -> int:
        """Batches in an epoch of this process."""
        return len(self._order)

    @property
    def share(self) -> int:
        """Images of the source per process, rounded up."""
        return -(-len(self.source) // self._world)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch from number `start` on."""
        permutation = self._order.permutation(self._seed, epoch)
        batches = (self._parts(epoch, permutation, number) for number in range(start, len(self)))
        parts = (part for batch in self._asked(batches) for part in batch)
        ahead = _BATCHES_AHEAD * math.ceil(self._batch_size / self._part)
        filled = ordered(self._pool, self._fill, parts, ahead=ahead, timeout=self._timeout, hung=self._hung)
        try:
            while (batch := self._next(filled)) is not None:
                if len(batch.labels):
                    yield batch
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
        """Ask a distant source for every batch some batches before it is yielded."""
        if self._asking is None:
            yield from batches
            return
        for parts, fetched in ahead(self._asking, self._ask, batches, math.ceil(_ON_THE_WAY / self._batch_size)):
            parts[0].slots.fetched = fetched
            yield parts

    def _ask(self, parts: list[BatchPart]) -> FetchedImages:
        assert is_distant(self.source)
        images = {self._order.image(part.permutation, place)[0] for part in parts for place in part.positions.tolist()}
        wanted = sorted(index for index in images if self._cache is None or self._cache.get(index) is None)
        return dict(zip(wanted, self.source.fetch(np.array(wanted, dtype=np.int64)), strict=True))

    def _parts(self, epoch: int, permutation: Permutation, number: int) -> list[BatchPart]:
        """Lay out a batch in memory and cut it into parts."""
        positions = self._order.positions(number)
        count = len(positions)
        # fresh memory for every batch: the caller may keep it, and page faults cost 1 % of decoding
        slots = Slots(
            np.empty((count, *self._size, 3), dtype=np.uint8),
            np.empty(count, dtype=np.int64),
            np.empty(count, dtype=np.int64),
            np.zeros(count, dtype=bool),
        )
        return [
            BatchPart(
                slots, begin, positions[begin : begin + self._part], permutation, epoch, begin + self._part >= count
            )
            for begin in range(0, count, self._part)
        ]

    def _fill(self, part: BatchPart) -> BatchPart:
        """Read, decode and transform every image of a part into its slot."""
        images = self._images(part)
        if self._cache is not None and isinstance(self._transform, Op):
            # small images: arithmetic over many at once, the same bits as one by one
            decoded = list(images)
            if decoded and len({image.shape for _, image, _, _ in decoded}) == 1:
                slots = [slot for slot, _, _, _ in decoded]
                stack = np.stack([image for _, image, _, _ in decoded])
                part.slots.images[slots] = transform_batch(self._transform, stack, [r for _, _, _, r in decoded])
                return part
            images = iter(decoded)
        for slot, image, index, random in images:
            part.slots.images[slot] = self._transformed(image, random, index)
        return part

    def _images(self, part: BatchPart) -> Iterator[tuple[int, np.ndarray, int, np.random.Generator]]:
        """Yield (slot, decoded image, index, its random numbers), and note labels and indices, one by one."""
        for slot, position in enumerate(part.positions.tolist(), start=part.begin):
            found = self._find(part, position)
            if found is None:
                continue
            image, label, index, copy = found
            part.slots.labels[slot], part.slots.index[slot], part.slots.good[slot] = label, index, True
            yield slot, image, index, stream(self._seed, part.epoch, index + copy * len(self.source))

    def _find(self, part: BatchPart, position: int) -> tuple[np.ndarray, int, int, int] | None:
        """Return (image, label, index, copy) for a position; None for an unreadable image in evaluation."""
        for attempt in range(1 if self._evaluation else ATTEMPTS):
            index, copy = self._order.image(part.permutation, position, attempt)
            part.reading, part.steps = index, part.steps + 1
            try:
                image, label = self._read(index, part.slots.fetched)
            except DecodeError as error:
                part.bad.append((index, error.reason))
                continue
            return image, label, index, copy
        if self._evaluation:
            return None
        index, reason = part.bad[-1]
        name = self._name(index)
        raise DataError(
            f"{ATTEMPTS} images in a row cannot be read; the last is {name}: {reason}. "
            "`vitrail data check` lists all bad images"
        )

    def _read(self, index: int, fetched: Future[FetchedImages] | None) -> tuple[np.ndarray, int]:
        """Return (pixels uint8 [H, W, 3], label) from the cache, from the fetched images, or from the source."""
        if self._cache is not None and (cached := self._cache.get(index)) is not None:
            return cached
        try:
            item = self._item(index, fetched)
            image = decode(item.image) if isinstance(item.image, bytes) else item.image
        except VitrailError:
            raise
        except Exception as error:
            raise DataError(f"image {self._name(index)} could not be read: {error!r}") from error
        if self._cache is not None:
            self._cache.put(index, image, item.label)
        return image, item.label

    def _item(self, index: int, fetched: Future[FetchedImages] | None) -> Item:
        image = None if fetched is None else fetched.result().get(index)
        if image is None or not is_distant(self.source):
            return self.source[index]
        if isinstance(image, DecodeError):
            raise image
        return Item(image, int(self.source.labels[index]), "")

    def _transformed(self, image: np.ndarray, random: np.random.Generator, index: int) -> np.ndarray:
        try:
            result = self._transform(image, random)
        except Exception as error:
            raise DataError(f"image {self._name(index)} could not be transformed: {error!r}") from error
        if result.shape != (*self._size, 3):
            raise DataError(f"image {self._name(index)} became {result.shape}, expected {(*self._size, 3)}")
        return result

    def _name(self, index: int) -> str:
        return self.source.id(index) if isinstance(self.source, Listed) else f"[{index}]"

    def _hung(self, part: BatchPart) -> Exception | None:
        """Explain a part that has not come for `timeout` seconds; None if it has moved on since it was last
        asked for."""
        if part.steps_seen < part.steps:
            part.steps_seen = part.steps
            return None
        return DataError(
            f"reading image {self._name(part.reading)} (index {part.reading}) has taken more than "
            f"{self._timeout:g} s: the disk or network does not respond. Check it and try again"
        )

    def _record(self, part: BatchPart) -> None:
        for index, reason in part.bad:
            if index not in self._seen_bad:
                self._seen_bad.add(index)
                self.bad.append((self._name(index), reason))
                self.bad_index.append(index)
