"""Several micro-batches at the same time on one CPU, each computed by a thread with its share of the cores.

torch divides every operation among the cores and waits for all of them at its end. A thread that computes a whole
micro-batch waits once a step. But Python runs one thread at a time, so that threads with short operations wait for each
other before each of them: steps with `LEAST_WORK` for each thread are faster in threads, smaller ones are slower
(`python -m benchmarks.threads`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import cast

import torch
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT
from vitrail.objective.base import Objective, Prepared
from vitrail.training.given import Given
from vitrail.training.processes.parallel import Computed, SingleProcess
from vitrail.training.run import Run

MOST = 4
"""Threads by default: each holds gradients of all weights."""
LARGEST = 30_000_000
"""Parameters of the largest network that has several threads by default."""
LEAST_WORK = 100_000_000
"""Tokens of a micro-batch times the square of the network's width, for each thread, at least: the multiply-adds of a
dense layer of this width."""
FEWEST_NORMALISED = 32
"""Images of a batch for each thread by default, at least, with BatchNorm, which normalises by the statistics of each
micro-batch."""
RESNET_PATCH, RESNET_WIDTH = 4, 4
"""The first stage of a ResNet has a quarter of the image's side, and four times the channels that are its width."""

RUNNING = ("running_mean", "running_var")
Statistics = list[tuple[Tensor, ...]]
"""Mean and unbiased variance of a micro-batch at each BatchNorm of a network."""


def hindrance(objective: Objective, run: Run, given: Given) -> str | None:
    """Return why micro-batches of this run cannot be computed at the same time; None if they can."""
    if next(objective.parameters()).device.type != "cpu":
        return "only a CPU has threads to compute them"
    if world.size() > 1 or run.compile or run.shard:
        return "they need one process that does not compile"
    if not objective.pure or given.losses is not None or type(objective.model) not in (ViT, ResNet):
        return "the objective or the network may have a state of its own"
    if any(norm.momentum is None for norm in batch_norms(objective)):
        return "a BatchNorm averages all micro-batches since the start"
    if any(getattr(part, "drop_path", 0) or (isinstance(part, nn.Dropout) and part.p) for part in objective.modules()):
        return "the numbers that dropout and stochastic depth draw would depend on the order of the threads"
    if any(torch_private.has_hooks(part) or not _is_known(part) for part in objective.modules()):
        return "the network has hooks or parts of your own"
    return None


def _is_known(part: nn.Module) -> bool:
    return type(part).__module__.startswith(("vitrail.", "torch.nn.modules."))


def batch_norms(objective: Objective) -> list[torch_private.BatchNorm]:
    """Return the BatchNorms whose running statistics change in training."""
    norms = (part for part in objective.modules() if isinstance(part, torch_private.BatchNorm))
    return [norm for norm in norms if norm.training and norm.track_running_stats]


