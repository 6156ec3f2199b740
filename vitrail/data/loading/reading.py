"""Reading images into a batch: read, decode, transform. Threads share one reader, and processes have a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.data.images.batched import Augmentation
from vitrail.data.images.geometry import Op
from vitrail.data.images.masked import MaskTransform
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels
from vitrail.data.images.work import within_memory
from vitrail.data.item import IndexedSource, Item, is_remote
from vitrail.data.labels.masks import Masks
from vitrail.data.labels.sets import Label, label_at
from vitrail.data.loading.order import Permutation, stream
from vitrail.errors import DataError, DecodeError, VitrailError

Transform = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Function of (image uint8 [H, W, 3], random numbers) that returns uint8 [*image_size, 3]. See `Op` for other bands."""

FetchedImages = dict[int, bytes | np.ndarray | DecodeError]
"""Index -> the image that a remote source returned for it, or the error."""
Read = tuple[Label, np.ndarray | None]
"""Label of an image, and the numbers drawn for what a device does with it later (`Augmentation.draw`)."""
Fetched = Callable[[], FetchedImages]
"""Waits for the images that were requested ahead of time from a remote source."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An image to read."""

    slot: int
    """Its place in the batch."""
    index: int
    """Its index in the source."""
    number: int
    """Number of its stream of random numbers in an epoch."""


@dataclass
class Slots:
    """The memory of one batch, which several threads or processes fill."""

    labels: np.ndarray
    index: np.ndarray
    """int64 [B]: index of the image in the source; -1 for an empty slot."""
    images: np.ndarray = field(init=False)
    """[B, H, W, channels]; there from the moment when the first part of the batch is read."""
    number: int = -1
    """Number of these slots in the memory that processes share; -1 if it is memory of this process."""
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    """Slot -> the numbers drawn for what a device does with its image."""
    fetched: Future[FetchedImages] | None = None
    """Images requested ahead of time from a remote source."""


@dataclass
class BatchPart:
    """Some slots of a batch, filled by one thread or process."""

    slots: Slots
    begin: int
    positions: np.ndarray
    permutation: Permutation
    epoch: int
    bad: list[tuple[int, str]] = field(default_factory=list)
    """(index, reason) of each image that could not be read."""
    progress: np.ndarray = field(default_factory=lambda: np.array((-1, 0)))
    """Index of the image that is being read, -1 before the first, and the number of reads begun."""
    steps_seen: int = -1
    """Number of reads begun at the last timeout of the consumer."""

    @property
    def last(self) -> bool:
        """Whether this is the last part of the batch."""
        return self.begin + len(self.positions) == len(self.slots.index)


