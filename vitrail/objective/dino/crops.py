"""Multi-crop: several crops of each image of a batch, resampled on its device, all of them at once.

What is drawn for an example is a function of (seed, step, image) and small: boxes and changes of colour, in one row
for each crop. The pixels follow from it without chance, and are made where and when a micro-batch needs them. So a
batch may be cut in any way, its images cross to the device once however many crops there are, and no thread of the
loader does a crop's work.

Boxes are drawn as `vitrail.data.images.geometry.InceptionCrop` draws them, but are not rounded to pixels; resampling is
Pillow's, antialiased, for a box with fractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.data.loading.stream import stream
from vitrail.objective.settings import DINO

CROPS = 27
"""Purpose of the stream drawn from here (the others are in `vitrail.data.loading.stream` and its users)."""
Size = tuple[int, int]
GLOBAL = 2
"""Global crops; they come first."""
RATIO = (3 / 4, 4 / 3)
"""Width over height of a crop in the image, before it becomes a square."""
ATTEMPTS = 10
TOP, LEFT, HEIGHT, WIDTH, FLIP, BRIGHTNESS, CONTRAST, SATURATION, HUE, GREY, BLUR, SOLARISE, ORDER = range(13)
"""Columns of what is drawn. The box is in shares of the image's sides; 1 changes nothing in the first three factors of
colour and 0 nothing in what follows them; BLUR is in pixels; ORDER numbers the 24 orders of the factors, and is one for
a step."""
FACTORS = (0.4, 0.4, 0.2, 0.1)
"""Largest change of brightness, contrast, saturation (factors 1 - c to 1 + c) and hue (turns, -c to c): BYOL's."""
CHANGED, GREYED, SOLARISED = 0.8, 0.2, 0.2
"""Shares of the crops whose colours are changed, that lose them, and (second crop only) that are solarised."""
BLURRED = (1.0, 0.1, 0.5)
"""Of the first global crop, the second, and local ones."""
SHARPEST = 0.1
"""Smallest standard deviation of a blur in pixels."""


