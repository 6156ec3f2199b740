"""Classification results of a frozen network: top-1, top-5, loss, accuracy per class, confusion; one row per image.

A row holds the five best classes, the loss and the Brier score of an image, not its logits. So memory grows with the
number of images and not with images x classes. Every number is computed from the rows sorted by image, so it does not
depend on batch size, number of processes or order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import world
from vitrail.data.benchmarks.imagenet_labels import AnswerKey
from vitrail.data.image_names import bad_kinds
from vitrail.device import (
    Precision,
    autocast_dtype,
    fast_float32,
    float32_products,
    prediction_precision,
    to_device,
)
from vitrail.errors import DataError, finite_rows
from vitrail.evaluation.ahead import ahead
from vitrail.evaluation.cuda_graphs import Graphs
from vitrail.evaluation.results import Guess, Results
from vitrail.model.block import compile_blocks
from vitrail.model.build import eval_mode, freeze

T = TypeVar("T")
Predict = Callable[[Tensor], Tensor]
"""images [batch, channels, height, width] -> logits [batch, classes], computed by any engine"""

How = Literal["torch", "compiled", "graphs"]
"""How torch computes a network."""

BEST_CLASSES = 5
"""Number of best classes stored for each image."""


class Batches(Protocol):
    """The part of `vitrail.data.loading.loader.Loader` that evaluation needs."""

    bad: list[Any]
    """(id, reason) of images that could not be read."""

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Batches with `images`, `labels` and `index`."""
        ...


