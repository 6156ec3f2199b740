"""One optimiser step: micro-batches, all processes, one mean, one update.

Nothing in a step waits for an accelerator. The sums of all micro-batches and processes, the time and the signals are
one tensor with one reduction. The device decides whether the update is finite. The numbers of a step are read when the
next step has been launched; on a CPU, where nothing runs ahead, they are read at once.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vitrail import world
from vitrail.device import autocast_dtype, has_cuda, out_of_memory, to_device
from vitrail.objective.base import ImageBatch, Objective, Prepared
from vitrail.training.batch_size import fewest_images
from vitrail.training.guard import FiniteGuard
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import LossScale, divisor_of_gradients, set_learning_rate, update
from vitrail.training.parallel import Parallel, Repeat
from vitrail.training.run import Run

LOSS, COUNT, NORM = "loss", "count", "norm"
OWN = "own "
"""Prefix of the numbers that each process adds to the reduction for itself; the others are metrics."""
PROVEN = 2
"""Number of steps after which images of a size are known to fit in memory: the first creates the optimiser's state."""


@dataclass
class StepSums:
    """Sums over the images of one step in all processes. They stay on the device until they are read."""

    names: list[str]
    values: Tensor
    """float64 [len(names)]; float32 on devices without float64."""
    _ready: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Start to copy the numbers to the CPU, without waiting for them."""
        if self.values.is_cuda:
            self.values = self.values.to("cpu", non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The value of each name. The first use waits for the device."""
        if self._ready is not None:
            self._ready.synchronize()
        return dict(zip(self.names, self.values.tolist(), strict=True))

    @property
    def loss(self) -> float:
        """Mean over the images."""
        return self.numbers[LOSS] / self.numbers[COUNT]

    @property
    def count(self) -> int:
        """Number of images."""
        return int(self.numbers[COUNT])

    @property
    def norm(self) -> float:
        """Global gradient norm before clipping."""
        return self.numbers[NORM]

    @property
    def metrics(self) -> dict[str, float]:
        """Sums over the images."""
        ours = (LOSS, COUNT, NORM)
        return {name: x for name, x in self.numbers.items() if name not in ours and not name.startswith(OWN)}

    def own(self) -> dict[str, float]:
        """Return the sums of what each process added for itself."""
        return {name.removeprefix(OWN): x for name, x in self.numbers.items() if name.startswith(OWN)}


