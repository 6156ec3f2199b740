"""The parity check: run a program and its network on the same images and measure the largest difference.

On another machine, a program's first outputs are compared with those that it had where it was exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.data.images.ops import eval_transform
from vitrail.data.sources.files import find_images
from vitrail.data.sources.folder import read_file
from vitrail.device import processor
from vitrail.errors import ExportError, finite
from vitrail.exports.kinds import CARD, KINDS, OutputName, RunProgram
from vitrail.exports.network import compute
from vitrail.files import read_json_object
from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.reference import TOLERANCE, fixed_input, relative_error

TOLERANCES = {"float32": TOLERANCE, "float16": 2e-2, "bf16": 1e-1, "int8": 1e-1}
"""Largest accepted difference from the network in float32, relative to the largest output. int8 programs are compared
only with themselves on another machine: their accuracy decides whether they are kept."""
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
    sizes: int = 1
    """Number of image sizes."""

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.relative <= self.tolerance

    def and_(self, other: Parity) -> Parity:
        """Return the differences of both comparisons together: `other` is of images of another size."""
        agreement = None
        if self.agreement is not None and other.agreement is not None:
            right = self.agreement * self.images + other.agreement * other.images
            agreement = right / (self.images + other.images)
        return replace(
            self,
            images=self.images + other.images,
            absolute=max(self.absolute, other.absolute),
            relative=float(np.maximum(self.relative, other.relative)),  # NaN stays NaN
            agreement=agreement,
            sizes=self.sizes + other.sizes,
        )

    def __str__(self) -> str:
        kinds = f"{self.real} of yours" if self.real else "synthetic"
        kinds += f", {self.sizes} sizes" if self.sizes > 1 else ""
        text = (
            f"{self.runtime}, {self.images} images ({kinds}), batches of {' and '.join(map(str, BATCHES))}: largest "
            f"difference {self.absolute:.1e}, relative to the largest output {self.relative:.1e} "
            f"(allowed {self.tolerance:g})"
        )
        if self.agreement is not None:
            text += f", the same best class for {round(self.agreement * self.images)} of {self.images}"
        return text


def compare_outputs(
    run: RunProgram,
    model: ViT | ResNet,
    images: np.ndarray,
    output: OutputName,
    precision: str,
    *,
    runtime: str,
    real: int = 0,
) -> Parity:
    """Run a program and its float32 network on images [n, channels, height, width], n at least 4, and compare.

    Raises WeightsError if an output of the network is not finite: nothing equals NaN.
    """
    first, later = BATCHES
    batches = np.split(np.ascontiguousarray(images), range(first, len(images), later))
    outputs = torch.cat([torch.from_numpy(run(batch)) for batch in batches])
    with torch.no_grad():
        expected = torch.cat([compute(model, torch.from_numpy(batch), output, model.card) for batch in batches])
    finite(expected, "output for an image to compare")
    same_shape = expected.shape == outputs.shape
    agreement, parts = None, [slice(None)]
    if output != "features" and same_shape:
        if model.card is not None and model.card.answers:  # each has outputs of its own size
            parts = [own for own, _ in model.card.of_answers().values()]
        best = [expected[:, one].argmax(1) == outputs[:, one].argmax(1) for one in parts]
        agreement = float(torch.stack(best).all(0).double().mean())
    return Parity(
        runtime=runtime,
        images=len(images),
        real=real,
        absolute=float((expected - outputs).abs().max()) if same_shape else float("inf"),
        relative=float(np.max([relative_error(outputs[:, one], expected[:, one]) for one in parts])),
        tolerance=TOLERANCES[precision],
        agreement=agreement,
    )


def images_of_another_size(card: Card, step: int) -> np.ndarray:
    """Return synthetic images that are one step of pixels higher and two steps wider than the card's, as above."""
    height, width = card.preprocess.size
    shape = (sum(BATCHES), card.config.channels, height + step, width + 2 * step)
    return noise(shape, card, np.random.default_rng(1))