def concurrent(objective: Objective, run: Run, given: Given) -> tuple[int, str]:
    """Return how many micro-batches are computed at the same time, and why it is not what is asked for or usual.

    It is a function of the network, the batch and the number of cores alone, so that two runs on one machine give the
    same bits. Where the number that the run asks for is not possible, it is 1: a resumed run may continue on a GPU.
    """
    why, asked = hindrance(objective, run, given), run.concurrent
    if why is not None:
        return 1, f"1, not {asked}: {why}" if (asked or 1) > 1 else ""
    if asked is not None:
        return asked, ""
    if sum(each.numel() for each in objective.parameters()) > LARGEST:
        return 1, ""
    images = run.batch_size or 1
    count = min(MOST, torch.get_num_threads(), _most(objective, images / (run.accumulate or 1)))
    if batch_norms(objective):
        count = min(count, images // ((run.accumulate or 1) * FEWEST_NORMALISED))
    if count <= 1:
        return 1, ""
    return count, f"{count}: micro-batches at the same time, each on its share of the cores"


def _most(objective: Objective, images: float, size: Sequence[int] | None = None) -> int:
    """Return how many threads a micro-batch of images [height, width] in pixels is enough for, maybe 0.

    Without `size` the images have the size of the network's config.
    """
    model = cast("ViT | ResNet", objective.model)
    rows, columns = size or model.config.image_size
    if isinstance(model, ViT):
        side, width = model.config.patch, model.config.width
    else:
        side, width = RESNET_PATCH, RESNET_WIDTH * model.config.width
    return int(images * (rows // side) * (columns // side) * width**2 / LEAST_WORK)


def _accumulated(
    objective: Objective,
    pieces: Sequence[Prepared],
    context: Callable[[], AbstractContextManager[object]],
    divisor: int,
) -> list[tuple[Computed, Statistics]]:
    """Accumulate gradients of the losses over `divisor` over micro-batches. Return what each of them gave."""
    results, norms = [], batch_norms(objective)
    for part in pieces:
        with context():
            loss, count, metrics = objective.loss(part)
        loss.backward(torch.full_like(loss, 1 / divisor))
        seen = [tuple(norm.get_buffer(name).clone() for name in RUNNING) for norm in norms]
        results.append(((loss.detach(), count, metrics), seen))
    return results


def _places(objective: Objective) -> list[tuple[int, bool]]:
    """Return where each weight is in memory, and whether it is trained."""
    return [(each.data_ptr(), each.requires_grad) for each in objective.parameters()]


class Threaded(SingleProcess):
    """A single process with `threads` threads, each with a copy of the objective that shares its weights.

    Steps with less than `LEAST_WORK` for each thread, such as those with small images at the start of progressive
    sizes, are computed without them, and so are all steps while this process shall have one thread (`ThreadCount`).

    The copies have gradients of their own, which are added in the order of the threads: two runs give the same bits.
    So are the running statistics of BatchNorm, in the order of the micro-batches.
    (Threads that share one network can wait for each other forever inside torch.)
    """

    def __init__(self, objective: Objective, threads: int) -> None:
        super().__init__(objective)
        self.threads = threads
        self._cores = torch.get_num_threads()
        share = max(1, self._cores // threads)
        self._pool = ThreadPoolExecutor(threads, "micro-batch", initializer=torch.set_num_threads, initargs=(share,))
        self._copies: list[Objective] = []

    def at_once(self, batch: Prepared, parts: int) -> int:
        """See `Parallel`."""
        most = _most(self.objective, len(batch) / parts, batch.images.shape[-2:])
        return self.threads if most >= self.threads and torch.get_num_threads() >= self._cores else 1

    def backward(
        self, pieces: Sequence[Prepared], context: Callable[[], AbstractContextManager[object]], divisor: int
    ) -> list[Computed]:
        """Add the gradients of the losses over `divisor`, and return what was computed, each loss in a `context`."""
        copies = self._current_copies()
        jobs = [
            self._pool.submit(copy_context().run, _accumulated, each, pieces[turn :: self.threads], context, divisor)
            for turn, each in enumerate(copies)
        ]
        wait(jobs)
        try:
            results = [job.result() for job in jobs]
            self._add_gradients(copies)
        finally:
            for each in copies:
                each.zero_grad(set_to_none=True)
        in_order = [results[number % self.threads][number // self.threads] for number in range(len(pieces))]
        self._update_statistics([seen for _, seen in in_order])
        return [computed for computed, _ in in_order]

    def _update_statistics(self, seen: Sequence[Statistics]) -> None:
        """Update running statistics with those of each micro-batch, as a thread does that computes all of them."""
        norms = batch_norms(self.objective)
        for statistics in seen:
            for norm, values in zip(norms, statistics, strict=True):
                assert norm.momentum is not None  # a hindrance
                for name, value in zip(RUNNING, values, strict=True):
                    norm.get_buffer(name).lerp_(value, norm.momentum)
                norm.get_buffer("num_batches_tracked").add_(1)

    def _add_gradients(self, copies: Sequence[Objective]) -> None:
        for weight, *same in zip(self.objective.parameters(), *(each.parameters() for each in copies), strict=True):
            for one in same:
                if one.grad is not None:
                    weight.grad = one.grad if weight.grad is None else weight.grad.add_(one.grad)

    def _current_copies(self) -> list[Objective]:
        """Return the copies, made anew if the weights are no longer where they were or other ones are trained."""
        if not self._copies or _places(self._copies[0]) != _places(self.objective):
            self._copies = [self._copy() for _ in range(self.threads)]
        for each in self._copies:
            each.at(self.objective.moment)
        return self._copies

    def _copy(self) -> Objective:
        shared: dict[int, object] = {
            id(each): nn.Parameter(each.detach(), each.requires_grad) for each in self.objective.parameters()
        }
        own = {id(each) for norm in batch_norms(self.objective) for each in norm.buffers()}
        shared |= {id(each): each for each in self.objective.buffers() if id(each) not in own}
        copied = copy.deepcopy(self.objective, shared)
        for norm in batch_norms(copied):
            norm.momentum = 1.0  # its statistics are then those of the newest micro-batch
        return copied

    def close(self) -> None:
        """See `Parallel`."""
        self._pool.shutdown()
