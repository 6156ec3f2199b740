"""Results of a network that predicts the class of each pixel: intersection over union (IoU) and pixel accuracy.

The scores count the pixels of the masks at their own size: the network's logits are enlarged to it bilinearly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.labels.masks import Masks
from vitrail.data.settings import IGNORED
from vitrail.errors import DataError
from vitrail.evaluation.ahead import ahead
from vitrail.evaluation.classify import Predict, gather_rows
from vitrail.evaluation.results import Guess, Results

STORED = {"index": "index", "pixels": "pixels", "pixel_loss": "losses"}
"""Array in a file -> field of `PixelResults`."""
RIGHT, TRUE, PREDICTED = range(3)
"""Rows of `PixelResults.pixels`: pixels that are rightly of a class, are of it, and are predicted as it."""
_LOGITS = 1 << 24
"""Number of logits that are enlarged at a time."""


class PixelNumbers(ABC):
    """The scores of all pixels together, as Pascal VOC and ADE20K define them."""

    @property
    @abstractmethod
    def totals(self) -> np.ndarray:
        """int64 [3, classes]: number of pixels, see `RIGHT`."""

    @property
    def iou(self) -> np.ndarray:
        """Intersection over union of each class, float64 [classes]; NaN for a class that is neither there nor seen."""
        right, true, predicted = self.totals
        union = true + predicted - right
        return np.divide(right, union, out=np.full(len(right), np.nan), where=union > 0)

    @property
    def miou(self) -> float:
        """Mean IoU of the classes that have one."""
        return float(np.nanmean(self.iou))

    @property
    def pixel_accuracy(self) -> float:
        """Share of the pixels whose class is right."""
        return float(self.totals[RIGHT].sum() / self.totals[TRUE].sum())

    @property
    def largest_share(self) -> float:
        """Share of the pixels that have the most frequent class: the accuracy without looking."""
        return float(self.totals[TRUE].max() / self.totals[TRUE].sum())


@dataclass(frozen=True)
class PixelResults(PixelNumbers, Results):
    """The pixels of each image, one row per image, sorted by `index`, and the numbers from all of them together."""

    task = "segmentation"
    headline = "miou"
    class_names: list[str]
    index: np.ndarray
    pixels: np.ndarray
    """int64 [N, 3, classes]: number of pixels, see `RIGHT`. Ignored pixels do not count."""
    losses: np.ndarray
    """float64 [N]: sum of the cross-entropy of the pixels."""
    bad: list[tuple[str, str]] = field(default_factory=list)

    @property
    def known(self) -> np.ndarray:
        """bool [N]: whether a pixel counts."""
        found: np.ndarray = self.pixels[:, TRUE].sum(axis=1) > 0
        return found

    @property
    def totals(self) -> np.ndarray:
        """See `PixelNumbers`."""
        found: np.ndarray = self.pixels.sum(axis=0)
        return found

    @property
    def loss(self) -> float:
        """Mean cross-entropy of the pixels."""
        return float(self.losses.sum() / self.totals[TRUE].sum())

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log: miou, pixel_accuracy, loss, count."""
        return {name: getattr(self, name) for name in ("miou", "pixel_accuracy", "loss", "count")}

    def in_words(self) -> str:
        """See `Results`."""
        return f"mIoU {self.miou:.2%}, pixel accuracy {self.pixel_accuracy:.2%}"

    def worst(self, most: int) -> np.ndarray:
        """See `Results`: those with the smallest share of right pixels."""
        rows = np.flatnonzero(self.known)
        share = self.pixels[rows, RIGHT].sum(axis=1) / self.pixels[rows, TRUE].sum(axis=1)
        order = np.argsort(share, kind="stable")
        return rows[order[share[order] < 1]][:most]

    def true_names(self, row: int) -> list[str] | None:
        """See `Results`: the classes in the mask, the largest first."""
        return [name for name, _ in self._shares(row, TRUE)] or None

    def guesses(self, row: int, most: int) -> list[Guess]:
        """See `Results`: the predicted classes with their share of the pixels, the largest first."""
        there = {name for name, _ in self._shares(row, TRUE)}
        return [Guess(name, share, name in there) for name, share in self._shares(row, PREDICTED)[:most]]

    def cells(self, row: int) -> tuple[list[str], list[str], list[str]]:
        """See `Results`: classes in the mask, predicted classes, and their shares of the pixels."""
        predicted = self._shares(row, PREDICTED)
        names = [name for name, _ in predicted]
        return self.true_names(row) or [], names, [f"{share:.4f}" for _, share in predicted]

    def _shares(self, row: int, which: int) -> list[tuple[str, float]]:
        counts = self.pixels[row, which]
        order = np.argsort(-counts, kind="stable")
        return [(self.class_names[k], float(counts[k] / counts.sum())) for k in order.tolist() if counts[k]]

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Results`."""
        return {name: getattr(self, field) for name, field in STORED.items()}


def enlarged(logits: Tensor, height: int, width: int) -> Iterator[Tensor]:
    """Yield the logits [classes, rows, columns] of one image at `height` x `width` pixels, some rows at a time.

    They are interpolated as torch does, bilinearly, and memory does not grow with the image.
    """
    down, across = (_weights(*sides).to(logits.device) for sides in zip(logits.shape[1:], (height, width), strict=True))
    wide = logits.float() @ across.T
    for part in down.split(max(1, _LOGITS // (len(logits) * width))):
        yield torch.einsum("hr,krw->khw", part, wide)


def _weights(cells: int, pixels: int) -> Tensor:
    """Return the share of each cell in each pixel's value, float32 [pixels, cells], as torch interpolates."""
    return F.interpolate(torch.eye(cells)[None], pixels, mode="linear", align_corners=False)[0].T.contiguous()


def pixel_classes(logits: Tensor, height: int, width: int) -> np.ndarray:
    """Return the class of each pixel, uint8 [height, width], from the logits [classes, rows, columns] of one image."""
    parts = [part.argmax(dim=0) for part in enlarged(logits, height, width)]
    return torch.cat(parts).to(torch.uint8).cpu().numpy()


def score_pixels(predict: Predict, loader: Any, class_names: Sequence[str]) -> PixelResults:
    """Run `predict` over one epoch of `loader` and return the pixels of all processes' images, on every process.

    An image that arrives twice counts once. Raises DataError for images without masks, if outputs and classes do not
    fit, and if no image could be read.
    """
    masks = loader.source.labels
    if not isinstance(masks, Masks):
        raise DataError(
            "this network predicts the class of each pixel, and these images have no masks. Expected are "
            "images/NAME.jpg and masks/NAME.png"
        )

    def launch(batch: Any) -> Tensor:
        outputs = predict(batch.images)
        if outputs.ndim != 4 or outputs.shape[1] != len(class_names):
            raise DataError(f"the model's outputs are {list(outputs.shape)}, and there are {len(class_names)} classes")
        return outputs

    rows = []
    for batch, outputs in ahead(loader.epoch(0), launch):
        found = [_score(one, masks.mask(index)) for one, index in zip(outputs, batch.index.tolist(), strict=True)]
        pixels, losses = zip(*found, strict=True)
        rows.append((batch.index, torch.from_numpy(np.stack(pixels)), torch.tensor(losses, dtype=torch.float64)))
    (index, counts, summed), bad = gather_rows(rows, loader)
    index, first = np.unique(index, return_index=True)
    return PixelResults(list(class_names), index, counts[first], summed[first], bad)


@torch.inference_mode()
def _score(logits: Tensor, mask: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the pixels of an image [3, classes], see `RIGHT`, and the sum of their cross-entropy."""
    truth, classes = torch.from_numpy(mask).long(), len(logits)
    parts, loss, begin = [], 0.0, 0
    for part in enlarged(logits, *mask.shape):
        wanted = truth[begin : begin + part.shape[1]]
        begin += part.shape[1]
        loss += float(F.cross_entropy(part[None], wanted[None], ignore_index=IGNORED, reduction="sum"))
        parts.append(part.argmax(dim=0))
    counted = mask != IGNORED
    true, predicted = mask[counted], torch.cat(parts).numpy()[counted]
    chosen = (true[true == predicted], true, predicted)
    return np.stack([np.bincount(one, minlength=classes) for one in chosen]), loss
