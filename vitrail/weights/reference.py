"""The outputs of a network for one fixed image: stored with the weights and compared when they are verified.

The image is an integer formula, because a random generator's stream could change with its version. It is normalised
in float64, so that every machine and every library gets the same float32 numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.model.variants import ResNetConfig, ViTConfig

if TYPE_CHECKING:
    from vitrail.weights.card import Card

IMAGE = "integers-1"
"""Name of the formula in `fixed_pixels`, stored with the outputs."""
STORED = 256
"""Maximum number of stored values of an output, evenly spaced; the stored norm is that of all values."""
TOLERANCE = 1e-4
"""Largest relative error at which two float32 computations of one network count as equal."""


def fixed_pixels(height: int, width: int, channels: int = 3) -> np.ndarray:
    """Return the fixed image, uint8 [height, width, channels]: a ramp plus a hash of each position."""
    y, x, c = np.meshgrid(*(np.arange(n, dtype=np.int64) for n in (height, width, channels)), indexing="ij")
    ramp = (y * 160 // height + x * 64 // width + 24 * c) % 256
    places = (y * 73_856_093) ^ (x * 19_349_663) ^ ((c + 1) * 83_492_791)
    return ((ramp + places // 64 % 61) % 256).astype(np.uint8)


def fixed_input(card: Card, height: int, width: int) -> np.ndarray:
    """Return the fixed image as a network with this card is called: uint8 or float32 [height, width, channels]."""
    pixels = fixed_pixels(height, width, card.config.channels)
    return pixels if card.input_type == "uint8" else (pixels.astype(np.float32) - 128) / 64


def fixed_images(config: ViTConfig | ResNetConfig) -> Tensor:
    """Return the fixed image as the input of a network with this config: float32 [1, channels, height, width]."""
    pixels = fixed_pixels(*config.image_size, config.channels) / 255.0
    normalised = (pixels - np.array(config.mean)) / np.array(config.std)
    return torch.from_numpy(normalised.astype(np.float32)).permute(2, 0, 1)[None].contiguous()


@torch.no_grad()
def outputs(model: nn.Module, images: Tensor | None = None) -> dict[str, Tensor]:
    """Return features and logits of the first of `images`, float32 [features] and [classes], in evaluation mode.

    Logits of pixels are those of all places. The default is the fixed image. The model is not changed; a model that is
    not float32 on a CPU is copied.
    """
    network: Any = model
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()):
        network = copy.deepcopy(model).to("cpu", torch.float32)
    images = fixed_images(network.config) if images is None else images
    training = network.training
    network.eval()
    try:
        found = {"features": network.features(images)[0]}
        if not (network.head is None or isinstance(network.head, nn.Identity)):
            found["logits"] = network(images)[0].flatten()
        return found
    finally:
        network.train(training)


def reference(model: nn.Module) -> dict[str, Any]:
    """Return the reference vector for a card: name and size of the fixed image, and the outputs for it.

    Of an output longer than `STORED`, evenly spaced values are stored, with the norm of the whole. The result is
    empty if outputs are not finite.
    """
    config: Any = model.config
    found = outputs(model)
    if not all(vector.isfinite().all() for vector in found.values()):
        return {}
    kept = {
        name: {"count": len(vector), "norm": _rounded(float(vector.double().norm())), "values": _thinned(vector)}
        for name, vector in found.items()
    }
    return {"image": IMAGE, "image_size": list(config.image_size), "outputs": kept}


def differences(found: Mapping[str, Tensor], kept: Mapping[str, Any]) -> dict[str, float]:
    """Return the relative error of each output against the values on a card; infinite if the sizes differ."""
    errors = {}
    for name, values in kept["outputs"].items():
        vector = found.get(name)
        if vector is None or len(vector) != values["count"]:
            errors[name] = float("inf")
            continue
        mine = torch.tensor([*_thinned(vector), float(vector.double().norm())])
        errors[name] = relative_error(mine, torch.tensor([*values["values"], values["norm"]]))
    return errors


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return max |found - expected| / max |expected|: 0 if both are zero; infinite if the shapes differ
    or a value is not finite."""
    if found.shape != expected.shape:
        return float("inf")
    largest = float(expected.detach().double().abs().max()) if expected.numel() else 0.0
    error = float((found.detach().double() - expected.detach().double()).abs().max()) if expected.numel() else 0.0
    if not (math.isfinite(error) and math.isfinite(largest)):
        return float("inf")  # NaN equals nothing, and any error is small beside infinity
    if error == 0.0:
        return 0.0
    return error / largest if largest else float("inf")


def _thinned(vector: Tensor) -> list[float]:
    count = min(len(vector), STORED)
    return [_rounded(float(vector[i * len(vector) // count])) for i in range(count)]


def _rounded(value: float) -> float:
    """Round to eight significant digits, more than float32 has."""
    return float(f"{value:.8g}")