def crop_sizes(images: Size, network: Size, patch: int, config: DINO) -> tuple[Size, Size]:
    """Return height and width in pixels of global crops, and of local ones, each in whole patches.

    Global crops have their share of the size of the network's input, or of the images where these are smaller.
    """
    whole = [min(pair) // patch * patch for pair in zip(images, network, strict=True)]
    large = [max(round(side * config.global_size / patch), 1) * patch for side in whole]
    small = [max(round(side * config.local_size / patch), 1) * patch for side in large]
    return (large[0], large[1]), (small[0], small[1])


def draw_crops(
    seed: int, step: int, index: Sequence[int], size: tuple[int, int], config: DINO, *, flip: bool
) -> np.ndarray:
    """Return float32 [batch, 2 + local crops, columns]: what is done to make each crop of images of `size`."""
    count = GLOBAL + config.local_crops
    chances = [stream(seed, step, int(example), CROPS).random((count, 2 * ATTEMPTS + 12)) for example in index]
    drawn = np.stack(chances) if chances else np.empty((0, count, 2 * ATTEMPTS + 12))
    boxes, rest = drawn[..., : 2 * ATTEMPTS], drawn[..., 2 * ATTEMPTS :].transpose(2, 0, 1)
    found = np.zeros((*drawn.shape[:2], ORDER + 1), dtype=np.float32)
    scales = np.array([config.global_scale] * GLOBAL + [config.local_scale] * config.local_crops)
    found[..., :FLIP] = _boxes(boxes.reshape(*drawn.shape[:2], ATTEMPTS, 2), rest[:2], size, scales)
    found[..., FLIP] = (rest[2] < 0.5) & flip
    changed = config.jitter * (rest[3] < CHANGED)
    for column, chance, most in zip((BRIGHTNESS, CONTRAST, SATURATION, HUE), rest[4:8], FACTORS, strict=True):
        shift = changed * most * (2 * chance - 1)
        found[..., column] = shift if column == HUE else np.maximum(1 + shift, 0)
    found[..., GREY] = (rest[8] < GREYED) & (config.jitter > 0)
    blurred = np.array((*BLURRED[:GLOBAL], *BLURRED[GLOBAL:] * config.local_crops))
    wide = SHARPEST + (max(config.blur, SHARPEST) - SHARPEST) * rest[10]
    found[..., BLUR] = np.where((rest[9] < blurred) & (config.blur > 0), wide, 0)
    found[:, 1, SOLARISE] = (rest[11, :, 1] < SOLARISED) & (config.jitter > 0)
    found[..., ORDER] = stream(seed, step, 0, CROPS).integers(24)
    return found


def _boxes(attempts: np.ndarray, place: np.ndarray, size: tuple[int, int], scales: np.ndarray) -> np.ndarray:
    """Chances [batch, crops, attempts, 2] and [2, batch, crops] -> [batch, crops, 4]: top, left, height, width."""
    rows, columns = size
    low, high = (math.log(ratio) for ratio in RATIO)
    area = rows * columns * (scales[:, :1] + (scales[:, 1:] - scales[:, :1]) * attempts[..., 0])
    ratio = np.exp(low + (high - low) * attempts[..., 1])
    height, width = np.sqrt(area / ratio) / rows, np.sqrt(area * ratio) / columns  # shares of the sides
    fits = (height <= 1) & (width <= 1)
    first = fits.argmax(-1)[..., None]
    # where none fits, the largest part of a permitted shape
    shape = min(max(columns / rows, RATIO[0]), RATIO[1])
    some = fits.any(-1)
    height = np.where(some, np.take_along_axis(height, first, -1)[..., 0], min(1.0, columns / shape / rows))
    width = np.where(some, np.take_along_axis(width, first, -1)[..., 0], min(1.0, rows * shape / columns))
    down, right = np.where(some, place, 0.5)
    return np.stack([down * (1 - height), right * (1 - width), height, width], axis=-1)


def cut(images: Tensor, drawn: Tensor, size: tuple[int, int], *, cubic: bool) -> Tensor:
    """Return crops float32 [batch, crops, channels, *size] of images [batch, channels, H, W], as drawn for them.

    Values are not rounded, and a cubic may leave 0..255: they are cut to it.
    """
    batch, channels, rows, columns = images.shape
    down = _weights(drawn[..., TOP] * rows, drawn[..., HEIGHT] * rows, rows, size[0], cubic)
    right = _weights(drawn[..., LEFT] * columns, drawn[..., WIDTH] * columns, columns, size[1], cubic)
    right = torch.where(drawn[..., FLIP, None, None] > 0, right.flip(2), right)
    pixels = images.permute(0, 2, 3, 1).float().reshape(batch, rows, columns * channels)
    with torch.autocast(images.device.type, enabled=False):
        high = torch.bmm(down.flatten(1, 2), pixels)  # [batch, crops * height, columns * channels]
        high = high.view(batch, -1, size[0], columns, channels).permute(0, 1, 3, 4, 2)
        wide = right @ high.flatten(3)  # [batch, crops, width, channels * height]
    return wide.unflatten(3, (channels, size[0])).permute(0, 1, 3, 4, 2).clamp(0, 255)


def _weights(start: Tensor, length: Tensor, pixels: int, places: int, cubic: bool) -> Tensor:
    """start, length [batch, crops] in pixels -> [batch, crops, places, pixels]: what each pixel adds to each place."""
    scale = (length / places)[..., None, None]
    numbers = torch.arange(max(pixels, places), device=start.device, dtype=torch.float32) + 0.5
    centres = start[..., None, None] + numbers[:places, None] * scale
    far = ((numbers[:pixels] - centres) / scale.clamp(min=1)).abs()
    if cubic:
        near = (1.5 * far - 2.5) * far * far + 1
        weights = torch.where(far < 1, near, (((-0.5 * far + 2.5) * far - 4) * far + 2) * (far < 2))
    else:
        weights = (1 - far).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)
