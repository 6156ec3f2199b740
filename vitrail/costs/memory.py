"""What one device holds in a training step, in bytes: one formula for `cost`, `plan` and the number of micro-batches.

A step has two peaks. At the end of the forward pass all activations are there, 16-bit copies of the weights, and soon
the gradients of a first block. In the update all gradients are there, and no activations. Weights and what the
optimiser and an average of the weights store are there all the time. DDP's buckets are the gradients themselves.

Compared with the tensors that are alive in real steps of S/16, B/16 and L/16 in bfloat16, with the layers of an
accelerator, the peak is 0 to 1.5 % too low (tests/costs/test_step_memory.py). No GPU has confirmed it yet. Outside of
it are the context of CUDA, the workspace of cuBLAS, and what the allocator cannot fill: `USABLE` leaves room for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.costs.count import DeviceKind
from vitrail.device import ComputePrecision

FLOAT32, BF16 = 4, 2
"""Bytes of a value."""
USABLE = 0.9
"""Share of a device's memory that the tensors of a step may take."""
COMPILED = 0.9
"""Share of the activations that compiled blocks keep, which compute norms and GELUs again in the backward pass (0.89 of
S/16 and of B/16, as torch's partitioner cuts their graphs)."""
INPUT_SHARE: dict[DeviceKind, float] = {"cpu": 1 / 8, "accelerator": 0.08}
"""Share of its input in the activations that a block keeps (measured on a CPU: 0.07 in float32, 0.11 in bfloat16; with
the layers of an accelerator 0.07 in bfloat16)."""


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a training step on one device, as a function of the number of images in the network at once."""

    state: float
    """Weights, and what the optimiser and an average of the weights store."""
    gradients: float
    beside: float
    """What is there with the activations: 16-bit copies of weights, gathered weights, and the first gradients."""
    image: float
    """Activations of an image."""

    def bytes(self, images: int) -> int:
        """Return the peak of a step with `images` images in the network at once."""
        return round(self.state + max(self.beside + self.image * images, self.gradients))

    def largest(self, memory: float) -> int:
        """Return the largest number of images whose peak is at most `memory` bytes; 0 if even the state is more."""
        if memory < self.state + self.gradients:
            return 0
        return max(int((memory - self.state - self.beside) // max(self.image, 1)), 0)


def step_memory(
    parameters: int,
    image: float,
    *,
    trainable: int | None = None,
    stored: int | None = None,
    blocks: int = 1,
    precision: ComputePrecision = "float32",
    accumulates: bool = False,
    shards: int = 1,
) -> StepMemory:
    """Return the memory of a step of a network with so many `parameters`, whose images keep `image` bytes each.

    trainable: Number of parameters that learn, and so have a gradient (default: all). stored: Number of values that the
    optimiser and an average store (default: two moments of each one that learns). blocks: Number of equal parts of the
    network whose gradients are computed one after another. precision: bf16 and fp16 are autocast, which keeps a copy of
    each weight until the backward pass. accumulates: Whether gradients of earlier micro-batches are there. shards:
    Number of devices that share weights, gradients and stored values; each gathers two blocks at a time.
    """
    trainable = parameters if trainable is None else trainable
    gradients = float(FLOAT32 * trainable)
    state = state_bytes(parameters, trainable, stored) - gradients
    beside = gradients if accumulates else gradients / blocks
    if precision in ("bf16", "fp16"):
        beside += BF16 * parameters
        gradients += BF16 * trainable / blocks  # of the last block, before they are made float32
    if shards > 1:
        beside += 2 * FLOAT32 * parameters / blocks
        # gradients of several micro-batches are reduced with the last one
        state, gradients = state / shards, gradients if accumulates else gradients / shards
    return StepMemory(state, gradients, beside, image)


def state_bytes(parameters: int, trainable: int | None = None, stored: int | None = None) -> int:
    """Return the bytes of the training state in float32: weights, gradients, and what the optimiser stores.

    trainable: Number of weights that learn, and so have a gradient (default: all). stored: Number of values that the
    optimiser and an average of the weights store (default: two moments of each trainable weight).
    """
    trainable = parameters if trainable is None else trainable
    return FLOAT32 * (parameters + trainable + (2 * trainable if stored is None else stored))


def recomputed(image: float, blocks: int, place: DeviceKind = "accelerator") -> float:
    """Return the bytes of an image that activation checkpointing leaves: all blocks' inputs, and one block in full."""
    return image * (1 / blocks + INPUT_SHARE[place]) if blocks > 1 else image
