"""The gradient of one optimiser step: micro-batches, all processes, one mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vitrail import world
from vitrail.objective.base import Batch, Objective
from vitrail.training.processes.parallel import Alone, Parallel


@dataclass(frozen=True)
class Outcome:
    """What one step's batch gave, over all processes."""

    loss: float
    """Mean over the examples."""
    count: int
    metrics: dict[str, float]
    """Sums over the examples."""


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make everything random inside a step (dropout, stochastic depth) a function of (seed, step, rank).

    No generator state needs to be kept, and a resumed run draws what it would have drawn.
    """
    (state,) = np.random.SeedSequence([seed % 2**64, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state))


def backward(
    objective: Objective, batch: Batch, *, step: int, parts: int, autocast: bool, network: Parallel | None = None
) -> Outcome:
    """Set the gradient of the mean loss over the batches of all processes, which compute as `network` says.

    The batch is cut into `parts` micro-batches; each gives the gradient of a *sum*, and the sums are divided by
    the global count once, at the end. So the gradient does not depend on `parts` or on the number of processes,
    up to rounding and to what normalises over the batch (BatchNorm).
    """
    network = network or Alone(objective)
    device = next(objective.parameters()).device
    totals: dict[str, torch.Tensor] = {}
    prepared = objective.prepare(batch, step=step)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        prepared = objective.before_step(prepared, parts)
    pieces = prepared.split(parts)
    for number, part in enumerate(pieces, start=1):
        with network.last(number == len(pieces)):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                loss, count, metrics = network(part, step=step)
            loss.backward()
        sums = {**metrics, "loss": loss.detach(), "count": torch.tensor(count)}
        for name, value in sums.items():
            value = value.to(device, torch.float32 if device.type == "mps" else torch.float64)
            totals[name] = totals[name] + value if name in totals else value
    values = world.sum_(torch.stack(list(totals.values()))).tolist()
    summed = dict(zip(totals, values, strict=True))
    total, examples = summed.pop("loss"), int(summed.pop("count"))
    network.mean(examples)
    return Outcome(total / examples, examples, summed)
