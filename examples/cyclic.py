"""A schedule of one's own: `vitrail train digits --schedule cyclic:Cyclic --schedule.cycles 4`."""

import math
from dataclasses import dataclass

from vitrail import Schedule
from vitrail.ranges import Count


@dataclass(frozen=True)
class Cyclic(Schedule):
    """Warm restarts (Loshchilov and Hutter 2017): several half cosines from the peak to `end`."""

    cycles: Count = 4
    """Number of half cosines in the run."""

    def rate(self, now, peak):
        """Return the learning rate of the step that follows `now`."""
        place = self.cycles * now.step / now.total % 1
        return self.end + (peak - self.end) * (1 + math.cos(math.pi * place)) / 2
