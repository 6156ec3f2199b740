"""The number of images that fit in memory at once, found before training. The batch size itself does not change.

A training step needs memory for weights, gradients and optimiser state, and for the activations that the forward pass
keeps for the backward pass. Activations grow with the number of images. They are measured on a few images, so that no
step has to run out of memory to find the limit. A batch that does not fit is cut into micro-batches, which changes
neither the gradient nor the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vitrail import torch_private, world
from vitrail.costs.count import DeviceKind, LiveTensors, kept_bytes
from vitrail.costs.memory import COMPILED, FLOAT32, USABLE, recomputed, step_memory
from vitrail.data.loading.loader import Batch
from vitrail.device import autocast_dtype, first_line, free_memory, out_of_memory
from vitrail.errors import TrainingError, UsageError
from vitrail.model.variants import NetworkConfig
from vitrail.objective.base import Objective
from vitrail.objective.settings import Segmentation
from vitrail.training.batches import Sizes
from vitrail.training.parallel import checkpointed_parts, sharded
from vitrail.training.run import Run

LARGEST = 512
"""Largest default number of images per step, unless several GPUs share them."""
EACH_GPU = 256
"""Images per step for which a GPU computes longer than the host takes to start its work: S/16 needs about 150."""
LARGEST_SHARED = 4096
"""Largest default number of images per step that GPUs share: that of the paper's recipes, whose learning rates for
AdamW, 8e-4 to 1e-3, are those of the small recipes."""
STEPS_PER_EPOCH = 20
"""Smallest number of steps per epoch: a small data set gets a smaller batch."""
SMALLEST = 16
"""Smallest default number of images per step, unless there are fewer images."""
SHARE = 0.8
"""Share of a CPU's free memory that a step may use. The rest is for caches and other programs."""
OVERHEAD = 1.6
"""Scratch space, and freed memory that the C library's heap keeps, as a factor on the activations that a CPU keeps
(peak measured: 1.2 to 1.4)."""
ROUNDING = 1.05
"""The same on accelerators, whose allocator reuses what is freed (`vitrail.costs.memory`)."""
LEAST_SHARE = 0.5
"""Smallest share of the activations that activation checkpointing leaves on a CPU, because the C library's heap keeps
freed memory (peak measured for S/16 in bfloat16: 0.8 of the activations, while 0.3 are in use)."""
STORED = 4
"""Values that are stored for each one that learns: two moments, its average, and a temporary copy."""
COPIES_ON_A_DEVICE = 4
"""Copies of the whole batch in device memory: the step's, and the next as loaded, mixed, and what is mixed in."""
COPIES_AT_THE_LOADER = 6
"""Copies of the whole batch on a CPU: as loaded, mixed, what is mixed in, and three decoded batches that wait."""


