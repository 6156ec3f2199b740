"""Sinkhorn-Knopp: every output gets an equal share of the images (Caron et al. 2020, SwAV, section 3 and appendix).

Q = exp(outputs / temperature) has a row for each crop of the whole step. Its columns and rows are scaled alternately:
each column is divided by its sum, then each row by its sum. DINOv2 (Oquab et al. 2023, section 4) uses the rows after
three rounds as DINO's targets. Scaling a column is the same as subtracting a number from its outputs,

    Q[i, j] / column[j] = exp((outputs[i, j] - temperature * log column[j]) / temperature),

and scaling the rows is a softmax. So the result is given by one vector, the centre: the targets are
softmax((outputs - centre) / temperature). Common factors of Q, such as SwAV's 1 / number of outputs, cancel in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail import world

ROUNDS = 3


def balancing_centre(outputs: Sequence[Tensor], temperature: float, rounds: int = ROUNDS) -> Tensor:
    """Return the centre [outputs] that gives all outputs equal shares, over the rows of all processes together.

    outputs: this process's rows in parts [rows, outputs], at least one row. Temporary memory is that of one part. All
    processes must call the function. Nothing overflows or vanishes: the largest value of each column is subtracted
    first, so each column has an element of 1. Scaling the column leaves at least 1 / rows of it, and scaling the row at
    least 1 / (rows * outputs), so every later sum is at least that.
    """
    centre = world.max_(torch.stack([part.amax(0) for part in outputs]).amax(0))
    for number in range(rounds):
        shares = torch.zeros_like(centre)
        for part in outputs:
            logits = (part - centre) / temperature
            shares += (logits.softmax(1) if number else logits.exp()).sum(0)
        centre = centre + temperature * world.sum_(shares).log()
    return centre
