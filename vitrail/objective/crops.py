"""Multi-crop: cut several crops from each image of a batch, resample and recolour all of them at once on the device.

The random numbers of an example are a function of (seed, step, image): one row with the box and the colour changes of
each crop. The crops are computed from them when a micro-batch needs them. So the result does not depend on how a batch
is cut, each image is copied to the device once, and the loader's threads have no work with crops.

Boxes are drawn as in `vitrail.data.images.geometry.InceptionCrop`, but not rounded to pixels. Resampling is Pillow's
antialiased resize of a box with fractional borders. Colours change as in Pillow and torchvision, for many pictures at
once, float [n, 3, height, width] in 0..255, each with its own strengths, float [n]. All changes are continuous in the
pixels, so they never amplify rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from vitrail.data.images.geometry import Size
from vitrail.data.loading.order import stream
from vitrail.objective.settings import DINO

CROPS = 27
"""Purpose of the stream drawn from here (the others are in `vitrail.data.loading.order` and its users)."""
GLOBAL = 2
"""Number of global crops. They come before the local ones."""
RATIO = (3 / 4, 4 / 3)
"""Smallest and largest aspect ratio (width over height) of a crop in the image, before it is resized."""
ATTEMPTS = 10
TOP, LEFT, HEIGHT, WIDTH, FLIP, BRIGHTNESS, CONTRAST, SATURATION, HUE, GREY, BLUR, SOLARISE, ORDER = range(13)
"""Columns of a row of `draw_crops`. The box is in shares of the image's sides. BRIGHTNESS, CONTRAST and SATURATION are
factors (1: no change), HUE is in turns, BLUR is a standard deviation in pixels, FLIP, GREY and SOLARISE are 0 or 1.
ORDER numbers the 24 orders of the four colour changes and is the same for all crops of a step."""
FACTORS = (0.4, 0.4, 0.2, 0.1)
"""Largest change of brightness, contrast, saturation (factors 1 - c to 1 + c) and hue (turns, -c to c): BYOL's."""
CHANGED, GREYED, SOLARISED = 0.8, 0.2, 0.2
"""Shares of the crops with changed colours, without colours, and (second global crop only) with solarisation."""
BLURRED = (1.0, 0.1, 0.5)
"""Share of blurred crops among first global crops, second global crops, and local crops."""
SHARPEST = 0.1
"""Smallest standard deviation of a blur in pixels."""


