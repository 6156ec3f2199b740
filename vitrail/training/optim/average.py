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
    """What evaluation needs of an average."""

    def swapped(self) -> AbstractContextManager[None]:
        """Context in which the network that is looked at holds the average, where there is one."""


class Averager:
    """The average of `model`'s trainable parameters, and its buffers (BatchNorm) as of the last update.

    - ema: average += (1 - d) * (weights - average), with d = min(decay, (1 + n) / (10 + n)) after n updates,
      so that the fresh weights are forgotten soon;
    - polyak: the uniform mean of the weights after every step >= `start`;
    - none: there is no average; every method does nothing.

    Weights narrower than float32 are averaged in float32: a step of 1e-4 would be lost in bfloat16. Hand in
    the model itself, not a wrapper, and after it has reached its device. Where its parameters are cut over the
    processes, so is their average. `start` is in optimiser steps.
    """

    def __init__(self, model: nn.Module, average: Average, *, start: int = 0) -> None:
        self.average = average
        self.start = start
        self.count = 0
        live = {} if average.kind == "none" else dict(model.named_parameters())
        self._live = {name: parameter.detach() for name, parameter in live.items() if parameter.requires_grad}
        self._buffers = {} if average.kind == "none" else _buffers(model)
        self._mean = {name: value.to(_wide(value.dtype), copy=True) for name, value in self._live.items()}
        self._kept = {name: value.clone() for name, value in self._buffers.items()}

    @property
    def active(self) -> bool:
        """Is there an average yet?"""
        return self.count > 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights as they are after optimiser step `step`, counted from 0."""
        if self.average.kind == "none" or (self.average.kind == "polyak" and step < self.start):
            return
        if self.average.kind == "polyak":
            weight = 1 / (self.count + 1)
        else:
            weight = 1 - min(self.average.decay, (1 + self.count) / (10 + self.count))
        self.count += 1
        if self._mean:
            means = [world.local(mean) for mean in self._mean.values()]
            live = [world.local(value) for value in self._live.values()]
            weights = [value.to(mean.dtype) for value, mean in zip(live, means, strict=True)]
            torch_private.foreach_lerp_(means, weights, weight)
        if self._kept:
            torch_private.foreach_copy_(list(self._kept.values()), list(self._buffers.values()))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the `with` block the model holds the average, to evaluate or to save it.

        Its own weights return afterwards. Before there is an average (see `active`) they stay.
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
        """Return everything a resumed run needs; the tensors are not copied."""
        return {"count": self.count, "mean": dict(self._mean), "buffers": dict(self._kept)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` left off. Raises CheckpointError if it is of another model."""
        for mine, theirs in ((self._mean, state["mean"]), (self._kept, state["buffers"])):
            wrong = set(mine) ^ set(theirs)
            wrong |= {name for name in set(mine) & set(theirs) if mine[name].shape != theirs[name].shape}
            if wrong:
                names = ", ".join(sorted(wrong)[:5]) + (" ..." if len(wrong) > 5 else "")
                raise CheckpointError(f"the averaged weights are of another model: {names} do not match")
            for name, value in mine.items():
                value.copy_(theirs[name])
        self.count = int(state["count"])


@torch.no_grad()
def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    for target, value in zip(to, source, strict=True):
        target.copy_(value)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are state: those a state_dict holds, not the constants it leaves out."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
