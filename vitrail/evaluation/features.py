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
from vitrail.errors import DataError
from vitrail.evaluation.classify import Batches, Precision, Predict, predictor

_CHECKED = 4096
"""Number of rows checked at a time."""


@dataclass(frozen=True)
class Features:
    """One row per image that could be read, sorted by `index`."""

    features: np.ndarray
    """float32 [N, width]."""
    labels: np.ndarray
    """int64 [N]; -1 for an unknown class."""
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
        known = self.labels >= 0
        if not known.any():
            raise DataError(f"none of the {len(self)} {what} images has a known class")
        return (self.features, self.labels) if known.all() else (self.features[known], self.labels[known])


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
    number is drawn. Raises DataError if no image could be read, or a label is not a number of `class_names`.
    """
    return collect(predictor(model, device, precision, features=True), loader, class_names)


def collect(embed: Predict, loader: Batches, class_names: Sequence[str]) -> Features:
    """Return `embed(images)`, float32 [batch, width], of all images of all processes, on every process.

    An image that arrives twice (a padded last batch, a sampler that wraps around) counts once. Processes exchange one
    batch at a time and then free it, so memory holds the result and a few batches. Raises the errors of `extract`.
    """
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    labels: list[np.ndarray] = []
    for batch in loader.epoch(0):
        parts.append((batch.index.cpu().numpy(), embed(batch.images).cpu().numpy()))
        labels.append(batch.labels.cpu().numpy())
    mine = np.concatenate([index for index, _ in parts] or [np.empty(0, np.int64)])
    gathered = world.gather(
        (
            (mine, np.concatenate(labels or [np.empty(0, np.int64)])),
            (len(parts), parts[0][1].shape[1] if parts else 0),
            [(str(item[0]), str(item[1])) for item in loader.bad],
        )
    )
    index, label = (np.concatenate(column) for column in zip(*(rows for rows, _, _ in gathered), strict=True))
    bad = sorted({item for _, _, items in gathered for item in items})
    if not len(index):
        raise DataError(f"no features: no image could be read ({len(bad)} failed)")
    if label.max() >= len(class_names) > 0:
        raise DataError(
            f"label {label.max()} in the data; with {len(class_names)} classes they go from 0 to {len(class_names) - 1}"
        )
    index, first = np.unique(index, return_index=True)
    counts, widths = zip(*(sizes for _, sizes, _ in gathered), strict=True)
    features = np.empty((len(index), max(widths)), np.float32)
    parts.reverse()
    for _ in range(max(counts)):
        for part in world.gather(parts.pop() if parts else None):
            if part is not None:
                features[np.searchsorted(index, part[0])] = part[1]
    return Features(features, label[first], index, list(class_names), bad)
