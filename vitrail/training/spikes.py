"""Losses that jump: noticed and named, with the images that made them, and not acted upon."""

from __future__ import annotations

import math
import statistics
from collections import deque

LOOKED_BACK = 50
"""Steps with whose median a loss is compared."""
FEWEST = 20
"""Steps before there is a median worth comparing with."""
TIMES = 10.0
"""How many times the median makes a spike."""


class Spikes:
    """Compares each loss with the median of those before it."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=LOOKED_BACK)

    def times(self, loss: float) -> float | None:
        """Return how many times the median `loss` is where that is a spike, else None; `loss` then counts, too."""
        usual = statistics.median(self._losses) if len(self._losses) >= FEWEST else math.inf
        if math.isfinite(loss):
            self._losses.append(loss)
        return loss / usual if 0 < usual * TIMES < loss < math.inf else None