@dataclass(frozen=True)
class FinishedStep:
    """A step whose update has been launched."""

    step: int
    """Counted from 0."""
    index: Tensor
    """int64 [batch]: the images of this process."""
    rate: float
    """Learning rate."""
    sums: StepSums

    @property
    def finite(self) -> bool:
        """Return whether loss and gradient were finite. If not, the step has changed nothing."""
        return math.isfinite(self.sums.loss) and math.isfinite(self.sums.norm)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make all randomness inside a step (dropout, stochastic depth) a function of (seed, step, rank).

    So no generator state needs to be saved, and a resumed run draws the same numbers.
    """
    (state,) = np.random.SeedSequence([seed % 2**64, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state))


def backward(
    objective: Objective,
    batch: ImageBatch | Prepared,
    *,
    step: int,
    parts: int,
    autocast: bool,
    network: Parallel | None = None,
    own: Callable[[], dict[str, float]] = dict,
    afterwards: bool = False,
    scale: Tensor | None = None,
) -> StepSums:
    """Set the gradient of the mean loss over the batches of all processes, and return the sums of the step.

    The batch is cut into `parts` micro-batches. Each of these gives the gradient of a *sum*, so that the gradient
    depends neither on the number of micro-batches nor on the number of processes, apart from rounding and from
    normalisation over the batch (BatchNorm).
    Several processes divide the sums at the end, by the count of all of them. A single process knows its count before,
    and divides the losses instead, which costs nothing. `own` returns further numbers of this process, which are summed
    over the processes. `afterwards`: See `Parallel.summed`, which says what is raised, too. With `autocast`, products
    are in bfloat16, or in float16 if there is a `scale`, by which the gradients are multiplied.
    """
    half = torch.bfloat16 if scale is None else torch.float16
    network = network or Parallel(objective)
    device = next(objective.parameters()).device
    totals: dict[str, Tensor] = {}
    examples = 0
    prepared = batch if isinstance(batch, Prepared) else objective.prepare(batch, step=step)
    with torch.no_grad(), torch.autocast(device.type, dtype=half, enabled=autocast):
        prepared = objective.before_step(prepared, parts)
    wide = torch.float32 if device.type == "mps" else torch.float64
    pieces, divisor = prepared.split(parts), 1 if world.active() else len(prepared)
    with network.summed(afterwards=afterwards):
        for number, part in enumerate(pieces, start=1):
            with network.last(number == len(pieces)):
                with torch.autocast(device.type, dtype=half, enabled=autocast):
                    loss, count, metrics = network.loss(part)
                gradient = torch.full_like(loss, 1 / divisor)
                loss.backward(gradient if scale is None else gradient * scale)
            examples += count
            for name, value in {**metrics, LOSS: loss.detach()}.items():
                value = value.to(device, wide, non_blocking=True)
                totals[name] = totals[name] + value if name in totals else value
    known = {COUNT: float(examples), **{f"{OWN}{name}": value for name, value in own().items()}}
    host = to_device(torch.tensor(list(known.values()), dtype=wide), device)
    values = world.sum_(torch.cat([torch.stack(list(totals.values())), host]))
    if world.active():
        network.mean(values[len(totals)])
    elif examples != divisor:  # an objective of one's own may count something else than images
        network.mean(examples / divisor)
    return StepSums([*totals, *known], values)


@dataclass
class TrainingStep:
    """Callable that takes one optimiser step: gradient, clipping, update.

    If memory runs out, the step is repeated with twice as many micro-batches, `parts`. Nothing is lost: a batch is a
    function of its step, and its gradient does not depend on the micro-batches, up to rounding. With several processes
    this is possible while gradients are summed after the passes of a step, as they are until `PROVEN` steps with images
    of a size have been taken. Later, the others wait inside of a sum for the process that lacks memory: the run fails,
    and `vitrail.training.processes.launch` resumes it with more micro-batches. A step with a non-finite loss or
    gradient changes nothing.
    """

    run: Run
    """With every decision made."""
    network: Parallel
    optimizer: torch.optim.Optimizer
    average: Averager
    guard: FiniteGuard
    """Restores BatchNorm statistics."""
    on_memory: Callable[[int, int], None]
    """Called with (step, parts) when `parts` grows."""
    on_done: Callable[[FinishedStep], None]
    """Called with each finished step, in order; one step late if `late` is set."""
    own: Callable[[], dict[str, float]]
    """Returns further numbers of this process, which `StepSums` holds summed over all processes."""
    scale: LossScale | None = None
    """The factor of the loss in float16."""
    again: int | None = None
    """If memory has run out in a step that failed: the number of micro-batches with which it may fit."""
    _pending: FinishedStep | None = None

    def __post_init__(self) -> None:
        assert self.run.batch_size and self.run.accumulate  # decided by now
        self.parts, self.objective = self.run.accumulate, self.network.objective
        self.late = next(self.objective.parameters()).device.type != "cpu"
        self._most_parts = max(self.run.batch_size // world.size() // fewest_images(self.objective), 1)
        self._largest = self._proven = 0

    def __call__(
        self,
        batch: ImageBatch | Prepared,
        step: int,
        *,
        rate: float,
        decay: float | None = None,
        now: float | None = None,
    ) -> None:
        """Take step number `step` with this learning rate, and with this weight decay on kernels.

        now: See `Averager.update`.

        Raises what the objective raises, and the error of an allocation if not even a single image fits in memory or
        other processes cannot repeat the step.
        """
        world.begin_step(step, first=not self._largest)
        self.guard.before_step()
        set_learning_rate(self.optimizer, rate, decay)
        scale = None if self.scale is None else self.scale.value
        if batch.images.numel() > self._largest:
            self._largest, self._proven = batch.images.numel(), 0
        afterwards = self._proven < PROVEN
        while True:
            try:
                seed_step(self.run.seed, step, world.rank())
                sums = backward(
                    self.objective,
                    batch,
                    step=step,
                    parts=self.parts,
                    autocast=autocast_dtype(self.run.precision) is not None,
                    network=self.network,
                    own=self.own,
                    afterwards=afterwards,
                    scale=scale,
                )
                break
            except (Repeat, RuntimeError, MemoryError) as error:
                ran_out, cut = out_of_memory(error), min(2 * self.parts, self._most_parts)
                self.again = cut if ran_out and cut > self.parts else None
                together = isinstance(error, Repeat) or (ran_out and world.size() == 1)
                if not together or (ran_out and self.again is None):
                    raise
            # here the error is gone, and with it the memory that its traceback held
            self._start_over()
            if self.again is not None:
                self.parts, self.again = self.again, None
                self.on_memory(step, self.parts)
            afterwards = True
        self._proven += 1
        self.settle()
        norm, divisor = divisor_of_gradients(self.objective.parameters(), self.run.optim.clip, scale)
        norm = norm.to(sums.values)
        finite = torch.isfinite(norm) & torch.isfinite(sums.values[sums.names.index(LOSS)])
        update(self.optimizer, finite, divisor)
        if self.scale is not None:
            self.scale.update(finite)
        self.guard.restore(unless=finite)
        self.average.update(step, finite, now)
        self.objective.after_step(finite)
        self.optimizer.zero_grad(set_to_none=True)
        sums = StepSums([*sums.names, NORM], torch.cat([sums.values, norm[None]]))
        sums.fetch()
        self._pending = FinishedStep(step, batch.index, rate, sums)
        if not self.late:
            self.settle()

    def settle(self) -> None:
        """Read the numbers of the newest step, unless that has happened, and pass them on."""
        done, self._pending = self._pending, None
        if done is None:
            return
        if not done.finite:
            self.average.skipped(done.step)
        self.on_done(done)

    def _start_over(self) -> None:
        """Undo what the passes of a step have changed, and free memory."""
        self.objective.zero_grad(set_to_none=True)
        self.guard.restore()
        gc.collect()
        if has_cuda():
            torch.cuda.empty_cache()
