"""Mixing pairs of images and their labels, on the device the batch is on: mixup and CutMix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.loading.order import MIX, stream
from vitrail.data.settings import Augment
from vitrail.errors import UsageError

AT_ONCE = 256
"""Images blended at a time."""


@dataclass(frozen=True)
class Mix:
    """Blend each image with another (mixup, Zhang et al. 2018) or paste a box of it (CutMix, Yun et al. 2019).

    One share of the own image is drawn per batch from Beta(alpha, alpha), for mixup the larger of it and its
    complement, as the paper's code does; with both alphas set, each batch takes one of the methods at random.
    All draws are a function of (seed, step), the same in every process.

    The other image is the one half a batch away: where `world` processes each hold every world-th place of the
    global batch, an even number of them, that is the same image as in one process with all of them. Rolling by
    one, as that code does, would need images of another process, and would meet the neighbouring copies that
    repeated augmentation makes.

    `classes` is the length of a target. Raises UsageError for a negative alpha.
    """

    augment: Augment
    classes: int
    seed: int

    def __post_init__(self) -> None:
        for name, alpha in (("mixup", self.augment.mixup), ("cutmix", self.augment.cutmix)):
            if not alpha >= 0:
                raise UsageError(f"augment.{name} is {alpha}; it must be 0 (off) or above")

    def __call__(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return mixed images, of the type and shape of `images`, and targets float32 [batch, classes].

        images: [batch, C, H, W], uint8 or float; labels: int64 [batch]. A blend of uint8 images is rounded to
        the nearest level. Where nothing is to be mixed both are returned as they are.
        """
        mixup, cutmix = self.augment.mixup, self.augment.cutmix
        if not (mixup or cutmix):
            return images, labels
        rng = stream(self.seed, 0, step, MIX)
        cut = rng.random() < 0.5 if mixup and cutmix else bool(cutmix)
        share = rng.beta(cutmix, cutmix) if cut else rng.beta(mixup, mixup)
        apart = len(labels) // 2
        if cut:
            height, width = images.shape[-2:]
            top, bottom, left, right = _box(share, height, width, rng)
            share = 1 - (bottom - top) * (right - left) / (height * width)
            mixed = images.clone()
            mixed[..., top:bottom, left:right] = images[..., top:bottom, left:right].roll(apart, 0)
        else:
            share = max(share, 1 - share)
            mixed = _blend(images, images.roll(apart, 0), share)
        own = F.one_hot(labels, self.classes).float()
        return mixed, own * share + own.roll(apart, 0) * (1 - share)


def _box(share: float, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw (top, bottom, left, right) of a box of 1 - share of the area, its centre uniform, cut at the edges."""
    side = math.sqrt(1 - share)
    h, w = int(height * side), int(width * side)
    top, left = int(rng.random() * height) - h // 2, int(rng.random() * width) - w // 2
    return max(top, 0), min(top + h, height), max(left, 0), min(left + w, width)


def _blend(images: Tensor, others: Tensor, share: float) -> Tensor:
    if images.is_floating_point():
        return torch.lerp(others, images, share)
    # the model takes uint8 as pixels and float as normalised, so the blend has to stay uint8; some at a time,
    # since as float a whole batch of 4096 would take twelve times its memory
    blended = torch.empty_like(images)
    for result, own, other in zip(blended.split(AT_ONCE), images.split(AT_ONCE), others.split(AT_ONCE), strict=True):
        result.copy_(torch.lerp(other.float(), own.float(), share).round_())
    return blended
