from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.images.geometry import Flip
from vitrail.data.images.ops import eval_transform
from vitrail.data.settings import Preprocess
from vitrail.errors import UsageError
from vitrail.inspection.overlay import Box, interpolate_grid, scale_to_unit, under_attention, visible_box

RNG = np.random.default_rng(0)


def cell_means(pixels: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """What a network knows of a picture [H, W] whose tokens are the mean of their patch."""
    rows, columns = grid
    return pixels.reshape(rows, len(pixels) // rows, columns, -1).mean(axis=(1, 3))


def test_the_usual_crop_by_hand() -> None:
    transform = eval_transform(Preprocess(image_size=(224, 224)))  # short side 256, middle 224
    box = visible_box(transform, 300, 400)  # becomes 256 x 341; 16 and 58 pixels are cut off
    assert (box.top, box.height) == pytest.approx((16 * 300 / 256, 224 * 300 / 256))
    assert (box.left, box.width) == pytest.approx((58 * 400 / 341, 224 * 400 / 341))
    squashed = eval_transform(Preprocess(image_size=(32, 64), resize="squash"))
    assert visible_box(squashed, 300, 400) == Box(0, 0, 300, 400)
    padded = eval_transform(Preprocess(image_size=(64, 64), resize="pad"))  # 48 x 64, and 8 pixels above and below
    assert visible_box(padded, 300, 400) == Box(-50, 0, 400, 400)


@given(
    height=st.integers(20, 400),
    width=st.integers(20, 400),
    resize=st.sampled_from(["small", "squash"]),
    crop=st.sampled_from([0.5, 0.875, 1.0]),
    grid=st.tuples(st.integers(2, 5), st.integers(2, 5)),
)
def test_a_ramp_comes_back_to_where_it_was(height: int, width: int, resize, crop: float, grid: tuple[int, int]) -> None:
    """Pixels say where they are; what tokens make of the network's input must lie over the same pixels."""
    size = grid[0] * 16, grid[1] * 16
    transform = eval_transform(Preprocess(image_size=size, resize=resize, crop=crop))
    box = visible_box(transform, height, width)
    for side, axis in ((height, 0), (width, 1)):
        ramp = np.linspace(0, 250, side).reshape((-1, 1) if axis == 0 else (1, -1))
        image = np.repeat(np.broadcast_to(ramp, (height, width))[:, :, None], 3, axis=2).round().astype(np.uint8)
        values = cell_means(transform(image, RNG)[:, :, 0].astype(float), grid)
        back = interpolate_grid(values, box, height, width)
        # beyond the centres of the outermost cells the map is constant, so only what lies between them is known
        start, length = ((box.top, box.height), (box.left, box.width))[axis]
        first, last = start + length / grid[axis] / 2, start + length * (1 - 0.5 / grid[axis])
        inside = np.flatnonzero((np.arange(side) + 0.5 >= first) & (np.arange(side) + 0.5 <= last))
        middle = int((box.left + box.width / 2, box.top + box.height / 2)[axis])
        line = np.take(back, middle, axis=1 - axis)
        pixel = 250 / (side - 1)
        assert np.abs(line[inside] - ramp.flatten()[inside]).max(initial=0) < 1 + 0.6 * pixel


@pytest.mark.parametrize(("height", "width"), [(90, 300), (300, 90), (128, 128), (20, 700)])
@pytest.mark.parametrize("resize", ["small", "squash"])
def test_a_bright_patch_is_found_where_it_is(height: int, width: int, resize) -> None:
    transform = eval_transform(Preprocess(image_size=(64, 64), resize=resize))
    box = visible_box(transform, height, width)
    high, wide = max(round(box.height / 5), 3), max(round(box.width / 5), 3)
    top, left = round(box.top + 0.55 * box.height), round(box.left + 0.2 * box.width)
    image = np.zeros((height, width, 3), np.uint8)
    image[top : top + high, left : left + wide] = 255
    values = cell_means(transform(image, RNG)[:, :, 0].astype(float), (16, 16))
    back = interpolate_grid(values, box, height, width)
    y, x = np.unravel_index(np.nanargmax(back), back.shape)
    assert top <= y < top + high and left <= x < left + wide
    bright = np.nan_to_num(back) > 127
    truth = image[:, :, 0] > 127
    assert (bright & truth).sum() / (bright | truth).sum() > 0.6


@pytest.mark.parametrize(("height", "width"), [(90, 300), (300, 90), (128, 128)])
def test_a_bright_patch_of_a_padded_picture_is_found_where_it_is(height: int, width: int) -> None:
    transform = eval_transform(Preprocess(image_size=(64, 64), resize="pad"))
    image = np.zeros((height, width, 3), np.uint8)
    top, left, high, wide = round(0.55 * height), round(0.2 * width), height // 5, width // 5
    image[top : top + high, left : left + wide] = 255
    values = cell_means(transform(image, RNG)[:, :, 0].astype(float), (16, 16))
    back = interpolate_grid(values, visible_box(transform, height, width), height, width)
    assert np.isfinite(back).all()  # nothing is cut off
    y, x = np.unravel_index(back.argmax(), back.shape)
    assert top <= y < top + high and left <= x < left + wide


@given(height=st.integers(10, 900), width=st.integers(10, 900), crop=st.sampled_from([0.7, 0.875, 1.0]))
def test_what_is_seen_lies_in_the_middle_of_the_picture(height: int, width: int, crop: float) -> None:
    box = visible_box(eval_transform(Preprocess(image_size=(32, 48), crop=crop)), height, width)
    assert box.top >= -1e-9 and box.left >= -1e-9
    assert box.top + box.height <= height + 1e-9 and box.left + box.width <= width + 1e-9
    pixel_y, pixel_x = box.height / 32, box.width / 48  # a pixel of the network's input
    assert abs(box.top + box.height / 2 - height / 2) <= pixel_y + 0.5
    assert abs(box.left + box.width / 2 - width / 2) <= pixel_x + 0.5


def test_outside_of_what_is_seen_nothing_is_known() -> None:
    values = interpolate_grid(np.ones((2, 2)), Box(10, 20, 30, 40), 100, 100)
    known = np.zeros((100, 100), bool)
    known[10:40, 20:60] = True
    assert (np.isfinite(values) == known).all() and (values[known] == 1).all()


def test_an_operation_of_unknown_place_is_refused() -> None:
    with pytest.raises(UsageError, match="Flip"):
        visible_box(Flip(), 10, 10)


def test_the_map_is_relative_to_itself() -> None:
    assert scale_to_unit(np.array([[2.0, 4.0], [3.0, 2.0]])).tolist() == [[0, 1], [0.5, 0]]
    assert scale_to_unit(np.full((2, 2), 7.0)).tolist() == [[0, 0], [0, 0]]


def test_unseen_parts_are_faded_and_seen_ones_tinted() -> None:
    image = np.full((200, 100, 3), 100, np.uint8)
    shares = np.array([[0.0, 1.0]])
    tinted = under_attention(image, shares, Box(50, 0, 100, 100)).astype(int)
    assert tinted.shape == (200, 100, 3)
    assert np.ptp(tinted[10, 10]) == 0 and tinted[10, 10, 0] > 150  # grey, light
    assert tinted[100, 5, 2] > tinted[100, 5, 0] + 30 and tinted[100, 95, 0] > tinted[100, 95, 2] + 80
