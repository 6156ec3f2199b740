"""Features of a frozen network, one row per image, for few-shot, kNN and linear probes.

The features are the input of the classifier (`ViT.features`, `ResNet.features`): the pooled tokens after the final
LayerNorm and, if the model has the pre-training head's tanh layer, after that layer too, as in big_vision's few-shot
evaluation. A distilled model's features are those of the class token, followed by those of the distillation token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from vitrail import world
from vitrail.data.image_names import bad_kinds
from vitrail.device import Precision
from vitrail.errors import DataError
from vitrail.evaluation.ahead import Refusing, ahead
from vitrail.evaluation.classify import Batches, Predict, check_labels, predictor, unreadable
from vitrail.words import one_line

_CHECKED = 4096
"""Number of rows checked at a time."""


@one_line
@dataclass(frozen=True)
class Features:
    """One row per image that could be read, sorted by `index`."""

    features: np.ndarray
    """float32 [N, width]."""
    labels: np.ndarray
    """int64 [N]; -1 for an unknown class. With several labels int8 [N, classes], 1 for each label."""
    index: np.ndarray
    """int64 [N]: number of the image in its source."""
    class_names: list[str]
    bad: list[tuple[str, str]] = field(default_factory=list)
    """(id, reason) of images that could not be read; they have no row."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def width(self) -> int:
        """Return the number of features of an image."""
        return int(self.features.shape[1])

    def labelled(self, what: str) -> tuple[np.ndarray, np.ndarray]:
        """Return features and labels of the images whose class is known.

        Raises DataError if there are none, or if a feature is not finite. `what` names the images in the error.
        """
        for begin in range(0, len(self), _CHECKED):
            wrong = ~np.isfinite(self.features[begin : begin + _CHECKED]).all(axis=1)
            if wrong.any():
                raise DataError(
                    f"the features of {what} image {self.index[begin + int(wrong.argmax())]} are not finite. Check "
                    "that the model's weights are finite: vitrail weights verify MODEL"
                )
        if self.labels.ndim > 1:
            raise DataError(
                f"the {what} images have several labels each, and this needs one class for each image. Measure a "
                "network for several labels with `vitrail evaluate`"
            )
        known = self.labels >= 0
        if not known.any():
            raise DataError(f"none of the {len(self)} {what} images has a known class")
        return (self.features, self.labels) if known.all() else (self.features[known], self.labels[known])


def unit_rows(features: np.ndarray) -> np.ndarray:
    """Return features [N, width] with rows of length 1, float32; a row of zeros stays zero.

    Lengths are computed in float64, because squares of large float32 features overflow.
    """
    lengths = np.sqrt(np.einsum("nw,nw->n", features, features, dtype=np.float64))[:, None]
    return (features / np.maximum(lengths, 1e-12)).astype(np.float32)


def extract(
    model: nn.Module,
    loader: Batches,
    class_names: Sequence[str],
    *,
    device: torch.device | str | None = None,
    precision: Precision = "auto",
) -> Features:
    """Return the features of the images in one epoch of `loader`, on every process.

    The model computes in eval mode, or on a CPU a frozen copy of it does; the model is not changed and no random
    number is drawn. Raises DataError if no image could be read, or a label is not a number of `class_names`,
    and WeightsError for features with NaN or infinity.
    """
    with Refusing(predictor(model, device, precision, features=True), precision) as embed:
        return collect(embed, loader, class_names)


def collect(embed: Predict, loader: Batches, class_names: Sequence[str]) -> Features:
    """Return `embed(images)`, float32 [batch, width], of all images of all processes, on every process.

    An image that arrives twice (a padded last batch, a sampler that wraps around) counts once. Processes exchange one
    batch at a time and then free it, so memory holds the result and a few batches. Raises the errors of `extract`, but
    not for NaN and infinity.
    """
    batches: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for batch, found in ahead(loader.epoch(0), lambda batch: embed(batch.images)):
        batches.append((batch.index.numpy(), batch.labels.numpy(), found.numpy()))
    processes = world.gather(([(index, labels, part.shape[1]) for index, labels, part in batches], loader.bad))
    bad = unreadable(part for _, part in processes)
    rows = [row for process, _ in processes for row in process]
    if not rows:
        raise DataError(f"no features: no image could be read: {bad_kinds(bad)}")
    index, first = np.unique(np.concatenate([index for index, _, _ in rows]), return_index=True)
    labels = np.concatenate([labels for _, labels, _ in rows])[first]
    if class_names and labels.ndim == 1:
        check_labels(int(labels.max()), len(class_names))
    features = np.empty((len(index), rows[0][2]), np.float32)
    batches.reverse()
    for _ in range(max(len(process) for process, _ in processes)):
        for part in world.gather(batches.pop() if batches else None):
            if part is not None:
                features[np.searchsorted(index, part[0])] = part[2]
    return Features(features, labels, index, list(class_names), bad)


def labelled_pair(train: Features, test: Features) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return features and labels of the training images, then of the test images, whose class is known.

    Raises DataError if the two have different numbers of features, and the errors of `Features.labelled`.
    """
    if train.width != test.width:
        raise DataError(f"training images have {train.width} features and test images {test.width}")
    return (*train.labelled("training"), *test.labelled("test"))
