from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from timm.loss import AsymmetricLossMultiLabel
from torch import Tensor, nn
from torchvision.ops import sigmoid_focal_loss

from vitrail.data.settings import Augment
from vitrail.errors import UsageError
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.objective.settings import Supervised
from vitrail.objective.supervised import SupervisedObjective, soft_targets, supervised_loss

PLAIN = Augment(crop="center", flip=False)


@dataclass
class Images:
    images: Tensor
    labels: Tensor
    index: Tensor


class Tiny(nn.Module):
    """Mean colour -> logits; enough to have a gradient."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.float().mean((2, 3)) / 255)


def batch(count: int, classes: int, seed: int = 0) -> Images:
    rng = torch.Generator().manual_seed(seed)
    return Images(
        torch.randint(0, 256, (count, 3, 4, 4), generator=rng, dtype=torch.uint8),
        torch.randint(0, classes, (count,), generator=rng),
        torch.arange(count),
    )


def objective(classes: int = 5, augment: Augment = PLAIN, **settings: object) -> SupervisedObjective:
    torch.manual_seed(0)
    return SupervisedObjective(Tiny(classes), Supervised(**settings), augment, classes, seed=3)  # type: ignore[arg-type]


def random_case(seed: int, soft: bool) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(7, 6, generator=rng, dtype=torch.float64)
    if soft:
        return logits, torch.rand(7, 6, generator=rng, dtype=torch.float64).softmax(-1)
    return logits, torch.randint(0, 6, (7,), generator=rng)


def one_hot(targets: Tensor, classes: int) -> np.ndarray:
    return np.eye(classes)[targets.numpy()] if targets.ndim == 1 else targets.numpy()


@given(st.integers(0, 10**6), st.booleans(), st.floats(0, 0.9))
def test_softmax_is_minus_the_targets_log_probability(seed: int, soft: bool, smoothing: float) -> None:
    logits, targets = random_case(seed, soft)
    z, t = logits.numpy(), one_hot(targets, 6)
    t = (1 - smoothing) * t + smoothing / 6
    expected = (t * (np.log(np.exp(z).sum(1, keepdims=True)) - z)).sum(1)
    ours = supervised_loss(logits, targets, Supervised(smoothing=smoothing))
    np.testing.assert_allclose(ours.numpy(), expected, rtol=2e-5, atol=1e-5)


@given(st.integers(0, 10**6), st.booleans(), st.floats(0, 0.9))
def test_sigmoid_sums_and_bce_averages_over_classes(seed: int, soft: bool, smoothing: float) -> None:
    logits, targets = random_case(seed, soft)
    z, t = logits.numpy(), one_hot(targets, 6)
    t = (1 - smoothing) * t + smoothing / 6
    s = 1 / (1 + np.exp(-z))
    expected = -(t * np.log(s) + (1 - t) * np.log1p(-s)).sum(1)
    sigmoid = supervised_loss(logits, targets, Supervised(loss="sigmoid", smoothing=smoothing))
    bce = supervised_loss(logits, targets, Supervised(loss="bce", smoothing=smoothing))
    np.testing.assert_allclose(sigmoid.numpy(), expected, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(bce.numpy(), expected / 6, rtol=2e-5, atol=1e-5)


def test_smoothing_agrees_with_torch() -> None:
    logits, targets = random_case(1, soft=False)
    theirs = F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(supervised_loss(logits, targets, Supervised(smoothing=0.1)).double(), theirs)


def test_threshold_comes_before_smoothing() -> None:
    mixed = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.1, 0.9]])
    config = Supervised(loss="bce", bce_threshold=0.2, smoothing=0.3)
    expected = torch.tensor([[0.8, 0.8, 0.1], [0.1, 0.1, 0.8]])
    torch.testing.assert_close(soft_targets(mixed, 3, config), expected)


def test_losses_of_reduced_precision_logits_are_computed_in_float32() -> None:
    logits, targets = random_case(2, soft=False)
    rounded = logits.bfloat16()
    for config in (Supervised(), Supervised(loss="sigmoid"), Supervised(loss="bce")):
        ours = supervised_loss(rounded, targets, config)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, supervised_loss(rounded.float(), targets, config), rtol=0, atol=0)


def test_the_initial_loss_of_a_head_bias_has_a_closed_form() -> None:
    classes, bias = 21, -10.0
    task = objective(classes, loss="sigmoid", head_bias=bias)
    nn.init.zeros_(task.model.head.weight)
    total, count, _ = task(batch(9, classes), step=0)
    # one class should be on, at logit -10; the others should be off, and nearly are
    each = np.log1p(np.exp(-bias)) + (classes - 1) * np.log1p(np.exp(bias))
    assert count == 9
    assert total.item() == pytest.approx(9 * each, rel=1e-5)


def test_a_head_bias_is_that_of_both_heads_of_a_distilled_model() -> None:
    """Fresh heads are zero, so every logit is the bias, as with one head."""
    config = ViTConfig.of(width=16, depth=1, heads=2, mlp_dim=16, patch=4, image_size=4, classes=21, distilled=True)
    task = SupervisedObjective(ViT(config), Supervised(loss="sigmoid", head_bias=-10.0), PLAIN, 21, seed=3)
    total, _, _ = task(batch(9, 21), step=0)
    assert total.item() == pytest.approx(9 * (np.log1p(np.exp(10)) + 20 * np.log1p(np.exp(-10))), rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid", "bce"])
@pytest.mark.parametrize("mixing", [Augment(), Augment(mixup=0.8, cutmix=1.0)])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_parts_of_a_batch_sum_to_the_whole(loss: str, mixing: Augment, parts: int) -> None:
    task = objective(augment=mixing, loss=loss, smoothing=0.1)
    data = batch(7, 5)
    whole, count, metrics = task(data, step=4)
    pieces = [task(part, step=4) for part in task.prepare(data, step=4).split(parts)]
    assert sum(n for _, n, _ in pieces) == count == 7
    assert sum(value.item() for value, _, _ in pieces) == pytest.approx(whole.item(), rel=1e-6)
    assert sum(int(m["top1"]) for _, _, m in pieces) == int(metrics["top1"])


def marked(seed: int, count: int = 7, classes: int = 6) -> Tensor:
    """Several labels for each image, and none for the first."""
    rng = torch.Generator().manual_seed(seed)
    marks = (torch.rand(count, classes, generator=rng) < 0.4).to(torch.int8)
    marks[0] = 0
    return marks


@pytest.mark.parametrize(
    "gammas", [(0.0, 4.0, 0.05), (1.0, 4.0, 0.05), (0.0, 2.0, 0.0), (0.0, 0.0, 0.0), (2.0, 3.0, 0.2)]
)
def test_asymmetric_loss_and_its_gradient_are_those_of_timm(gammas: tuple[float, float, float]) -> None:
    positive, negative, margin = gammas
    theirs = AsymmetricLossMultiLabel(negative, positive, margin, eps=1e-12)
    config = Supervised(loss="asymmetric", gamma_positive=positive, gamma_negative=negative, margin=margin)
    logits, marks = random_case(3, soft=False)[0].requires_grad_(), marked(3)
    expected = 7 * theirs(logits, marks.double())  # a mean over images
    (their_gradient,) = torch.autograd.grad(expected, logits)
    ours = supervised_loss(logits, marks, config)
    (gradient,) = torch.autograd.grad(ours.sum(), logits)
    assert ours.shape == (7,)
    torch.testing.assert_close(ours.sum(), expected, rtol=1e-5, atol=1e-6, check_dtype=False)  # theirs is float32
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-4, atol=1e-5)


def test_asymmetric_loss_has_a_closed_form_for_mixed_targets() -> None:
    logits, targets = random_case(4, soft=True)
    z, t = logits.numpy(), targets.numpy()
    p = 1 / (1 + np.exp(-z))
    q = np.maximum(p - 0.1, 0)
    expected = -(t * (1 - p) ** 1.5 * np.log(p) + (1 - t) * q**3 * np.log(1 - q)).sum(1)
    config = Supervised(loss="asymmetric", gamma_positive=1.5, gamma_negative=3.0, margin=0.1)
    np.testing.assert_allclose(supervised_loss(logits, targets, config).numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("gamma", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("loss", ["sigmoid", "bce"])
def test_focal_loss_of_several_labels_and_its_gradient_are_torchvisions(loss: str, gamma: float) -> None:
    logits, marks = random_case(6, soft=False)[0].requires_grad_(), marked(6)
    theirs = sigmoid_focal_loss(logits, marks.double(), alpha=-1, gamma=gamma)
    expected = theirs.sum(1) if loss == "sigmoid" else theirs.mean(1)
    ours = supervised_loss(logits, marks, Supervised(loss=loss, focal_gamma=gamma))  # type: ignore[arg-type]
    torch.testing.assert_close(ours, expected)
    for found, wanted in zip(*(torch.autograd.grad(one.sum(), logits) for one in (ours, expected)), strict=True):
        torch.testing.assert_close(found, wanted)


@given(st.integers(0, 10**6), st.booleans(), st.floats(0, 0.9), st.sampled_from([0.5, 1.0, 2.0, 5.0]))
def test_focal_loss_of_classes_has_a_closed_form(seed: int, soft: bool, smoothing: float, gamma: float) -> None:
    """Also for mixed and smoothed targets, in which it is linear."""
    logits, targets = random_case(seed, soft)
    z, t = logits.numpy(), one_hot(targets, 6)
    t = (1 - smoothing) * t + smoothing / 6
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    expected = -(t * (1 - p) ** gamma * np.log(p)).sum(1)
    ours = supervised_loss(logits, targets, Supervised(smoothing=smoothing, focal_gamma=gamma))
    np.testing.assert_allclose(ours.numpy(), expected, rtol=2e-5, atol=1e-5)


def test_focal_loss_goes_with_class_weights_and_mixing() -> None:
    """A mixed image counts as its parts do, each with the weight of its class."""
    settings = Supervised(focal_gamma=2.0, class_weights="balanced")
    torch.manual_seed(0)
    task = SupervisedObjective(Tiny(3), settings, Augment(mixup=0.5), 3, seed=3, class_counts=(1, 4, 5))
    prepared = task.prepare(batch(6, 3), step=1)
    logits = task.model(prepared.images).double()
    weights = np.array([10 / 3 / 1, 10 / 3 / 4, 10 / 3 / 5])
    p = logits.softmax(1).detach().numpy()
    expected = -(prepared.targets.numpy() * weights * (1 - p) ** 2 * np.log(p)).sum()
    assert task.loss(prepared)[0].item() == pytest.approx(expected, rel=1e-5)


def test_focal_loss_of_extreme_logits_has_a_finite_gradient_and_asymmetric_none() -> None:
    logits = torch.tensor([[-200.0, 200.0, 0.0]], requires_grad=True)
    for loss in ("softmax", "sigmoid", "bce"):
        for label in (0, 1):
            config = Supervised(loss=loss, focal_gamma=0.5)  # type: ignore[arg-type]
            value = supervised_loss(logits, torch.tensor([label]), config).sum()
            assert value.isfinite() and torch.autograd.grad(value, logits)[0].isfinite().all()
    with pytest.raises(UsageError, match=r"focal_gamma is for .* softmax, sigmoid and bce"):
        objective(loss="asymmetric", focal_gamma=2.0)


def test_extreme_logits_have_a_finite_gradient() -> None:
    logits = torch.tensor([[-200.0, 200.0, -200.0, 200.0]], requires_grad=True)
    marks = torch.tensor([[1, 1, 0, 0]], dtype=torch.int8)
    for gammas in ({}, {"gamma_positive": 0.5, "gamma_negative": 0.5}, {"margin": 0.0}):
        loss = supervised_loss(logits, marks, Supervised(loss="asymmetric", **gammas)).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("loss", ["sigmoid", "bce"])
def test_several_labels_are_targets_of_ones(loss: str) -> None:
    """As torch computes it."""
    logits, marks = random_case(5, soft=False)[0], marked(5)
    each = F.binary_cross_entropy_with_logits(logits, marks.double(), reduction="none")
    ours = supervised_loss(logits, marks, Supervised(loss=loss))  # type: ignore[arg-type]
    torch.testing.assert_close(ours, each.sum(1) if loss == "sigmoid" else each.mean(1))


@pytest.mark.parametrize("mixing", [Augment(mixup=0.8), Augment(cutmix=1.0), Augment()])
def test_mixing_and_cutting_batches_of_several_labels(mixing: Augment) -> None:
    task, data = objective(augment=mixing, loss="sigmoid"), batch(6, 5)
    data.labels = marked(1, 6, 5)
    prepared = task.prepare(data, step=2)
    partner = data.labels.roll(3, 0).double()
    if mixing == Augment():
        assert prepared.targets is prepared.labels
    else:
        # one share for the batch: t = s own + (1 - s) other, so t - other = s (own - other)
        own = data.labels.double()
        differs = own != partner
        share = ((prepared.targets - partner) / (own - partner))[differs]
        assert differs.any() and torch.allclose(share, share[0]) and 0 <= share[0] <= 1
        assert torch.equal(prepared.targets[~differs], own[~differs].float())
    whole, count, metrics = task(prepared, step=2)
    pieces = [task(part, step=2) for part in prepared.split(4)]
    assert count == 6 and sum(value.item() for value, _, _ in pieces) == pytest.approx(whole.item(), rel=1e-6)
    best = task.model(prepared.images).argmax(1)
    assert int(metrics["top1"]) == sum(int(data.labels[row, best[row]]) for row in range(6))


def test_split_never_makes_an_empty_part() -> None:
    prepared = objective().prepare(batch(3, 5), step=0)
    assert [len(part) for part in prepared.split(8)] == [1, 1, 1]


def test_the_first_images_keep_all_that_belongs_to_them() -> None:
    prepared = objective(augment=Augment(mixup=1.0)).prepare(batch(6, 5), step=0)
    prepared = replace(prepared, precomputed=torch.rand(6, 2), numbers=(3,))
    for count in (2, 9):
        first = prepared.first(count)
        pairs = zip(first.columns(), prepared.columns(), strict=True)
        assert all(torch.equal(mine, column[:count]) for mine, column in pairs) and len(first.columns()) == 5
        assert first.numbers == (3,) and len(first) == min(count, 6)


def test_top1_counts_the_label_before_mixing() -> None:
    task = objective(augment=Augment(mixup=1.0))
    data = batch(64, 5)
    prepared = task.prepare(data, step=0)
    assert prepared.targets.shape == (64, 5) and not torch.equal(prepared.images, data.images)
    _, _, metrics = task(prepared, step=0)
    expected = (task.model(prepared.images).argmax(-1) == data.labels).sum()
    assert metrics["top1"] == expected


def test_mixing_is_a_function_of_seed_and_step() -> None:
    task = objective(augment=Augment(mixup=1.0, cutmix=1.0))
    data = batch(8, 5)
    first, again, later = (task.prepare(data, step=step) for step in (5, 5, 6))
    assert torch.equal(first.images, again.images) and torch.equal(first.targets, again.targets)
    assert not torch.equal(first.targets, later.targets)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match=r"bce_threshold needs objective\.loss: bce, not softmax"):
        objective(bce_threshold=0.0)
    with pytest.raises(UsageError, match="smoothing is 1"):
        objective(smoothing=1.0)
    with pytest.raises(UsageError, match="linear classifier"):
        SupervisedObjective(nn.Flatten(), Supervised(head_bias=-1.0), PLAIN, 2, 0)
