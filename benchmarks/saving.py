"""Measure how long training stops for a checkpoint: written at once, or copied and then written in the background.

    python -m benchmarks.saving              S/16 with AdamW and an average, 8 images a step

"standing still" is the time of `Checkpoints.save`. "step" is a training step without a save. "step meanwhile" is a step
while a checkpoint is being written, since the writing thread takes processor time, too. All are medians of `--rounds`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import record
from vitrail.data.loading.loader import Batch
from vitrail.data.settings import Augment
from vitrail.device import fast_float32
from vitrail.model.build import create
from vitrail.objective.settings import Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.training.checkpoints.flatten import nbytes
from vitrail.training.checkpoints.state import Checkpoints, TrainingState
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer
from vitrail.training.run import Average, Optim
from vitrail.training.step import backward

IMAGES = 8


def main() -> None:
    """Measure, print a table and record it."""
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk")
    asked = parser.parse_args()
    record.prepare(asked)
    found = measure(asked.model, asked.rounds, asked.out)
    table = Table(title=f"{asked.model}: {found['megabytes']:.0f} MB a checkpoint")
    for column in ("", "standing still, s", "step meanwhile, s"):
        table.add_column(column)
    table.add_row("written at once", f"{found['at_once']:.3f}", f"{found['step']:.3f}")
    table.add_row("while training goes on", f"{found['meanwhile']:.3f}", f"{found['step_meanwhile']:.3f}")
    Console().print(table)
    record.save("saving", asked, model=asked.model, images=IMAGES, medians_of=asked.rounds, results=found)


@fast_float32()
def measure(model: str, rounds: int, out: Path) -> dict[str, float]:
    """Return the seconds, and the size of a checkpoint."""
    objective = SupervisedObjective(create(model, classes=1000), Supervised(), Augment(), 1000, 0)
    optimizer = build_optimizer(objective, Optim())
    average = Averager(objective.model, Average("ema"))
    state = TrainingState(objective, optimizer, average, {})
    nothing = torch.zeros(IMAGES, dtype=torch.int64)
    batch = Batch(torch.zeros(IMAGES, 3, 224, 224, dtype=torch.uint8), nothing, nothing)

    def step() -> float:
        began = time.perf_counter()
        backward(objective, batch, step=0, parts=1, autocast=False)
        optimizer.step()
        average.update(state.status.step)
        optimizer.zero_grad(set_to_none=True)
        state.status.step += 1
        return time.perf_counter() - began

    def save(wait: bool) -> float:
        began = time.perf_counter()
        checkpoints.save(state, wait=wait)
        return time.perf_counter() - began

    times: dict[str, list[float]] = {name: [] for name in ("step", "at_once", "meanwhile", "step_meanwhile")}
    with tempfile.TemporaryDirectory(dir=out) as folder:
        place: Any = SimpleNamespace(checkpoints=Path(folder))
        with Checkpoints(place, 2, print) as checkpoints:
            for number in range(rounds + 1):  # the first makes room for the copies
                one = {"step": step(), "at_once": save(wait=True)}
                step()
                one |= {"meanwhile": save(wait=False), "step_meanwhile": step()}
                checkpoints.wait()
                for name, seconds in one.items():
                    times[name] += [seconds] if number else []
        megabytes = nbytes(state.state_dict()) / 1e6
    return {**{name: statistics.median(values) for name, values in times.items()}, "megabytes": megabytes}


if __name__ == "__main__":
    main()
