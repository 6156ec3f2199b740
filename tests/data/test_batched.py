"""Augmentations of whole batches against Pillow's of single images, on real photographs: the bounds of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitrail.data.images.augment import CHANGES, VALUES, ColorJitter, RandAugment, RandomErasing, ThreeAugment
from vitrail.data.images.batched import (
    NAMES,
    STEPS,
    Augmentation,
    Group,
    Plan,
    augment_on_device,
    divided,
)
from vitrail.data.images.geometry import Flip, Op
from vitrail.data.images.ops import train_transform
from vitrail.data.loading.order import stream
from vitrail.data.settings import Augment, Bands, Preprocess

SIZES = ((96, 128), (64, 64))
LEVELS = (-2.0, -1.0, -0.9, -0.3, 0.0, 0.3, 0.9, 1.0, 2.0)
RADII = (0.1, 0.31, 0.52, 0.83, 1.04, 1.37, 1.71, 2.0)
MOVED = {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}


@pytest.fixture(scope="module")
def photographs(shared_data: Path) -> list[Image.Image]:
    files = sorted((shared_data / "imagenet-val20").glob("*.JPEG"))[:8]
    return [Image.open(file).convert("RGB") for file in files]


def batch(photographs: list[Image.Image], size: tuple[int, int]) -> np.ndarray:
    return np.stack([np.asarray(one.resize(size[::-1])) for one in photographs])


def as_tensor(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def as_array(images: torch.Tensor) -> np.ndarray:
    assert images.dtype == torch.uint8
    return images.permute(0, 2, 3, 1).numpy().astype(int)


def changed(images: np.ndarray, name: str, value: float) -> tuple[np.ndarray, np.ndarray]:
    """The result of one change on the batch, and that of Pillow on each image."""
    row = np.array([0.0] * STEPS + [NAMES.index(name), value])
    found = augment_on_device(as_tensor(images), Plan.of([row] * len(images), images.shape[1:3]))
    return as_array(found), np.stack([np.asarray(CHANGES[name](Image.fromarray(one), value)) for one in images])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in MOVED | {"blur", "rotate90"}])
def test_changes_of_colours_are_pillows_to_the_bit(name: str, size: tuple[int, int], photographs) -> None:
    images = batch(photographs, size)
    images[0] = 77  # without contrast
    images[1, :, :, 1] = 200
    values = {VALUES[name](level) for level in LEVELS} if name in VALUES else {0.0}
    for value in values | ({128.0} if name == "solarize" else set()):
        found, expected = changed(images, name, value)
        assert np.array_equal(found, expected), value


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted(MOVED))
def test_moved_pixels_are_within_a_level_of_pillows(name: str, size: tuple[int, int], photographs) -> None:
    """Except for one of 500 at the border of the filled area, and on average within 0.04 levels."""
    images = batch(photographs, size)
    for level in LEVELS:
        found, expected = changed(images, name, VALUES[name](level))
        difference = found - expected
        assert (abs(difference) > 1).mean() < 0.002, level
        assert abs(difference[abs(difference) <= 1].mean()) < 0.04, level


@pytest.mark.parametrize("size", SIZES)
def test_a_blur_is_within_two_levels_of_pillows(size: tuple[int, int], photographs) -> None:
    """Pillow rounds after each of six passes, this after two; on average within 0.02 levels."""
    images = batch(photographs, size)
    for radius in RADII:
        difference = np.subtract(*changed(images, "blur", radius))
        assert abs(difference).max() <= 2 and abs(difference.mean()) < 0.02, radius


class Recorded(Op):
    """Stands for the part of a transform before the device's."""

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return image


EVERYTHING = Augment(randaugment=(2, 9), three_augment=True, color_jitter=0.3, erasing=0.5)


