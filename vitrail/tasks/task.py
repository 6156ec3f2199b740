"""What a label is, and so what a network's outputs mean: one `Task` for each kind of labels.

A card names its task (`vitrail.weights.card.Card.task`). What depends on the kind of labels asks the task, or the
`Results` that it computed, so that another kind is another file beside this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
from torch import Tensor

from vitrail.data.item import IndexedSource
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.labels.sets import Labels
from vitrail.data.settings import Data
from vitrail.data.sources.indexed import GivenImages
from vitrail.errors import UsageError
from vitrail.evaluation.classify import BEST_CLASSES
from vitrail.evaluation.confidence import fit_if_better
from vitrail.evaluation.results import Results
from vitrail.objective.base import Head
from vitrail.objective.settings import Segmentation, SeveralAnswers
from vitrail.tasks.prediction import Prediction
from vitrail.weights.answer import Confidences
from vitrail.weights.confidence import Confidence
from vitrail.words import as_text

if TYPE_CHECKING:
    from vitrail.data.benchmarks.imagenet_labels import AnswerKey
    from vitrail.data.npz import Npz
    from vitrail.evaluation.classify import Batches, Predict
    from vitrail.evaluation.groups import GroupAccuracy
    from vitrail.terminal import TerminalPage
    from vitrail.weights.card import Card


Found = TypeVar("Found", bound=Results)
PredictedColumns = dict[str, np.ndarray | list[list[str]]]
"""Column -> an array [images, ...], or a list of names for each image."""


class Task(ABC, Generic[Found]):
    """One kind of labels. It has no state: whatever belongs to a network is in its card."""

    name: ClassVar[str]
    logged: ClassVar[tuple[str, ...]]
    """Names of all numbers in `Results.metrics`."""
    predicts: ClassVar[str]
    """What a network predicts for an image, in words."""
    probable: ClassVar[bool] = True
    """Whether the outputs are probabilities of classes."""
    unrejected: ClassVar[str] = ""
    """Why an image cannot be rejected for a small probability, as the end of a sentence; "" if it can."""

    # a run

    @abstractmethod
    def holds(self, labels: Labels) -> bool:
        """Return whether labels are of this kind."""

    @abstractmethod
    def adapt(self, run: Any, labels: Labels) -> tuple[Any, dict[str, str]]:
        """Return a `vitrail.training.run.Run` with a loss and a metric for these labels: setting -> value and reason.

        Raises UsageError for settings of another kind of labels.
        """

    def scale(self, run: Any, card: Card | None, labels: Labels, names: list[str]) -> TargetScale | None:
        """Return mean and deviation of the targets of training images; None if they are no numbers.

        With `Run.keep_head` the scale is that of the weights with this `card`. Raises DataError for a constant target.
        """
        return None

    def heads(self, labels: Labels) -> list[Head]:
        """Return the answers that a network learns from these labels; none if it gives one.

        Raises DataError for an answer of which nothing can be learned.
        """
        return []

    # a network

    @abstractmethod
    def measure(
        self,
        predict: Predict,
        images: Batches,
        class_names: Sequence[str],
        card: Card,
        *,
        temperature: float,
        best: int = BEST_CLASSES,
        key: AnswerKey | None = None,
    ) -> Found:
        """Run `predict` over one epoch of `images` and return the results of all processes, on every process.

        card: That of the network. temperature: Divides the logits. best: Number of best classes to keep. key: See
        `vitrail.evaluation.classify.classify`. Raises DataError for images that do not fit the network.
        """

    @abstractmethod
    def activated(self, logits: Tensor, card: Card) -> Tensor:
        """Return what a network's outputs [batch, outputs] mean, after their temperature: probabilities, or numbers."""

    @abstractmethod
    def outputs(self, activated: Tensor, card: Card) -> Tensor:
        """Return outputs whose `activated` these are."""

    @abstractmethod
    def meaning(self, card: Card, *, inside: bool) -> dict[str, Any]:
        """Return what an exported program's outputs mean; `inside`: `activated` is a part of the program."""

    @abstractmethod
    def predictions(self, logits: Tensor, card: Card, top: int) -> Iterator[Prediction]:
        """Yield what each row of `logits` [batch, outputs] predicts, still without a path.

        logits: After the temperature. top: Number of classes to name, at most as many as there are.
        """

    def of_tiles(
        self, logits: Tensor, card: Card, top: int, filled: Sequence[tuple[float, float]]
    ) -> Iterator[Prediction]:
        """Yield what `predictions` yields, for tiles of which an image fills these shares of height and width."""
        return self.predictions(logits, card, top)

    @abstractmethod
    def columns(self, logits: Tensor, card: Card, top: int, reject: float | None = None) -> PredictedColumns:
        """Return what `predictions` yields as columns of a table of many images, also for no image.

        reject: Smallest probability of the best class; it adds a column, if classes have one.
        """

    def fitted(self, card: Card, logits: np.ndarray, labels: np.ndarray) -> Confidence | Confidences:
        """Return temperatures that suit the outputs of a network for images with known labels, the same everywhere.

        logits: float32 [images, outputs]. labels: As batches have them. See `fit_if_better`.
        """
        return Confidence(temperature=fit_if_better(logits, labels) or 1.0)

    # images

    def settings(self, data: Data, card: Card) -> Data:
        """Return the settings with which images are read for a network with this card."""
        return data

    def images(self, source: IndexedSource, who: str) -> IndexedSource:
        """Return images with labels of this kind. Raises DataError, which says `who` needs them, for others."""
        return source

    def given(self, images: list[Any], labels: Sequence[Any], names: list[str], *, bands: bool) -> GivenImages:
        """Return images and labels that Python holds as a source. Raises DataError for labels that do not fit."""
        return GivenImages(images, bands=bands, labels=labels, class_names=names)

    # results

    def confidence(self, found: Found, temperature: float) -> Confidence | Confidences | None:
        """Return what results on validation images say about the probabilities of a network; None without any."""
        return None

    def on_card(self, card: Card, found: Found) -> Card:
        """Return the card of a network with what these results on validation images decide about it."""
        return card

    @abstractmethod
    def read(self, file: Npz, class_names: Sequence[str]) -> Found:
        """Return the results in a file of `Results.arrays`. Raises ValueError and KeyError for other contents."""

    @abstractmethod
    def page(
        self, subject: str, found: Found, notes: list[str], groups: Sequence[GroupAccuracy], temperature: float
    ) -> TerminalPage:
        """Return the results as tables for a terminal; `subject` says of what on which images."""

    @abstractmethod
    def as_json(self, found: Found, groups: Sequence[GroupAccuracy], temperature: float) -> dict[str, Any]:
        """Return the results as JSON values."""

    @abstractmethod
    def write(self, found: Found, out: Path, *, raw: bool = False) -> None:
        """Write tables and figures into a folder; `raw` is that of `vitrail.data.spreadsheet.SafeWriter`."""

    @abstractmethod
    def sentence(self, numbers: Mapping[str, float], classes: int) -> str:
        """Return the numbers of an evaluation as a phrase, without those of the user's own and the number of images.

        classes: Number of classes or targets.
        """

    def own(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers that are none of this task: those of the user's own metrics and of probes."""
        return {name: value for name, value in numbers.items() if name not in self.logged}


def shown_names(card: Card) -> list[str]:
    """Return the names of a network's outputs, or their numbers if its card has none."""
    return [as_text(name) for name in card.class_names] or [str(number) for number in range(card.config.classes)]


def refuse_classes(run: Any) -> None:
    """Raise UsageError if the objective of `run` needs numbers or masks as labels: these are classes."""
    if isinstance(run.objective, Segmentation):
        raise UsageError(
            f"objective segmentation needs images with masks, and those of {run.data.path} have classes. Expected are "
            "images/NAME.jpg and masks/NAME.png, or leave objective.kind out"
        )
    if run.objective.numbers:
        raise UsageError(
            f"objective {run.objective.kind} needs numbers as labels, and these are classes "
            f"(data.labels_per_image is {run.data.labels_per_image!r}). Set data.labels_per_image to 'numbers'"
        )
    if isinstance(run.objective, SeveralAnswers):
        raise UsageError(
            "objective answers needs several answers for an image, and these have one. Name their columns in "
            "data.answers, or leave objective.kind out"
        )


def before(ece: float, temperature: float) -> str:
    """Return the calibration error before temperature scaling in words; "" without scaling."""
    return "" if temperature == 1 else f" ({ece:.2%} before its temperature of {temperature:.3g})"
