"""The parity check: run a program and its network on the same images and measure the largest difference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from vitrail.data.images.decode import decode
from vitrail.data.images.ops import eval_transform
from vitrail.data.sources.folder import read_file
from vitrail.evaluation.predict import find_images
from vitrail.exports.kinds import Output, Run
from vitrail.exports.network import compute
from vitrail.model.resnet.network import ResNet
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.reference import TOLERANCE, fixed_pixels, relative_error

TOLERANCES = {"float32": TOLERANCE, "float16": 2e-2, "bf16": 1e-1}
"""Largest accepted difference from the network in float32, relative to the largest output."""
BATCHES = (1, 3)
"""Batch sizes that a program is tested with. Further images come in batches of three."""
MOST_IMAGES = 64
"""Maximum number of the user's images to compare on."""


@dataclass(frozen=True)
class Parity:
    """Differences between the outputs of a program and those of the network in float32."""

    runtime: str
    """Name and version of the runtime that ran the program."""
    images: int
    real: int
    """Number of images from the user; the others are synthetic."""
    absolute: float
    """Largest absolute difference of any output."""
    relative: float
    """Largest difference relative to the largest output."""
    tolerance: float
    """Largest accepted value of `relative`."""
    agreement: float | None = None
    """Share of the images for which both predict the same class; None if the outputs are features."""

    @property
    def passed(self) -> bool:
        """Is the difference within the tolerance? NaN is not."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        kinds = f"{self.real} of yours" if self.real else "synthetic"
        text = (
            f"{self.runtime}, {self.images} images ({kinds}), batches of {' and '.join(map(str, BATCHES))}: largest "
            f"difference {self.absolute:.1e}, relative to the largest output {self.relative:.1e} "
            f"(allowed {self.tolerance:g})"
        )
        if self.agreement is not None:
            text += f", the same best class for {round(self.agreement * self.images)} of {self.images}"
        return text


def compare(
    run: Run, model: ViT | ResNet, images: np.ndarray, output: Output, precision: str, *, runtime: str, real: int = 0
) -> Parity:
    """Run a program and its float32 network on uint8 images [n, channels, height, width], n at least 4."""
    batches = list(_batches(images))
    found = torch.cat([torch.from_numpy(run(batch)) for batch in batches])
    with torch.no_grad():
        expected = torch.cat([compute(model, torch.from_numpy(batch), output) for batch in batches])
    same_shape = expected.shape == found.shape
    agreement = None
    if output != "features" and same_shape:
        agreement = float((expected.argmax(1) == found.argmax(1)).double().mean())
    return Parity(
        runtime=runtime,
        images=len(images),
        real=real,
        absolute=float((expected - found).abs().max()) if same_shape else float("inf"),
        relative=relative_error(found, expected),
        tolerance=TOLERANCES[precision],
        agreement=agreement,
    )


def _batches(images: np.ndarray) -> Iterable[np.ndarray]:
    start = 0
    for size in (*BATCHES, *[BATCHES[-1]] * len(images)):
        if start < len(images):
            yield np.ascontiguousarray(images[start : start + size])
            start += size


def synthetic_images(card: Card, count: int = sum(BATCHES)) -> np.ndarray:
    """Return uint8 images [count, channels, height, width]: the fixed image of the reference vectors, then noise."""
    first = fixed_pixels(*card.preprocess.image_size, card.config.channels).transpose(2, 0, 1)[None]
    noise = np.random.default_rng(0).integers(0, 256, (count - 1, *first.shape[1:]), dtype=np.uint8)
    return np.concatenate([first, noise])


def real_images(paths: Iterable[str | Path], card: Card) -> np.ndarray:
    """Return up to `MOST_IMAGES` of the user's images, preprocessed, uint8 [n, channels, height, width].

    Raises DataError if there are none, DecodeError for an image that cannot be decoded.
    """
    transform, unused = eval_transform(card.preprocess), np.random.default_rng(0)
    images = [transform(decode(read_file(path)), unused) for path in islice(find_images(paths), MOST_IMAGES)]
    return np.stack(images).transpose(0, 3, 1, 2)
