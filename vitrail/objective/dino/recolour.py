"""Change the colours of many pictures at once, blur and solarise them, each picture with its own strengths.

Pictures are float [n, 3, height, width] in 0..255, strengths float [n]. Colours change as in Pillow and torchvision.
All functions are continuous in the pixels, so they never amplify rounding errors.
"""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor

from vitrail.objective.dino.crops import BLUR, BRIGHTNESS, CONTRAST, GREY, HUE, ORDER, SATURATION, SOLARISE

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a grey picture (ITU-R 601)."""
ORDERS = tuple(permutations(range(4)))


def recolour(pictures: Tensor, drawn: Tensor) -> Tensor:
    """Return pictures [n, 3, height, width] with the changes in `drawn` [n, columns] (`objective.dino.crops`)."""
    if not len(pictures):
        return pictures
    changes = (brightness, contrast, saturation, hue)
    columns = (BRIGHTNESS, CONTRAST, SATURATION, HUE)
    with torch.autocast(pictures.device.type, enabled=False):
        for which in ORDERS[int(drawn[0, ORDER])]:
            pictures = changes[which](pictures, drawn[:, columns[which]])
        pictures = saturation(pictures, 1 - drawn[:, GREY])
        return solarise(blur(pictures, drawn[:, BLUR]), drawn[:, SOLARISE])


def grey(pictures: Tensor) -> Tensor:
    """[n, 3, height, width] -> [n, 1, height, width]"""
    red, green, blue = pictures.split(1, 1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def brightness(pictures: Tensor, factor: Tensor) -> Tensor:
    """Blend black (factor 0) and the picture (factor 1); larger factors extrapolate."""
    return (pictures * _each(factor)).clamp(0, 255)


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
    sixths = sixths + 6 * turns[:, None, None]
    places = sixths[:, None] + sixths.new_tensor([5.0, 3.0, 1.0])[:, None, None]
    places = places.remainder(6)
    return value[:, None] - chroma[:, None] * torch.minimum(places, 4 - places).clamp(0, 1)


def blur(pictures: Tensor, deviation: Tensor) -> Tensor:
    """Blur by a Gaussian of this standard deviation in pixels; 0 changes nothing. Edges weigh only existing pixels."""
    down, right = (_gaussian(deviation, side) for side in pictures.shape[2:])
    return down[:, None] @ pictures @ right[:, None].transpose(-1, -2)


def solarise(pictures: Tensor, share: Tensor) -> Tensor:
    """Invert the values above 127.5 of the pictures with share 1; a share of 0 changes nothing."""
    return torch.lerp(pictures, torch.minimum(pictures, 255 - pictures), _each(share))


def _gaussian(deviation: Tensor, side: int) -> Tensor:
    """Return the blur's weights [n, side, side] along one axis: output pixel, input pixel."""
    places = torch.arange(side, device=deviation.device, dtype=torch.float32)
    apart = (places[:, None] - places).square()
    weights = torch.exp(-apart / (2 * deviation.clamp(min=1e-3)[:, None, None].square()))
    return weights / weights.sum(-1, keepdim=True)


def _blend(pictures: Tensor, with_: Tensor, factor: Tensor) -> Tensor:
    return (with_ + (pictures - with_) * _each(factor)).clamp(0, 255)


def _each(values: Tensor) -> Tensor:
    return values[:, None, None, None]