def crop_sizes(images: Size, network: Size, patch: int, config: DINO) -> tuple[Size, Size]:
    """Return (height, width) in pixels of the global and of the local crops, both multiples of the patch.

    The size of global crops is a share of the network's input size, or of the images' size if that is smaller.
    """
    whole = [min(pair) // patch * patch for pair in zip(images, network, strict=True)]
    large = [max(round(side * config.global_size / patch), 1) * patch for side in whole]
    small = [max(round(side * config.local_size / patch), 1) * patch for side in large]
    return (large[0], large[1]), (small[0], small[1])


def draw_crops(
    seed: int, step: int, index: Sequence[int], size: tuple[int, int], config: DINO, *, flip: bool
) -> np.ndarray:
    """Return the random numbers of all crops of images of `size`, float32 [batch, 2 + local crops, columns]."""
    count = GLOBAL + config.local_crops
    chances = [stream(seed, step, int(example), CROPS).random((count, 2 * ATTEMPTS + 12)) for example in index]
    drawn = np.stack(chances) if chances else np.empty((0, count, 2 * ATTEMPTS + 12))
    boxes, rest = drawn[..., : 2 * ATTEMPTS], drawn[..., 2 * ATTEMPTS :].transpose(2, 0, 1)
    table = np.zeros((*drawn.shape[:2], ORDER + 1), dtype=np.float32)
    scales = np.array([config.global_scale] * GLOBAL + [config.local_scale] * config.local_crops)
    table[..., :FLIP] = _boxes(boxes.reshape(*drawn.shape[:2], ATTEMPTS, 2), rest[:2], size, scales)
    table[..., FLIP] = (rest[2] < 0.5) & flip
    changed = config.jitter * (rest[3] < CHANGED)
    for column, chance, most in zip((BRIGHTNESS, CONTRAST, SATURATION, HUE), rest[4:8], FACTORS, strict=True):
        shift = changed * most * (2 * chance - 1)
        table[..., column] = shift if column == HUE else np.maximum(1 + shift, 0)
    table[..., GREY] = (rest[8] < GREYED) & (config.jitter > 0)
    blurred = np.array((*BLURRED[:GLOBAL], *BLURRED[GLOBAL:] * config.local_crops))
    wide = SHARPEST + (max(config.blur, SHARPEST) - SHARPEST) * rest[10]
    table[..., BLUR] = np.where((rest[9] < blurred) & (config.blur > 0), wide, 0)
    table[:, 1, SOLARISE] = (rest[11, :, 1] < SOLARISED) & (config.jitter > 0)
    table[..., ORDER] = stream(seed, step, 0, CROPS).integers(24)
    return table


def _boxes(attempts: np.ndarray, place: np.ndarray, size: tuple[int, int], scales: np.ndarray) -> np.ndarray:
    """Return boxes [batch, crops, 4] (top, left, height, width) from uniform random numbers in 0..1.

    attempts [batch, crops, attempts, 2] are area and aspect ratio; place [2, batch, crops] is the position.
    """
    rows, columns = size
    low, high = (math.log(ratio) for ratio in RATIO)
    area = rows * columns * (scales[:, :1] + (scales[:, 1:] - scales[:, :1]) * attempts[..., 0])
    ratio = np.exp(low + (high - low) * attempts[..., 1])
    height, width = np.sqrt(area / ratio) / rows, np.sqrt(area * ratio) / columns  # shares of the sides
    fits = (height <= 1) & (width <= 1)
    first = fits.argmax(-1)[..., None]
    # if no attempt fits, take the largest box of a permitted shape
    shape = min(max(columns / rows, RATIO[0]), RATIO[1])
    some = fits.any(-1)
    height = np.where(some, np.take_along_axis(height, first, -1)[..., 0], min(1.0, columns / shape / rows))
    width = np.where(some, np.take_along_axis(width, first, -1)[..., 0], min(1.0, rows * shape / columns))
    down, right = np.where(some, place, 0.5)
    return np.stack([down * (1 - height), right * (1 - width), height, width], axis=-1)


def cut(images: Tensor, drawn: Tensor, size: tuple[int, int], *, cubic: bool) -> Tensor:
    """Return the crops `drawn` of images [batch, channels, H, W], float32 [batch, crops, channels, *size].

    Values are not rounded. Those of uint8 images are clamped to 0..255, because cubic interpolation may overshoot.
    """
    batch, channels, rows, columns = images.shape
    starts, lengths = drawn[..., TOP:HEIGHT].movedim(-1, 0), drawn[..., HEIGHT:FLIP].movedim(-1, 0)
    if rows == columns and size[0] == size[1]:
        down, right = _weights(starts * rows, lengths * rows, rows, size[0], cubic)
    else:
        down = _weights(starts[0] * rows, lengths[0] * rows, rows, size[0], cubic)
        right = _weights(starts[1] * columns, lengths[1] * columns, columns, size[1], cubic)
    right = torch.where(drawn[..., FLIP, None, None] > 0, right.flip(2), right)
    pixels = images.permute(0, 2, 3, 1).float().reshape(batch, rows, columns * channels)
    with torch.autocast(images.device.type, enabled=False):
        high = torch.bmm(down.flatten(1, 2), pixels)  # [batch, crops * height, columns * channels]
        high = high.view(batch, -1, size[0], columns, channels).permute(0, 1, 3, 4, 2)
        wide = right @ high.flatten(3)  # [batch, crops, width, channels * height]
    crops = wide.unflatten(3, (channels, size[0])).permute(0, 1, 3, 4, 2)
    return crops.clamp(0, 255) if images.dtype == torch.uint8 else crops


def _weights(start: Tensor, length: Tensor, pixels: int, places: int, cubic: bool) -> Tensor:
    """start, length [..., batch, crops] in pixels -> [..., batch, crops, places, pixels]: resampling weights."""
    scale = (length / places)[..., None, None]
    numbers = torch.arange(0.5, max(pixels, places), device=start.device, dtype=torch.float32)
    centres = start[..., None, None] + numbers[:places, None] * scale
    far = ((numbers[:pixels] - centres) / scale.clamp(min=1)).abs_()
    if cubic:
        near = (1.5 * far - 2.5) * far * far + 1
        far.clamp_(max=2)  # where the other polynomial is 0
        weights = torch.where(far < 1, near, ((-0.5 * far + 2.5) * far - 4) * far + 2)
    else:
        weights = (1 - far).clamp_(min=0)
    return weights / weights.sum(-1, keepdim=True)


LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a grey picture (ITU-R 601)."""
ORDERS = tuple(permutations(range(4)))


def recolour(pictures: Tensor, drawn: Tensor, order: Sequence[int]) -> Tensor:
    """Return pictures [n, 3, height, width] with the changes in `drawn` [n, columns] (`draw_crops`).

    order: The one of `ORDERS` that `drawn` names. Reading it there would wait for the device.
    """
    if not len(pictures):
        return pictures
    changes = (brightness, contrast, saturation, hue)
    columns = (BRIGHTNESS, CONTRAST, SATURATION, HUE)
    with torch.autocast(pictures.device.type, enabled=False):
        for which in order:
            pictures = changes[which](pictures, drawn[:, columns[which]])
        pictures = saturation(pictures, 1 - drawn[:, GREY])
        return solarise(blur(pictures, drawn[:, BLUR]), drawn[:, SOLARISE])


def grey(pictures: Tensor) -> Tensor:
    """[n, 3, height, width] -> [n, 1, height, width]"""
    red, green, blue = pictures.split(1, 1)
    return (LUMA[0] * red).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def brightness(pictures: Tensor, factor: Tensor) -> Tensor:
    """Blend black (factor 0) and the picture (factor 1); larger factors extrapolate."""
    return (pictures * _each(factor)).clamp_(0, 255)


def contrast(pictures: Tensor, factor: Tensor) -> Tensor:
    """Blend the picture's mean grey (factor 0) and the picture (factor 1); larger factors extrapolate."""
    return _blend(pictures, grey(pictures).mean((2, 3), keepdim=True), factor)


def saturation(pictures: Tensor, factor: Tensor) -> Tensor:
    """Blend the grey picture (factor 0) and the picture (factor 1); larger factors extrapolate."""
    return _blend(pictures, grey(pictures), factor)


def hue(pictures: Tensor, turns: Tensor) -> Tensor:
    """Rotate the hue (of HSV) by this number of turns."""
    value, lowest = pictures.amax(1), pictures.amin(1)
    chroma = value - lowest
    red, green, blue = pictures.unbind(1)
    safe = chroma.clamp(min=1e-6)
    sixths = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixths = torch.add(sixths, turns[:, None, None], alpha=6)
    places = sixths[:, None] + torch.arange(5.0, 0.0, -2.0, device=sixths.device)[:, None, None]  # 5, 3, 1
    places.remainder_(6)
    shares = torch.minimum(places, 4 - places).clamp_(0, 1)
    return torch.addcmul(value[:, None], chroma[:, None], shares, value=-1)


def blur(pictures: Tensor, deviation: Tensor) -> Tensor:
    """Blur by a Gaussian of this standard deviation in pixels; 0 changes nothing. Edges weigh only existing pixels."""
    height, width = pictures.shape[2:]
    down = _gaussian(deviation, height)
    right = down if width == height else _gaussian(deviation, width)
    return down[:, None] @ pictures @ right[:, None].transpose(-1, -2)


def solarise(pictures: Tensor, share: Tensor) -> Tensor:
    """Invert the values above 127.5 of the pictures with share 1; a share of 0 changes nothing."""
    return torch.lerp(pictures, torch.minimum(pictures, 255 - pictures), _each(share))


def _gaussian(deviation: Tensor, side: int) -> Tensor:
    """Return the blur's weights [n, side, side] along one axis: output pixel, input pixel."""
    places = torch.arange(side, device=deviation.device, dtype=torch.float32)
    apart = (places[:, None] - places).square()
    weights = torch.exp(apart / (-2 * deviation.clamp(min=1e-3)[:, None, None].square()))
    return weights / weights.sum(-1, keepdim=True)


def _blend(pictures: Tensor, with_: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(with_, pictures, _each(factor)).clamp_(0, 255)


def _each(values: Tensor) -> Tensor:
    return values[:, None, None, None]
