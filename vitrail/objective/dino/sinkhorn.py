"""Sinkhorn-Knopp: every output gets an equal share of the images (Caron et al. 2020, SwAV, section 3 and appendix).

Q = exp(answers / temperature), a row for each crop of the whole step, is scaled by turns: every column is divided by
its sum, then every row by its. DINOv2 (Oquab et al. 2023, section 4) takes the rows after three turns for DINO's
targets. As scaled columns are answers from which something has been taken away,

    Q[i, j] / column[j] = exp((answers[i, j] - temperature * log column[j]) / temperature),

and as scaled rows are a softmax, all of it comes to one vector, a centre: targets are
softmax((answers - centre) / temperature). Factors that all of Q shares, such as SwAV's 1 / outputs, cancel in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail import world

TURNS = 3


def balanced(answers: Sequence[Tensor], temperature: float, turns: int = TURNS) -> Tensor:
    """Return the centre [outputs] that makes the outputs' shares equal, for the rows of all processes together.

    answers: [rows, outputs] each, what a process has in pieces, at least one row; scratch space is that of a piece. All
    processes must call it. Nothing overflows: the largest answer of a column is taken away first. A column then has an
    element of 1, and after its scaling one of at least 1 / rows, of which a row's scaling leaves at least
    1 / (rows outputs): no later sum is less.
    """
    centre = world.max_(torch.stack([part.amax(0) for part in answers]).amax(0))
    for turn in range(turns):
        shares = torch.zeros_like(centre)
        for part in answers:
            logits = (part - centre) / temperature
            shares += (logits.softmax(1) if turn else logits.exp()).sum(0)
        centre = centre + temperature * world.sum_(shares).log()
    return centre
