"""How many images fit in memory at once, found before training. The batch size itself does not change.

The memory of a training step is weights, gradients and optimiser state, plus what the forward pass keeps for the
backward pass, which grows with the number of images. The second is measured on a few images, so nothing has to
run out of memory to find the limit. A batch that does not fit is cut into micro-batches: same gradient, same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail import world
from vitrail.costs.memory import LiveTensors, kept_bytes
from vitrail.device import free_memory
from vitrail.errors import TrainingError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.objective.base import Objective
from vitrail.training.processes.parallel import checkpointed_parts
from vitrail.training.processes.sharding import sharded
from vitrail.training.run import Run

LARGEST = 512
"""Largest default number of images per step."""
STEPS_PER_EPOCH = 20
"""A small data set gets a smaller batch rather than fewer steps than this per epoch."""
SMALLEST = 16
SHARE = 0.8
"""Share of the free memory that a step may use; the rest is for caches and other programs."""
OVERHEAD = 1.6
"""Gradients of activations and scratch space, as a factor on the activations kept (peak measured: 1.2 to 1.4)."""
INPUT_SHARE = 1 / 8
"""Share of its input in the activations that a block keeps (measured: 0.07 in float32, 0.11 in bfloat16)."""
LEAST_SHARE = 0.5
"""Smallest share of the activations that activation checkpointing leaves on a CPU: the heap of the C library keeps
freed memory (peak measured for S/16 in bfloat16: 0.8 of the activations, where 0.3 are in use)."""
CPU_WORDS = ("DefaultCPUAllocator", "could not create a primitive", "could not create a memory", "std::bad_alloc")
"""Parts of torch's messages about failed allocations on a CPU: its own, oneDNN's, C++'s."""
STATE_BYTES = 20
"""Bytes per trainable value: float32 gradient, two moments, averaged weights, and one temporary copy."""
COPIES_ON_A_DEVICE = 3
"""Copies of the whole batch in device memory: as loaded, mixed, and the images that are mixed in."""
COPIES_AT_THE_LOADER = COPIES_ON_A_DEVICE + 3
"""Copies of the whole batch on a CPU, where three decoded batches wait in the same memory."""


def default_batch(images: int) -> int:
    """Return the batch for a training set of `images`: the largest power of two with enough steps per epoch."""
    wanted = min(LARGEST, max(images // STEPS_PER_EPOCH, SMALLEST))
    return max(1, min(2 ** int(math.log2(wanted)), images))


def micro_batches(objective: Objective, run: Run, config: ViTConfig | ResNetConfig) -> int:
    """Return into how many micro-batches each process must cut its batch to fit in memory.

    `objective` is on its device, in training mode and not yet wrapped by `vitrail.training.processes.parallel.prepare`.
    """
    return cut(objective, run, config, image_bytes(objective, run, config))


def image_bytes(objective: Objective, run: Run, config: ViTConfig | ResNetConfig) -> float:
    """Return the bytes that a step takes for each image at once, scratch space included; measured on `objective`."""
    device = next(objective.parameters()).device

    def loss(images: int) -> Tensor:
        pixels = torch.zeros(images, config.channels, *config.image_size, dtype=torch.uint8)
        nothing = torch.zeros(images, dtype=torch.int64)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=run.precision == "bf16"):
            return objective(Blank(pixels, nothing, nothing), step=0)[0]

    per_image = OVERHEAD * activation_bytes(objective, loss)
    blocks = len(checkpointed_parts(objective.model))
    if run.activation_checkpointing and blocks > 1:  # the inputs of all blocks, and one block in full
        share = 1 / blocks + INPUT_SHARE
        per_image *= max(share, LEAST_SHARE) if device.type == "cpu" else share
    if run.tune != "all":  # where little is kept, what frozen layers need while they compute is the most
        per_image = max(per_image, passing_bytes(objective, loss))
    return per_image


def cut(objective: Objective, run: Run, config: ViTConfig | ResNetConfig, per_image: float) -> int:
    """Return into how many micro-batches a batch must be cut whose images take `per_image` bytes each."""
    assert run.batch_size is not None
    device = next(objective.parameters()).device
    batch = run.batch_size // world.size()
    trainable = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
    pixels = batch * config.channels * math.prod(config.image_size)  # bytes: images are uint8
    waiting = COPIES_AT_THE_LOADER if device.type == "cpu" else COPIES_ON_A_DEVICE
    state = STATE_BYTES * trainable / (world.size() if sharded(run) else 1)
    room = SHARE * free_memory(device) - state - waiting * pixels - batch * objective.known_bytes
    fitting = min(max(1, int(room / max(per_image, 1))), batch)
    return max(world.gather(math.ceil(batch / fitting)))


@dataclass(frozen=True)
class Blank:
    """A batch to measure with."""

    images: Tensor
    labels: Tensor
    index: Tensor


def activation_bytes(objective: nn.Module, loss: Callable[[int], Tensor]) -> float:
    """Return the bytes per image that a forward pass keeps for the backward pass.

    Leaves the objective as it was: running statistics are put back, gradients are not touched.
    """
    with _statistics_kept(objective):
        return kept_bytes(loss)


def passing_bytes(objective: nn.Module, loss: Callable[[int], Tensor], images: int = 2) -> float:
    """Return the bytes per image that a forward pass has in use at most, what it keeps and its images included.

    Computed from the difference of two batches, of `images` and twice as many. The objective does not change.
    """

    def peak(number: int) -> int:
        with LiveTensors() as live:
            loss(number)
        return live.peak

    with _statistics_kept(objective):
        return (peak(2 * images) - peak(images)) / images


@contextmanager
def _statistics_kept(objective: nn.Module) -> Iterator[None]:
    """Context after which the running statistics are what they were before."""
    buffers = [(buffer, buffer.clone()) for buffer in objective.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def out_of_memory(error: BaseException) -> bool:
    """Is this what torch raises when an allocation fails, on any device?"""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_WORDS)


@contextmanager
def explaining_memory(run: Run, parts: Callable[[], int] | None = None) -> Iterator[None]:
    """Context in which running out of memory becomes a TrainingError that says what to do about it.

    `parts` tells the number of micro-batches at that time, where it may have changed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        now = parts() if parts is not None else run.accumulate or 1
        more = min(2 * now, run.batch_size or 2 * now)
        smaller = f"with accumulate: {more} (the same batch of {run.batch_size}, in smaller pieces), or " * (more > now)
        raise TrainingError(
            f"out of memory ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}): "
            f"resume {smaller}with activation_checkpointing. Checkpoints in the run folder are untouched"
        ) from error
