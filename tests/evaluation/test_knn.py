from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.metrics
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from vitrail.errors import DataError, UsageError
from vitrail.evaluation import knn as module
from vitrail.evaluation.features import Features
from vitrail.evaluation.knn import knn, neighbours


def features(images: int, width: int, classes: int, seed: int) -> Features:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, images)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    x = (centres[labels] + rng.normal(size=(images, width))).astype(np.float32)
    return Features(x, labels, np.arange(images), [str(name) for name in range(classes)])


@pytest.fixture(params=[(1024, 16384), (7, 16), (5, 3)], ids=str)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEST_ROWS", request.param[0])
    monkeypatch.setattr(module, "TRAIN_ROWS", request.param[1])


@pytest.mark.usefixtures("blocks")
def test_neighbours_are_scikit_learns() -> None:
    train, test = features(83, 9, 4, 0).features, features(41, 9, 4, 1).features
    distance, row = NearestNeighbors(n_neighbors=11, metric="cosine", algorithm="brute").fit(train).kneighbors(test)
    found = list(neighbours(train, test, 11))
    np.testing.assert_allclose(np.concatenate([s.numpy() for s, _ in found]), 1 - distance, atol=1e-5)
    np.testing.assert_array_equal(np.concatenate([r.numpy() for _, r in found]), row)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_accuracies_are_scikit_learns(temperature: float) -> None:
    train, test = features(90, 12, 8, 0), features(60, 12, 8, 1)
    found = knn(train, test, k=[1, 5, 20, 90], temperature=temperature)
    for k in (1, 5, 20, 90):
        peer = KNeighborsClassifier(
            k, weights=lambda d: np.exp((1 - d) / temperature), metric="cosine", algorithm="brute"
        ).fit(train.features, train.labels)
        assert found.top1[k] == pytest.approx((peer.predict(test.features) == test.labels).mean())
        if k >= 20:
            shares = peer.predict_proba(test.features)
            expected = sklearn.metrics.top_k_accuracy_score(test.labels, shares, k=5, labels=range(8))
            assert found.top5[k] == pytest.approx(expected)
    assert found.train_images == 90 and found.test_images == 60


def test_only_directions_matter() -> None:
    train, test = features(50, 6, 3, 0), features(40, 6, 3, 1)
    scale = np.random.default_rng(2).uniform(0.1, 10, (50, 1)).astype(np.float32)
    longer = Features(train.features * scale, train.labels, train.index, train.class_names)
    assert knn(longer, test, k=[3, 10]).top1 == knn(train, test, k=[3, 10]).top1


def test_a_low_temperature_leaves_the_nearest_alone_and_a_high_one_counts_heads() -> None:
    train, test = features(60, 5, 2, 0), features(50, 5, 2, 1)  # an odd k and two classes: no equal counts
    assert knn(train, test, k=[15], temperature=1e-6).top1[15] == knn(train, test, k=[1]).top1[1]
    majority = KNeighborsClassifier(15, metric="cosine", algorithm="brute").fit(train.features, train.labels)
    expected = (majority.predict(test.features) == test.labels).mean()
    assert knn(train, test, k=[15], temperature=1e3).top1[15] == pytest.approx(expected)


def test_a_class_without_votes_is_not_among_the_five() -> None:
    train = Features(np.eye(6, dtype=np.float32), np.arange(6), np.arange(6), list("abcdef"))
    test = Features(np.eye(6, dtype=np.float32)[:1].repeat(6, 0), np.arange(6), np.arange(6), list("abcdef"))
    found = knn(train, test, k=[1])
    assert found.top1[1] == found.top5[1] == 1 / 6


def test_images_without_a_class_neither_vote_nor_count() -> None:
    train, test = features(50, 6, 3, 0), features(40, 6, 3, 1)
    masked = [Features(f.features, np.where(np.arange(len(f)) % 4, f.labels, -1), f.index, f.class_names)
              for f in (train, test)]  # fmt: skip
    kept = [Features(f.features[f.labels >= 0], f.labels[f.labels >= 0], f.index[f.labels >= 0], f.class_names)
            for f in masked]  # fmt: skip
    found = knn(*masked, k=[5])
    assert found == knn(*kept, k=[5]) and found.test_images == 30


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(k=[51]), "with 50 training images it must be from 1 to 50"),
        (dict(k=[0]), "from 1 to 50"),
        (dict(k=[]), "from 1 to 50"),
        (dict(k=[5], temperature=0.0), "the temperature is 0; it must be above 0"),
    ],
)
def test_settings_that_make_no_sense(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        knn(features(50, 6, 3, 0), features(40, 6, 3, 1), **more)


def test_features_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="have 6 features and test images 7"):
        knn(features(50, 6, 3, 0), features(40, 7, 3, 1))


@pytest.mark.parametrize("size", [2, 3, 70])
def test_processes_share_the_test_images(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = features(90, 12, 8, 0), features(60, 12, 8, 1)
    whole, shares = knn(train, test, k=[1, 5]), np.zeros((2, 2))
    monkeypatch.setattr(module.world, "size", lambda: size)
    for rank in range(size):
        monkeypatch.setattr(module.world, "rank", lambda rank=rank: rank)
        part = knn(train, test, k=[1, 5])
        shares += [[part.top1[k], part.top5[k]] for k in (1, 5)]
    assert shares == pytest.approx(np.array([[whole.top1[k], whole.top5[k]] for k in (1, 5)]))
