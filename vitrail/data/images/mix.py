"""Mix pairs of images and their labels on the batch's device: mixup and CutMix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.loading.order import MIX, stream
from vitrail.data.settings import Augment

AT_ONCE = 256
"""Number of images blended at a time."""


@dataclass(frozen=True)
class Mix:
    """Blend each image with another (mixup, Zhang et al. 2018) or paste a box of it (CutMix, Yun et al. 2019).

    The share of an image in its own blend is drawn from Beta(alpha, alpha), once per batch. Mixup takes the larger of
    this share and its complement, as the paper's code does. With both alphas set, each batch uses one of the methods at
    random. All draws depend on (seed, step) only, so every process draws the same.

    Each image is mixed with the image half a batch away. If each of several processes holds an even number of images,
    this is the same pair as in one process with all images. The paper's code mixes neighbours. This would need images
    of another process, and with repeated augmentation a neighbour is a copy of the same image.
    """

    augment: Augment
    classes: int
    """Length of a target."""
    seed: int

    def __call__(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return mixed images, of the type and shape of `images`, and targets float32 [batch, classes].

        images: [batch, C, H, W], uint8 or float; labels: int64 [batch], or several labels int8 [batch, classes]. A
        blend of uint8 images is rounded to the nearest level. Without mixup and CutMix both are returned unchanged.
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
        own = (F.one_hot(labels, self.classes) if labels.ndim == 1 else labels).float()
        return mixed, own * share + own.roll(apart, 0) * (1 - share)


def _box(share: float, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw (top, bottom, left, right) of a box with 1 - share of the area and a uniform centre, cut at the edges."""
    side = math.sqrt(1 - share)
    h, w = int(height * side), int(width * side)
    top, left = int(rng.random() * height) - h // 2, int(rng.random() * width) - w // 2
    return max(top, 0), min(top + h, height), max(left, 0), min(left + w, width)


def _blend(images: Tensor, others: Tensor, share: float) -> Tensor:
    """Return share * images + (1 - share) * others, of the type of `images`."""
    if images.is_floating_point():
        return torch.lerp(others, images, share)
    # the blend must stay uint8, because the model takes floats as normalised; a whole batch of 4096 as float would take
    # twelve times the memory, so a few images are blended at a time
    blended = torch.empty_like(images)
    for result, own, other in zip(blended.split(AT_ONCE), images.split(AT_ONCE), others.split(AT_ONCE), strict=True):
        result.copy_(torch.lerp(other.float(), own.float(), share).round_())
    return blended
