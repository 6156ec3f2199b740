"""Passes over a loader with the same number of rounds in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

from vitrail import world
from vitrail.data.loading.loader import Batch, Loader


class Rounds:
    """A loader whose passes take equally many rounds in every process; `check` is called once in each round.

    Processes may have different numbers of evaluation batches, and batches without a readable image are left out. So
    `check` may talk to the other processes, while no loop over batches may: a process without a batch takes part in the
    round all the same. `check` may raise to end the pass, in all processes at the same round. All processes must create
    it together.
    """

    def __init__(self, loader: Loader, check: Callable[[], None]) -> None:
        self.loader = loader
        self._check = check
        self.bad = loader.bad
        self._rounds = max(world.gather(len(loader)))

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Iterate over the batches of this process."""
        with closing(self.loader.epoch(epoch)) as batches:  # type: ignore[type-var]
            for _ in range(self._rounds):
                self._check()
                if (batch := next(batches, None)) is not None:
                    yield batch
