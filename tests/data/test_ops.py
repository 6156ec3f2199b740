from __future__ import annotations

import itertools
import math
import random
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from scipy import stats
from timm.data import auto_augment as timm_augment
from torchvision.transforms import v2

from vitrail.data.images.augment import (
    BIG_VISION,
    CHANGES,
    MOVES,
    VALUES,
    BigVisionRandAugment,
    ColorJitter,
    DrawnSteps,
    RandAugment,
    RandomErasing,
    ThreeAugment,
)
from vitrail.data.images.decode import decode
from vitrail.data.images.geometry import (
    CentralCrop,
    Compose,
    Flip,
    InceptionCrop,
    Letterbox,
    LetterboxedCrop,
    Op,
    PadShift,
    RandomCrop,
    ResizeSmall,
    Squash,
    resize,
)
from vitrail.data.images.ops import eval_transform, operations, train_transform
from vitrail.data.loading.order import stream
from vitrail.data.settings import Augment, Preprocess
from vitrail.errors import UsageError

RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
SMALL = Preprocess(image_size=(32, 32), crop=1.0)
EVERYTHING = Augment(
    randaugment=(2, 9), three_augment=True, color_jitter=0.3, erasing=0.5, crop="inception", scale=(0.3, 1.0)
)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Noise over a gradient: sharp edges and smooth parts."""
    noise = np.random.default_rng(seed).integers(0, 120, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([x * 135 // width, y * 135 // height, (x + y) * 135 // (height + width)], -1)
    return (noise + smooth).astype(np.uint8)


def pillow_resized(image: np.ndarray, height: int, width: int, interpolation: str) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((width, height), RESAMPLING[interpolation])).astype(int)


# ---------------------------------------------------------------- resizing and the transform of evaluation


@given(
    source=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    target=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
)
def test_resizing_is_pillows_within_a_rounding(source, target, interpolation):
    image = picture(*source)
    result = resize(image, *target, interpolation)
    assert result.shape == (*target, 3) and result.dtype == np.uint8 and result.flags.c_contiguous
    width_first = pillow_resized(image, source[0], target[1], interpolation).astype(np.uint8)
    expected = pillow_resized(width_first, *target, interpolation)
    assert abs(result - expected).max() <= (1 if interpolation == "bilinear" else 2)


def test_resizing_a_photograph_is_pillows_within_one_level(shared_data):
    photograph = decode(next((shared_data / "imagenet-samples").glob("*.JPEG")).read_bytes())
    for interpolation, target in itertools.product(RESAMPLING, [(224, 224), (96, 160), (700, 640)]):
        expected = pillow_resized(photograph, *target, interpolation)
        assert abs(resize(photograph, *target, interpolation) - expected).max() <= 1


def test_resizing_takes_any_memory_layout_without_a_word():
    image = picture(40, 50)
    expected = resize(np.ascontiguousarray(image[3:30, 45:5:-1]), 20, 20)
    frozen = image.copy()
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about memory it could write to but must not
        assert (resize(frozen[3:30, 45:5:-1], 20, 20) == expected).all()
        assert (resize(frozen, 20, 20) == resize(image, 20, 20)).all()
    part = image[3:23, 5:25]
    assert resize(part, 20, 20).flags.c_contiguous and (resize(part, 20, 20) == part).all()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [(375, 500), (500, 333), (100, 80)])
def test_resize_small_and_central_crop(shape, interpolation):
    image = picture(*shape)
    height, width = shape
    short = min(shape)
    resized = pillow_resized(image, round(height * 256 / short), round(width * 256 / short), interpolation)
    top, left = (resized.shape[0] - 224) // 2, (resized.shape[1] - 224) // 2
    transform = eval_transform(Preprocess(image_size=(224, 224), crop=0.875, interpolation=interpolation))
    result = transform(image, None)
    assert abs(result - resized[top : top + 224, left : left + 224]).max() <= 1


def test_squash():
    image = picture(100, 150)
    result = eval_transform(Preprocess(image_size=(64, 48), resize="squash"))(image, None)
    assert abs(result - pillow_resized(image, 64, 48, "bilinear")).max() <= 1


def letterboxed(image: np.ndarray, height: int, width: int, fill: tuple[int, int, int]) -> np.ndarray:
    """By Pillow: the contained picture, pasted into the middle of a canvas."""
    contained = ImageOps.contain(Image.fromarray(image), (width, height), Image.Resampling.BILINEAR)
    canvas = Image.new("RGB", (width, height), fill)
    canvas.paste(contained, ((width - contained.width) // 2, (height - contained.height) // 2))
    return np.asarray(canvas).astype(int)


@pytest.mark.parametrize("shape", [(375, 500), (500, 333), (100, 100), (40, 300), (9, 5), (64, 48)])
@pytest.mark.parametrize("size", [(64, 64), (64, 48), (31, 64)])
def test_pad_is_pillows_contained_picture_on_a_canvas(shape, size):
    image = picture(*shape)
    result = eval_transform(Preprocess(image_size=size, resize="pad", fill=(124, 116, 104)))(image, None)
    assert abs(result - letterboxed(image, *size, (124, 116, 104))).max() <= 1


def test_without_a_colour_the_rest_is_grey_and_in_bands_their_mean():
    grey = eval_transform(Preprocess(image_size=(20, 20), resize="pad"))(picture(10, 20), None)
    assert (grey[:5] == 128).all() and (grey[15:] == 128).all() and (grey[5:15] == picture(10, 20)).all()
    floats = np.ones((10, 20, 4), np.float32)
    padded = Letterbox((20, 20))(floats, None)
    assert padded.dtype == np.float32 and padded[:5].sum() == padded[15:].sum() == 0 and (padded[5:15] == 1).all()


def test_resize_small_for_a_size_that_is_no_square():
    result = ResizeSmall((64, 128))(picture(100, 100), None)
    assert result.shape == (128, 128, 3)
    assert ResizeSmall((64, 128))(picture(50, 200), None).shape == (64, 256, 3)


@pytest.mark.parametrize("resize_mode", ["squash", "small", "pad"])
def test_an_image_of_the_final_size_is_passed_through(resize_mode):
    image = picture(32, 32)
    assert eval_transform(replace(SMALL, resize=resize_mode))(image, None) is image
    images = image[None]
    assert eval_transform(replace(SMALL, resize=resize_mode)).batch(images, [None]) is images
    assert train_transform(Augment(crop="center", flip=False), SMALL)(image, None) is image


# ---------------------------------------------------------------- what every operation owes

OPS = [
    InceptionCrop((24, 24)),
    ResizeSmall((24, 24)),
    CentralCrop((24, 24)),
    Squash((24, 24)),
    Letterbox((24, 24)),
    LetterboxedCrop((24, 24)),
    RandomCrop((24, 24)),
    PadShift(4),
    Flip(),
    RandAugment(4, 9, probability=1.0),
    ThreeAugment(),
    ColorJitter(0.4),
    RandomErasing(1.0),
    train_transform(EVERYTHING, SMALL),
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_an_operation_is_a_function_of_image_and_stream_and_leaves_the_image_alone(op):
    image = picture(40, 56)
    before = image.copy()
    results = [op(image, stream(0, 0, index)) for index in range(12)]
    assert (image == before).all()
    for index, result in enumerate(results):
        assert result.dtype == np.uint8 and result.ndim == 3 and result.flags.c_contiguous
        np.random.seed(index)
        random.seed(index)
        torch.manual_seed(index)
        assert (op(image, stream(0, 0, index)) == result).all()
    deterministic = isinstance(op, Letterbox | ResizeSmall | CentralCrop | Squash)
    assert (len({result.tobytes() for result in results}) == 1) == deterministic


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
@pytest.mark.parametrize("count", [1, 9])
def test_a_batch_is_bit_equal_to_one_by_one(op, count):
    images = np.stack([picture(32, 36, seed) for seed in range(count)])
    before = images.copy()
    result = op.batch(images, [stream(1, 2, index) for index in range(count)])
    expected = np.stack([op(image, stream(1, 2, index)) for index, image in enumerate(images)])
    assert (result == expected).all() and (images == before).all()


def test_the_fast_batch_of_small_images_never_loops_over_operations(monkeypatch):
    """Shift and flip of cached small images: whole-array arithmetic, no call per image."""
    transform = train_transform(Augment(crop="pad", pad=3), SMALL)
    images = np.stack([picture(32, 32, seed) for seed in range(50)])
    expected = np.stack([transform(image, stream(0, 0, index)) for index, image in enumerate(images)])
    for kind in (Compose, Flip, PadShift, ResizeSmall, CentralCrop):
        monkeypatch.setattr(kind, "__call__", None)
    result = transform.batch(images, [stream(0, 0, index) for index in range(50)])
    assert (result == expected).all() and (result != images).any(axis=(1, 2, 3)).mean() > 0.8


CROPS = ("inception", "random", "pad", "center")


@pytest.mark.parametrize("crop, resize_mode", itertools.product(CROPS, ("squash", "small", "pad")))
def test_transforms_give_exactly_the_size_asked_for_whatever_comes_in(crop, resize_mode):
    preprocess = Preprocess(image_size=(24, 20), resize=resize_mode)
    transform = train_transform(replace(EVERYTHING, crop=crop), preprocess)
    for shape in ((1, 1), (5000, 1), (1, 5000), (7, 400), (24, 20), (30, 20), (100, 90)):
        image = picture(*shape)
        assert eval_transform(preprocess)(image, None).shape == (24, 20, 3), shape
        assert transform(image, stream(0, 0, 0)).shape == (24, 20, 3), shape


# ---------------------------------------------------------------- crops and flips


def test_inception_crop_draws_like_torchvision():
    crop = InceptionCrop((8, 8), scale=(0.08, 1.0))
    ours = np.array([crop.box(300, 400, stream(0, 0, index)) for index in range(3000)], dtype=float)
    torch.manual_seed(0)
    blank = torch.zeros(3, 300, 400)
    theirs = v2.RandomResizedCrop(8, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), antialias=True)
    params = [theirs.make_params([blank]) for _ in range(3000)]
    theirs_boxes = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in params], dtype=float)
    for statistic in (lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 3] / b[:, 2], lambda b: b[:, 0], lambda b: b[:, 1]):
        assert stats.ks_2samp(statistic(ours), statistic(theirs_boxes)).pvalue > 1e-3


@given(
    st.integers(1, 60), st.integers(1, 60), st.integers(0, 1000), st.sampled_from([(0.05, 1.0), (0.9, 1.0), (1.0, 1.0)])
)
def test_inception_boxes_lie_inside(height, width, index, scale):
    top, left, h, w = InceptionCrop((8, 8), scale=scale).box(height, width, stream(0, 0, index))
    assert 0 <= top <= top + h <= height and 0 <= left <= left + w <= width and h > 0 and w > 0


@pytest.mark.parametrize(("mode", "usual"), [("small", 1.0), ("squash", 4.0), ("pad", 4.0)])
def test_a_part_has_the_proportions_that_evaluation_shows(mode, usual):
    """A banner of 100 x 400: squashed, its parts are four times as wide as high; cropped, they are squares."""
    (crop,) = train_transform(Augment(flip=False), Preprocess(image_size=(32, 32), resize=mode)).ops
    boxes = np.array([crop.box(100, 400, stream(0, 0, index)) for index in range(1500)], dtype=float)
    large = boxes[boxes[:, 2] > 20]  # smaller ones are rounded to pixels
    ratio = large[:, 3] / large[:, 2] / usual
    assert 0.7 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.43
    assert abs(np.log(ratio)).mean() == pytest.approx(np.log(4 / 3) / 2, rel=0.1)  # log-uniform


def test_a_ratio_that_is_given_is_that_of_the_picture():
    fixed = Augment(flip=False, ratio=(3 / 4, 4 / 3))
    (crop,) = train_transform(fixed, Preprocess(image_size=(32, 32), resize="squash")).ops
    boxes = np.array([crop.box(100, 400, stream(0, 0, index)) for index in range(300)], dtype=float)
    assert (boxes[:, 3] / boxes[:, 2]).max() < 1.5


@pytest.mark.parametrize("crop", ["inception", "center", "pad"])
def test_padded_training_images_have_the_margins_of_evaluation(crop):
    preprocess = Preprocess(image_size=(40, 40), resize="pad", fill=(1, 2, 3))
    image = np.full((50, 100, 3), 200, np.uint8)
    evaluated = eval_transform(preprocess)(image, None) == 200
    augment = Augment(crop=crop, flip=False, pad=0)
    for index in range(20):
        assert ((train_transform(augment, preprocess)(image, stream(0, 0, index)) == 200) == evaluated).all()
    assert evaluated.all(axis=2).sum() == 20 * 40


def test_the_largest_part_of_a_padded_image_is_what_evaluation_shows():
    preprocess = Preprocess(image_size=(32, 32), resize="pad")
    whole = Augment(scale=(1.0, 1.0), ratio=(2.0, 2.0), flip=False)
    image = picture(60, 120)
    result = train_transform(whole, preprocess)(image, stream(0, 0, 0))
    assert (result == eval_transform(preprocess)(image, None)).all()


def test_inception_crop_shows_the_box_it_drew():
    image = picture(60, 80)
    crop = InceptionCrop((16, 16), interpolation="bicubic")
    top, left, height, width = crop.box(60, 80, stream(0, 0, 5))
    expected = pillow_resized(image[top : top + height, left : left + width], 16, 16, "bicubic")
    assert abs(crop(image, stream(0, 0, 5)) - expected).max() <= 1


def test_random_crop_reaches_every_place_equally():
    image = np.arange(4 * 5, dtype=np.uint8).reshape(4, 5, 1).repeat(3, 2)
    corners = [int(RandomCrop((2, 3))(image, stream(0, 0, i))[0, 0, 0]) for i in range(1800)]
    counts = [corners.count(5 * top + left) for top in range(3) for left in range(3)]
    assert sum(counts) == 1800 and stats.chisquare(counts).pvalue > 1e-3


def test_pad_shift_is_a_window_of_the_reflected_picture():
    image = picture(6, 7)
    reflected = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect")
    windows = {reflected[t : t + 6, s : s + 7].tobytes(): (t, s) for t in range(5) for s in range(5)}
    places = [windows[PadShift(2)(image, stream(0, 0, i)).tobytes()] for i in range(2500)]
    assert stats.chisquare([places.count(place) for place in windows.values()]).pvalue > 1e-3


def test_flip_mirrors_as_often_as_asked():
    image = picture(5, 6)
    results = [Flip(0.3)(image, stream(0, 0, i)) for i in range(2000)]
    mirrored = [(r == np.fliplr(image)).all() for r in results]
    assert all(m or r is image for m, r in zip(mirrored, results, strict=True))
    assert stats.binomtest(sum(mirrored), 2000, 0.3).pvalue > 1e-3


# ---------------------------------------------------------------- colours, bending, erasing

TIMM_NAMES = {
    "autocontrast": "AutoContrast",
    "equalize": "Equalize",
    "invert": "Invert",
    "rotate": "Rotate",
    "posterize": "PosterizeIncreasing",
    "solarize": "SolarizeIncreasing",
    "solarize_add": "SolarizeAdd",
    "color": "ColorIncreasing",
    "contrast": "ContrastIncreasing",
    "brightness": "BrightnessIncreasing",
    "sharpness": "SharpnessIncreasing",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}


@pytest.mark.parametrize("name", VALUES)
def test_randaugments_operations_are_timms(name, monkeypatch):
    hparams = {"img_mean": (128, 128, 128), "interpolation": Image.Resampling.BILINEAR}
    image = Image.fromarray(picture(33, 45))
    for magnitude, sign in itertools.product((0, 3.3, 9, 9.9), (1, -1)):
        monkeypatch.setattr(timm_augment.random, "random", lambda sign=sign: 0.75 if sign < 0 else 0.25)
        theirs = timm_augment.AugmentOp(TIMM_NAMES[name], prob=1.0, magnitude=magnitude, hparams=hparams)
        found = CHANGES[name](image, VALUES[name](sign * magnitude / 10))
        assert (np.asarray(found) == np.asarray(theirs(image))).all(), (magnitude, sign)


@pytest.mark.parametrize("name", VALUES)
def test_every_operation_survives_the_ends_of_its_range(name):
    image = Image.fromarray(picture(33, 45))
    for level in (-3.0, -1.0, 0.0, 1.0, 3.0):
        result = CHANGES[name](image, VALUES[name](level))
        assert result.size == image.size and result.mode == "RGB"


def test_randaugment_has_exactly_timms_increasing_operations():
    assert {TIMM_NAMES[name] for name in VALUES} == set(timm_augment._RAND_INCREASING_TRANSFORMS)


def test_randaugment_applies_as_many_operations_as_asked(monkeypatch):
    calls: list[tuple[str, float]] = []

    def recorder(name: str):
        return lambda image, level: calls.append((name, level)) or image

    for name in VALUES:
        monkeypatch.setitem(VALUES, name, lambda level: level)
        monkeypatch.setitem(CHANGES, name, recorder(name))
    image = picture(8, 8)
    for index in range(3000):
        RandAugment(2, 9)(image, stream(0, 0, index))
    assert stats.binomtest(len(calls), 6000, 0.5).pvalue > 1e-3
    assert stats.chisquare([sum(n == name for n, _ in calls) for name in VALUES]).pvalue > 1e-3
    assert stats.binomtest(sum(level > 0 for _, level in calls), len(calls), 0.5).pvalue > 1e-3
    magnitudes = np.array([abs(level) * 10 for _, level in calls])
    assert magnitudes.max() <= 10
    inside = magnitudes[magnitudes < 10]  # the noise is cut off at two standard deviations above
    normal = stats.truncnorm(-18, 2, loc=9, scale=0.5)
    assert stats.kstest(inside, normal.cdf).pvalue > 1e-3
    assert RandAugment(2, 9, probability=0)(image, stream(0, 0, 0)) is image


# magnitude -> big_vision's `level_to_arg` of it: factor of colours, bits, threshold, added, degrees, shear
BIG_VISION_LEVELS = {
    0: (0.1, 1, 0, 0, 0, 0),  # a shift by 8 bits, which TensorFlow makes 7
    10: (1.9, 4, 256, 110, 30, 0.3),
    15: (2.8, 6, 384, 165, 45, 0.45),
    20: (3.7, 8, 512, 220, 60, 0.6),
}


@pytest.mark.parametrize("magnitude", BIG_VISION_LEVELS)
def test_big_visions_randaugment_has_its_authors_levels(magnitude: int) -> None:
    factor, bits, threshold, added, degrees, shear = BIG_VISION_LEVELS[magnitude]
    drawn = [step for index in range(800) for step in BigVisionRandAugment(2, magnitude).steps(stream(0, 0, index))]
    assert len(drawn) == 1600  # every one is applied
    assert stats.chisquare([sum(name == one for one, _ in drawn) for name in BIG_VISION]).pvalue > 1e-3
    for names, value in (
        (("color", "contrast", "brightness", "sharpness"), factor), (("posterize",), bits), (("solarize",), threshold),
        (("solarize_add",), added), (("rotate",), degrees), (("shear_x", "shear_y"), shear),
        (("translate_x", "translate_y"), magnitude / 10 * 100 / 224),
    ):  # fmt: skip
        found = np.array([one for name, one in drawn if name in names])
        assert np.abs(found) == pytest.approx(value)
        assert (found.min() < 0 < found.max()) == (value > 0 and set(names) <= set(MOVES))


@pytest.mark.parametrize("magnitude", [15, 20])
def test_no_magnitude_makes_images_black(magnitude: int, shared_data: Path) -> None:
    """With timm's levels beyond 10, factors of brightness were negative, and 3 % of images black."""
    with Image.open(sorted((shared_data / "flowers12" / "train").glob("*/*.jpg"))[0]) as opened:
        image = np.array(opened.convert("RGB").resize((64, 64)))
    (augment,) = [op for op in operations(Augment(randaugment=(2, magnitude)), SMALL) if isinstance(op, DrawnSteps)]
    black = [augment(image, stream(0, 0, index)).mean() < 3 for index in range(600)]
    assert isinstance(augment, BigVisionRandAugment) and sum(black) == 0
    with pytest.raises(UsageError, match="timm's goes to 10"):
        operations(Augment(randaugment=(2, magnitude), randaugment_form="timm"), SMALL)


