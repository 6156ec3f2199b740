"""Changes of colour, blur and solarisation of many pictures at once, each with strengths of its own.

Pictures are float [n, 3, height, width] in 0..255, strengths float [n]. The definitions are Pillow's and torchvision's
for colours; everything is continuous in the pixels, so rounding elsewhere is never amplified.
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
    """Return pictures [n, 3, height, width] changed as drawn [n, columns] says (`vitrail.objective.dino.crops`)."""
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
    """Between black (factor 0), the picture (1) and beyond."""
    return (pictures * _each(factor)).clamp(0, 255)


def contrast(pictures: Tensor, factor: Tensor) -> Tensor:
    """Between the picture's mean grey (factor 0), the picture (1) and beyond."""
    return _blend(pictures, grey(pictures).mean((2, 3), keepdim=True), factor)


def saturation(pictures: Tensor, factor: Tensor) -> Tensor:
    """Between the grey picture (factor 0), the picture (1) and beyond."""
    return _blend(pictures, grey(pictures), factor)


def hue(pictures: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of HSV by so many whole turns."""
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
    """Gaussian blur of this standard deviation in pixels; 0 leaves a picture as it is. Edges weigh what is there."""
    down, right = (_gaussian(deviation, side) for side in pictures.shape[2:])
    return down[:, None] @ pictures @ right[:, None].transpose(-1, -2)


def solarise(pictures: Tensor, share: Tensor) -> Tensor:
    """Invert what is brighter than the middle, where share is 1."""
    return torch.lerp(pictures, torch.minimum(pictures, 255 - pictures), _each(share))


def _gaussian(deviation: Tensor, side: int) -> Tensor:
    """[n, side, side]: what each pixel of a line adds to each."""
    places = torch.arange(side, device=deviation.device, dtype=torch.float32)
    apart = (places[:, None] - places).square()
    weights = torch.exp(-apart / (2 * deviation.clamp(min=1e-3)[:, None, None].square()))
    return weights / weights.sum(-1, keepdim=True)


def _blend(pictures: Tensor, with_: Tensor, factor: Tensor) -> Tensor:
    return (with_ + (pictures - with_) * _each(factor)).clamp(0, 255)


def _each(values: Tensor) -> Tensor:
    return values[:, None, None, None]