def default_batch(images: int, gpus: int = 1) -> int:
    """Return the batch for a training set of `images`: the largest power of two with enough steps per epoch.

    It is at most `LARGEST`, and with several GPUs at most `EACH_GPU` for each of them.
    """
    largest = max(LARGEST, min(EACH_GPU * gpus, LARGEST_SHARED))
    wanted = min(largest, max(images // STEPS_PER_EPOCH, SMALLEST))
    return max(1, min(2 ** int(math.log2(wanted)), images))


def image_bytes(objective: Objective, run: Run, config: NetworkConfig) -> float:
    """Return the bytes that a step takes for each image in the network, scratch space included.

    Measured on `objective`, which is on its device, in training mode, and not prepared for several processes
    (`vitrail.training.parallel`). It does not change.
    """
    device = next(objective.parameters()).device

    def peak(images: int) -> int:
        with LiveTensors() as live:
            _loss(objective, run, config, images)
        return live.peak

    with _unchanged_buffers(objective):
        overhead = OVERHEAD if device.type == "cpu" else ROUNDING * (COMPILED if run.compile else 1)
        per_image = overhead * kept_bytes(partial(_loss, objective, run, config))
        # frozen layers keep little for the backward pass: then the memory they compute in may be the most
        forward = 0.0 if run.tune == "all" else (peak(4) - peak(2)) / 2
    blocks = len(checkpointed_parts(objective.model))
    if run.activation_checkpointing and blocks > 1:
        least = LEAST_SHARE * per_image if device.type == "cpu" else 0.0
        place: DeviceKind = "cpu" if device.type == "cpu" else "accelerator"
        per_image = max(recomputed(per_image, blocks, place), least)
    return max(per_image, forward)


def _loss(
    objective: Objective,
    run: Run,
    config: NetworkConfig,
    images: int,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """Return the loss of this number of black images, of the network's size by default."""
    pixels = torch.zeros(images, config.channels, *(size or config.image_size), dtype=_pixel_type(run))
    batch = Batch(pixels, blank_labels(objective, run, config, pixels), torch.zeros(images, dtype=torch.int64))
    device = next(objective.parameters()).device
    half = autocast_dtype(run.precision)
    with torch.autocast(device.type, dtype=half, enabled=half is not None):
        return objective(batch, step=0)[0]


def blank_labels(objective: Objective, run: Run, config: NetworkConfig, images: Tensor) -> Tensor:
    """Return labels of the kind that an objective learns, all zero, for images [batch, channels, height, width]."""
    if isinstance(run.objective, Segmentation):
        return torch.zeros(len(images), *images.shape[2:], dtype=torch.uint8)
    width = config.classes if run.objective.numbers else objective.label_width
    return torch.zeros(len(images), dtype=torch.int64) if width is None else torch.zeros(len(images), width)


@contextmanager
def _unchanged_buffers(objective: Objective) -> Iterator[None]:
    """Context after which the buffers of `objective`, such as statistics of BatchNorm, are what they were."""
    buffers = [(buffer, buffer.clone()) for buffer in objective.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def refuse_lone_values(objective: Objective, run: Run, config: NetworkConfig) -> None:
    """Raise UsageError if a BatchNorm would get a single value per channel, which has no variance.

    That may happen in micro-batches of one image, whose deepest feature map is a single position. `run` has every
    decision made.
    """
    assert run.batch_size and run.accumulate
    if run.batch_size // world.size() // run.accumulate > 1 or not batch_norms(objective):
        return
    size = Sizes(run.progressive, config).size(0.0)  # the smallest images have the smallest feature map
    try:
        with _unchanged_buffers(objective), torch.no_grad():
            _loss(objective, run, config, 1, size)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        cut = f", in {run.accumulate} micro-batches (accumulate)" if run.accumulate > 1 else ""
        raise UsageError(
            f"batch_size is {run.batch_size}{cut}, so that the network sees a single image of {size[0]} x {size[1]} "
            "pixels at a time, of which its BatchNorm gets one value per channel and needs two. Use a larger "
            "--batch-size, a smaller --accumulate, or --vit.stem-norm layer"
        ) from None


def batch_norms(objective: Objective) -> list[torch_private.BatchNorm]:
    """Return the BatchNorms whose running statistics change in training."""
    norms = (part for part in objective.modules() if isinstance(part, torch_private.BatchNorm))
    return [norm for norm in norms if norm.training and norm.track_running_stats]


def fewest_images(objective: Objective) -> int:
    """Return the smallest number of images in a micro-batch that is chosen automatically: BatchNorm needs two."""
    return 2 if batch_norms(objective) else 1


def _pixel_type(run: Run) -> torch.dtype:
    """Return the type of the images that the loader gives."""
    return torch.uint8 if run.preprocess is None or run.preprocess.bands is None else torch.float32


def waiting_bytes(run: Run, config: NetworkConfig, batch: int, device: torch.device) -> int:
    """Return the bytes of all copies of a batch of images: on a device, and at the loader where that is a CPU."""
    copies = COPIES_AT_THE_LOADER if device.type == "cpu" else COPIES_ON_A_DEVICE
    return copies * batch * _pixel_type(run).itemsize * config.channels * math.prod(config.image_size)


def micro_batches(objective: Objective, run: Run, config: NetworkConfig, per_image: float) -> int:
    """Return into how many micro-batches a batch must be cut so that it fits, at `per_image` bytes for each image."""
    assert run.batch_size is not None
    device = next(objective.parameters()).device
    batch = run.batch_size // world.size()
    values = sum(parameter.numel() for parameter in objective.parameters())
    trainable = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
    held = step_memory(
        values,
        per_image,
        trainable=trainable,
        stored=STORED * trainable,
        precision=run.decided_precision,
        accumulates=True,  # where a batch must be cut
        shards=world.size() if sharded(run) else 1,
    )
    waiting = waiting_bytes(run, config, batch, device) + batch * objective.precomputed_bytes
    share = SHARE if device.type == "cpu" else USABLE
    room = share * free_memory(device) - waiting + FLOAT32 * values  # the weights are there
    fitting = min(max(1, held.largest(room)), batch)
    most = max(batch // fewest_images(objective), 1)
    return max(world.gather(min(math.ceil(batch / fitting), most)))


class OutOfMemory(TrainingError):
    """Memory ran out for good. `again`: micro-batches per step with which the run in `folder` may continue, if any."""

    def __init__(self, message: str, again: int | None = None, folder: Path | None = None) -> None:
        super().__init__(message)
        self.again, self.folder = again, folder


@contextmanager
def explaining_memory(
    run: Run,
    parts: Callable[[], int] | None = None,
    again: Callable[[], int | None] = lambda: None,
    folder: Path | None = None,
) -> Iterator[None]:
    """Context in which running out of memory becomes an OutOfMemory error that says what to do.

    `parts` returns the number of micro-batches at that time, which may have changed. again, folder: See `OutOfMemory`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        now = parts() if parts is not None else run.accumulate or 1
        more = min(2 * now, (run.batch_size or 2 * now) // world.size())
        smaller = f"with --accumulate {more} (the same batch of {run.batch_size} in smaller pieces), or " * (more > now)
        raise OutOfMemory(
            f"out of memory ({first_line(error)}). Resume {smaller}with --activation-checkpointing. Checkpoints in the "
            "run folder did not change.",
            again(),
            folder,
        ) from error