def test_three_augment_takes_one_of_three_equally():
    image = picture(20, 20)
    solarised = np.where(image < 128, image, 255 - image)
    kinds = []
    for index in range(900):
        result = ThreeAugment()(image, stream(0, 0, index))
        if (result == solarised).all():
            kinds.append("solarise")
        elif (result == result[..., :1]).all():
            assert abs(result[..., 0] - image @ [0.299, 0.587, 0.114]).max() <= 1
            kinds.append("gray")
        else:
            # a blur keeps the mean and takes out what is sharp
            assert abs(result.mean() - image.mean()) < 2 and result.std() <= image.std() + 0.01
            kinds.append("blur")
    assert stats.chisquare([kinds.count(k) for k in ("solarise", "gray", "blur")]).pvalue > 1e-3


@pytest.mark.parametrize("index", range(8))
def test_color_jitter_is_torchvisions_with_the_same_draws(index):
    """torchvision's tensor kernels compute the same formulas without Pillow."""
    image = picture(20, 30)
    rng = stream(0, 0, index)
    factors = 1 + 0.4 * (2 * rng.random(3) - 1)
    pixels = torch.from_numpy(image).permute(2, 0, 1)
    adjust = (v2.functional.adjust_brightness, v2.functional.adjust_contrast, v2.functional.adjust_saturation)
    for which in rng.permutation(3):
        pixels = adjust[which](pixels, factors[which])
    result = ColorJitter(0.4)(image, stream(0, 0, index)).astype(int)
    assert abs(result - pixels.permute(1, 2, 0).numpy()).max() <= 3  # three roundings


