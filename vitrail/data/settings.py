"""The settings of the data and of what happens to each image. Torch-free.

The docstring of each field is the help text of its flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Data:
    """Where the images are and how they are split."""

    path: str = "digits"
    """A folder, a CSV or parquet file, tar shards, an .npz of arrays, a hub data set, an address, or 'digits'."""
    train: str = "train"
    """Split to train on. 'train+val' joins two splits."""
    validation: str | Literal["none"] | None = None
    """Split by which the best model is chosen (default: validation, val or dev if there is one). Without such a split,
    or with 'none', part of the training split is held out."""
    holdout: float = 0.1
    """Share of the training images held out for validation, stratified by class and drawn by the seed, if the
    data have no validation split."""
    test: str | Literal["none"] | None = None
    """Split that is measured once at the end; 'none' for no test (default: test or testing if there is one)."""
    image_column: str | None = None
    """Column of a table that holds the images (default: the usual names are tried)."""
    label_column: str | None = None
    """Column of a table that holds the labels (default: the usual names are tried)."""
    max_bad: float = 0.05
    """Largest share of training images that may be unreadable. Training stops if there are more."""
    strict: bool = False
    """Reject data with any defect: an empty class folder, a broken link, an unreadable image."""
    subset: int | float | None = None
    """Number of training images to use, or their share (0.1), drawn by the seed in proportion to the classes. A smaller
    subset is part of a larger one; the validation images stay the same (default: all images)."""
    together: int = 1
    """Number of neighbouring images that are read in one piece and stay in one batch; 1 shuffles single images. Use it
    for remote shards that were packed in random order (`vitrail data pack --shuffle`)."""


@dataclass(frozen=True)
class Preprocess:
    """How an image is prepared for evaluation: resize, then crop. Sizes in pixels."""

    image_size: tuple[int, int] = (224, 224)
    """Height and width of the network's input in pixels."""
    resize: Literal["squash", "small"] = "small"
    """How an image is resized. squash: to the input size, whatever its aspect ratio; small: by its short side, then the
    central crop."""
    crop: float = 0.875
    """Side of the crop as a share of the resized image (0.875: resize to 256, crop 224). Evaluation uses it with
    resize small only."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation for resizing."""

    def __post_init__(self) -> None:
        if isinstance(self.image_size, int):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        object.__setattr__(self, "image_size", tuple(self.image_size))


@dataclass(frozen=True)
class Augment:
    """Random changes to training images. With every field at its default images are cropped, resized and flipped."""

    crop: Literal["inception", "random", "pad", "center"] = "inception"
    """How a training image is cropped. inception: random area and aspect ratio, then resize (paper, B.1); random:
    resize to image_size / preprocess.crop, then a random crop; pad: shift by up to `pad` pixels (for small images);
    center: as in evaluation."""
    scale: tuple[float, float] = (0.05, 1.0)
    """For crop inception: smallest and largest share of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """For crop inception: smallest and largest aspect ratio (width over height)."""
    pad: int = 4
    """For crop pad: largest shift in pixels."""
    flip: bool = True
    """Flip half of the images horizontally."""
    randaugment: tuple[int, float] | None = None
    """RandAugment: number of operations and their magnitude, 0 to 30, usually up to 10 (default: off)."""
    three_augment: bool = False
    """Apply one of grayscale, solarise and blur, at random (3-Augment of DeiT-III)."""
    color_jitter: float = 0.0
    """Strength of random changes to brightness, contrast and saturation; 0 for none."""
    erasing: float = 0.0
    """Probability of erasing a random rectangle of the image."""
    mixup: float = 0.0
    """Alpha of the Beta distribution of mixup; 0 switches mixup off."""
    cutmix: float = 0.0
    """Alpha of the Beta distribution of CutMix; 0 switches CutMix off. If mixup is on too, each batch uses one of them
    at random."""
    repeats: int = 1
    """Number of copies of an image in one batch, each augmented differently (repeated augmentation)."""
