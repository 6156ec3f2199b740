"""What the tests of the .npz formats do again and again: write a file, compare files, compare networks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_outputs import block_outputs
from flax_reference import Result
from torch import nn

from vitrail.model.build import build
from vitrail.model.resnet import ResNet
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT

Arrays = Mapping[str, np.ndarray]
Change = Callable[[dict[str, np.ndarray]], Any]
"""What is done to a file's arrays."""
TOLERANCE = 1e-5


def save(path: Path, arrays: Arrays, prefix: str = "") -> Path:
    """Write an .npz, `prefix` in front of every name."""
    np.savez(path, **{prefix + name: array for name, array in arrays.items()})
    return path


def read(path: Path, prefix: str = "") -> dict[str, np.ndarray]:
    """Read an .npz with NumPy, names without the prefix that all of them have."""
    with np.load(path, allow_pickle=False) as file:
        assert all(name.startswith(prefix) for name in file.files)
        return {name.removeprefix(prefix): file[name] for name in file.files}


def identical(found: Arrays, expected: Arrays) -> None:
    """Assert that two files hold the same arrays: names, shapes, types and bits."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        assert found[name].tobytes() == array.tobytes(), name


def pixels(height: int, width: int, channels: int = 3, batch: int = 2) -> np.ndarray:
    """Random images [batch, height, width, channels]."""
    return np.random.default_rng(1).standard_normal((batch, height, width, channels)).astype(np.float32)


def randomised(model: nn.Module) -> nn.Module:
    """Give every parameter a value that matters: biases, norms and the zero head included."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def scaled(arrays: Arrays, factor: float, *ends: str) -> dict[str, np.ndarray]:
    """Arrays whose names end in one of `ends`, smaller: what is added to a variance then makes a difference."""
    return {name: array * np.float32(factor) if name.endswith(ends) else array for name, array in arrays.items()}


def without(name: str) -> Change:
    """Take away the arrays whose names begin so."""
    return lambda arrays: [arrays.pop(one) for one in list(arrays) if one.startswith(name)]


def having(name: str, *shape: int) -> Change:
    """Put an array of ones there."""
    return lambda arrays: arrays.__setitem__(name, np.ones(shape, np.float32))


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative error in the Euclidean norm; infinite for another shape."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def agree(model: nn.Module, images: np.ndarray, expected: Result, tolerance: float = TOLERANCE) -> None:
    """Assert that logits and the output of every block, or unit of a ResNet, are the reference's."""
    dtype = next(model.parameters()).dtype
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().to(dtype)
    if isinstance(model, ViT):
        with torch.inference_mode():
            logits = model(tensor)
        blocks = list(block_outputs(model, tensor).values())
    else:
        assert isinstance(model, ResNet)
        logits, blocks = _units(model, tensor)
    assert error(logits.numpy(), expected.logits) <= tolerance
    assert len(blocks) == len(expected.blocks)
    for layer, (ours, theirs) in enumerate(zip(blocks, expected.blocks, strict=True)):
        assert error(ours.numpy(), theirs) <= tolerance, layer


def agrees_at_full_size(model: nn.Module, images: np.ndarray, expected: Result) -> None:
    """Assert that the logits are the reference's in float32, and everything is in float64.

    In float32 the rounding of fifty convolutions with random kernels adds up to 3e-5 in the last blocks.
    """
    with torch.inference_mode():
        # contiguous: GroupNorm of maps with channels last sums in another order, to five times the error
        logits = model(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous())
    assert error(logits.numpy(), expected.logits) <= TOLERANCE
    agree(copy.deepcopy(model).double(), images, expected, tolerance=1e-11)


def differs(model: nn.Module, images: np.ndarray, expected: Result, **changes: Any) -> None:
    """Assert that the same weights in a network of another config compute something else."""
    changed = model.config.changed if isinstance(model.config, ViTConfig) else partial(replace, model.config)
    other = build(changed(**changes))
    other.load_state_dict(model.state_dict())
    with torch.inference_mode():
        logits = other.eval()(torch.from_numpy(images).permute(0, 3, 1, 2))
    assert error(logits.numpy(), expected.logits) > 100 * TOLERANCE


def _units(model: ResNet, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and what leaves every unit as [batch, height, width, features]."""
    units: list[torch.Tensor] = []
    handles = [
        unit.register_forward_hook(lambda module, inputs, output: units.append(output.permute(0, 2, 3, 1)))
        for stage in model.stages
        for unit in stage
    ]
    with torch.inference_mode():
        logits = model(images)
    for handle in handles:
        handle.remove()
    return logits, units
