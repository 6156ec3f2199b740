"""The share of a GPU's peak that training reaches, by network and batch: from counted FLOPs, bytes and launches.

A step takes as long as its matrix products and its other operations, one after another, or as long as the host needs to
launch them. Operations are those of the forward pass, counted on fake tensors; the backward pass has twice as many and
moves twice as many bytes. AdamW reads and writes seven values of each weight. Compiled blocks fuse norms, activations
and residuals.

The rates are those of products and copies alone on an H100 (650 of 989 TFLOP/s, 2.7 of 3.35 TB/s; 20 us a launch). A
real run does not reach that: `REACHED` is fitted to published runs, which it meets within 15 % (ViT-g/14 of NVIDIA's
NeMo, 44 % of an A100 and 29 % of an H100; ViT-5-Small, compiled, 22 % of an H100). No GPU has confirmed it for vitrail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.costs.count import (
    ACCELERATOR,
    FusedAttention,
    fake,
    fake_autocast,
    learned_values,
    of_few_layers,
    training_flops,
)
from vitrail.costs.devices import Device
from vitrail.model.build import build
from vitrail.model.compute import computed
from vitrail.model.variants import Config
from vitrail.torch_private import TorchDispatchMode, tree_leaves

PRODUCTS, COPIES = 650 / 989, 2.7 / 3.35
"""Shares of a data sheet's FLOP/s and bytes/s that products and copies alone reach."""
LAUNCH = 20e-6
"""Seconds of the host for each operation."""
UPDATED = 7 * 4
"""Bytes that AdamW reads and writes for each weight: weight and moments both ways, and the gradient."""
FUSED = 0.72
"""Bytes and launches that compiled blocks leave: the casts that they fuse are joined without them, too."""
REACHED = 0.73
"""Share of this model's speed that published runs reach."""
PRODUCT_NAMES = ("mm", "attention", "conv")
"""Parts of the names of operations whose time is that of their FLOPs."""


class Traffic(NamedTuple):
    """The operations of a forward pass that are no products."""

    image: float
    """Bytes that they read and write for each image."""
    fixed: float
    """Bytes that do not depend on the batch, such as those of weights that are cast."""
    launches: int
    """Number of all operations, products included."""


class _Moved(TorchDispatchMode):
    """Context that adds up the bytes that operations read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.launches = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        # attention is one kernel, whose stand-in fills tensors of its own
        if not name.startswith("aten::") or func.is_view or name in ("aten::detach", "aten::new_full"):
            return result
        self.launches += 1
        if not any(part in name for part in PRODUCT_NAMES):
            tensors = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return result


@cache
def traffic(config: Config) -> Traffic:
    """Return what a forward pass in bfloat16 autocast moves and launches on an accelerator."""

    def count(measure: Callable[[Config], int]) -> int:
        return of_few_layers(measure, config, different=2) or measure(config)

    few, more = (count(lambda some, images=images: _moved(some, images).bytes) for images in (2, 4))  # type: ignore[misc]
    image = (more - few) / 2
    return Traffic(image, few - 2 * image, count(lambda some: _moved(some, 2).launches))


@cache
def _moved(config: Config, images: int) -> _Moved:
    with (
        fake(lambda: build(config)) as model,
        fake_autocast(ACCELERATOR, "bf16"),
        FusedAttention(ACCELERATOR),
        computed("fast"),
        torch.inference_mode(False),
    ):
        pixels = torch.empty(images, config.channels, *config.image_size, dtype=torch.uint8, device=ACCELERATOR)
        model.train()
        with _Moved() as moved:
            model(pixels)
    return moved


def step_seconds(config: Config, batch: int, device: Device, *, compiled: bool = False) -> float:
    """Return the shortest time of a training step with `batch` images on one `device`, whose bandwidth is known."""
    assert device.bandwidth is not None
    counted, fused = traffic(config), FUSED if compiled else 1.0
    moved = fused * 3 * (counted.image * batch + counted.fixed) + UPDATED * learned_values(config)
    work = training_flops(config) * batch / (PRODUCTS * device.peak) + moved / (COPIES * device.bandwidth)
    return max(work, fused * 3 * counted.launches * LAUNCH)


def utilisation(config: Config, batch: int, device: Device) -> float:
    """Return the share of a device's peak that training with compiled blocks reaches, as published runs do."""
    seconds = step_seconds(config, batch, device, compiled=True)
    return REACHED * training_flops(config) * batch / seconds / device.peak
