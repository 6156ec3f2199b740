"""Images of the galleries: which ones are worth looking at, what was predicted, and where the network attended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitrail.data.images.ops import eval_transform
from vitrail.data.images.pixels import Pixels
from vitrail.errors import DecodeError, VitrailError
from vitrail.evaluation.classify import Classification
from vitrail.evaluation.labels.numbers import NumberScores
from vitrail.evaluation.labels.scores import LabelScores
from vitrail.inspection.overlay import under_attention
from vitrail.inspection.rollout import rollout
from vitrail.model.vit import ViT

Evaluated = Classification | LabelScores | NumberScores
SHOWN = 12
"""Maximum number of images in a gallery of one run."""
_BATCH = 4


@dataclass(frozen=True)
class Guess:
    """One class that a network predicted, with its probability, or its numbers."""

    name: str
    probability: float | None
    """None for a number."""
    right: bool


@dataclass(frozen=True)
class Exhibit:
    """One image of a gallery."""

    id: str
    image: np.ndarray
    """uint8 [H, W, 3]."""
    true: str | None
    """The name of its class; None if it is not known."""
    guesses: list[list[Guess]]
    """The best guesses of each network, best first; an empty list if its outputs were not finite."""
    attention: np.ndarray | None = None
    """uint8 [H, W, 3]: the image under its attention rollout."""


def worst_mistakes(evaluation: Evaluated) -> np.ndarray:
    """Return rows of wrong predictions, the largest loss first; of numbers the largest errors, in deviations."""
    if isinstance(evaluation, NumberScores):
        error = ((evaluation.prediction - evaluation.target) / np.array(evaluation.scale.deviation)) ** 2
        rows = np.flatnonzero(evaluation.known & np.isfinite(error).all(axis=1))
        return rows[np.argsort(-error[rows].sum(axis=1), kind="stable")][:SHOWN]
    if isinstance(evaluation, LabelScores):
        wrong = np.flatnonzero(evaluation.known & ~evaluation.correct & np.isfinite(evaluation.probability).all(axis=1))
        return wrong[np.argsort(-evaluation.loss[wrong], kind="stable")][:SHOWN]
    wrong = np.flatnonzero(evaluation.known & ~evaluation.correct & (evaluation.top[:, 0] >= 0))
    return wrong[np.argsort(-evaluation.loss[wrong], kind="stable")][:SHOWN]


def most_uncertain(evaluation: Classification) -> np.ndarray:
    """Return rows with the smallest gap between the two best classes, the smallest first."""
    if evaluation.probability.shape[1] < 2:
        return np.empty(0, dtype=np.int64)
    gap = evaluation.probability[:, 0] - evaluation.probability[:, 1]
    rows = np.flatnonzero(evaluation.top[:, 0] >= 0)
    return rows[np.argsort(gap[rows], kind="stable")][:SHOWN]


def exhibits(rows: np.ndarray, evaluation: Evaluated, source: Any, model: Any) -> list[Exhibit]:
    """Return the images of these rows as the network sees them, with attention rollout if `model` is a ViT.

    `model` is a network with its card, in eval mode. Images that can no longer be decoded are left out.
    """
    transform = eval_transform(model.card.preprocess)
    unused = np.random.default_rng(0)  # nothing is random in evaluation
    found = []
    for row in rows.tolist():
        if (decoded := decode_image(source, int(evaluation.index[row]), transform.pixels.read)) is not None:
            found.append((row, decoded[0], transform(decoded[1], unused)))
    maps = _rollouts(model, [image for _, _, image in found], transform.pixels)
    return [
        Exhibit(
            name, transform.pixels.shown(image), true_class(evaluation, row), [guesses(evaluation, row, 3)], attention
        )
        for (row, name, image), attention in zip(found, maps, strict=True)
    ]


def decode_image(source: Any, index: int, read: Callable[[Any], np.ndarray]) -> tuple[str, np.ndarray] | None:
    """Return id and pixels of image `index`, as `read` returns them; None if it is absent or unreadable."""
    if index >= len(source):  # the results are those of other images
        return None
    try:
        item = source[index]
        return item.id, read(item.image)
    except DecodeError:
        return None


def true_class(evaluation: Evaluated, row: int) -> str | None:
    """Return the name of an image's class, the names of its labels, or its numbers; None if they are not known."""
    if isinstance(evaluation, NumberScores):
        return _numbers(evaluation.target[row]) if evaluation.known[row] else None
    if isinstance(evaluation, LabelScores):
        names = [evaluation.class_names[label] for label in np.flatnonzero(evaluation.target[row] == 1)]
        return (", ".join(names) or "no label") if evaluation.known[row] else None
    label = int(evaluation.label[row])
    return evaluation.class_names[label] if label >= 0 else None


def _numbers(values: np.ndarray) -> str:
    return ", ".join(f"{value:.4g}" for value in values.tolist())


def guesses(evaluation: Evaluated, row: int, most: int) -> list[Guess]:
    """Return the best `most` predictions for a row, or all predicted labels; none if the outputs were not finite.

    The numbers of a row are one guess.
    """
    if isinstance(evaluation, NumberScores):
        return [Guess(_numbers(evaluation.prediction[row]), None, False)]
    if isinstance(evaluation, LabelScores):
        chosen = np.flatnonzero(evaluation.predicted[row])
        chosen = chosen[np.argsort(-evaluation.probability[row, chosen], kind="stable")]
        there = evaluation.target[row] == 1
        return [Guess(evaluation.class_names[k], float(evaluation.probability[row, k]), bool(there[k])) for k in chosen]
    label = evaluation.label[row]
    return [
        Guess(evaluation.class_names[k], p, k == label)
        for k, p in zip(evaluation.top[row, :most].tolist(), evaluation.probability[row, :most].tolist(), strict=True)
        if k >= 0
    ]


def _rollouts(model: Any, images: list[np.ndarray], pixels: Pixels) -> Iterable[np.ndarray | None]:
    if not isinstance(model, ViT):
        return [None] * len(images)
    device, found = next(model.parameters()).device, []
    for start in range(0, len(images), _BATCH):
        batch = images[start : start + _BATCH]
        try:
            shares = rollout(model, torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2).to(device)).cpu().numpy()
        except VitrailError:
            return [None] * len(images)
        found += [under_attention(pixels.shown(image), share) for image, share in zip(batch, shares, strict=True)]
    return found
