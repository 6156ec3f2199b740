from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge as Sklearn
from sklearn.preprocessing import StandardScaler

from vitrail.errors import DataError, UsageError
from vitrail.evaluation.features import Features
from vitrail.evaluation.fewshot import (
    BIAS,
    EPS,
    PROTOCOLS,
    FewShotImages,
    Ridge,
    ShotSelection,
    best_l2,
    bilinear,
    draw_shots,
    fewshot,
    protocol_named,
    ridge,
)

STRENGTHS = PROTOCOLS["paper-2020"].l2
SHAPES = [(40, 8), (8, 40), (24, 23), (24, 24), (24, 25)]  # images, features: on either side of n = width + 1


def draw_data(images: int, width: int, classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(images) % classes
    centres = np.random.default_rng(99).normal(size=(classes, width))
    return (centres[labels] + rng.normal(size=(images, width)) * 2 + 5).astype(np.float32), labels


def targets(labels: np.ndarray, classes: int = 3) -> np.ndarray:
    return 2.0 * np.eye(classes)[labels] - 1.0


def standardised(train: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What the protocols do to features, with scikit-learn's scaler."""
    scaler = StandardScaler().fit(train.astype(np.float64))
    scaler.scale_ = np.sqrt(scaler.var_) + 1e-5
    return np.hstack([scaler.transform(other.astype(np.float64)), np.full((len(other), 1), 100.0)])


@pytest.mark.parametrize(("images", "width"), SHAPES)
@pytest.mark.parametrize("form", ["primal", "dual", "auto"])
def test_the_solution_is_scikit_learns(images: int, width: int, form: Any) -> None:
    x, labels = draw_data(images, width)
    test, _ = draw_data(30, width, seed=1)
    fitted = Ridge.fit(x, labels, 3, form)
    design, asked = standardised(x, x), standardised(x, test)
    for l2 in STRENGTHS:
        theirs = Sklearn(alpha=l2, fit_intercept=False, solver="svd").fit(design, targets(labels))
        ours = fitted.weights(l2)
        np.testing.assert_allclose(ours, theirs.coef_.T, rtol=0, atol=1e-6 * np.abs(theirs.coef_).max())
        np.testing.assert_allclose(asked @ ours, theirs.predict(asked), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(fitted.answers(test, [l2])[0], theirs.predict(asked).argmax(1))


@pytest.mark.parametrize(("images", "width"), SHAPES)
def test_primal_and_dual_agree(images: int, width: int) -> None:
    x, labels = draw_data(images, width)
    primal, dual = (Ridge.fit(x, labels, 3, form) for form in ("primal", "dual"))  # type: ignore[arg-type]
    assert len(primal.eigenvalues) == width + 1 and len(dual.eigenvalues) == images
    for l2 in STRENGTHS:
        weights = dual.weights(l2)
        np.testing.assert_allclose(primal.weights(l2), weights, rtol=0, atol=1e-6 * np.abs(weights).max())


@pytest.mark.parametrize("l2", [1.0, 1024.0, 2.0**19])
def test_the_constant_is_a_bias_that_is_hardly_regularised(l2: float) -> None:
    """Standardised features have mean 0, so the bias is a problem of its own: mean target times n c² / (n c² + l2)."""
    x, labels = draw_data(40, 8, seed=2)
    weights = Ridge.fit(x, labels, 3).weights(l2)
    free = Sklearn(alpha=l2, fit_intercept=True).fit(standardised(x, x)[:, :-1], targets(labels))
    np.testing.assert_allclose(weights[:-1], free.coef_.T, rtol=0, atol=1e-6 * np.abs(free.coef_).max())
    shrunk = len(x) * BIAS**2 / (len(x) * BIAS**2 + l2)
    np.testing.assert_allclose(BIAS * weights[-1], shrunk * targets(labels).mean(0), rtol=1e-9)


def test_one_image_has_the_solution_one_can_write_down() -> None:
    """With one image every standardised feature is 0; only the constant is left."""
    fitted = Ridge.fit(np.array([[3.0, -7.0]], np.float32), np.array([1]), 2)
    np.testing.assert_array_equal(fitted.deviation, [EPS, EPS])
    expected = BIAS / (BIAS**2 + 10.0) * np.array([-1.0, 1.0])
    np.testing.assert_allclose(fitted.weights(10.0), [[0, 0], [0, 0], expected], atol=1e-15)


def test_accuracy_is_the_share_of_right_answers_for_each_strength() -> None:
    x, labels = draw_data(60, 12)
    test, truth = draw_data(90, 12, seed=3)
    found = ridge(x, labels, test, truth, classes=3, l2=[0.01, 1e3, 1e9])
    design, asked = standardised(x, x), standardised(x, test)
    for l2, top1 in zip([0.01, 1e3, 1e9], found, strict=True):
        answers = Sklearn(alpha=l2, fit_intercept=False).fit(design, targets(labels)).predict(asked).argmax(1)
        assert top1 == (answers == truth).mean()


def test_blocks_of_test_images_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = draw_data(30, 6)
    test, truth = draw_data(70, 6, seed=4)
    whole = ridge(x, labels, test, truth, classes=3, l2=STRENGTHS)
    monkeypatch.setattr("vitrail.evaluation.fewshot._ROWS", 16)
    np.testing.assert_array_equal(ridge(x, labels, test, truth, classes=3, l2=STRENGTHS), whole)


def test_one_eigendecomposition_serves_all_strengths(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    eigh = np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda a: calls.append(a.shape) or eigh(a))
    x, labels = draw_data(30, 6)
    ridge(x, labels, x, labels, classes=3, l2=STRENGTHS)
    assert calls == [(7, 7)]
    ridge(x[:5], labels[:5], x, labels, classes=3, l2=STRENGTHS)
    assert calls[1:] == [(5, 5)]  # of either form the smaller


@given(seed=st.integers(0, 10**6), images=st.integers(3, 30), width=st.integers(1, 20))
def test_order_of_images_features_and_classes_does_not_matter(seed: int, images: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    x, labels = draw_data(images, width, seed=seed)
    rows, columns, classes = rng.permutation(images), rng.permutation(width), rng.permutation(3)
    plain = Ridge.fit(x, labels, 3).weights(1024.0)
    moved = Ridge.fit(x[rows][:, columns], classes[labels[rows]], 3).weights(1024.0)
    expected = plain[[*columns, width]]
    np.testing.assert_allclose(moved[:, classes], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("l2", [0.0, -1.0, float("nan"), float("inf")])
def test_a_strength_must_be_above_zero(l2: float) -> None:
    x, labels = draw_data(6, 2)
    with pytest.raises(UsageError, match="must be above 0 and finite"):
        ridge(x, labels, x, labels, classes=3, l2=[1.0, l2])


# which images are shots

counts = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(counts=counts, seed=st.integers(0, 99), unknown=st.integers(0, 4))
def test_shots_are_those_that_the_protocol_draws(counts: list[int], seed: int, unknown: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(-1, len(counts)), [unknown, *counts]))
    found = draw_shots(labels, len(counts), [1, 2, 5], seed)
    rng = np.random.default_rng(seed)  # protocols.md 3.1, as it stands there
    shuffled = [rng.permutation(np.where(labels == c)[0]) for c in range(len(counts))]
    for shots in (1, 2, 5):
        np.testing.assert_array_equal(found[shots], np.concatenate([rows[:shots] for rows in shuffled]))
    assert set(found[1]) <= set(found[2]) <= set(found[5])
    first = draw_shots(labels, len(counts), [2], None)[2]
    np.testing.assert_array_equal(first, np.concatenate([np.where(labels == c)[0][:2] for c in range(len(counts))]))


def plan(labels: Any, **more: Any) -> ShotSelection:
    return ShotSelection(np.asarray(labels, dtype=np.int64), ["cat", "dog", "eel"], **more)


def test_a_plan_knows_its_images_before_any_feature() -> None:
    labels = np.arange(60) % 3
    made = plan(labels, shots=(5, 1), seeds=2)
    assert made.shots == (1, 5) and made.l2 == (1024.0,) and len(made.draws) == 2
    drawn = np.concatenate([found[5] for found in made.draws])
    np.testing.assert_array_equal(made.rows, np.unique(drawn))
    assert len(made.rows) < 60
    np.testing.assert_array_equal(plan(labels, protocol="paper-2020", shots=(2,)).rows, np.arange(6))


def test_the_published_protocols() -> None:
    assert PROTOCOLS["big_vision-2023"].l2 == (1024.0,) and PROTOCOLS["big_vision-2023"].seeds == 3
    assert (STRENGTHS[0], STRENGTHS[-1], len(STRENGTHS)) == (2.0**-10, 2.0**19, 30)
    with pytest.raises(UsageError, match="Did you mean 'paper-2020'"):
        protocol_named("paper-2002")


def test_a_class_with_too_few_images_gives_all_it_has_and_one_without_any_is_named() -> None:
    made = plan([0, 0, 0, 1, 1, 2], shots=(1, 2, 3))
    assert made.short == {2: ["eel"], 3: ["dog", "eel"]}
    assert sorted(made.draws[0][3]) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(DataError, match=r"no training image of 'dog', 'eel': few-shot needs at least one"):
        plan([0, 0, -1])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(shots=(0, 1)), "both must be at least 1"),
        (dict(seeds=0), "both must be at least 1"),
        (dict(protocol="paper-2020", seeds=3), "takes the first of each class"),
        (dict(l2=(0.0,)), "must be above 0"),
    ],
)
def test_plans_that_make_no_sense(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan([0, 1, 2], **more)


# the whole


def features(images: int, width: int, seed: int) -> Features:
    x, labels = draw_data(images, width, seed=seed)
    return Features(x, labels, np.arange(images), ["cat", "dog", "eel"])


def test_numbers_are_those_of_the_drawn_images_by_scikit_learn() -> None:
    train, test = features(90, 10, 0), features(60, 10, 1)
    found = fewshot(plan(train.labels, shots=(1, 5), seeds=3, l2=(1.0, 1024.0)), train, test)
    assert found.top1.shape == (2, 2, 3) and found.test_images == 60
    for i, shots in enumerate((1, 5)):
        for seed in range(3):
            rng = np.random.default_rng(seed)
            rows = np.concatenate([rng.permutation(np.where(train.labels == c)[0])[:shots] for c in range(3)])
            design, asked = (standardised(train.features[rows], x) for x in (train.features[rows], test.features))
            for j, l2 in enumerate((1.0, 1024.0)):
                model = Sklearn(alpha=l2, fit_intercept=False).fit(design, targets(train.labels[rows]))
                assert found.top1[i, j, seed] == (model.predict(asked).argmax(1) == test.labels).mean()
    np.testing.assert_allclose(found.mean, np.mean(found.top1, axis=2))
    np.testing.assert_allclose(found.std, np.apply_along_axis(statistics.stdev, 2, found.top1), atol=1e-12)
    assert found.top1[1].mean() > 0.4  # classes apart by their centres are told apart better than by chance


def test_features_of_the_shots_alone_are_enough_and_a_missing_one_is_left_out() -> None:
    train, test = features(90, 10, 0), features(60, 10, 1)
    made = plan(train.labels, shots=(1, 5))
    part = Features(train.features[made.rows], train.labels[made.rows], made.rows, train.class_names)
    np.testing.assert_array_equal(fewshot(made, part, test).top1, fewshot(made, train, test).top1)
    kept = np.delete(np.arange(90), made.draws[0][5][0])
    fewer = Features(train.features[kept], train.labels[kept], kept, train.class_names)
    without = plan(train.labels, shots=(5,), seeds=1)
    rows = without.draws[0][5][1:]
    expected = ridge(train.features[rows], train.labels[rows], test.features, test.labels, classes=3, l2=[1024.0])
    np.testing.assert_array_equal(fewshot(without, fewer, test).top1[0, :, 0], expected)


def test_one_seed_has_no_deviation() -> None:
    train, test = features(30, 4, 0), features(30, 4, 1)
    assert np.isnan(fewshot(plan(train.labels, protocol="paper-2020", shots=(2,)), train, test).std).all()


def test_features_that_do_not_fit_are_refused() -> None:
    train, test = features(30, 4, 0), features(30, 5, 1)
    with pytest.raises(DataError, match="training images have 4 features and test images 5"):
        fewshot(plan(train.labels), train, test)
    train.features[4, 2] = np.inf
    with pytest.raises(DataError, match="training image 4 are not finite"):
        fewshot(plan(train.labels), train, features(30, 4, 1))


def test_the_strength_of_the_paper_ranks_best_over_data_sets() -> None:
    rng = np.random.default_rng(0)
    strengths = [2.0**power for power in range(-3, 4)]
    accuracies = [{(5, l2): float(rng.random()) for l2 in strengths} for _ in range(6)]
    ranks = np.mean([scipy.stats.rankdata([found[5, l2] for l2 in strengths]) for found in accuracies], axis=0)
    assert best_l2(accuracies) == {5: strengths[int(ranks.argmax())]}
    # one data set much better at a strength that all others dislike does not decide
    high = {(1, 1.0): 0.5, (1, 2.0): 0.9}, {(1, 1.0): 0.6, (1, 2.0): 0.5}, {(1, 1.0): 0.61, (1, 2.0): 0.6}
    assert best_l2(high) == {1: 1.0}
    assert best_l2(high[:1]) == {1: 2.0}


# images as the protocol prepares them


@pytest.mark.parametrize(("height", "width"), [(300, 500), (224, 224), (90, 31), (1, 1), (256, 256)])
def test_images_are_resized_between_pixel_centres_without_antialiasing(height: int, width: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    exact = F.interpolate(torch.from_numpy(image).permute(2, 0, 1)[None].double(), (256, 256), mode="bilinear")[0]
    ours = bilinear(image, 256, 256).astype(float)
    error = exact.permute(1, 2, 0).numpy() - ours
    assert error.min() > -1e-2 and error.max() < 1 + 1e-2  # cut off, not rounded


def test_images_are_squashed_and_their_middle_is_kept() -> None:
    ramp = np.repeat(np.linspace(0, 255, 512).astype(np.uint8)[None, :, None], 64, 0).repeat(3, 2)
    seen = FewShotImages((224, 224))(ramp, np.random.default_rng(0))
    assert seen.shape == (224, 224, 3)
    np.testing.assert_array_equal(seen, bilinear(ramp, 256, 256)[16:240, 16:240])
    small = FewShotImages((32, 64))(ramp, np.random.default_rng(0))
    np.testing.assert_array_equal(small, bilinear(ramp, 36, 73)[2:34, 4:68])
