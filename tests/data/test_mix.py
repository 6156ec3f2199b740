from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitrail.data.images import mix
from vitrail.data.images.mix import Mix
from vitrail.data.settings import Augment
from vitrail.errors import UsageError

CLASSES = 5


def batch(count: int = 8, side: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, side, side + 4), generator=generator, dtype=torch.uint8)
    return images, torch.arange(count) % CLASSES


def share_of(targets: torch.Tensor, labels: torch.Tensor, row: int = 0) -> float:
    """Weight of the own label, for an example whose partner has another one."""
    return targets[row, labels[row]].item()


def test_nothing_to_mix_returns_the_very_batch():
    images, labels = batch()
    mixed, targets = Mix(Augment(), CLASSES, seed=0)(images, labels, step=0)
    assert mixed is images and targets is labels


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("step", range(5))
def test_mixup_is_the_weighted_mean_with_the_image_half_a_batch_away(kind, step):
    images, labels = batch()
    before = images.clone()
    mixed, targets = Mix(Augment(mixup=0.8), CLASSES, seed=1)(images.to(kind), labels, step)
    share = share_of(targets, labels)
    assert 0.5 <= share <= 1
    own, other = images.double().numpy(), images.double().numpy()[[4, 5, 6, 7, 0, 1, 2, 3]]
    expected = share * own + (1 - share) * other
    assert mixed.dtype == kind and mixed.shape == images.shape
    assert abs(mixed.double().numpy() - expected).max() <= (0.501 if kind == torch.uint8 else 1e-3)
    one_hot = np.eye(CLASSES)[labels.numpy()]
    assert np.allclose(targets, share * one_hot + (1 - share) * one_hot[[4, 5, 6, 7, 0, 1, 2, 3]], atol=1e-6)
    assert (images == before).all()


def test_a_blend_does_not_depend_on_how_many_images_are_blended_at_once(monkeypatch):
    images, labels = batch(count=10)
    whole, _ = Mix(Augment(mixup=0.8), CLASSES, seed=1)(images, labels, step=0)
    assert not torch.equal(whole, images)
    monkeypatch.setattr(mix, "AT_ONCE", 3)
    parts, _ = Mix(Augment(mixup=0.8), CLASSES, seed=1)(images.to(memory_format=torch.channels_last), labels, step=0)
    assert torch.equal(parts, whole) and parts.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("step", range(20))
def test_cutmix_pastes_one_box_and_weighs_labels_by_its_area(step):
    images, labels = batch()
    before = images.clone()
    mixed, targets = Mix(Augment(cutmix=1.0), CLASSES, seed=2)(images, labels, step)
    other = images.roll(4, 0)
    assert ((mixed == images) | (mixed == other)).all()
    pasted = ((mixed == other) & (images != other)).any(dim=1).any(dim=0)  # [H, W]
    area = 0.0
    if pasted.any():
        rows, columns = pasted.any(1).nonzero()[:, 0], pasted.any(0).nonzero()[:, 0]
        box = pasted[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert box.all()
        area = box.numel() / pasted.numel()
    assert share_of(targets, labels) == pytest.approx(1 - area, abs=1e-6)
    assert mixed.dtype == torch.uint8 and (images == before).all()


@given(st.integers(1, 9), st.integers(0, 10**6), st.sampled_from([(0.2, 0.0), (0.0, 1.0), (0.8, 1.0)]))
def test_targets_are_distributions_for_any_batch_size(count, step, alphas):
    images, labels = batch(count)
    mixed, targets = Mix(Augment(mixup=alphas[0], cutmix=alphas[1]), CLASSES, seed=3)(images, labels, step)
    assert mixed.shape == images.shape
    assert targets.dtype == torch.float32 and targets.shape == (count, CLASSES)
    assert (targets >= 0).all() and torch.allclose(targets.sum(1), torch.ones(count))


def test_an_image_alone_stays_itself():
    images, labels = batch(1)
    mixed, targets = Mix(Augment(mixup=1.0), CLASSES, seed=0)(images, labels, step=5)
    assert (mixed == images).all() and targets[0].tolist() == [1, 0, 0, 0, 0]


def test_a_function_of_seed_and_step():
    images, labels = batch()
    augment = Augment(mixup=0.8, cutmix=1.0)

    def run(seed: int, step: int) -> torch.Tensor:
        return Mix(augment, CLASSES, seed)(images, labels, step)[0]

    torch.manual_seed(1)
    first = run(4, 9)
    torch.manual_seed(2)
    assert (run(4, 9) == first).all()
    assert (run(4, 10) != first).any() and (run(5, 9) != first).any()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("step", range(6))
def test_processes_with_every_world_th_image_agree_with_one(world, step):
    images, labels = batch(16)
    mix = Mix(Augment(mixup=0.8, cutmix=1.0), CLASSES, seed=6)
    mixed, targets = mix(images, labels, step)
    for rank in range(world):
        mine, my_targets = mix(images[rank::world], labels[rank::world], step)
        assert (mine == mixed[rank::world]).all() and (my_targets == targets[rank::world]).all()


def test_copies_of_repeated_augmentation_do_not_meet():
    images, _ = batch(12)
    labels = torch.arange(12) // 3 % CLASSES  # three neighbouring copies of each image
    _, targets = Mix(Augment(mixup=0.8), CLASSES, seed=0)(images, labels, step=0)
    assert ((targets > 0).sum(1) == 2).all()


def test_shares_and_choice_have_the_documented_distribution():
    images, labels = batch(2, side=64)
    mixup = Mix(Augment(mixup=0.4), CLASSES, seed=7)
    shares = np.array([share_of(mixup(images, labels, step)[1], labels) for step in range(1500)])
    beta = stats.beta(0.4, 0.4)  # the larger of x and 1 - x, x symmetric about a half
    assert stats.kstest(shares, lambda x: np.clip(2 * beta.cdf(x) - 1, 0, 1)).pvalue > 1e-3


def test_with_both_each_batch_takes_one_of_them_at_random():
    images, labels = batch(2)
    both = Mix(Augment(mixup=8.0, cutmix=1.0), CLASSES, seed=8)  # shares near a half: a blend shows everywhere
    mixed = [both(images, labels, step)[0] for step in range(400)]
    cut = [bool(((m == images) | (m == images.flip(0))).all()) for m in mixed]
    assert 160 < sum(cut) < 240  # four standard deviations


@pytest.mark.parametrize("field", ["mixup", "cutmix"])
@pytest.mark.parametrize("alpha", [-0.1, float("nan")])
def test_impossible_alphas_are_refused(field, alpha):
    with pytest.raises(UsageError, match=f"augment.{field}"):
        Mix(Augment(**{field: alpha}), CLASSES, seed=0)
