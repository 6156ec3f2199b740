"""What data, and what is done to each image, as values. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Data:
    """Where the images are and how they are split."""

    path: str = "digits"
    """A folder, a CSV or parquet file, tar shards, an .npz of arrays, a hub data set, an address, or 'digits'."""
    train: str = "train"
    """Split to train on; 'train+val' joins two."""
    validation: str | None = None
    """Split to choose by; None takes validation | val | dev if there is one; without one, or with 'none', part of
    train is held out."""
    holdout: float = 0.1
    """Share held out, stratified and seeded, where there is no validation split."""
    test: str | None = None
    """Split measured once, at the end; None takes test | testing if there is one, 'none' leaves it unopened."""
    image_column: str | None = None
    label_column: str | None = None
    """Columns of a table; None finds the usual names."""
    max_bad: float = 0.05
    """Largest share of training images that may be unreadable; when more turn up, training ends."""
    strict: bool = False
    """Refuse data of which anything is left out: an empty class folder, a broken link, an image that cannot be read."""
    subset: int | float | None = None
    """Use only this many training images, or as a share (0.1). Drawn by `seed`, classes in proportion; a smaller subset
    is part of a larger one, and validation images are the same for all."""

    together: int = 1
    """Neighbours in the data set that are shown in one batch and read in one piece; 1 shuffles single images. For
    shards at an address, which were packed in random order (`vitrail data pack --shuffle`)."""


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes the network's input when nothing is random: resize, then crop. Sizes in pixels."""

    image_size: tuple[int, int] = (224, 224)
    """Height and width handed to the network."""
    resize: Literal["squash", "small"] = "small"
    """'squash' ignores the aspect ratio; 'small' scales the short side, then takes the central crop."""
    crop: float = 0.875
    """The crop as a share of the resized image (0.875: resize 256, crop 224), in evaluation for 'small' only."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        if isinstance(self.image_size, int):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        object.__setattr__(self, "image_size", tuple(self.image_size))


@dataclass(frozen=True)
class Augment:
    """What is random about a training image; every field at its default does nothing but resize and crop."""

    crop: Literal["inception", "random", "pad", "center"] = "inception"
    """inception: random area and aspect, then resize (paper, B.1); random: resize to image_size / preprocess.crop,
    then crop anywhere; pad: shift by up to `pad` pixels (small images); center: as in evaluation."""
    scale: tuple[float, float] = (0.05, 1.0)
    """inception: share of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """inception: width over height."""
    pad: int = 4
    flip: bool = True
    """Mirror half of the images left to right."""
    randaugment: tuple[int, float] | None = None
    """(operations, magnitude 0..30; usual are 0..10)."""
    three_augment: bool = False
    """Grayscale, solarise or blur, one of them (DeiT-III)."""
    color_jitter: float = 0.0
    """Strength of brightness, contrast and saturation jitter."""
    erasing: float = 0.0
    """Probability of erasing a random rectangle."""
    mixup: float = 0.0
    """Alpha of mixup's Beta distribution; 0 switches it off."""
    cutmix: float = 0.0
    """Alpha of CutMix; with mixup on too, each batch takes one of them at random."""
    repeats: int = 1
    """Repeated augmentation: copies of an image in one batch, each augmented on its own."""