@dataclass(frozen=True)
class Classification(Results):
    """The outputs of a network, one row per image, sorted by `index`, and the numbers computed from them."""

    task = "classes"
    headline = "top1"
    class_names: list[str]
    index: np.ndarray
    label: np.ndarray
    """int64 [N]; -1 for an unknown class. Such images have outputs but are not counted."""
    top: np.ndarray
    """int64 [N, k]: the k best classes, best first; -1 if the logits are not finite. k is the number of classes or 5,
    whichever is smaller; for a metric that needs all classes, it is their number."""
    probability: np.ndarray
    """float32 [N, k]: softmax probability of each of them, with the network's temperature."""
    loss: np.ndarray
    """float64 [N]: minus the log probability of the label; NaN if the label is unknown."""
    brier: np.ndarray
    """float64 [N]: squared distance of all probabilities from 1 for the label and 0 for the others; NaN if the
    label is unknown."""
    bad: list[tuple[str, str]] = field(default_factory=list)
    uncalibrated: np.ndarray | None = None
    """float32 [N]: probability of the best class with temperature 1; None if that is the network's temperature."""

    @property
    def known(self) -> np.ndarray:
        """bool [N]: whether the label is known."""
        return self.label >= 0

    @property
    def correct(self) -> np.ndarray:
        """bool [N]: whether the best class is the label."""
        return self.known & (self.top[:, 0] == self.label)

    @property
    def among_best(self) -> np.ndarray:
        """bool [N]: whether the label is among the five best classes (or among all, if there are fewer)."""
        return self.known & (self.top[:, :BEST_CLASSES] == self.label[:, None]).any(axis=1)

    @property
    def top1(self) -> float:
        """Share of labelled images whose best class is correct."""
        return float(self.correct.sum()) / self.count

    @property
    def top5(self) -> float:
        """Share of labelled images whose class is among the five best."""
        return float(self.among_best.sum()) / self.count

    @property
    def nll(self) -> float:
        """Mean cross-entropy in nats over labelled images."""
        return float(self.loss[self.known].mean())

    @property
    def class_count(self) -> np.ndarray:
        """int64 [K]: number of labelled images of each class."""
        return np.bincount(self.label[self.known], minlength=len(self.class_names))

    @property
    def class_correct(self) -> np.ndarray:
        """int64 [K]: number of correctly classified images of each class."""
        return np.bincount(self.label[self.correct], minlength=len(self.class_names))

    @property
    def class_accuracy(self) -> np.ndarray:
        """float64 [K]; NaN for a class without images."""
        count = self.class_count
        return np.divide(self.class_correct, count, out=np.full(len(count), np.nan), where=count > 0)

    @cached_property
    def confusion(self) -> np.ndarray:
        """int64 [K, K]: number of images of class (row) that are classified as class (column)."""
        answered = self.known & (self.top[:, 0] >= 0)
        classes = len(self.class_names)
        return confusion_counts(self.label[answered], self.top[answered, 0], classes)

    @property
    def balanced_accuracy(self) -> float:
        """Mean of the accuracies of the classes that have images (macro accuracy): each class counts the same."""
        return float(np.nanmean(self.class_accuracy))

    @property
    def class_f1(self) -> np.ndarray:
        """float64 [K]: harmonic mean of precision and recall; NaN for a class without images and predictions."""
        predicted = np.bincount(self.top[self.known & (self.top[:, 0] >= 0), 0], minlength=len(self.class_names))
        whole = predicted + self.class_count
        return np.divide(2 * self.class_correct, whole, out=np.full(len(whole), np.nan), where=whole > 0)

    @property
    def macro_f1(self) -> float:
        """Mean F1 score of the classes that have images or predictions."""
        return float(np.nanmean(self.class_f1))

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log: top1, top5, balanced_accuracy, macro_f1, nll, count."""
        names = ("top1", "top5", "balanced_accuracy", "macro_f1", "nll", "count")
        return {name: getattr(self, name) for name in names}

    def in_words(self) -> str:
        """See `Results`."""
        return f"top-1 {self.top1:.2%}"

    def worst(self, most: int) -> np.ndarray:
        """See `Results`: those with the largest loss."""
        wrong = np.flatnonzero(self.known & ~self.correct & (self.top[:, 0] >= 0))
        return wrong[np.argsort(-self.loss[wrong], kind="stable")][:most]

    def uncertain(self, most: int) -> np.ndarray:
        """See `Results`: rows with the smallest gap between the two best classes."""
        if self.probability.shape[1] < 2:
            return super().uncertain(most)
        gap = self.probability[:, 0] - self.probability[:, 1]
        rows = np.flatnonzero(self.top[:, 0] >= 0)
        return rows[np.argsort(gap[rows], kind="stable")][:most]

    def true_names(self, row: int) -> list[str] | None:
        """See `Results`."""
        return [self.class_names[self.label[row]]] if self.known[row] else None

    def guesses(self, row: int, most: int) -> list[Guess]:
        """See `Results`."""
        best = zip(self.top[row, :most].tolist(), self.probability[row, :most].tolist(), strict=True)
        return [Guess(self.class_names[k], p, bool(k == self.label[row])) for k, p in best if k >= 0]

    def cells(self, row: int) -> tuple[list[str], list[str], list[str]]:
        """See `Results`."""
        best = [self.class_names[k] for k in self.top[row, :1].tolist() if k >= 0]
        return self.true_names(row) or [], best, [f"{self.probability[row, 0]:.6f}"]

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Results`: index, labels, classes and probabilities (the best k), loss, brier.

        With a temperature there is `uncalibrated`, too.
        """
        found: dict[str, np.ndarray] = {name: getattr(self, field) for name, field in STORED.items()}
        found["classes"] = self.top.astype(np.int32)
        return found if self.uncalibrated is None else {**found, "uncalibrated": self.uncalibrated}

    def stored(self) -> Classification:
        """See `Results`: with at most five classes of an image."""
        return replace(self, top=self.top[:, :BEST_CLASSES], probability=self.probability[:, :BEST_CLASSES])


def has_top5(classes: int) -> bool:
    """Return whether top-5 says anything about this number of classes. With at most five it is always 100 %."""
    return classes > BEST_CLASSES


