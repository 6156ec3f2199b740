from __future__ import annotations

import numpy as np
import pytest
import torch
from masked_cases import images

from vitrail.errors import UsageError
from vitrail.objective.masked_patch import colours_to_pixels, mean_colours, paint_colours


def by_numpy(image: np.ndarray, patch: int, across: int) -> np.ndarray:
    """Colours of a uint8 image [3, H, W], cell by cell, from float64 means."""
    side, rows, columns = patch // across, image.shape[1] // patch, image.shape[2] // patch
    found = np.empty((rows * columns, across * across), dtype=np.int64)
    for n in range(rows * columns):
        for cell in range(across * across):
            top = n // columns * patch + cell // across * side
            left = n % columns * patch + cell % across * side
            mean = image[:, top : top + side, left : left + side].astype(np.float64).mean((1, 2))
            red, green, blue = np.floor(mean * 8 / 256).astype(int)
            found[n, cell] = red * 64 + green * 8 + blue
    return found


@pytest.mark.parametrize("across", [1, 4])
def test_colours_are_those_of_the_means(across: int) -> None:
    pixels = images(2, 32)
    pixels[1, 0] //= 4  # more than mid grey
    pixels[1, 2] = 255
    found = mean_colours(pixels, 8, across)
    for ours, image in zip(found, pixels.numpy(), strict=True):
        np.testing.assert_array_equal(ours.numpy(), by_numpy(image, 8, across))


@pytest.mark.parametrize(("value", "level"), [(0, 0), (31, 0), (32, 1), (127, 3), (128, 4), (224, 7), (255, 7)])
def test_levels_are_32_values_wide(value: int, level: int) -> None:
    image = torch.full((1, 3, 4, 4), value, dtype=torch.uint8)
    assert mean_colours(image, 4).item() == level * 73  # 64 + 8 + 1


def test_a_mean_just_below_a_level_is_below_it() -> None:
    image = torch.full((1, 3, 4, 4), 32, dtype=torch.uint8)
    image[0, 0, 0, 0] = 31
    assert mean_colours(image, 4).item() == 0 * 64 + 1 * 8 + 1


def test_painting_inverts_the_quantisation() -> None:
    every = torch.arange(512)
    values = colours_to_pixels(every)
    assert len(np.unique(values.numpy(), axis=0)) == 512
    assert (values[0].tolist(), values[511].tolist()) == ([16, 16, 16], [240, 240, 240])
    colours = every.view(2, 16, 16)  # 2 images of 4 x 4 patches of 4 x 4 cells
    picture = paint_colours(colours, (4, 4), 8)
    assert picture.shape == (2, 3, 32, 32)
    assert torch.equal(mean_colours(picture, 8, 4), colours)


def test_a_picture_is_never_further_off_than_half_a_level() -> None:
    pixels = images(1, 16)
    picture = paint_colours(mean_colours(pixels, 8), (2, 2), 8)
    means = pixels.view(1, 3, 2, 8, 2, 8).double().mean((3, 5))
    assert (picture[:, :, ::8, ::8].double() - means).abs().max() <= 16


def test_refusals() -> None:
    with pytest.raises(UsageError, match="4 x 4"):
        mean_colours(images(1, 28), 14, 4)
    with pytest.raises(UsageError, match="uint8"):
        mean_colours(images(1).float(), 8)
