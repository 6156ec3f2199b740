"""A batch while it is filled: memory laid out once, parts that several threads fill, tensors at the end."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from vitrail.data.loading.order import Permutation
from vitrail.errors import DecodeError

Fetched = dict[int, bytes | np.ndarray | DecodeError]
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
    """The memory of one batch, to be filled by several threads."""

    images: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    good: np.ndarray
    """bool: which slots got an image."""
    fetched: Future[Fetched] | None = None
    """What was asked for ahead of time, of a distant source."""

    def batch(self) -> Batch:
        """Hand the filled batch over as tensors, without a copy unless a slot stayed empty."""
        arrays = (self.images, self.labels, self.index)
        if not self.good.all():
            arrays = tuple(array[self.good] for array in arrays)
        images, labels, index = map(torch.from_numpy, arrays)
        return Batch(images.permute(0, 3, 1, 2), labels, index)


@dataclass
class Part:
    """Some slots of a batch, filled by one thread."""

    slots: Slots
    begin: int
    positions: np.ndarray
    permutation: Permutation
    epoch: int
    last: bool
    """Is it the batch's last part?"""
    bad: list[tuple[int, str]] = field(default_factory=list)
    """Index and reason of what could not be read."""
    reading: int = -1
    """The image being read, -1 before the first."""
    steps: int = 0
    """Reads begun so far."""
    steps_seen: int = -1
    """`steps` when the consumer last lost patience."""
