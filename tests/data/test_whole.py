from __future__ import annotations

import itertools

import numpy as np
import pytest

from vitrail.data.images import whole
from vitrail.data.images.ops import eval_transform
from vitrail.data.settings import Preprocess


def counted(size: tuple[int, int], preprocess: Preprocess) -> float:
    """Share of an image's pixels that a transform shows: each row and column has a level of its own."""
    share = 1.0
    for axis, length in enumerate(size):
        ramp = np.linspace(0, 250, length)
        image = np.repeat(np.moveaxis(np.broadcast_to(ramp, (size[1 - axis], length)), 1, axis)[:, :, None], 3, 2)
        seen = eval_transform(preprocess)(image.round().astype(np.uint8), np.random.default_rng(0))[:, :, 0]
        side = preprocess.image_size[axis]
        share *= (int(seen.max()) - int(seen.min())) / 250 * side / (side - 1)  # between the centres of the outermost
    return share


@pytest.mark.parametrize(
    ("size", "mode", "crop"),
    itertools.product([(480, 640), (640, 480), (500, 500), (300, 900)], ["small", "squash"], [0.875, 1.0]),
)
def test_the_share_is_that_of_the_pixels_that_come_through(size: tuple[int, int], mode: str, crop: float) -> None:
    preprocess = Preprocess((96, 96), resize=mode, crop=crop)
    assert whole.share_shown(size, preprocess) == pytest.approx(counted(size, preprocess), abs=0.03)


def test_shares_by_hand() -> None:
    small = Preprocess((100, 100), crop=1.0)
    assert whole.share_shown((100, 400), small) == pytest.approx(0.25)
    assert whole.share_shown((10, 1000), small) == pytest.approx(0.01)  # longer than is resized at all
    assert whole.filled((100, 400), small) == pytest.approx(0.25)
    assert whole.stretched((100, 400), small) == whole.stretched((400, 100), small) == pytest.approx(4)


def test_all_ways_are_told_and_much_cut_off_is_warned_of() -> None:
    sizes = [(200, 100)] * 3 + [(100, 100)]
    told, warning = whole.parts_shown(sizes, Preprocess((56, 56)))  # 56 / 64 of the short side, 56 / 128 of the other
    assert told.startswith("small shows 38% of an image's pixels, squash, pad and native show all")
    assert "by a factor of 2.00, pad leaves 50% of the input empty, native neither (medians of 4 images)" in told
    assert warning.startswith("62% of an image's pixels are cut off (median of 4 images)")
    assert whole.parts_shown(sizes, Preprocess((56, 56), resize="pad")) == (told, "")
    assert whole.parts_shown([(100, 100)], Preprocess((56, 56)))[1] == ""  # a quarter is cut off
    assert whole.parts_shown([(100, 100)], Preprocess((56, 56), crop=1.0)) == ("", "")
    assert whole.parts_shown([], Preprocess((56, 56))) == ("", "")


def test_the_choice_follows_the_sizes() -> None:
    assert whole.choose_resize([(30, 40)] * 5) == ("squash", "images of 30 x 40 px")
    assert whole.choose_resize([(30, 40), (40, 30)]) == ("small", "images differ in size")
    assert whole.choose_resize([]) == ("small", "images differ in size")


def test_the_rest_has_the_mean_of_the_network_unless_a_colour_is_given() -> None:
    mean = (0.485, 0.456, 0.406)
    pad = Preprocess((32, 32), resize="pad")
    assert whole.with_fill(pad, mean).fill == (124, 116, 104)
    assert whole.with_fill(pad, (0.5,)).fill == (128, 128, 128)
    assert whole.with_fill(Preprocess((32, 32), resize="pad", fill=(1, 2, 3)), mean).fill == (1, 2, 3)
    assert whole.with_fill(Preprocess((32, 32)), mean).fill is None
