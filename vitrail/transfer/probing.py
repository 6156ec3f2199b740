"""Time and memory of probes apart from the network: their arithmetic, timed on random features."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from vitrail.costs.count import activation_bytes, learned_values
from vitrail.evaluation.fewshot import Ridge
from vitrail.evaluation.softmax import solve
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.ranges import InputSize, height_width

PART = 1024
"""Maximum number of images with which the arithmetic is timed."""
TIMED, USUAL = 11, 140
"""Number of the solver's iterations that are timed, and that a linear probe usually takes for all strengths."""
COPIES = 5
"""Number of copies of a batch in memory: waiting at the loader, on the device, and converted."""


def fewshot_seconds(shots: Sequence[int], seeds: int, strengths: int, *, classes: int, width: int, test: int) -> float:
    """Return the seconds to fit few-shot classifiers and to classify `test` images with them.

    `shots` holds, for each number of shots, the number of images of all classes together. The time of a fit grows with
    the cube of the number of images or of features, whichever is smaller.
    """
    asked, _ = _features(min(test, PART), width)
    total = 0.0
    for images in shots:
        part = min(images, PART)
        features, labels = _features(part, width, classes)
        began = time.perf_counter()
        fitted = Ridge.fit(features, labels, classes)
        between = time.perf_counter()
        fitted.answers(asked, [1.0] * strengths)
        growth = max(images / part, (min(images, width) / min(part, width)) ** 3)
        total += (between - began) * growth + (time.perf_counter() - between) * test / len(asked)
    return seeds * total


def linear_seconds(images: int, *, classes: int, width: int, device: torch.device) -> float:
    """Return the seconds of a linear probe: all strengths on nine tenths of the images, then the best on all."""
    part = min(images, max(PART, 2 * width))  # fewer images than features are solved in another way
    features, labels = _features(part, width, classes)

    def seconds(iterations: int) -> float:
        began = time.perf_counter()
        for _ in solve(
            features,
            labels,
            np.arange(part),
            [1e-4],
            classes=classes,
            device=device,
            iterations=iterations,
            tolerance=0,
        ):
            pass
        return time.perf_counter() - began

    seconds(1)  # the first call allocates memory
    preparation = seconds(1)
    iteration = (seconds(TIMED) - preparation) / (TIMED - 1)
    return (2 * preparation + USUAL * iteration) * images / part


def answering_bytes(config: ViTConfig | ResNetConfig, image_size: InputSize | None, batch: int) -> int:
    """Return an estimate of the peak bytes of computing features for batches of `batch` images.

    It counts the weights twice (as they are, and laid out for speed), and the activations of one layer, all in float32.
    `image_size` None is the config's.
    """
    layers = sum(config.units) if isinstance(config, ResNetConfig) else config.depth
    layer = activation_bytes(config, image_size) / max(layers, 1)
    pixels = math.prod(config.image_size if image_size is None else height_width(image_size))
    return round(8 * learned_values(config) + batch * (layer + COPIES * config.channels * pixels))


def _features(images: int, width: int, classes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return random features [images, width] and labels that cycle through the classes."""
    features = np.random.default_rng(0).standard_normal((images, width), dtype=np.float32)
    return features, np.arange(images, dtype=np.int64) % classes
