"""Does a program compute what the network computes? Real or made-up images through both, and the largest difference."""

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
from vitrail.model.resnet.network import ResNet
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.reference import TOLERANCE, fixed_pixels, relative_error

TOLERANCES = {"float32": TOLERANCE, "float16": 2e-2, "bf16": 1e-1}
"""Largest difference from the network in float32 that is let pass, relative to the largest output."""
BATCHES = (1, 3)
"""Batch sizes a program is tried at; further images come in threes."""
MOST = 64
"""Images of the user's that are looked at."""


@dataclass(frozen=True)
class Parity:
    """How far a program's outputs are from those of the network in float32, which are the measure."""

    runtime: str
    """What ran the program, with its version."""
    images: int
    real: int
    """How many of them were the user's; the others are made up."""
    absolute: float
    """Largest difference of any output."""
    relative: float
    """The same, relative to the largest output."""
    tolerance: float
    """What `relative` may be."""
    agreement: float | None = None
    """Share of the images with the same best class; None where the outputs are no classes."""

    @property
    def passed(self) -> bool:
        """Is the difference within the tolerance? NaN is not."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        kinds = f"{self.real} of yours" if self.real else "made up"
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
    """Run a program and the network, which is float32, on uint8 images [n, channels, height, width], n at least 4."""
    found, expected = [], []
    for batch in _batches(images):
        found.append(torch.from_numpy(run(batch)))
        expected.append(_outputs(model, torch.from_numpy(batch), output))
    ours, theirs = torch.cat(expected), torch.cat(found)
    same_shape = ours.shape == theirs.shape
    agreement = None
    if output != "features" and same_shape:
        agreement = float((ours.argmax(1) == theirs.argmax(1)).double().mean())
    return Parity(
        runtime=runtime,
        images=len(images),
        real=real,
        absolute=float((ours - theirs).abs().max()) if same_shape else float("inf"),
        relative=relative_error(theirs, ours),
        tolerance=TOLERANCES[precision],
        agreement=agreement,
    )


def _batches(images: np.ndarray) -> Iterable[np.ndarray]:
    sizes = [*BATCHES, *[BATCHES[-1]] * len(images)]
    start = 0
    for size in sizes:
        if start < len(images):
            yield np.ascontiguousarray(images[start : start + size])
            start += size


@torch.no_grad()
def _outputs(model: ViT | ResNet, images: torch.Tensor, output: Output) -> torch.Tensor:
    if output == "features":
        return model.features(images)
    logits = model(images)
    return logits.softmax(dim=1) if output == "probabilities" else logits


def made_up(card: Card, count: int = sum(BATCHES)) -> np.ndarray:
    """Return uint8 images [count, channels, height, width]: the fixed one of reference vectors, and noise."""
    first = fixed_pixels(*card.preprocess.image_size, card.config.channels).transpose(2, 0, 1)[None]
    noise = np.random.default_rng(0).integers(0, 256, (count - 1, *first.shape[1:]), dtype=np.uint8)
    return np.concatenate([first, noise])


def real_images(paths: Iterable[str | Path], card: Card) -> np.ndarray:
    """Return up to `MOST` images of the user's as the network takes them, uint8 [n, channels, height, width].

    Raises DataError where there are none, DecodeError for one that cannot be read.
    """
    transform, unused = eval_transform(card.preprocess), np.random.default_rng(0)
    found = [transform(decode(read_file(path)), unused) for path in islice(find_images(paths), MOST)]
    return np.stack(found).transpose(0, 3, 1, 2)