def classify(
    predict: Predict,
    loader: Batches,
    class_names: Sequence[str],
    key: AnswerKey | None = None,
    best: int = BEST_CLASSES,
    temperature: float = 1.0,
) -> Classification:
    """Run `predict` over one epoch of `loader` and return the outputs of all processes, on every process.

    `key` defines which outputs are correct if labels are not the numbers of outputs. Probabilities belong to outputs;
    `loss` and `brier` use the sum over all correct outputs of an image. `best` is the number of best classes to keep.
    `temperature` divides the logits (`vitrail.evaluation.confidence`).
    An image that arrives twice (a padded last batch, a sampler that wraps around) counts once. Raises DataError if
    labels and classes do not fit, or no labelled image could be read.
    """
    outputs = len(class_names) if key is None else key.right.shape[1]
    labels = outputs if key is None else len(key.label)

    def with_right_outputs() -> Iterator[tuple[Any, Tensor]]:
        for batch in loader.epoch(0):
            check_labels(int(batch.labels.max()), labels)
            yield batch, _right(batch.labels, outputs, key)

    def launch(given: tuple[Any, Tensor]) -> tuple[Tensor, ...]:
        batch, right = given
        logits = predict(batch.images)
        if logits.shape[1] != outputs:
            raise DataError(f"the model has {logits.shape[1]} outputs, but the data have {outputs} classes")
        return logits.float().softmax(dim=1).amax(dim=1), *_image_rows(logits / temperature, right, best)

    rows = [(batch.index, batch.labels, *found) for (batch, _), found in ahead(with_right_outputs(), launch)]
    (index, label, sure, top, hit, probability, loss, brier), bad = gather_rows(rows, loader)
    if key is not None:
        label, top = key.as_classes(label, top, hit)
    index, first = np.unique(index, return_index=True)
    if not (label >= 0).any():
        raise DataError(f"none of the {len(index)} images has a known class. Evaluation needs labelled images")
    label, top, probability, loss, brier = (column[first] for column in (label, top, probability, loss, brier))
    before = None if temperature == 1 else sure[first]
    return Classification(list(class_names), index, label, top, probability, loss, brier, bad, before)


def gather_rows(rows: Sequence[tuple[Tensor, ...]], loader: Batches) -> tuple[list[np.ndarray], list[tuple[str, str]]]:
    """Return the rows of all batches and processes, column by column, and (id, reason) of the unreadable images.

    Raises DataError if no image could be read.
    """
    mine = [torch.cat(column).numpy() for column in zip(*rows, strict=True)]
    processes = world.gather((mine, loader.bad))
    columns = [part for part, _ in processes if part]
    bad = unreadable(part for _, part in processes)
    if not columns:
        raise DataError(f"no image could be evaluated, because none could be read: {bad_kinds(bad)}")
    return [np.concatenate(parts) for parts in zip(*columns, strict=True)], bad


def confusion_counts(label: np.ndarray, answer: np.ndarray, classes: int) -> np.ndarray:
    """Return the number of things of class (row) that are classified as class (column), int64 [classes, classes].

    `label` and `answer` are whole numbers [N] from 0 to `classes` - 1.
    """
    cells = label.astype(np.int64) * classes + answer
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def check_labels(largest: int, classes: int) -> None:
    """Raise DataError if a label of the data is not the number of a class."""
    if largest >= classes:
        raise DataError(f"label {largest} in the data; with {classes} classes they go from 0 to {classes - 1}")


def unreadable(processes: Iterable[list[Any]]) -> list[tuple[str, str]]:
    """Return (id, reason) of each image in the `bad` lists of all processes once, sorted."""
    return sorted({(str(item[0]), str(item[1])) for bad in processes for item in bad})


def _right(labels: Tensor, outputs: int, key: AnswerKey | None) -> Tensor:
    """Return which outputs are correct for each label: bool [B, outputs]."""
    if key is not None:
        return torch.from_numpy(key.marks(labels.numpy()))
    return labels[:, None] == torch.arange(outputs)


