"""Classification results of a frozen network: top-1, top-5, loss, accuracy per class, confusion; one row per image.

A row holds the five best classes, the loss and the Brier score of an image, not its logits. So memory grows with the
number of images and not with images x classes. Every number is computed from the rows sorted by image, so it does not
depend on batch size, number of processes or order.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import world
from vitrail.data.benchmarks.imagenet_labels import AnswerKey
from vitrail.device import fast_bf16, fast_float32
from vitrail.errors import DataError
from vitrail.model.frozen import freeze

Predict = Callable[[Tensor], Tensor]
"""images [batch, channels, height, width] -> logits [batch, classes], computed by any engine"""

BEST_CLASSES = 5
"""Number of best classes stored for each image."""

Precision = Literal["auto", "bf16", "float32"]


class Batches(Protocol):
    """The part of `vitrail.data.loading.loader.Loader` that evaluation needs."""

    bad: list[Any]
    """(id, reason) of images that could not be read."""

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Batches with `images`, `labels` and `index`."""
        ...


@dataclass(frozen=True)
class Classification:
    """The outputs of a network, one row per image, sorted by `index`, and the numbers computed from them."""

    class_names: list[str]
    index: np.ndarray
    """int64 [N]: number of the image in its source."""
    label: np.ndarray
    """int64 [N]; -1 for an unknown class. Such images have outputs but are not counted."""
    top: np.ndarray
    """int64 [N, k]: the k = min(5, classes) best classes, best first; -1 if the logits are not finite."""
    probability: np.ndarray
    """float32 [N, k]: softmax probability of each of them."""
    loss: np.ndarray
    """float64 [N]: minus the log probability of the label; NaN if the label is unknown."""
    brier: np.ndarray
    """float64 [N]: squared distance of all probabilities from 1 for the label and 0 for the others; NaN if the
    label is unknown."""
    bad: list[tuple[str, str]] = field(default_factory=list)
    """(id, reason) of unreadable images; no number includes them."""

    @property
    def known(self) -> np.ndarray:
        """bool [N]: whether the label is known."""
        return self.label >= 0

    @property
    def count(self) -> int:
        """Number of labelled images."""
        return int(self.known.sum())

    @property
    def correct(self) -> np.ndarray:
        """bool [N]: whether the best class is the label."""
        return self.known & (self.top[:, 0] == self.label)

    @property
    def top1(self) -> float:
        """Share of labelled images whose best class is correct."""
        return float(self.correct.sum()) / self.count

    @property
    def top5(self) -> float:
        """Share of labelled images whose class is among the five best (or among all, if there are fewer)."""
        return float((self.known & (self.top == self.label[:, None]).any(axis=1)).sum()) / self.count

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
        cells = self.label[answered] * classes + self.top[answered, 0]
        return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log: top1, top5, nll, count."""
        return {"top1": self.top1, "top5": self.top5, "nll": self.nll, "count": self.count}


class Classify:
    """Evaluator: iterating over it evaluates and yields (name, value); `result` then holds the `Classification`.

    It can be run many times while the weights behind `predict` change.
    """

    def __init__(self, predict: Predict, loader: Batches, class_names: Sequence[str]) -> None:
        self.predict = predict
        self.loader = loader
        self.class_names = list(class_names)
        self.result: Classification | None = None

    def __iter__(self) -> Iterator[tuple[str, float]]:
        self.result = classify(self.predict, self.loader, self.class_names)
        yield from self.result.metrics().items()


def classify(
    predict: Predict, loader: Batches, class_names: Sequence[str], key: AnswerKey | None = None
) -> Classification:
    """Run `predict` over one epoch of `loader` and return the outputs of all processes, on every process.

    `key` defines which outputs are correct if labels are not the numbers of outputs. Probabilities belong to outputs;
    `loss` and `brier` use the sum over all correct outputs of an image. An image that arrives twice (a padded last
    batch, a sampler that wraps around) counts once. Raises DataError if labels and classes do not fit, or no labelled
    image could be read.
    """
    outputs = len(class_names) if key is None else key.right.shape[1]
    labels = outputs if key is None else len(key.label)
    rows: list[tuple[Tensor, ...]] = []
    for batch in loader.epoch(0):
        logits = predict(batch.images)
        if logits.shape[1] != outputs:
            raise DataError(f"the model has {logits.shape[1]} outputs, but the data have {outputs} classes")
        largest = int(batch.labels.max())
        if largest >= labels:
            raise DataError(f"label {largest} in the data; with {labels} classes they go from 0 to {labels - 1}")
        rows.append((batch.index, batch.labels, *_image_rows(logits, _right(batch.labels, outputs, key))))
    mine = [torch.cat(column).cpu().numpy() for column in zip(*rows, strict=True)]
    gathered = world.gather((mine, [(str(item[0]), str(item[1])) for item in loader.bad]))
    columns = [part for part, _ in gathered if part]
    bad = [item for _, items in gathered for item in items]
    if not columns:
        raise DataError(f"no image could be evaluated: {len(bad)} could not be read")
    index, label, top, hit, probability, loss, brier = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    if key is not None:
        label, top = key.as_classes(label, top, hit)
    index, first = np.unique(index, return_index=True)
    if not (label >= 0).any():
        raise DataError(f"none of the {len(index)} images has a known class. Evaluation needs labelled images")
    label, top, probability, loss, brier = (column[first] for column in (label, top, probability, loss, brier))
    return Classification(list(class_names), index, label, top, probability, loss, brier, sorted(set(bad)))


def _right(labels: Tensor, outputs: int, key: AnswerKey | None) -> Tensor:
    """Return which outputs are correct for each label: bool [B, outputs]."""
    if key is not None:
        return torch.from_numpy(key.marks(labels.cpu().numpy()))
    return labels[:, None] == torch.arange(outputs, device=labels.device)


@torch.no_grad()
def _image_rows(logits: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return best outputs, whether each is correct, and their probabilities [B, k], and loss and Brier score [B].

    If its logits are not finite, an image gets -1 as best outputs and counts as wrong. topk would rank NaN first and
    could be correct by accident.
    """
    right = right.to(logits.device)
    finite = logits.isfinite().all(dim=1, keepdim=True)
    unknown = ~right.any(dim=1)
    log_probability = logits.float().log_softmax(dim=1)
    values, top = log_probability.topk(min(BEST_CLASSES, logits.shape[1]), dim=1)
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
) -> Predict:
    """Return images -> float32 logits of `model`, on `device` (None: the device of the model).

    With `features`, return images -> features instead (`vitrail.evaluation.features`).

    Images may be on any device; uint8 images are moved as uint8. On a CPU a frozen copy of the model computes
    (`vitrail.model.frozen`). On other devices the model itself computes in eval mode, with float32 weights and
    autocast. The model and its training mode are not changed.
    """
    here = next(model.parameters()).device
    place = here if device is None else torch.device(device)
    if place != here:
        model = deepcopy(model).to(place)  # the caller's model stays where it is
    reduced = precision == "bf16" or (precision == "auto" and fast_bf16(place))
    if place.type == "cpu":
        with fast_float32():
            frozen = freeze(model, torch.bfloat16 if reduced else torch.float32)
        ask: Predict = frozen.features if features else frozen  # type: ignore[assignment]

        @torch.inference_mode()
        def answer(images: Tensor) -> Tensor:
            images = images if images.dtype == torch.uint8 else images.to(torch.bfloat16 if reduced else torch.float32)
            with fast_float32():
                return ask(images.to(place)).float()

        return answer
    run: Predict = model.features if features else model  # type: ignore[assignment]

    @torch.inference_mode()
    def predict(images: Tensor) -> Tensor:
        training = model.training
        model.eval()
        try:
            with torch.autocast(place.type, dtype=torch.bfloat16, enabled=reduced):
                return run(images.to(place, non_blocking=True)).float()
        finally:
            model.train(training)

    return predict


def save_classification(path: Path, found: Classification) -> None:
    """Write the rows as an .npz: index, labels, classes and probabilities (the best k), loss, brier, bad."""
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            index=found.index,
            labels=found.label,
            classes=found.top.astype(np.int32),
            probabilities=found.probability,
            loss=found.loss,
            brier=found.brier,
            bad=np.array(found.bad, dtype=np.str_).reshape(-1, 2),
        )


def load_classification(path: Path, class_names: Sequence[str]) -> Classification:
    """Read a file that `save_classification` wrote. Raises DataError for a damaged or different file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            bad = [(str(id_), str(reason)) for id_, reason in file["bad"]]
            return Classification(
                list(class_names),
                file["index"],
                file["labels"],
                file["classes"].astype(np.int64),
                file["probabilities"],
                file["loss"],
                file["brier"] if "brier" in file else np.full(len(file["index"]), np.nan),  # absent in earlier versions
                bad,
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read as the outputs of an evaluation: {error}") from error