def test_random_erasing_overwrites_one_rectangle():
    image = np.full((40, 50, 3), 77, np.uint8)
    shares = []
    for index in range(600):
        result = RandomErasing(0.5)(image, stream(0, 0, index))
        changed = (result != image).any(2)
        if not changed.any():
            continue
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert changed.sum() >= 0.95 * height * width - 3  # a random pixel may happen to be 77, 77, 77
        assert 0.25 < height / width < 4
        shares.append(height * width / changed.size)
    assert stats.binomtest(len(shares), 600, 0.5).pvalue > 1e-3
    assert min(shares) > 0.015 and max(shares) < 0.36
    filled = RandomErasing(1.0, scale=(0.3, 0.3), ratio=(1, 1))(np.zeros((200, 200, 3), np.uint8), stream(0, 0, 0))
    values = filled[filled.any(2)]
    assert stats.kstest(values.ravel() / 255, "uniform").statistic < 0.02
    assert RandomErasing(0.0)(image, stream(0, 0, 0)) is image


# ---------------------------------------------------------------- settings


def test_the_order_of_operations():
    kinds = [type(op) for op in train_transform(EVERYTHING, SMALL).ops]
    assert kinds == [InceptionCrop, Flip, ThreeAugment, RandAugment, ColorJitter, RandomErasing]
    plain = train_transform(Augment(flip=False), Preprocess(image_size=(24, 24), interpolation="bicubic"))
    assert plain.ops == (InceptionCrop((24, 24), (0.05, 1.0), None, "bicubic"),)


