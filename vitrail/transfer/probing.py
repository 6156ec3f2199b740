"""Time and memory of probes apart from the network: their arithmetic, timed on random features."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from vitrail.costs.count import activation_bytes, parameters
from vitrail.evaluation.fewshot import Ridge
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.transfer.linear_probe import HOLDOUT, LEARNING_RATES, train_stack

EPOCHS, MINIBATCH = 100, 256
"""Of `vitrail.transfer.linear_probe.linear_probe`, where nothing else is asked for."""
PART = 1024
"""Largest number of images that are timed."""
COPIES = 5
"""Copies of a batch of images in memory: waiting at the loader, on the device, and converted."""


def fewshot_seconds(shots: Sequence[int], seeds: int, strengths: int, *, classes: int, width: int, test: int) -> float:
    """Return how long few-shot classifiers take to fit and to answer for `test` images.

    shots: images of all classes together, for each number of shots. A fit grows with the cube of the smaller of images
    and features, answers in proportion.
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
    """Return the seconds of a linear probe: all learning rates on the images not held out, then the best on all."""
    features, labels = _features(min(images, PART), width, classes)
    rows = np.arange(len(labels))

    def passing(rates: Sequence[float]) -> float:
        began = time.perf_counter()
        pairs = [(rate, 0.0) for rate in rates]
        how = dict(classes=classes, epochs=1, minibatch=MINIBATCH, seed=0, device=device)
        train_stack(features, labels, rows, pairs, **how)  # type: ignore[arg-type]
        return time.perf_counter() - began

    passing(LEARNING_RATES)  # the first allocates
    epoch = (1 - HOLDOUT) * passing(LEARNING_RATES) + passing(LEARNING_RATES[:1])
    return EPOCHS * epoch * images / len(rows)


def answering_bytes(config: ViTConfig | ResNetConfig, image_size: int | None, batch: int) -> int:
    """Return the bytes that answering about `batch` images takes, by formula; image_size None: the config's.

    Weights, as they are and laid out for speed, in float32; of activations, what training keeps of one layer.
    """
    layers = sum(config.units) if isinstance(config, ResNetConfig) else config.depth
    layer = activation_bytes(config, image_size) / max(layers, 1)
    pixels = math.prod(config.image_size) if image_size is None else image_size**2
    return round(8 * parameters(config) + batch * (layer + COPIES * config.channels * pixels))


def _features(images: int, width: int, classes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return random features [images, width] and labels that cycle through the classes."""
    features = np.random.default_rng(0).standard_normal((images, width), dtype=np.float32)
    return features, np.arange(images, dtype=np.int64) % classes
