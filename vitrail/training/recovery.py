"""Running out of memory in the middle of a step: the same step again, in smaller pieces.

A batch is a function of its step, and its gradient does not depend on into how many micro-batches it is cut, up to
rounding. So nothing is lost but a moment, and the batch stays what was asked for.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import torch
from torch import nn

from vitrail import world
from vitrail.training.batch_size import out_of_memory
from vitrail.training.guard import FiniteGuard
from vitrail.training.run import Run
from vitrail.training.step import Outcome, seed_step


class MicroBatches:
    """Into how many micro-batches a step is cut: `parts`, doubled where memory runs out.

    `tell(step, parts)` hears of that. Among several processes a step is not repeated: the others wait for its sum.
    """

    def __init__(self, objective: nn.Module, guard: FiniteGuard, run: Run, tell: Callable[[int, int], None]) -> None:
        assert run.batch_size and run.accumulate
        self.parts = run.accumulate
        self._most = math.ceil(run.batch_size / world.size())
        self._objective = objective
        self._guard = guard
        self._seed = run.seed
        self._tell = tell

    def __call__(self, compute: Callable[..., Outcome], step: int) -> Outcome:
        """Return `compute(parts=...)`, the gradient of a step, with as many parts as memory needs.

        Raises what it raises where an image at a time is too much.
        """
        while True:
            try:
                return compute(parts=self.parts)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or world.size() > 1 or self.parts >= self._most:
                    raise
            # only here is the error gone, and with it what its traceback held
            self._start_over(step)

    def _start_over(self, step: int) -> None:
        self._objective.zero_grad(set_to_none=True)
        self._guard.restore()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.parts = min(2 * self.parts, self._most)
        seed_step(self._seed, step, world.rank())
        self._tell(step, self.parts)
