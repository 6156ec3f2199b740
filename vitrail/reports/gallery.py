"""Images worth looking at: answered wrongly with most confidence, or closest to being answered otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitrail.data.images.decode import decode
from vitrail.data.images.ops import eval_transform
from vitrail.errors import DecodeError, VitrailError
from vitrail.evaluation.classify import Classification
from vitrail.inspection.rollout import rollout
from vitrail.model.vit import ViT

SHOWN = 12
"""Images per gallery."""
_BATCH = 4


@dataclass(frozen=True)
class Exhibit:
    """One image with its answer; what could not be had is None."""

    row: int
    """In the classification."""
    id: str
    image: np.ndarray
    """uint8 [H, W, 3], as the network sees it."""
    shares: np.ndarray | None
    """Attention rollout [rows, columns]."""


def worst_mistakes(answers: Classification) -> np.ndarray:
    """Rows of wrong answers, the largest loss first."""
    wrong = np.flatnonzero(answers.known & ~answers.correct & (answers.top[:, 0] >= 0))
    return wrong[np.argsort(-answers.loss[wrong], kind="stable")][:SHOWN]


def most_uncertain(answers: Classification) -> np.ndarray:
    """Rows with the smallest gap between the two best classes, the smallest first."""
    if answers.probability.shape[1] < 2:
        return np.empty(0, dtype=np.int64)
    gap = answers.probability[:, 0] - answers.probability[:, 1]
    rows = np.flatnonzero(answers.top[:, 0] >= 0)
    return rows[np.argsort(gap[rows], kind="stable")][:SHOWN]


def exhibits(rows: np.ndarray, answers: Classification, source: Any, model: Any) -> Iterator[Exhibit]:
    """Yield what can be shown of these rows: images that still decode, with rollout where `model` is a ViT.

    `model` is a network with its card, in eval mode.
    """
    transform = eval_transform(model.card.preprocess)
    unused = np.random.default_rng(0)  # nothing is random in evaluation
    found: list[tuple[int, str, np.ndarray]] = []
    for row in rows.tolist():
        try:
            item = source[int(answers.index[row])]
            image = decode(item.image) if isinstance(item.image, bytes) else item.image
        except DecodeError:  # it could be read when it was evaluated
            continue
        found.append((row, item.id, transform(image, unused)))
    for start in range(0, len(found), _BATCH):
        batch = found[start : start + _BATCH]
        maps = _rollouts(model, np.stack([image for _, _, image in batch]))
        for (row, id_, image), shares in zip(batch, maps, strict=True):
            yield Exhibit(row, id_, image, shares)


def _rollouts(model: Any, images: np.ndarray) -> list[np.ndarray] | list[None]:
    if not isinstance(model, ViT):
        return [None] * len(images)
    device = next(model.parameters()).device
    try:
        shares = rollout(model, torch.from_numpy(images).permute(0, 3, 1, 2).to(device))
    except VitrailError:
        return [None] * len(images)
    return list(shares.cpu().numpy())
