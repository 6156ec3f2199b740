"""A second set of weights, averaged over the steps of a run: exponential (EMA) or uniform (Polyak).

The paper averages with Polyak & Juditsky (1992) at decay 0.9999 for its ImageNet numbers (section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.errors import CheckpointError
from vitrail.training.run import Average


class Swapped(Protocol):
    """The part of an average that an evaluation uses."""

    def swapped(self) -> AbstractContextManager[None]:
        """Context in which the evaluated network holds the average, if there is one."""


class Averager:
    """The average of `model`'s trainable parameters, and its buffers (BatchNorm) as of the last update.

    - ema: average += (1 - d) * (weights - average), with d = min(decay, (1 + n) / (10 + n)) after n updates,
      so that the fresh weights are forgotten soon;
    - polyak: the uniform mean of the weights after every step >= `start`. If the run becomes longer, so that `start` is
      still to come, the mean begins anew;
    - none: there is no average; every method does nothing.

    Weights narrower than float32 are averaged in float32, because a step of 1e-4 would be lost in bfloat16. `model` is
    the model itself, not a wrapper, and is on its device. If its parameters are sharded, so is their average. `start`
    is in optimiser steps.

    On an accelerator an update does not wait to know whether its step was finite: see `update` and `skipped`.
    """

    def __init__(self, model: nn.Module, average: Average, *, start: int = 0) -> None:
        self.average = average
        self.start = start
        self.count = 0
        self._newest = -1
        """The step that was counted before it was known whether it was finite; -1 for none."""
        self._live: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        if average.kind != "none":
            self._live = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
            self._buffers = _buffers(model)
        wide = {name: torch.promote_types(value.dtype, torch.float32) for name, value in self._live.items()}
        self._mean = {name: value.to(wide[name], copy=True) for name, value in self._live.items()}
        self._kept = {name: value.clone() for name, value in self._buffers.items()}

    @property
    def active(self) -> bool:
        """Return whether there is an average yet."""
        return self.count > 0

    @torch.no_grad()
    def update(self, step: int, finite: Tensor | None = None, now: float | None = None) -> None:
        """Add the weights after optimiser step `step`, counted from 0, to the average.

        now: Where step `step` is in the run as planned, in steps: with a time limit another number (`Moment.step`).
        Nothing changes if `finite`, a bool scalar on the device of the weights, is false. On an accelerator the device
        decides that, and `skipped` must be called before the next update if it was.
        """
        if self.average.kind == "none":
            return
        if self.average.kind == "polyak" and (step if now is None else now) < self.start:
            self.count = 0
            return
        finite = torch.tensor(True) if finite is None else finite
        if finite.device.type != "cpu":
            self._newest = step
        elif not finite:
            return
        if self.average.kind == "polyak":
            weight = 1 / (self.count + 1)
        else:
            weight = 1 - min(self.average.decay, (1 + self.count) / (10 + self.count))
        self.count += 1
        if self._mean:
            means = [world.local_part(mean) for mean in self._mean.values()]
            live = [world.local_part(value) for value in self._live.values()]
            weights = [value.to(mean.dtype) for value, mean in zip(live, means, strict=True)]
            torch_private.foreach_lerp_if_(finite, means, weights, weight)
        if self._kept:  # a step that is not finite has left the statistics as they were (`guard.FiniteGuard`)
            torch_private.foreach_copy_(list(self._kept.values()), list(self._buffers.values()))

    def skipped(self, step: int) -> None:
        """Uncount step number `step`, which was not finite."""
        if step == self._newest:
            self.count, self._newest = self.count - 1, -1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context in which the model holds the average, to evaluate or save it. Its own weights return afterwards.

        Before there is an average (see `active`) the model keeps its own weights.
        """
        if not self.active:
            yield
            return
        live = [*self._live.values(), *self._buffers.values()]
        own = [value.clone() for value in live]
        try:
            _copy(live, [*self._mean.values(), *self._kept.values()])
            yield
        finally:
            _copy(live, own)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs. The tensors are not copied."""
        return {"count": self.count, "mean": dict(self._mean), "buffers": dict(self._kept)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises CheckpointError if it belongs to another model."""
        for mine, theirs in ((self._mean, state["mean"]), (self._kept, state["buffers"])):
            wrong = set(mine) ^ set(theirs)
            wrong |= {name for name in set(mine) & set(theirs) if mine[name].shape != theirs[name].shape}
            if wrong:
                names = ", ".join(sorted(wrong)[:5]) + (" ..." if len(wrong) > 5 else "")
                raise CheckpointError(f"the averaged weights belong to another model: {names} do not match")
            for name, value in mine.items():
                value.copy_(theirs[name])
        self.count = int(state["count"])


@torch.no_grad()
def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    for target, value in zip(to, source, strict=True):
        target.copy_(value)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state_dict contains; the others are constants."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}
