"""The features of a data set: as a map on a plane, and as lists of nearest neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitrail.errors import UsageError
from vitrail.inspection.components import positive_largest
from vitrail.version import extras_named

MapMethod = Literal["tsne", "pca"]
FEWEST_FOR_TSNE = 10
"""Minimum number of images for t-SNE. With fewer, PCA draws the map."""
TSNE_COMPONENTS = 50
"""Principal components that t-SNE starts from. Their distances are almost those of the features."""


@dataclass(frozen=True)
class EmbeddingMap:
    """Points of images on a plane."""

    points: np.ndarray
    """float64 [N, 2]."""
    method: MapMethod


def embedding_map(features: np.ndarray, method: MapMethod | None = None, *, seed: int = 0) -> EmbeddingMap:
    """Return a map of features [N, width] on a plane. The same features give the same map.

    t-SNE (van der Maaten and Hinton, 2008) keeps neighbours together; its distances between groups mean nothing. PCA
    keeps the two directions of the largest variance. By default it is t-SNE for 10 or more images. Raises UsageError
    for fewer than 2 images and for features with NaN or infinity.
    """
    if len(features) < 2:
        raise UsageError(f"a map needs at least 2 images, not {len(features)}")
    if not np.isfinite(features).all():
        raise UsageError(
            "the features contain NaN or infinity, so no map is drawn. Check the model: vitrail weights verify MODEL"
        )
    method = method or ("tsne" if len(features) >= FEWEST_FOR_TSNE else "pca")
    if method == "pca":
        return EmbeddingMap(_principal(features, 2), method)
    with extras_named():
        from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed)
    return EmbeddingMap(tsne.fit_transform(_principal(features, TSNE_COMPONENTS)).astype(np.float64), method)


def _principal(features: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` principal components, [N, count], with fixed signs; missing ones are 0."""
    rows = features.astype(np.float64) - features.mean(axis=0, dtype=np.float64)
    left, scale, _ = np.linalg.svd(rows, full_matrices=False)
    found = positive_largest((left[:, :count] * scale[:count]).T).T
    return np.pad(found, ((0, 0), (0, max(2 - found.shape[1], 0))))


def neighbours(
    queries: np.ndarray, features: np.ndarray, count: int, *, themselves: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` nearest rows of `features` [N, width] to each query [Q, width], the nearest first.

    The result is their numbers, int64 [Q, count], and cosine similarities, float32 [Q, count]; fewer if there are fewer
    rows. If the queries are rows of `features`, `themselves` [Q] are their numbers: no row is its own neighbour. Equal
    similarities keep the order of the rows. Queries are processed in chunks to save memory.
    """
    count = min(count, len(features) - (themselves is not None))
    targets = _directions(features)
    index = np.empty((len(queries), count), dtype=np.int64)
    similarity = np.empty((len(queries), count), dtype=np.float32)
    chunk = max(1, features.shape[1] // 4)
    for start in range(0, len(queries), chunk):
        part = slice(start, start + chunk)
        alike = _directions(queries[part]) @ targets.T
        if themselves is not None:
            alike[np.arange(len(alike)), themselves[part]] = -np.inf
        index[part] = np.argsort(-alike, axis=1, kind="stable")[:, :count]
        similarity[part] = np.take_along_axis(alike, index[part], axis=1)
    return index, similarity


def _directions(features: np.ndarray) -> np.ndarray:
    norms = np.sqrt(np.einsum("nw,nw->n", features, features, dtype=np.float64))[:, None]  # squares may overflow
    return (features / np.maximum(norms, 1e-12)).astype(np.float32)
