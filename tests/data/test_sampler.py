"""Sampling by class: its shares, and that an epoch is a function of seed and epoch only."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.item import Item
from vitrail.data.loading.loader import Batch, Loader
from vitrail.data.loading.order import ClassSampler, EpochOrder, class_shares, places_per_class, stream
from vitrail.errors import UsageError

SIDE = 2


class Labelled:
    """Image i is filled with i, and has the label `labels[i]`."""

    def __init__(self, labels: np.ndarray) -> None:
        self.labels = labels
        self.class_names = [f"class {number}" for number in range(int(labels.max()) + 1)]
        self.sizes = np.zeros(len(labels), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        return Item(np.full((SIDE, SIDE, 3), index, np.uint8), int(self.labels[index]), self.id(index))

    def id(self, index: int) -> str:
        return str(index)


def noise(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    drawn = random.integers(0, 256, image.shape, dtype=np.uint8)
    drawn[..., 0] = image[..., 0]
    return drawn


LABELS = np.repeat(np.arange(3), (40, 8, 2))


def epoch(number: int = 0, start: int = 0, **options: object) -> list[Batch]:
    values: dict[str, object] = dict(transform=noise, image_size=SIDE, batch_size=10, seed=3, sampler="balanced")
    loader = Loader(Labelled(LABELS), **{**values, **options})  # type: ignore[arg-type]
    try:
        return list(loader.epoch(number, start))
    finally:
        loader.close()


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any),
    st.integers(0, 4),
    st.sampled_from(["uniform", "sqrt", "balanced"]),
    st.integers(0, 10**6),
)
def test_an_epoch_gives_each_class_its_share_and_each_image_of_a_class_the_same(
    counts: list[int], unlabelled: int, sampling: str, seed: int
) -> None:
    labels = np.concatenate([np.repeat(np.arange(len(counts)), counts), np.full(unlabelled, -1)])
    sampler = ClassSampler(labels, sampling)  # type: ignore[arg-type]
    shown = sampler.draw(stream(seed, 0, 0))
    before, index = np.divmod(shown, len(labels))
    assert len(shown) == len(labels) and len(set(shown.tolist())) == len(shown) and before.max() < sampler.most
    wanted = np.array(counts) ** {"uniform": 1.0, "sqrt": 0.5, "balanced": 0.0}[sampling] * (np.array(counts) > 0)
    found = np.bincount(labels[index], minlength=len(counts))  # an unlabelled image would be an error here
    assert np.abs(found - len(labels) * wanted / wanted.sum()).max() < 1 + 1e-6
    times = Counter(index.tolist())
    for klass in range(len(counts)):
        each = [times[image] for image in np.flatnonzero(labels == klass).tolist()]
        assert not each or max(each) - min(each) <= 1


def test_over_epochs_the_shares_are_exact() -> None:
    sampler = ClassSampler(LABELS, "sqrt")
    draws = [LABELS[sampler.draw(stream(0, number, 0)) % len(LABELS)] for number in range(400)]
    mean = np.mean([np.bincount(drawn, minlength=3) for drawn in draws], axis=0)
    roots = np.sqrt([40, 8, 2])
    np.testing.assert_allclose(mean, 50 * roots / roots.sum(), atol=0.1)
    np.testing.assert_allclose(places_per_class(LABELS, 3, "sqrt"), 50 * roots / roots.sum())
    assert class_shares(np.array([5, 0, 1]), "balanced").tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize("options", [{"workers": 2}, {"cache": True}, {"workers": 1, "cache": True}])
def test_threads_and_cache_change_no_bit(options: dict[str, object]) -> None:
    for ours, theirs in zip(epoch(1), epoch(1, **options), strict=True):
        assert torch.equal(ours.images, theirs.images) and torch.equal(ours.index, theirs.index)


def test_processes_share_the_same_batches_and_a_resume_begins_anywhere() -> None:
    alone = epoch(2)
    halves = [epoch(2, batch_size=5, rank=rank, world=2) for rank in (0, 1)]
    for whole, first, second in zip(alone, *halves, strict=True):
        assert torch.equal(whole.images[0::2], first.images) and torch.equal(whole.images[1::2], second.images)
    for ours, theirs in zip(alone[3:], epoch(2, start=3), strict=True):
        assert torch.equal(ours.images, theirs.images)
    orders = {tuple(torch.cat([batch.index for batch in epoch(number)]).tolist()) for number in (0, 1, 2)}
    assert len(orders) == 3


@pytest.mark.parametrize("repeats", [1, 2])
def test_each_showing_of_an_image_is_another_copy(repeats: int) -> None:
    images = torch.cat([batch.images for batch in epoch(repeats=repeats)])
    assert len({image.numpy().tobytes() for image in images}) == len(images) == len(LABELS)


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(UsageError, match="these images have no labels"):
        ClassSampler(np.full(4, -1), "balanced")
    with pytest.raises(UsageError, match=r"data.together is 2.*Use one of them"):
        EpochOrder(50, 10, shuffle=True, drop_last=True, together=2, sampler=ClassSampler(LABELS, "sqrt"))
