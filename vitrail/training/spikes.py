"""Detection of loss spikes. They are reported with their images; training does not change."""

from __future__ import annotations

import math
import statistics
from collections import deque

LOOKED_BACK = 50
"""Number of previous steps with whose median a loss is compared."""
FEWEST = 20
"""Smallest number of previous steps for a comparison."""
TIMES = 10.0
"""A loss of more than this many medians is a spike."""


class Spikes:
    """Compares each loss with the median of previous losses."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=LOOKED_BACK)

    def times(self, loss: float) -> float | None:
        """Return `loss` divided by the median if it is a spike, else None. Finite losses enter later medians."""
        usual = statistics.median(self._losses) if len(self._losses) >= FEWEST else math.inf
        if math.isfinite(loss):
            self._losses.append(loss)
        return loss / usual if 0 < usual * TIMES < loss < math.inf else None
