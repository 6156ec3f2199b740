from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from vitrail.data.loading.order import stream
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.features import Features
from vitrail.transfer.linear_probe import ORDER, Stack, held_out, linear_probe, measure, train_stack

PAIRS = [(0.01, 0.0), (0.3, 0.0), (0.1, 1e-2), (1.0, 0.3)]


def features(images: int = 60, width: int = 6, classes: int = 3, seed: int = 0) -> Features:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(images) % classes)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    x = (centres[labels] + rng.normal(size=(images, width))) * 3 + 7
    return Features(x.astype(np.float32), labels, np.arange(images), [str(name) for name in range(classes)])


def stacked(data: Features, pairs: list[tuple[float, float]], **more: Any) -> Stack:
    how: dict[str, Any] = dict(classes=len(data.class_names), epochs=5, minibatch=16, seed=3, device="cpu") | more
    return train_stack(data.features, data.labels, np.arange(len(data)), pairs, **how)


def test_each_of_many_ends_as_it_does_alone() -> None:
    data = features()
    together = stacked(data, PAIRS)
    for number, pair in enumerate(PAIRS):
        alone = stacked(data, [pair])
        torch.testing.assert_close(together.weight[number], alone.weight[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(together.bias[number], alone.bias[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pair", PAIRS)
def test_each_of_many_is_what_torchs_sgd_gives(pair: tuple[float, float]) -> None:
    """Autograd, nn.Linear, torch's SGD and cosine, on features from scikit-learn's scaler."""
    data = features()
    found = stacked(data, PAIRS)
    x = torch.from_numpy(StandardScaler().fit_transform(data.features.astype(np.float64))).float()
    label = torch.from_numpy(data.labels)
    head = torch.nn.Linear(6, 3)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    lr, decay = pair
    groups = [{"params": [head.weight], "weight_decay": decay}, {"params": [head.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5 * 4)
    for epoch in range(5):
        for rows in np.array_split(stream(3, epoch, 0, ORDER).permutation(60), [16, 32, 48]):
            optimizer.zero_grad()
            F.cross_entropy(head(x[rows]), label[rows]).backward()
            optimizer.step()
            schedule.step()
    number = PAIRS.index(pair)
    torch.testing.assert_close(found.weight[number], head.weight.detach(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.bias[number], head.bias.detach(), rtol=1e-3, atol=1e-5)


def test_long_training_ends_at_scikit_learns_optimum() -> None:
    data, decay = features(images=90), 0.05
    found = stacked(data, [(0.3, decay)], epochs=400, minibatch=90)
    x = StandardScaler().fit_transform(data.features.astype(np.float64))
    exact = LogisticRegression(C=1 / (len(data) * decay), tol=1e-10, max_iter=1000).fit(x, data.labels)
    np.testing.assert_allclose(found.weight[0].numpy(), exact.coef_, atol=1e-4)
    bias = found.bias[0].numpy()
    np.testing.assert_allclose(bias - bias.mean(), exact.intercept_ - exact.intercept_.mean(), atol=1e-4)


def test_measures_are_scikit_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = features(classes=8, images=80), features(classes=8, images=70, seed=1)
    made = stacked(train, PAIRS)
    found = measure(made, test.features, test.labels, np.arange(70))
    logits = made.logits(made.standardised(test.features)).double()
    for number, (top1, top5, nll) in enumerate(found):
        shares = logits[:, number].softmax(dim=1).numpy()
        assert top1 == pytest.approx(sklearn.metrics.accuracy_score(test.labels, shares.argmax(1)))
        assert top5 == pytest.approx(sklearn.metrics.top_k_accuracy_score(test.labels, shares, k=5, labels=range(8)))
        assert nll == pytest.approx(sklearn.metrics.log_loss(test.labels, shares, labels=range(8)), rel=1e-5)


def test_the_best_on_held_out_images_is_chosen_and_trained_again_on_all() -> None:
    train, test = features(images=100), features(images=60, seed=1)
    found = linear_probe(train, test, lr=(1e-5, 1e-3, 0.1), weight_decay=(0.0, 0.1), epochs=4, minibatch=16, seed=3)
    assert [(one.lr, one.weight_decay) for one in found.settings] == [
        (lr, decay) for decay in (0.0, 0.1) for lr in (1e-5, 1e-3, 0.1)
    ]
    kept, held = held_out(train.labels, 3)
    part = Features(train.features[kept], train.labels[kept], np.arange(len(kept)), train.class_names)
    for one in found.settings:
        how: dict[str, Any] = dict(classes=3, epochs=4, minibatch=16, seed=3, device="cpu")
        alone = train_stack(train.features, train.labels, kept, [(one.lr, one.weight_decay)], **how)
        ((top1, _, nll),) = measure(alone, train.features, train.labels, held)
        assert (one.top1, one.nll) == (pytest.approx(top1), pytest.approx(nll, rel=1e-4))
    assert found.chosen.top1 == max(one.top1 for one in found.settings)
    assert found.chosen.nll == min(one.nll for one in found.settings if one.top1 == found.chosen.top1)
    final = stacked(train, [(found.chosen.lr, found.chosen.weight_decay)], epochs=4)
    ((top1, top5, nll),) = measure(final, test.features, test.labels, np.arange(60))
    assert (found.top1, found.top5, found.nll) == (top1, top5, nll)
    assert len(part) + found.held_out_images == found.train_images == 100


def test_the_test_images_have_no_say_and_the_seed_decides() -> None:
    train, test = features(images=100), features(images=60, seed=1)
    how: dict[str, Any] = dict(lr=(1e-3, 0.1), epochs=3, minibatch=16)
    first = linear_probe(train, test, **how)
    wrong = replace(test, labels=(test.labels + 1) % 3)
    other = linear_probe(train, wrong, **how)
    assert (other.settings, other.chosen) == (first.settings, first.chosen) and other.top1 < first.top1
    assert linear_probe(train, test, **how) == first
    assert linear_probe(train, test, seed=1, **how).settings != first.settings


def test_a_tenth_of_each_class_is_held_out() -> None:
    labels = np.repeat([0, 1, 2, 3], [100, 20, 2, 1])
    kept, held = held_out(labels, 0)
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, held])), np.arange(123))
    np.testing.assert_array_equal(np.bincount(labels[held], minlength=4), [10, 2, 1, 0])
    assert not np.array_equal(held, held_out(labels, 1)[1])
    with pytest.raises(DataError, match="no class has two training images"):
        held_out(np.arange(5), 0)


def test_what_diverges_is_not_chosen_and_does_not_touch_its_neighbours() -> None:
    train, test = features(images=80), features(images=40, seed=1)
    found = linear_probe(train, test, lr=(1e-4, 10.0), weight_decay=(1e3,), epochs=20, minibatch=16)
    assert not np.isfinite(found.settings[1].nll) and found.settings[1].top1 == 0.0
    assert found.chosen == found.settings[0] and np.isfinite(found.settings[0].nll)
    alone = linear_probe(train, test, lr=(1e-4,), weight_decay=(1e3,), epochs=20, minibatch=16)
    assert alone.chosen.nll == pytest.approx(found.settings[0].nll, rel=1e-5)
    with pytest.raises(UsageError, match="training diverged at every learning rate, from 10 on"):
        linear_probe(train, test, lr=(10.0,), weight_decay=(1e3,), epochs=20, minibatch=16)


def test_a_constant_feature_does_no_harm() -> None:
    train, test = features(), features(seed=1)
    wide = [
        Features(np.hstack([f.features, np.full((len(f), 1), 0.1, np.float32)]), f.labels, f.index, f.class_names)
        for f in (train, test)
    ]
    found = linear_probe(*wide, lr=(0.1,), epochs=5)
    assert found.top1 == pytest.approx(linear_probe(train, test, lr=(0.1,), epochs=5).top1)
    assert found.top1 > 0.5


@pytest.mark.parametrize("more", [dict(lr=()), dict(lr=(0.0,)), dict(weight_decay=(-1.0,)), dict(epochs=0)])
def test_settings_that_make_no_sense(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="learning rates are above 0"):
        linear_probe(features(), features(seed=1), **more)


def test_features_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="training images have 6 features and test images 7"):
        linear_probe(features(), features(width=7))
