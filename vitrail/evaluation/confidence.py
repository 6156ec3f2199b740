"""How sure a network is: temperature of its probabilities, rejection of unsure images, and the mean of several views.

Temperature scaling divides logits by one number, so that probabilities agree with accuracy: "On Calibration of Modern
Neural Networks" (Guo et al., 2017, section 4.2). The temperature minimises the cross-entropy of validation images,
which is convex in 1 / temperature: Newton's method on its derivative, kept within an interval that contains the
optimum. The order of the classes does not change. With several labels, the one temperature scales the logits of all
labels, and the loss is the binary cross-entropy.

Rejection: images whose best class has a low probability get no class, which costs coverage and saves mistakes. Coverage
is the share of images that still get a class, and risk the share of wrong ones among these ("Selective Classification
for Deep Neural Networks", Geifman and El-Yaniv 2017).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from vitrail import world
from vitrail.data.loading.loader import Batch
from vitrail.device import to_device
from vitrail.evaluation.ahead import HostCopy
from vitrail.evaluation.calibration import binned
from vitrail.evaluation.classify import Batches, Classification, Predict

LOGITS = 1 << 24
"""Maximum number of logits that a temperature is fitted to. Of more, evenly spaced images are used."""
LARGEST = 64.0
"""Largest temperature; the smallest is its inverse. Beyond them, logits say nothing about classes, or everything."""
GAIN = 1.0
"""Nats by which a temperature must lower the cross-entropy, summed over its own images, to be expected to lower that of
others (Akaike's criterion for one parameter: "A new look at the statistical model identification", 1974). If no
temperature is needed, twice the gain has a chi-squared distribution, so that 16 % of such networks get one."""
PARTS = 5
"""Number of parts of the images; the probabilities of each are judged with a temperature fitted to the others."""
ROWS = 4096
"""Images that are summed at a time, in float64."""


def calibrated(predict: Predict, temperature: float) -> Predict:
    """Return `predict`, whose logits are now divided by `temperature`."""
    return predict if temperature == 1 else lambda images: predict(images) / temperature


def at_temperature(probability: np.ndarray, temperature: float) -> np.ndarray:
    """Return probabilities of labels (sigmoid), float64, as they are if their logits are divided by `temperature`."""
    probability = probability.astype(np.float64)
    with np.errstate(divide="ignore"):
        odds = np.log(probability) - np.log1p(-probability)
    found: np.ndarray = torch.from_numpy(odds / temperature).sigmoid().numpy()
    return found


class KeptLogits:
    """The logits of one epoch of an evaluation, of which it is both the images and the predict function.

    images: Number of images of the epoch, over all processes.
    """

    def __init__(self, predict: Predict, loader: Batches, images: int) -> None:
        self._predict, self._loader, self._images = predict, loader, images
        self._logits: Tensor | None = None
        self._kept: list[tuple[HostCopy[Tensor], Tensor, Tensor]] = []
        self._all = True
        self.bad = loader.bad

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        self._logits = self._predict(images)
        return self._logits

    def epoch(self, epoch: int) -> Iterator[object]:
        """See `Batches`. The logits of a batch are kept when the next one is asked for."""
        for batch in self._loader.epoch(epoch):
            yield batch
            assert self._logits is not None
            step = -(-self._images * self._logits.shape[1] // LOGITS)
            self._all = step == 1
            rows = (batch.index % step == 0).nonzero()[:, 0]
            logits = HostCopy(self._logits[to_device(rows, self._logits.device)])
            self._kept.append((logits, batch.labels[rows], batch.index[rows]))

    def again(self) -> tuple[Predict, Batches]:
        """Return a predict function and images that give the same logits once more.

        The network does not compute them again if all were kept. All processes must call this together.
        """
        if world.any_(not self._all):
            return self._predict, self._loader
        return lambda logits: logits, KeptBatches(self._batches(), self.bad)

    def _batches(self) -> list[Batch]:
        return [Batch(logits.get(), labels, index) for logits, labels, index in self._kept]

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the kept logits and labels of all processes, each image once."""
        mine = [(kept.index.numpy(), kept.labels.numpy(), kept.images.float().numpy()) for kept in self._batches()]
        parts = [part for process in world.gather(mine) for part in process]
        index, labels, logits = (np.concatenate(column) for column in zip(*parts, strict=True))
        rows = np.unique(index, return_index=True)[1]
        return logits[rows], labels[rows]


@dataclass
class KeptBatches:
    """Batches that have logits in the place of images."""

    batches: list[Batch]
    bad: list[Any]

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """See `Batches`."""
        return iter(self.batches)


def fit_if_better(logits: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the temperature of `fit_temperature`; None if it cannot be expected to be better than 1 for other images.

    The arguments are those of `fit_temperature`.
    """
    # A temperature of few images follows their accidents, and may be worse for others than none. How much the loss of
    # its own images falls decides, because no number of images would do: fifty are enough for a network that is much
    # too sure, and a thousand too few for one that is nearly calibrated. A lower loss may come with a larger
    # calibration error, where one temperature does not suit sure and unsure images; then none is used, either.
    temperature = fit_temperature(logits, labels)
    if temperature is None:
        return None
    known = _known(labels)
    values, truth = torch.from_numpy(logits[known]), torch.from_numpy(labels[known])
    if _loss(values, truth, 1.0) - _loss(values, truth, 1 / temperature) <= GAIN:
        return None
    part = np.arange(len(values)) % PARTS
    scaled = values / temperature
    held_out = torch.empty_like(values)
    for number in range(PARTS):
        rows, others = part == number, part != number
        held_out[rows] = values[rows] / (fit_temperature(logits[known][others], labels[known][others]) or 1.0)
    allowed = _calibration_error(values, truth)
    return temperature if max(_calibration_error(one, truth) for one in (scaled, held_out)) <= allowed else None


def _calibration_error(logits: Tensor, labels: Tensor) -> float:
    """Return the expected calibration error; with several labels, the mean over those that are there."""
    if labels.ndim == 1:
        probability, best = logits.softmax(dim=1).max(dim=1)
        return binned(probability.numpy(), (best == labels).numpy()).ece
    there = (labels == 1).any(dim=0)
    columns = zip(logits[:, there].sigmoid().T.numpy(), (labels[:, there] == 1).T.numpy(), strict=True)
    return float(np.mean([binned(*column).ece for column in columns]))


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the temperature with the lowest cross-entropy; None if there is none from 1 / `LARGEST` to `LARGEST`.

    logits: float32 [images, classes]. labels: int64 [images], or int8 [images, classes] for several labels; images
    with a negative label do not count. There is none if every image is classified correctly, if the logits are not
    better than chance, or if one is not finite.
    """
    known = _known(labels)
    if not known.any() or not np.isfinite(logits).all():
        return None
    values, truth = torch.from_numpy(logits[known]), torch.from_numpy(labels[known])
    low, high, inverse = 1 / LARGEST, LARGEST, 1.0
    if _derivatives(values, truth, low)[0] >= 0 or _derivatives(values, truth, high)[0] <= 0:
        return None
    for _ in range(100):
        slope, curvature = _derivatives(values, truth, inverse)
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        newton = inverse - slope / max(curvature, 1e-300)
        better = newton if low < newton < high else (low + high) / 2
        if abs(better - inverse) <= 1e-10 * inverse:
            break
        inverse = better
    return 1 / better


def _known(labels: np.ndarray) -> np.ndarray:
    """Return whether the labels of an image are known: bool [images]."""
    known: np.ndarray = (labels if labels.ndim == 1 else labels[:, 0]) >= 0
    return known


def _loss(logits: Tensor, labels: Tensor, inverse: float) -> float:
    """Return the loss, summed over the images, of logits that are multiplied by `inverse`."""
    total = 0.0
    for z, y in zip(logits.split(ROWS), labels.split(ROWS), strict=True):
        z = z.double() * inverse
        if y.ndim == 2:
            total += float(binary_cross_entropy_with_logits(z, y.double(), reduction="sum"))
        else:
            total += float(cross_entropy(z, y, reduction="sum"))
    return total


def _derivatives(logits: Tensor, labels: Tensor, inverse: float) -> tuple[float, float]:
    """Return the first two derivatives of the mean loss with respect to 1 / temperature, at `inverse`."""
    slope = curvature = 0.0
    for z, y in zip(logits.split(ROWS), labels.split(ROWS), strict=True):
        z = z.double()
        if y.ndim == 2:
            p = (z * inverse).sigmoid()
            slope += float((z * (p - y)).sum())
            curvature += float((z.square() * p * (1 - p)).sum())
        else:
            z = z - z.amax(dim=1, keepdim=True)
            p = (z * inverse).softmax(dim=1)
            mean = (p * z).sum(dim=1)
            slope += float((mean - z.gather(1, y[:, None])[:, 0]).sum())
            curvature += float(((p * z.square()).sum(dim=1) - mean.square()).sum())
    return slope / len(logits), curvature / len(logits)


NONE = "none of these"
"""What an image that is rejected is called in place of a class."""
SHOWN = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Thresholds in tables."""


def counts_at(evaluation: Classification, thresholds: Sequence[float]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many images have at least the confidence of each threshold, and how many of these are wrong."""
    sure, wrong = evaluation.probability[evaluation.known, 0], ~evaluation.correct[evaluation.known]
    enough = [sure >= threshold for threshold in np.array(thresholds, sure.dtype)]
    return tuple(int(one.sum()) for one in enough), tuple(int((one & wrong).sum()) for one in enough)


def risk_coverage_curve(evaluation: Classification) -> tuple[np.ndarray, np.ndarray]:
    """Return coverage and risk after each image, the surest first: float64 [n], one value for equal confidences."""
    sure, wrong = evaluation.probability[evaluation.known, 0], ~evaluation.correct[evaluation.known]
    order = np.argsort(-sure, kind="stable")
    named = np.arange(1, len(order) + 1)
    last = np.append(np.diff(sure[order]) != 0, True)
    return (named / len(order))[last], (np.cumsum(wrong[order]) / named)[last]


SMALLEST = torch.finfo(torch.float32).tiny
"""Smallest probability: its logarithm is finite."""


def averaged(predict: Predict, count: int, temperature: float, *, several: bool = False) -> Predict:
    """Return images [batch, channels, count * height, width] -> logits of the mean probabilities of `count` views.

    This is test-time augmentation. The views of an image lie one below the other. predict: Images of one view ->
    logits, which are divided by `temperature` before they become probabilities; it gets the views of a batch one after
    another, so that it computes batches of the usual size. several: Probabilities are the sigmoid of each logit.
    """

    def mean(images: Tensor) -> Tensor:
        views = [predict(view).float() / temperature for view in images.chunk(count, dim=2)]
        return mean_probabilities(views, several=several)

    return mean


def mean_probabilities(logits: Sequence[Tensor], *, several: bool = False) -> Tensor:
    """Return logits of the mean of the probabilities that several logits [batch, classes] stand for.

    several: Probabilities are the sigmoid of each logit, and not the softmax.
    """
    if several:
        shares = torch.stack([one.sigmoid() for one in logits]).mean(dim=0)
        return shares.clamp(SMALLEST, 1 - torch.finfo(torch.float32).eps).logit()
    return torch.stack([one.softmax(dim=1) for one in logits]).mean(dim=0).clamp_min(SMALLEST).log()
