"""Micro-batches in threads against torch's own threads, over the size of a step: where the former begin to pay.

`vitrail.training.processes.threads` divides a step among threads if each has `LEAST_WORK`; here all steps are divided.
"early stem" is the network of scratch-small, at the image sizes through which its runs grow; the others have a linear
stem. Both sides are ours, in a process each, with two threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks import compare, peers, record, train_step
from benchmarks.compare import Contender
from benchmarks.peers import Architecture
from benchmarks.train_step import Case
from vitrail.device import keep_freed_memory
from vitrail.model.build import create
from vitrail.model.variants import OWN
from vitrail.training.processes import threads

THREADS, WHOLE = "in threads", "torch's own threads"


@dataclass(frozen=True)
class Work:
    """A network and a batch; `early` for that of scratch-small."""

    architecture: Architecture
    batch: int
    early: bool = False

    @property
    def name(self) -> str:
        """Say what is measured."""
        a = self.architecture
        network = f"early stem, width {self.width}" if self.early else f"width {self.width}, depth {a.depth}"
        return f"{network}, {a.image_size} px, patch {a.patch}"

    @property
    def width(self) -> int:
        """Return the width of the network."""
        return OWN["small"][0][0] if self.early else self.architecture.width

    @property
    def size(self) -> int:
        """Tokens of the batch times the square of the width, which the rule counts."""
        a = self.architecture
        return self.batch * (a.image_size // a.patch) ** 2 * self.width**2


SMALL, DIGITS = peers.SMALL_IMAGES, replace(peers.SMALL_IMAGES, width=96, depth=4, image_size=16)
WORK = (
    *(Work(replace(SMALL, image_size=side), 256, early=True) for side in (8, 12, 16, 20, 24, 32)),
    Work(DIGITS, 64),
    *(Work(SMALL, batch) for batch in (64, 128, 256)),
    Work(replace(peers.S16, image_size=96), 64),
    Work(peers.S16, 16),
)


def contender(side: str, work: Work) -> Contender:
    """Return one side: the same step, divided or not."""
    keep_freed_memory()
    threads.LEAST_WORK = 1
    threads.MOST = 2 if side == THREADS else 1
    a = work.architecture
    early = create(f"small/{a.patch}", image_size=a.image_size, classes=a.classes) if work.early else None
    model = early or peers.ours(a)
    step = train_step.vitrail_step(model, Case(work.name, a, work.batch), "bf16")
    return Contender(side, step, work.batch, compare.tuned)


def measure(work: Work, rounds: int, seconds: float) -> dict[str, Any]:
    """Time both sides."""
    sides = {side: partial(contender, side, work) for side in (THREADS, WHOLE)}
    rows = record.rows(compare.race_apart(sides, rounds=rounds, seconds=seconds), ours=THREADS)
    record.show(f"{work.name}, batch {work.batch}, images/s of training", rows)
    return {"case": work.name, "batch": work.batch, "size": work.size, "rows": rows}


def main() -> None:
    """Measure everything and write results/threads.json."""
    options = record.arguments(__doc__).parse_args()
    options.threads = 2
    record.prepare(options)
    seconds, work = (0.05, WORK[:1]) if options.quick else (1.5, WORK)
    record.save("threads", options, results=[measure(one, options.rounds, seconds) for one in work])


if __name__ == "__main__":
    main()
