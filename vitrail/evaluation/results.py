"""What all results of a network on images have in common, whatever their labels are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np


class Guess(NamedTuple):
    """One class that a network predicted, with its probability, or its numbers."""

    name: str
    probability: float | None
    """None for a number."""
    right: bool


class Results(ABC):
    """The outputs of a network for many images, one row per image, sorted by `index`, and the numbers from them."""

    task: ClassVar[str]
    """Name of the task (`vitrail.tasks.catalog`)."""
    headline: ClassVar[str]
    """The number that says how good the network is."""
    class_names: list[str]
    index: np.ndarray
    """int64 [N]: number of the image in its source."""
    bad: list[tuple[str, str]]
    """(id, reason) of unreadable images; no number includes them."""

    @property
    @abstractmethod
    def known(self) -> np.ndarray:
        """bool [N]: whether the labels are known."""

    @property
    def count(self) -> int:
        """Number of images with known labels."""
        return int(self.known.sum())

    @property
    def measurable(self) -> bool:
        """Whether there is an image of which something can be measured."""
        return self.count > 0

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return the numbers to log."""

    @abstractmethod
    def in_words(self) -> str:
        """Return how good the network is: "top-1 93.40%"."""

    @abstractmethod
    def worst(self, most: int) -> np.ndarray:
        """Return at most `most` rows of wrong predictions, the worst first."""

    def uncertain(self, most: int) -> np.ndarray:
        """Return at most `most` rows of predictions that were nearly others, the nearest first."""
        return np.empty(0, dtype=np.int64)

    @abstractmethod
    def true_names(self, row: int) -> list[str] | None:
        """Return the names of an image's classes, or its numbers as text; None if they are not known."""

    @abstractmethod
    def guesses(self, row: int, most: int) -> list[Guess]:
        """Return the best `most` predictions for a row, or all predicted labels; none if outputs were not finite."""

    @abstractmethod
    def cells(self, row: int) -> tuple[list[str], list[str], list[str]]:
        """Return the label, the prediction and its probability in a table: of several labels one text for each."""

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the rows as arrays for a file, without `bad`."""

    def stored(self) -> Results:
        """Return the results as a run folder stores them."""
        return self