@pytest.mark.parametrize(
    "augment", [EVERYTHING, replace(EVERYTHING, three_augment=False, erasing=0.0), Augment(three_augment=True)]
)
def test_a_divided_transform_is_the_whole_one(augment: Augment, photographs) -> None:
    """The same crops, flips, changes and rectangles; after several changes some levels apart, and on average none."""
    whole = train_transform(augment, Preprocess(image_size=(96, 96)))
    host, rest = divided(whole, (96, 96))  # type: ignore[misc]
    assert host.ops == ()  # type: ignore[attr-defined]
    images = [np.asarray(one) for one in photographs] * 4
    expected = np.stack([whole(image, stream(0, 0, index)) for index, image in enumerate(images)]).astype(int)
    streams = [stream(0, 0, index) for index in range(len(images))]
    memory = np.zeros((len(images), rest.crop.room), np.uint8)
    parts = [rest.crop.place(*one) for one in zip(images, memory, streams, strict=True)]
    rows = [rest.draw(random) for random in streams]
    plan = Plan.of(list(map(np.append, parts, rows)), (96, 96), rest.crop)
    found = as_array(plan.apply(torch.from_numpy(memory), torch.device("cpu")))
    erased = np.zeros((len(images), 96, 96, 1), bool)
    for place, row in enumerate(rows):
        top, left, height, width = row[1:5].astype(int)
        erased[place, top : top + height, left : left + width] = True
    assert erased.any() == bool(augment.erasing)
    difference = np.where(erased, 0, found - expected)
    assert abs(difference.mean()) < 0.1 and (abs(difference) > 4).mean() < 0.02
    assert np.median(abs(difference).max((1, 2, 3))) <= 4  # of most images every pixel
    # what is erased is noise on both sides
    if augment.erasing:
        noise = found[np.broadcast_to(erased, found.shape)]
        assert stats.chisquare(np.bincount(noise // 16, minlength=16)).pvalue > 1e-3


def test_erased_noise_depends_on_the_draws_of_the_image_alone() -> None:
    rest = Augmentation(None, (), RandomErasing(1.0, scale=(0.3, 0.3)), (32, 32))
    rows = [rest.draw(stream(0, 0, index)) for index in (5, 6, 5)]
    images = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
    first, second, third = augment_on_device(images, Plan.of(rows, (32, 32)))
    assert torch.equal(first, third) and not torch.equal(first, second)
    alone = augment_on_device(images[:1], Plan.of(rows[2:], (32, 32)))[0]
    assert torch.equal(alone, first) and not images.any()


def test_transforms_that_only_pillow_can_do_stay_whole() -> None:
    size = (32, 32)
    bands = Preprocess(image_size=size, bands=Bands("16", (9.0,), (2.0,), (0.0,), (99.0,)))
    for transform in (
        train_transform(Augment(), Preprocess(image_size=size)),  # nothing that is worth the way
        train_transform(Augment(randaugment=(2, 9)), bands),
        Recorded(),
    ):
        assert divided(transform, size) is None
    for transform in (
        train_transform(Augment(crop="pad", randaugment=(2, 9)), Preprocess(image_size=size)),
        train_transform(Augment(), Preprocess(image_size=size, resize="pad")),
        train_transform(Augment(randaugment=(2, 9)), bands),
        Recorded(),
    ):
        assert divided(transform, size, decodes=True) is None


def test_a_batch_without_changes_is_copied() -> None:
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    plan = Plan.of([np.zeros(STEPS)] * 4, (8, 8))
    assert plan.groups == () and torch.equal(augment_on_device(images, plan), images)


class Launches(TorchDispatchMode):
    """Records the names of all operations but views, and the devices of what they take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.devices: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function.namespace == "aten" and not function.is_view:
            self.names.append(function.name())
        tensors = [one for one in tree_leaves((arguments, result)) if isinstance(one, torch.Tensor)]
        self.devices |= {one.device.type for one in tensors}
        return result


WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "aten::index.Tensor", "lift_fresh")


@pytest.mark.parametrize(("changes", "most"), [((RandAugment(2, 9),), 350), ((ThreeAugment(), ColorJitter(0.3)), 300)])
def test_nothing_in_it_waits_for_the_device(changes: tuple, most: int) -> None:
    """Counted on fake CUDA tensors: no value is read, nothing is copied from or to the host, and launches are few."""
    rest = Augmentation(Flip(), changes, RandomErasing(0.5), (224, 224))
    plan = Plan.of([rest.draw(stream(0, 0, index)) for index in range(512)], (224, 224))
    with FakeTensorMode():
        there = Plan(tuple(Group(one.kind, fake(one.images), fake(one.values)) for one in plan.groups))
        with Launches() as seen:
            found = augment_on_device(torch.empty(512, 3, 224, 224, dtype=torch.uint8, device="cuda"), there)
    assert found.device.type == "cuda" and found.shape == (512, 3, 224, 224)
    assert not [name for name in seen.names if any(word in name for word in WAITS)]
    assert seen.devices == {"cuda"} and 100 < len(seen.names) < most


def fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
