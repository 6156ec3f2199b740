"""Image preparation as in the papers' code: an `Augment` for training and a `Preprocess` for evaluation.

The two presets for fine-tuning, `vit_jax` and `big_vision`, give different accuracies for the same weights: the first
squashes a test image to the network's size, the second keeps its aspect ratio and crops its border.

One difference cannot be expressed: vit_jax resizes without antialiasing, vitrail always with it.
big_vision's `decode_jpeg_and_inception_crop` crops training images while decoding, which gives the same crops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from vitrail.data.settings import Augment, Preprocess
from vitrail.training.run import Run

PRE_TRAINING = 224
"""Pixels: "all training is done on resolution 224" (appendix B.1)."""
FINE_TUNING = 384
"""Pixels, "if not mentioned otherwise" (Table 4)."""


@dataclass(frozen=True)
class Preset:
    """The preparation of training images and of evaluation images."""

    augment: Augment
    preprocess: Preprocess

    def of(self, run: Run) -> Run:
        """Return `run` with this preparation. The size of the network's input is that of the prepared images."""
        side, _ = self.preprocess.image_size
        return replace(run, image_size=side, augment=self.augment, preprocess=self.preprocess)


def inception(side: int = PRE_TRAINING) -> Preset:
    """Return the preset for pre-training ViT and BiT.

    Inception crop, mirroring; a test image gets `resize_small`, then the central 87.5 %.
    """
    return Preset(Augment(crop="inception", scale=(0.05, 1.0)), Preprocess((side, side)))


def vit_jax(side: int = FINE_TUNING) -> Preset:
    """Return the preset for fine-tuning in google-research/vision_transformer (`input_pipeline.py`).

    Inception crop of at least 5 % of the area, mirroring; a test image is squashed to side x side pixels.
    """
    augment = Augment(crop="inception", scale=(0.05, 1.0), ratio=(3 / 4, 4 / 3))  # although evaluation squashes
    return Preset(augment, Preprocess((side, side), resize="squash"))


def big_vision(side: int = FINE_TUNING, crop: Literal["inception", "random"] = "inception") -> Preset:
    """Return the preset for fine-tuning in big_vision (`configs/transfer.py`).

    `inception_crop(384)` or, for CIFAR, `resize_small(448)|random_crop(384)`, then mirroring; a test image gets
    `resize_small(448)|central_crop(384)`. Other sizes keep the proportion of 384 to 448.
    """
    return Preset(Augment(crop=crop, scale=(0.05, 1.0)), Preprocess((side, side), resize="small", crop=384 / 448))


def bit(side: int, resized: int) -> Preset:
    """Return the preset for fine-tuning BiT: squash to `resized`, random crop of `side`, mirroring.

    A test image is squashed to `side`. If cropping or mirroring would change the label (orientation, position), BiT
    does neither: use `--augment.crop center --augment.no-flip`.
    """
    return Preset(Augment(crop="random"), Preprocess((side, side), resize="squash", crop=side / resized))


def bicubic(run: Run, side: int, crop: float) -> Run:
    """Return `run` at `side` pixels, prepared as by DeiT and its successors: resize the short side, then crop."""
    preprocess = Preprocess((side, side), crop=crop, interpolation="bicubic")
    return replace(run, image_size=side, preprocess=preprocess)