def noise(shape: tuple[int, ...], card: Card, random: np.random.Generator) -> np.ndarray:
    """Return random pixels of the type that a network with this card is called with."""
    if card.input_type == "uint8":
        return random.integers(0, 256, shape, dtype=np.uint8)
    return random.standard_normal(shape, np.float32)


def images_to_compare(paths: Sequence[str | Path], card: Card) -> tuple[np.ndarray, int]:
    """Return images [n, channels, height, width], n at least 4, and the number of them that are the user's.

    Up to `MOST_IMAGES` of the user's images come first, preprocessed. If they are too few for the first batches,
    synthetic images follow: the fixed image of the reference vectors, then noise.

    Raises DataError if the paths hold no images, and DecodeError for an image that cannot be decoded.
    """
    transform, random = eval_transform(card.preprocess), np.random.default_rng(0)
    files = islice(find_images(paths), MOST_IMAGES) if paths else ()
    real = [transform(transform.pixels.read(read_file(path)), random) for path in files]
    height, width = card.preprocess.size
    others = noise((sum(BATCHES) - 1, height, width, card.config.channels), card, random)
    synthetic = [fixed_input(card, height, width), *others][: max(sum(BATCHES) - len(real), 0)]
    return np.stack([*real, *synthetic]).transpose(0, 3, 1, 2), len(real)


OUTPUTS = 1_000
"""Maximum number of outputs that are compared."""


@dataclass(frozen=True)
class ExportRecord:
    """Where a program was exported, and what it computed there for a fixed image."""

    processor: str
    runtime: str
    """Name and version of the runtime."""
    outputs: list[float]
    """Its first outputs for `vitrail.weights.reference.fixed_pixels`."""


def origin_here(run: RunProgram, to: str, card: Card, device: str = "cpu") -> ExportRecord:
    """Return this machine and what a program computes on it."""
    return ExportRecord(_processor(device), runtime_version(to, device), _outputs(run, card).tolist())


def _processor(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else processor()


def check_here(path: Path, run: RunProgram, to: str, card: Card, device: str = "cpu") -> None:
    """Run a program once if it was exported on another processor or for another version of its runtime.

    Raises ExportError if its outputs differ from those that it had there by more than its parity check allows. A
    program without the card that was written beside it is not checked.
    """
    if not (beside := path.parent / CARD).is_file():
        return
    about: dict[str, Any] = read_json_object(beside, ExportError)
    if "origin" not in about:
        return
    try:
        there, allowed = ExportRecord(**about["origin"]), TOLERANCES[about["program"]["precision"]]
        expected = torch.tensor(there.outputs, dtype=torch.float32)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ExportError(f"{beside} has no usable origin of the program. Export the model again") from error
    if (there.processor, there.runtime) == (here := (_processor(device), runtime_version(to, device))):
        return
    difference = relative_error(torch.from_numpy(_outputs(run, card)), expected)
    if not difference <= allowed:
        raise ExportError(
            f"{path} computes something else on this machine: the largest difference, relative to the largest output, "
            f"is {difference:.1e} (allowed {allowed:g}). It was exported on {there.processor} with {there.runtime}, "
            f"and this is {here[0]} with {here[1]}. Export the model again here (vitrail export)."
        )


def _outputs(run: RunProgram, card: Card) -> np.ndarray:
    image = fixed_input(card, *card.preprocess.size).transpose(2, 0, 1)
    return run(np.ascontiguousarray(image[None])).ravel()[:OUTPUTS]


def runtime_version(to: str, device: str = "cpu") -> str:
    """Return name and version of the runtime of a kind of program, and what it runs on if that is no CPU."""
    name = KINDS[to].packages[-1]
    place = torch.device(device).type
    return f"{name} {version(name)}" + (f" on {place}" if place != "cpu" else "")
