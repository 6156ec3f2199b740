"""Decoded images held in memory, so that small data sets are read and decoded once."""

from __future__ import annotations

import threading

import numpy as np


class Kept:
    """Images and labels by index: one array where the images have one size, single ones for those of another.

    Several threads may put and get; an image put twice is the same image.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._images: np.ndarray | None = None
        self._others: dict[int, np.ndarray] = {}
        self._labels = np.zeros(count, dtype=np.int64)
        self._there = np.zeros(count, dtype=bool)

    def get(self, index: int) -> tuple[np.ndarray, int] | None:
        """Return (image uint8 [H, W, 3], label), None if it was not put yet."""
        if not self._there[index] or self._images is None:
            return None
        image = self._others.get(index)
        return (self._images[index] if image is None else image), int(self._labels[index])

    def put(self, index: int, image: np.ndarray, label: int) -> None:
        """Keep a copy of an image of the common size, or an image of another size itself."""
        with self._lock:
            if self._images is None:  # the first image decides what the common size is
                self._images = np.empty((self._count, *image.shape), dtype=np.uint8)
        if image.shape == self._images.shape[1:]:
            self._images[index] = image
        else:
            self._others[index] = image
        self._labels[index] = label
        self._there[index] = True  # last: another thread may look at any moment
