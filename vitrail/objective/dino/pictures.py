"""Pictures of what DINO sees: where its crops are, the crops, where the teacher looks, and what both answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.model.taps import attention_maps
from vitrail.model.vit import ViT
from vitrail.objective.dino.crops import GLOBAL, HEIGHT, LEFT, TOP, WIDTH
from vitrail.objective.seen import Columns, to_pixels

SMALLEST = 112
"""Pixels of a picture's shorter side, at least: enlarged, so that outlines and local crops can be told apart."""
LARGE = ((255, 140, 0), (255, 220, 0))
"""Outlines of the global crops."""
SMALL = (0, 210, 255)
TEACHER, STUDENT = (30, 90, 160), (200, 90, 30)
"""Bars."""
BARS = 12
"""Outputs that are drawn: those that the teacher answers most strongly."""
DIM = 0.2
"""Of its brightness, what is left of a picture where nobody looks."""


@dataclass(frozen=True)
class CropsSeen(Columns):
    """Pictures of each image, uint8 [batch, 3, height, width] each, and what to call them."""

    pictures: list[Tensor]
    titles: list[str]

    def columns(self) -> list[Tensor]:
        """See `Columns`."""
        return self.pictures


def outlined(images: Tensor, drawn: Tensor) -> Tensor:
    """Return uint8 `images`, enlarged, with an outline for each crop that is drawn [batch, crops, columns]."""
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
    """uint8 [batch, crops, 3, h, w] -> [batch, 3, *size]: all crops of an image in rows, as large as there is room."""
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
    """Return uint8 `pictures` of `size`, bright where the last layer looks when the network is `shown` them.

    The mean over heads of the class token's attention to the patches; without one, of that of all patches.
    """
    maps = attention_maps(teacher, shown, layers=[-1])[0].maps.mean(1)
    front = teacher.config.prefix
    asking = maps[:, :1] if teacher.config.has_class_token else maps[:, front:]
    heat = asking[:, :, front:].mean(1)
    heat = (heat / heat.amax(1, keepdim=True)).unflatten(1, teacher.grid(shown))[:, None]
    heat = F.interpolate(heat, size=size, mode="nearest")
    return to_pixels(resized(pictures, size).float() * (DIM + (1 - DIM) * heat))


def strongest(target: Tensor, guess: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Probabilities [batch, outputs] of student and teacher -> (prediction, target) as bars, uint8 [batch, 3, *size].

    For the outputs to which the teacher gives most, most first, all bars of an image on one scale.
    """
    top = target.topk(min(BARS, target.shape[1]), dim=1)
    theirs, ours = top.values, guess.gather(1, top.indices)
    scale = torch.maximum(theirs.amax(1), ours.amax(1))[:, None]
    return _bars(ours / scale, STUDENT, size), _bars(theirs / scale, TEACHER, size)


def resized(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [batch, 3, h, w] -> [batch, 3, *size]: pixels stay visible where it grows, and are averaged else."""
    grows = size[0] >= pictures.shape[-2]
    how = {"mode": "nearest"} if grows else {"mode": "bilinear", "antialias": True}
    return to_pixels(F.interpolate(pictures.float(), size=size, **how))  # type: ignore[arg-type]


def _bars(shares: Tensor, colour: tuple[int, int, int], size: tuple[int, int]) -> Tensor:
    """[batch, bars] in 0..1 -> uint8 [batch, 3, *size], from the bottom up."""
    height, width = size
    places = torch.arange(width, device=shares.device) * shares.shape[1]
    bar = (places // width).clamp(max=shares.shape[1] - 1)
    gap = places % width >= width * 0.8
    level = (height - torch.arange(height, device=shares.device))[:, None] / height
    filled = (shares[:, None, bar] >= level) & ~gap
    ink = torch.tensor(colour, dtype=torch.uint8, device=shares.device)[:, None, None]
    return torch.where(filled[:, None], ink, torch.tensor(246, dtype=torch.uint8, device=shares.device))
