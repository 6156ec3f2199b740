"""Image and mask move together: whatever the transform of an image, its mask is that of the transformed image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.images.geometry import Compose
from vitrail.data.images.masked import MaskTransform, nearest
from vitrail.data.images.ops import eval_transform, train_transform
from vitrail.data.images.own import OwnOp
from vitrail.data.loading.loader import Loader
from vitrail.data.loading.order import stream
from vitrail.data.settings import IGNORED, Augment, Data, Preprocess
from vitrail.data.sources.open import open_data
from vitrail.errors import UsageError

SQUASH = Preprocess((32, 48), resize="squash")
SQUARE = Preprocess((40, 40), resize="squash")
LEVELS = np.array([0, 128, 255])
MOVING = ["vflip", "rotate:30", "shear:20", "translate:0.2", "zoom:0.3", "perspective:0.5", "elastic"]


def painted(mask: np.ndarray) -> np.ndarray:
    """A grey picture in which each class has a level of its own."""
    return np.repeat(LEVELS[mask][:, :, None], 3, axis=2).astype(np.uint8)


def large_areas(height: int, width: int, seed: int) -> np.ndarray:
    """A mask of classes 0 to 2 in areas that are wide enough to survive interpolation."""
    coarse = np.random.default_rng(seed).integers(0, 3, (3, 4)).astype(np.uint8)
    return nearest(coarse, height, width)


def differing(augment: Augment, preprocess: Preprocess, seed: int) -> float:
    """Share of the pixels that count whose class is not that of the transformed picture."""
    mask = large_areas(90, 120, seed)
    transform = train_transform(augment, preprocess)
    image = transform(painted(mask), np.random.default_rng(seed)).astype(int)
    moved = MaskTransform(transform)(mask, np.random.default_rng(seed))
    assert moved.shape == image.shape[:2] == preprocess.size
    seen = np.abs(image[:, :, :1] - LEVELS).argmin(axis=2)
    # between two areas interpolation gives levels of a third one, so only pure pixels say which class they are
    pure = (np.abs(image[:, :, :1] - LEVELS).min(axis=2) < 8) & (moved != IGNORED)
    inner = pure.copy()
    for axis in (0, 1):
        for step in (-2, -1, 1, 2):
            inner &= np.roll(seen, step, axis) == seen
    assert inner.mean() > 0.1
    return float((moved != seen)[inner].mean())


@given(st.integers(0, 2**20), st.sampled_from(["inception", "random", "pad", "center"]), st.sampled_from(MOVING))
def test_a_mask_moves_with_its_picture(seed: int, crop: str, word: str) -> None:
    augment = Augment(crop=crop, scale=(0.3, 1.0), flip=True, also=(word,))  # type: ignore[arg-type]
    assert differing(augment, SQUASH, seed) < 0.02


@given(st.integers(0, 2**20))
def test_a_mask_makes_quarter_turns_with_its_picture(seed: int) -> None:
    assert differing(Augment(crop="inception", scale=(0.3, 1.0), also=("rotate90", "vflip")), SQUARE, seed) < 0.02


@pytest.mark.parametrize("colours", [("hue", "rotate:30"), ("noise:0.02", "rotate:30"), ("blur:0.2", "shear")])
def test_what_changes_colours_draws_its_numbers_and_leaves_the_mask(colours: tuple[str, ...]) -> None:
    """A move after a change of colours has the same random numbers on both sides."""
    for seed in range(8):
        assert differing(Augment(crop="center", flip=False, also=colours), SQUASH, seed) < 0.02


def test_randaugment_moves_both() -> None:
    """Its colours would hide the classes, so places are compared: a mask of one dot in a picture of one dot."""
    moves, augment = 0, Augment(crop="center", flip=False, randaugment=(2, 9))
    transform = train_transform(augment, SQUARE)
    of_mask = MaskTransform(transform)
    mask = np.zeros((40, 40), np.uint8)
    mask[10:20, 12:24] = 1
    for seed in range(60):
        moved = of_mask(mask, np.random.default_rng(seed))
        image = transform(painted(2 * mask), np.random.default_rng(seed)).astype(int)
        inner = image[moved == 1]
        others = image[moved == 0]
        if not np.array_equal(moved, mask) and len(inner) and inner.std() < 40 and others.std() < 40:
            moves += 1
            assert abs(np.median(inner) - np.median(others)) > 20, seed
    assert moves > 10


def test_erased_pixels_and_gaps_do_not_count() -> None:
    mask = np.ones((40, 40), np.uint8)
    transform = train_transform(Augment(crop="center", flip=False, erasing=1.0), SQUARE)
    image = transform(painted(mask), np.random.default_rng(3))
    moved = MaskTransform(transform)(mask, np.random.default_rng(3))
    assert (moved == IGNORED).any() and np.array_equal(
        (image != 128).any(axis=2) | (moved == IGNORED), moved == IGNORED
    )
    turned = train_transform(Augment(crop="center", flip=False, also=("rotate:45",)), SQUARE)
    assert (MaskTransform(turned)(mask, np.random.default_rng(1)) == IGNORED).any()


def test_no_class_is_made_up_between_two() -> None:
    """Nothing is interpolated: classes 0 and 2 never give a 1."""
    mask = 2 * (large_areas(90, 120, 5) > 0).astype(np.uint8)
    for word in MOVING:
        transform = train_transform(Augment(crop="inception", also=(word,)), SQUASH)
        for seed in range(5):
            assert set(np.unique(MaskTransform(transform)(mask, np.random.default_rng(seed)))) <= {0, 2, IGNORED}


@pytest.mark.parametrize("resize", ["pad", "native"])
def test_186_an_operation_that_says_not_where_pixels_go_is_refused(resize: str) -> None:
    with pytest.raises(UsageError, match=r"where it moves the pixels of a mask.*squash"):
        MaskTransform(eval_transform(Preprocess((32, 32), resize=resize, patch=16)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="where it moves the pixels"):
        MaskTransform(Compose((OwnOp(lambda image, rng: image[:, ::-1]),)))


def scenes(root: Path, count: int = 12) -> Path:
    for split, images in (("train", count), ("val", 4)):
        for number in range(images):
            mask = large_areas(60, 80, number)
            for folder, picture in (("images", Image.fromarray(painted(mask))), ("masks", Image.fromarray(mask))):
                (root / folder / split).mkdir(parents=True, exist_ok=True)
                picture.save(root / folder / split / f"{number}.png")
    return root


def test_masks_travel_with_their_images_in_every_way_of_loading(tmp_path: Path) -> None:
    """In the calling thread, in threads, and with cached images the batches are the same, to the bit."""
    train = open_data(Data(str(scenes(tmp_path)))).train
    transform = train_transform(Augment(crop="inception", scale=(0.3, 1.0), also=("rotate:20",)), SQUASH)
    found = []
    for workers, cache in ((0, False), (3, False), (2, True)):
        loader = Loader(
            train, transform=transform, image_size=SQUASH.size, batch_size=4, workers=workers, cache=cache, seed=7
        )
        found.append(
            [(batch.images.numpy(), batch.labels.numpy()) for epoch in (0, 1) for batch in loader.epoch(epoch)]
        )
        loader.close()
    for _, masks in found[0]:
        assert masks.dtype == np.uint8 and masks.shape == (4, *SQUASH.size)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert all(np.array_equal(*pair) for pair in zip(one, two, strict=True))
    first, index = found[0][0][1], next(iter(Loader(train, transform=transform, image_size=SQUASH.size, batch_size=4,
                                                    seed=7).epoch(0))).index.tolist()  # fmt: skip
    stored = train.labels.mask(index[0])  # type: ignore[union-attr]
    assert np.array_equal(first[0], MaskTransform(transform)(stored, stream(7, 0, index[0])))


def test_the_folder_of_masks_is_read_with_its_splits_and_classes(tmp_path: Path) -> None:
    scenes(tmp_path)
    found = open_data(Data(str(tmp_path), ignore=(2,)))
    assert (len(found.train), found.class_names) == (12, ["0", "1"])
    assert found.validation is not None and len(found.validation) == 4
    assert set(np.unique(found.train.labels.mask(0))) <= {0, 1, IGNORED}  # type: ignore[union-attr]
    (tmp_path / "classes.txt").write_text("floor\nwall\nroof\n")
    assert open_data(Data(str(tmp_path))).class_names == ["floor", "wall", "roof"]


def test_without_labels_the_images_alone_are_read(tmp_path: Path) -> None:
    found = open_data(Data(str(scenes(tmp_path))), labels=False)
    assert len(found.train) == 12 and not found.train.class_names
