"""`ModelInput`: the preprocessing of a network as a callable for images of Pillow, as torchvision's transforms are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.images.decode import pixels_of
from vitrail.data.images.geometry import Op
from vitrail.data.images.ops import eval_transform
from vitrail.data.settings import Preprocess
from vitrail.errors import UsageError


@dataclass(frozen=True)
class ModelInput:
    """Image of Pillow's -> the network's input, float32 [3, height, width]: upright, RGB, resized, cropped, normalised.

    The result for `PIL.Image.open(file)` is to the bit what `predict` computes from the file. It can be pickled, for
    the workers of a DataLoader. A conversion before it (`image.convert("RGB")`, which torchvision's ImageFolder does
    unless it gets `loader=PIL.Image.open`) is Pillow's own, which differs for CMYK, 16 bits and transparency.

    Raises DecodeError for a damaged image, and UsageError for anything that is not an image of Pillow's.
    """

    preprocess: Preprocess
    normalise: Callable[[Tensor], Tensor]
    """uint8 [3, height, width] -> float32."""

    @cached_property
    def _prepare(self) -> Op:
        return eval_transform(self.preprocess)

    def __call__(self, image: Image.Image) -> Tensor:
        """See the class."""
        if not isinstance(image, Image.Image):
            kind = type(image).__name__
            raise UsageError(f"expected an image of Pillow's, not {kind}: open a file with PIL.Image.open(file)")
        pixels = self._prepare(pixels_of(image), np.random.default_rng(0))  # nothing is random in evaluation
        return self.normalise(torch.from_numpy(pixels).permute(2, 0, 1)).contiguous()