@torch.no_grad()
def _image_rows(
    logits: Tensor, right: Tensor, best: int = BEST_CLASSES
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return best outputs, whether each is correct, and their probabilities [B, k], and loss and Brier score [B].

    If its logits are not finite, an image gets -1 as best outputs and counts as wrong. topk would rank NaN first and
    could be correct by accident.
    """
    right = to_device(right, logits.device)
    finite = finite_rows(logits)[:, None]
    unknown = ~right.any(dim=1)
    log_probability = logits.float().log_softmax(dim=1)
    values, top = log_probability.topk(min(best, logits.shape[1]), dim=1)
    own = log_probability.masked_fill(~right, -torch.inf).logsumexp(dim=1)
    others = log_probability.exp().masked_fill(right, 0).square().sum(dim=1)
    scores = torch.stack([-own, others + (1 - own.exp()).square()]).masked_fill(unknown, torch.nan)
    loss, brier = scores.double() if scores.device.type != "mps" else scores
    return top.masked_fill(~finite, -1), right.gather(1, top) & finite, values.exp(), loss, brier


def predictor(
    model: nn.Module,
    device: torch.device | str | None = None,
    precision: Precision = "auto",
    *,
    features: bool = False,
    how: How = "torch",
) -> Predict:
    """Return images -> float32 logits of `model`, as `applied` computes them.

    With `features`, return images -> features instead (`vitrail.evaluation.features`).
    """

    def call(network: Any, images: Tensor) -> Tensor:
        return (network.features(images) if features else network(images)).float()

    return applied(call, model, device, precision, how=how)


def applied(
    call: Callable[[Any, Tensor], T],
    model: nn.Module,
    device: torch.device | str | None = None,
    precision: Precision = "auto",
    *,
    how: How = "torch",
) -> Callable[[Tensor], T]:
    """Return images -> `call(network, images)` on `device` (None: the device of the model), without gradients.

    Images may be on any device; uint8 images are moved as uint8. On a CPU the network is a frozen copy of the model
    (`vitrail.model.fast.frozen`). On other devices it is one in 16 bits, which reads half as many bytes as autocast and
    casts nothing, or in float32 the model itself in eval mode. The model and its training mode are not changed.

    how: "compiled": torch.compile computes the blocks of the copy, or `call` if there are none, from the first images
    on; all sizes of a batch above 1 share its graphs. "graphs": a CUDA device repeats what `call`, which returns a
    tensor, launches (`vitrail.evaluation.cuda_graphs`).
    """
    here = next(model.parameters()).device
    place = here if device is None else torch.device(device)
    computed = prediction_precision(place, precision)
    dtype = autocast_dtype(computed) or torch.float32
    if place != here:
        model = deepcopy(model).to(place)  # the caller's model stays where it is
    if place.type == "cpu" or dtype != torch.float32 or how == "compiled":
        with fast_float32():
            model = freeze(model, dtype, blocks=how != "compiled")
    if how == "compiled" and not compile_blocks(model):
        call = torch.compile(call)
    compute: Callable[[Tensor], Any] = partial(call, model)
    if how == "graphs":
        compute = Graphs(compute)

    @torch.inference_mode()
    def on_cpu(images: Tensor) -> T:
        images = images if images.dtype == torch.uint8 else images.to(dtype)
        with fast_float32():
            return compute(images.to(place))

    @torch.inference_mode()
    def on_device(images: Tensor) -> T:
        images = images if images.dtype == torch.uint8 else images.to(dtype)
        with float32_products(computed), eval_mode(model):
            return compute(to_device(images, place))

    return on_cpu if place.type == "cpu" else on_device


NOT_FINITE = "not-finite"
"""Reason of an image for which a network has no result."""


STORED = {
    "index": "index",
    "labels": "label",
    "classes": "top",
    "probabilities": "probability",
    "loss": "loss",
    "brier": "brier",
}
"""Array in the file -> field of `Classification`."""


NUMBERS: dict[str, tuple[str, int]] = {
    "index": ("i", 1),
    "label": ("i", 1),
    "top": ("i", 2),
    "probability": ("f", 2),
    "loss": ("f", 1),
    "brier": ("f", 1),
}
"""Field of `Classification` -> kind of its numbers (`numpy.dtype.kind`) and number of its dimensions."""


def check_rows(arrays: Mapping[str, np.ndarray], numbers: Mapping[str, tuple[str, int]]) -> None:
    """Raise ValueError, naming the field, unless arrays from a file are rows of images: see `NUMBERS`."""
    for name, (kind, dimensions) in numbers.items():
        array = arrays[name]
        if array.dtype.kind != kind or array.ndim != dimensions or len(array) != len(arrays["index"]):
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape}")
    if (np.diff(arrays["index"], prepend=-1) < 1).any():
        raise ValueError("the numbers of the images are not ascending")
