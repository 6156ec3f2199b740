from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from vitrail.data.item import evenly_spaced
from vitrail.errors import UsageError
from vitrail.inspection.embedding_map import embedding_map, neighbours
from vitrail.inspection.figures.embedding import thumbnail_points


def clouds(count: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Three groups far from each other."""
    rng = np.random.default_rng(0)
    labels = np.arange(3).repeat(count)
    return (rng.normal(size=(3, 12)) * 20)[labels] + rng.normal(size=(3 * count, 12)), labels


def test_the_principal_plane_is_scikit_learns() -> None:
    features, _ = clouds()
    found = embedding_map(features.astype(np.float32), "pca")
    expected = PCA(2, svd_solver="full").fit_transform(features)
    signs = np.sign((found.points * expected).sum(axis=0))
    np.testing.assert_allclose(found.points, signs * expected, rtol=1e-3, atol=1e-3)


def test_tsne_keeps_groups_together_and_repeats_itself() -> None:
    features, labels = clouds()
    found = embedding_map(features)
    assert found.method == "tsne" and found.points.shape == (60, 2)
    assert (embedding_map(features).points == found.points).all()
    distances = np.linalg.norm(found.points[:, None] - found.points, axis=2) + np.diag(np.full(60, np.inf))
    assert (labels[distances.argmin(axis=1)] == labels).all()


def test_few_images_are_laid_out_by_their_components() -> None:
    assert embedding_map(np.eye(3)).method == "pca"
    line = embedding_map(np.array([[0.0], [2.0]])).points
    np.testing.assert_allclose(np.abs(line), [[1, 0], [1, 0]])  # one direction is all there is
    with pytest.raises(UsageError, match="at least 2"):
        embedding_map(np.ones((1, 4)))
    with pytest.raises(UsageError, match="NaN or infinity"):
        embedding_map(np.array([[0.0], [np.nan]]))


@given(queries=st.integers(1, 6), images=st.integers(1, 9), count=st.integers(1, 12), seed=st.integers(0, 99))
def test_neighbours_are_those_of_plain_loops(queries: int, images: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    asked, features = rng.normal(size=(queries, 5)), rng.normal(size=(images, 5))
    index, similarity = neighbours(asked, features, count)
    assert index.shape == similarity.shape == (queries, min(count, images))
    for query in range(queries):
        alike = [a @ asked[query] / np.linalg.norm(a) / np.linalg.norm(asked[query]) for a in features]
        order = sorted(range(images), key=lambda row: -alike[row])[:count]
        assert index[query].tolist() == order
        np.testing.assert_allclose(similarity[query], [alike[row] for row in order], atol=1e-5)


def test_an_image_is_not_its_own_neighbour() -> None:
    features = np.random.default_rng(0).normal(size=(6, 4))
    index, similarity = neighbours(features[[1, 4]], features, 9, themselves=np.array([1, 4]))
    assert index.shape == (2, 5) and 1 not in index[0] and 4 not in index[1]
    assert (similarity < 1).all() and (np.diff(similarity) <= 0).all()


@given(count=st.integers(1, 200), most=st.integers(1, 50))
def test_a_sample_is_spread_evenly_spaced(count: int, most: int) -> None:
    rows = evenly_spaced(count, most)
    assert len(rows) == min(count, most) and rows[0] == 0 and rows.max() < count
    assert len(rows) < 2 or np.diff(rows).max() - np.diff(rows).min() <= 1


def test_thumbnails_leave_each_other_room() -> None:
    points = np.random.default_rng(0).random((500, 2))
    chosen = thumbnail_points(points, cells=4)
    low, span = points.min(axis=0), np.ptp(points, axis=0)
    cells = {tuple(np.minimum((points[i] - low) / span * 4, 3).astype(int)) for i in chosen}
    assert len(cells) == len(chosen) == 16
    assert thumbnail_points(np.zeros((3, 2))) == [0]