def test_random_crop_is_taken_from_the_size_that_evaluation_resizes_to():
    """big_vision's resize_small(448)|random_crop(384), evaluated with resize_small(448)|central_crop(384)."""
    transform = train_transform(Augment(crop="random", flip=False), Preprocess((384, 384), crop=384 / 448))
    assert transform.ops == (ResizeSmall((448, 448)), RandomCrop((384, 384)))


def test_random_crop_of_a_squashed_picture_is_bits():
    """BiT resizes to 160 x 160, whatever the shape, and crops 128; it evaluates on 128 x 128."""
    preprocess = Preprocess((128, 128), resize="squash", crop=128 / 160)
    assert train_transform(Augment(crop="random", flip=False), preprocess).ops == (
        Squash((160, 160)),
        RandomCrop((128, 128)),
    )
    assert eval_transform(preprocess) == Squash((128, 128))


@pytest.mark.parametrize(
    "augment, changes, named",
    [
        (dict(scale=(0.0, 1.0)), {}, "scale"),
        (dict(scale=(0.5, 0.2)), {}, "scale"),
        (dict(ratio=(0.0, 1.0)), {}, "ratio"),
        (dict(crop="pad", pad=-1), {}, "pad"),
        (dict(randaugment=(2, 31)), {}, "randaugment"),
        (dict(randaugment=(-1, 5)), {}, "randaugment"),
        (dict(color_jitter=2), {}, "color_jitter"),
        (dict(erasing=1.5), {}, "erasing"),
        ({}, dict(crop=0.0), "crop is 0.0"),
        ({}, dict(crop=1.1), "crop is 1.1"),
        ({}, dict(crop=math.nan), "crop is nan"),
        ({}, dict(image_size=(0, 32)), r"image_size is \(0, 32\)"),
        ({}, dict(image_size=(32, 100_000)), r"image_size is \(32, 100000\)"),
        ({}, dict(crop=0.001), "crop is 0.001, so images of 32 x 32 pixels would be cut from larger ones"),
    ],
)
def test_impossible_settings_are_refused_by_name(augment, changes, named):
    with pytest.raises(UsageError, match=named):
        train_transform(Augment(**augment), replace(SMALL, **changes))


@pytest.mark.parametrize("op", [CentralCrop((24, 24)), RandomCrop((24, 24)), PadShift(10)])
def test_an_image_too_small_for_an_operation_is_refused(op: Op):
    with pytest.raises(UsageError, match="10 x 50"):
        op(picture(10, 50), stream(0, 0, 0))


def test_a_strip_is_cut_before_it_grows():
    tall = ResizeSmall((256, 256))(picture(5000, 1), None)
    assert tall.shape == (2048, 256, 3) and math.prod(tall.shape) < 2e6
