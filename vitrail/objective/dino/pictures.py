"""Pictures of DINO's training: the boxes of the crops, the crops, the teacher's attention, and both outputs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.model.record import attention_maps
from vitrail.model.vit import ViT
from vitrail.objective.dino.crops import GLOBAL, HEIGHT, LEFT, TOP, WIDTH
from vitrail.objective.self_supervised import to_pixels

SMALLEST = 112
"""Minimum length of a picture's shorter side in pixels. Smaller images are enlarged, so that outlines stay visible."""
LARGE = ((255, 140, 0), (255, 220, 0))
"""Outlines of the global crops."""
SMALL = (0, 210, 255)
"""Outlines of the local crops."""
TEACHER, STUDENT = (30, 90, 160), (200, 90, 30)
"""Colours of the bars."""
BARS = 12
"""Number of outputs to draw: the teacher's largest."""
DIM = 0.2
"""Brightness of a picture, as a share of its own, where the attention is 0."""


def outlined(images: Tensor, drawn: Tensor) -> Tensor:
    """Return uint8 `images`, enlarged, with an outline for each crop in `drawn` [batch, crops, columns]."""
    times = math.ceil(SMALLEST / min(images.shape[-2:]))
    large = images.repeat_interleave(times, -2).repeat_interleave(times, -1)
    height, width = large.shape[-2:]
    thick = max(round(min(height, width) / 100), 1)
    for picture, boxes in zip(large, drawn.tolist(), strict=True):
        for number, box in reversed(list(enumerate(boxes))):
            colour = picture.new_tensor(LARGE[number] if number < GLOBAL else SMALL)[:, None, None]
            top, left = round(box[TOP] * height), round(box[LEFT] * width)
            bottom, right = round((box[TOP] + box[HEIGHT]) * height), round((box[LEFT] + box[WIDTH]) * width)
            picture[:, top : top + thick, left:right] = colour
            picture[:, max(bottom - thick, 0) : bottom, left:right] = colour
            picture[:, top:bottom, left : left + thick] = colour
            picture[:, top:bottom, max(right - thick, 0) : right] = colour
    return large


def side_by_side(crops: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [batch, crops, 3, h, w] -> [batch, 3, *size]: all crops of an image on a square grid."""
    across = math.ceil(math.sqrt(crops.shape[1]))
    sheet = torch.full((len(crops), 3, *size), 255, dtype=torch.uint8, device=crops.device)
    height, width = size[0] // across, size[1] // across
    gap = 2 if across > 1 else 0
    for number, crop in enumerate(crops.unbind(1)):
        row, column = divmod(number, across)
        fitted = resized(crop, (height - gap, width - gap))
        top, left = row * height, column * width
        sheet[..., top : top + height - gap, left : left + width - gap] = fitted
    return sheet


def attended(teacher: ViT, shown: Tensor, pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Return uint8 `pictures` of `size`, bright where the last layer attends to. `shown` are the normalised pictures.

    The attention is the class token's to the patches, or without a class token the mean over all patches. It is
    averaged over the heads.
    """
    maps = attention_maps(teacher, shown, layers=[-1])[0].maps.mean(1)
    front = teacher.config.prefix
    asking = maps[:, :1] if teacher.config.has_class_token else maps[:, front:]
    heat = asking[:, :, front:].mean(1)
    heat = (heat / heat.amax(1, keepdim=True)).unflatten(1, teacher.grid(shown))[:, None]
    heat = F.interpolate(heat, size=size, mode="nearest")
    return to_pixels(resized(pictures, size).float() * (DIM + (1 - DIM) * heat))


def strongest(target: Tensor, guess: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (prediction, target) as bar charts, uint8 [batch, 3, *size].

    target, guess: probabilities [batch, outputs] of the teacher and the student. The bars are the teacher's largest
    outputs in descending order. All bars of an image have the same scale.
    """
    top = target.topk(min(BARS, target.shape[1]), dim=1)
    theirs, ours = top.values, guess.gather(1, top.indices)
    scale = torch.maximum(theirs.amax(1), ours.amax(1))[:, None]
    return _bars(ours / scale, STUDENT, size), _bars(theirs / scale, TEACHER, size)


def resized(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [batch, 3, h, w] -> [batch, 3, *size]: nearest pixels to enlarge, antialiased to shrink."""
    grows = size[0] >= pictures.shape[-2]
    how = {"mode": "nearest"} if grows else {"mode": "bilinear", "antialias": True}
    return to_pixels(F.interpolate(pictures.float(), size=size, **how))  # type: ignore[arg-type]


def _bars(shares: Tensor, colour: tuple[int, int, int], size: tuple[int, int]) -> Tensor:
    """[batch, bars] in 0..1 -> bars that rise from the bottom, uint8 [batch, 3, *size]."""
    height, width = size
    places = torch.arange(width, device=shares.device) * shares.shape[1]
    bar = (places // width).clamp(max=shares.shape[1] - 1)
    gap = places % width >= width * 0.8
    level = (height - torch.arange(height, device=shares.device))[:, None] / height
    filled = (shares[:, None, bar] >= level) & ~gap
    ink = torch.tensor(colour, dtype=torch.uint8, device=shares.device)[:, None, None]
    return torch.where(filled[:, None], ink, torch.tensor(246, dtype=torch.uint8, device=shares.device))
