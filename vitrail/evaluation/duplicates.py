"""Confirm with a network's features that pairs with similar perceptual hashes show the same picture.

Hashes are quick and coarse. With a distance wide enough for crops and changed colours, they also pair pictures that
merely share their layout. The cosine similarity of their features tells these pairs apart. Features are computed only
for images in pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch

from vitrail.data.check import OnProgress
from vitrail.data.copies.dedup import HashedImages, Pairs
from vitrail.data.images.geometry import Compose, Flip
from vitrail.data.images.ops import eval_transform
from vitrail.data.item import Subset
from vitrail.data.loading.loader import Loader
from vitrail.device import Precision
from vitrail.errors import WeightsError
from vitrail.evaluation.features import Features, extract, unit_rows

COSINE = 0.95
"""Minimum cosine similarity of two images of the same picture."""
PAIRS = 1 << 14
"""Number of pairs compared at a time; the features of at most twice as many images are in memory."""


def cosines(
    model: Any,
    left: HashedImages,
    right: HashedImages,
    pairs: Pairs,
    *,
    batch_size: int = 64,
    workers: int = 0,
    device: torch.device | str | None = None,
    precision: Precision = "auto",
    progress: OnProgress | None = None,
) -> np.ndarray:
    """Return the cosine similarity of the features of the two images of each pair, float32 [P].

    `model` is a network with a card (from `vitrail.load`), which defines its preprocessing. In a mirrored pair the
    right image is mirrored first. The value is NaN if an image can no longer be read. Raises WeightsError for a model
    without a card.
    """
    if getattr(model, "card", None) is None:
        raise WeightsError("this model has no card, which says how its images are prepared. Load it with vitrail.load")
    preprocess = model.card.preprocess
    prepare = eval_transform(preprocess)

    def embed(source: Subset, mirrored: bool) -> Features:
        loader = Loader(
            source,
            transform=Compose((prepare, Flip(1.0)), prepare.pixels) if mirrored else prepare,
            image_size=preprocess.size,
            batch_size=batch_size,
            workers=workers,
            shuffle=False,
            drop_last=False,
        )
        with closing(loader):
            return extract(model, loader, source.class_names, device=device, precision=precision)

    similarity = np.full(len(pairs), np.nan, np.float32)
    order = np.argsort(pairs.left, kind="stable")
    for begin in range(0, len(pairs), PAIRS):
        places = order[begin : begin + PAIRS]
        for mirrored in (False, True):
            here = places[pairs.mirrored[places] == mirrored]
            if len(here):
                ours = _directions(left, pairs.left[here], partial(embed, mirrored=False))
                theirs = _directions(right, pairs.right[here], partial(embed, mirrored=mirrored))
                similarity[here] = (ours * theirs).sum(axis=1)
        if progress is not None:
            progress(begin + len(places), len(pairs))
    return similarity


def _directions(images: HashedImages, numbers: np.ndarray, embed: Callable[[Subset], Features]) -> np.ndarray:
    """Return features of length 1 of each image, float32 [K, width]; NaN if unreadable. Each image is read once."""
    distinct, places = np.unique(numbers, return_inverse=True)
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    for source, mine, indices in images.by_part(distinct):
        readable = embed(Subset(source, indices))
        pieces.append((mine[readable.index], unit_rows(readable.features)))
    result = np.full((len(distinct), pieces[0][1].shape[1]), np.nan, np.float32)
    for rows, features in pieces:
        result[rows] = features
    return result[places]