@dataclass
class ImageReader:
    """Reads images of a source and transforms each with the random numbers of (seed, epoch, its number).

    `rest` is a part of the augmentation for which the numbers are drawn only.
    """

    source: IndexedSource
    transform: Transform
    shape: tuple[int, ...]
    """Height, width and channels of a transformed image; of one whose crop is left to a device, the bytes for it."""
    seed: int
    cache: dict[int, tuple[np.ndarray, Label]] | None = None
    """Index -> (decoded image, label) of the images that were read before."""
    rest: Augmentation | None = None
    of_masks: MaskTransform | None = None
    """What `transform` does to the masks of images whose labels are masks."""

    @property
    def pixels(self) -> Pixels:
        """How stored images become the input of the transform."""
        return getattr(self.transform, "pixels", EIGHT_BIT_RGB)

    def read(
        self, epoch: int, wanted: Sequence[Wanted], images: np.ndarray, progress: np.ndarray, fetched: Fetched | None
    ) -> list[Read | DecodeError]:
        """Fill the slots of the wanted images, and return the label and row of each, or why it cannot be read.

        images: [slots, *shape], which is changed. progress: int64 [2], the index of the image that is being read and
        the number of reads begun, which are kept up to date.
        """
        read: list[tuple[Label, np.random.Generator, np.ndarray | None] | DecodeError] = []
        together: list[tuple[Wanted, np.ndarray, np.random.Generator]] = []
        crop = None if self.rest is None else self.rest.crop
        for image in wanted:
            progress[:] = image.index, progress[1] + 1
            random, part = stream(self.seed, epoch, image.number), None
            try:
                stored, label = self._read(image.index, fetched, decoded=crop is None)
                if self.of_masks is not None:
                    assert isinstance(label, np.ndarray)
                    label = self.of_masks(label, stream(self.seed, epoch, image.number))
                if crop is not None:
                    with self._naming(image.index):
                        part = crop.place(stored, images[image.slot], random)
                elif self.cache is not None and isinstance(self.transform, Op):
                    together.append((image, stored, random))
                else:
                    images[image.slot] = self._transformed(stored, random, image.index)
                read.append((label, random, part))
            except DecodeError as error:
                read.append(error)
        self._transform_together(together, images)
        return [one if isinstance(one, DecodeError) else (one[0], self._row(*one[1:])) for one in read]

    def _row(self, random: np.random.Generator, part: np.ndarray | None) -> np.ndarray | None:
        """Return the numbers for what a device does with an image; `part`: those of its crop."""
        if self.rest is None:
            return None
        drawn = self.rest.draw(random)
        return drawn if part is None else np.concatenate([part, drawn])

    def _transform_together(
        self, decoded: list[tuple[Wanted, np.ndarray, np.random.Generator]], images: np.ndarray
    ) -> None:
        """Transform small images all at once, with the same bits as one by one; one by one if their sizes differ."""
        if isinstance(self.transform, Op) and len({pixels.shape for _, pixels, _ in decoded}) == 1:
            stack = np.stack([pixels for _, pixels, _ in decoded])
            images[[image.slot for image, *_ in decoded]] = self.transform.batch(stack, [one for *_, one in decoded])
            return
        for image, pixels, random in decoded:
            images[image.slot] = self._transformed(pixels, random, image.index)

    def _read(self, index: int, fetched: Fetched | None, *, decoded: bool) -> tuple[Any, Label]:
        """Return (image, label) from the cache, from the fetched images, or from the source.

        The image is [H, W, channels], or unless `decoded` is needed, as it is stored.
        """
        if self.cache is not None and (cached := self.cache.get(index)) is not None:
            return cached
        with self._naming(index):
            item = self._item(index, fetched)
            if not decoded and self.cache is None:
                return item.image, item.label
            image, label = self.pixels.read(item.image), item.label
            if self.of_masks is not None:
                label = self._mask(index, image.shape[:2])
        if self.cache is not None:
            self.cache[index] = image, label
        return image, label

    def _mask(self, index: int, size: tuple[int, ...]) -> np.ndarray:
        """Return the mask of an image of `size`. Raises DecodeError if it cannot be read or has another size."""
        masks = self.source.labels
        assert isinstance(masks, Masks)
        mask = masks.mask(index)
        if mask.shape != size:
            raise DecodeError(f"its mask {masks.path(index)} has another size", reason="mask of another size")
        return mask

    @contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        """Context in which an image is read. Raises DataError, which names it, for any error that is not vitrail's."""
        try:
            with within_memory():
                yield
        except VitrailError:
            raise
        except Exception as error:
            raise DataError(f"image {self.source.id(index)} could not be read: {error!r}") from error

    def _item(self, index: int, fetched: Fetched | None) -> Item:
        """Return an image as it is stored, from the fetched images or else from the source."""
        image = None if fetched is None else fetched().get(index)
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
                result = self.transform(image, random)
        except DecodeError:
            raise
        except Exception as error:
            raise DataError(f"image {self.source.id(index)} could not be transformed: {error!r}") from error
        if result.shape != self.shape:
            raise DataError(f"image {self.source.id(index)} became {result.shape}, expected {self.shape}")
        return result
