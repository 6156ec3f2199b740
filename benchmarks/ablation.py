"""Which settings of `scratch-small` pay in the same time: each one in a plain recipe, and each in the recipe itself.

    python -m benchmarks.ablation                   all settings with 3 minutes a run, some with 10; three seeds
    python -m benchmarks.ablation --minutes 3 --only early-stem muon

A minute is `STEPS_A_MINUTE` steps of `scratch-small`. A run with a setting that makes a step slower has fewer steps.
How much slower is measured first, in short runs that share a core with one of `scratch-small`. So the accuracies depend
neither on what else the machine does nor on which machine continues the benchmark.

Accuracy is that on 5,000 training images of CIFAR-100 that are held out of all runs; the test images are never opened.
Whether the settings only serve CIFAR-100 is measured by benchmarks.transfer, on photographs.

The log holds all finished runs: the same command continues an interrupted benchmark.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from benchmarks import record
from benchmarks.cells import Cells, arguments
from benchmarks.learn import json_of, vitrail_verb

Arguments, Result = TypeVar("Arguments", bound=tuple[Any, ...]), TypeVar("Result")

DATA = record.DATA / "cifar100"
LOG = record.RESULTS / "ablation.jsonl"


class Setting(NamedTuple):
    """Flags that add a setting to the plain recipe, and those that take it out of `scratch-small` if that has it."""

    on: str
    off: str = ""
    before: str = ""
    """Flags of a training before, which takes `SHARE_BEFORE` of the time."""


ADAMW = "--optim.name=adamw --optim.lr=0.0015 --batch-size=128"
"""The recipe before Muon. Both learning rates and batches are the best that were tried."""
MAE = "--recipe=mae-small --model=small/4 --objective.mask-after-stem"
"""Flags with which mae-small trains the network of scratch-small, on the same images without labels."""
SETTINGS = {
    "early-stem": Setting("--vit.stem=early", "--vit.stem=linear"),
    "growing-images": Setting("--progressive.start=0.25 --progressive.until=80%", "--progressive.start=1"),
    "mean-pooling": Setting("--vit.pool=gap", "--vit.pool=cls"),
    "smoothing": Setting("--objective.smoothing=0.1", "--objective.smoothing=0"),
    "muon": Setting("--optim.name=muon --optim.lr=0.008 --batch-size=256", ADAMW),
    "four-layers": Setting("--vit.depth=4", "--vit.depth=6"),
    "narrow-mlp": Setting("--vit.mlp-dim=384", "--vit.mlp-dim=512"),
    "width-128": Setting(
        "--vit.width=128 --vit.heads=4 --vit.mlp-dim=256", "--vit.width=192 --vit.heads=6 --vit.mlp-dim=384"
    ),
    "linear-decay": Setting("--schedule.shape=linear", "--schedule.shape=cosine"),
    "layer-scale": Setting("--vit.layer-scale=0.1", "--vit.layer-scale=none"),
    "attention-pooling": Setting("--vit.pool=map"),
    "average-of-weights": Setting("--average.kind=ema --average.decay=0.99"),
    "cutmix": Setting("--augment.cutmix=1 --augment.mixup=0.2"),
    "patch-dropout": Setting("--objective=benchmarks.leads:PatchDropout"),
    "alternating-flips": Setting("--objective=benchmarks.leads:AlternatingFlips --augment.no-flip"),
    "growing-batch": Setting("--objective=benchmarks.leads:GrowingBatch"),
    "mae-before": Setting("", before=MAE),
}
PLAIN = (
    f"--vit.stem=linear --progressive.start=1 --vit.pool=cls --objective.smoothing=0 {ADAMW} "
    "--vit.depth=6 --vit.width=192 --vit.heads=6 --vit.mlp-dim=768 --schedule.shape=cosine --vit.layer-scale=none"
)
"""Flags that take everything out of `scratch-small`: MLPs are four times as wide as the tokens, as in the paper."""
SHARE_BEFORE = 1 / 3
"""Share of the time of a run for the training before it."""
STEPS_A_MINUTE = 200
"""What one core of a cloud machine does beside busy neighbours; in a quiet hour it is 300, of a faster one 500."""
TIMED_STEPS = 120
"""Length of the runs that measure the time of a step."""
CORE_TIME = "import time; time.monotonic = time.process_time; from vitrail.cli import main; raise SystemExit(main())"
"""Program that is `vitrail` with another clock: only the time of the process itself counts."""
LONG = "early-stem", "mean-pooling", "muon", "width-128", "layer-scale", "patch-dropout", "mae-before"
"""What more steps may change: the stem, pooling, the optimiser, the size of the network, patches that are left out,
training before."""
BUDGETS = {3.0: tuple(SETTINGS), 10.0: LONG}
"""Minutes of a run -> the settings that are measured with it; with more than the first, only in the recipe itself."""
COMMON = (
    *("train", str(DATA), "--data.test=none", "--recipe=scratch-small"),
    *("--evaluate-every=100 %", "--checkpoint-every=100 %"),
)


class Row(NamedTuple):
    """A figure of the table: the setting that is changed in the plain recipe or in scratch-small, "" for none."""

    minutes: float
    base: str
    name: str

    def phases(self) -> list[tuple[str, float]]:
        """Return the flags and the minutes of each training of a run: the second one continues the first."""
        setting = SETTINGS.get(self.name, Setting(""))
        flags = f"{PLAIN} {setting.on}".strip() if self.base == "plain" else setting.off or setting.on
        if not setting.before:
            return [(flags, self.minutes)]
        return [(setting.before, self.minutes * SHARE_BEFORE), (flags, self.minutes * (1 - SHARE_BEFORE))]


def rows(minutes: Sequence[float], bases: Sequence[str], names: Sequence[str]) -> list[Row]:
    """Return the figures of the table: in the plain recipe, no setting trains before, and the runs are short."""
    found = (Row(*one) for one in product(minutes, bases, ("", *names)) if one[2] in ("", *BUDGETS[one[0]]))
    alone = (min(BUDGETS), 1)
    return [row for row in found if row.base == "recipe" or (row.minutes, len(row.phases())) == alone]


def over_recipe(flags: str, steps: int, folder: Path) -> dict[str, float]:
    """Train with the recipe and with the flags at the same time on one core; return the ratio of the times of a step.

    Time is that of the core for each process. The two take turns of milliseconds, so that whatever else slows the core
    down slows both.
    """
    words = [*COMMON, "--data.holdout=0.002", f"--duration={steps} steps"]

    def step_time(side: str) -> float:
        more = (*(flags.split() if side == "changed" else ()), f"--out={folder / side}", "--json")
        ran = json_of([sys.executable, "-c", CORE_TIME, *words, *more])
        return ran["seconds"] / ran["steps"]

    with ThreadPoolExecutor(2) as pair:
        recipe, changed = pair.map(step_time, ("recipe", "changed"))
    return {"over_recipe": round(changed / recipe, 3)}


def measured(phases: Sequence[tuple[str, int]], seed: int, folder: Path) -> dict[str, float]:
    """Train with the flags of each phase for its steps, and return the accuracy on the images held out, in %."""
    ran: dict[str, Any] = {}
    for number, (flags, steps) in enumerate(phases):
        words = [*COMMON, "--data.holdout=0.1", *flags.split(), f"--duration={steps} steps", f"--seed={seed}"]
        if ran:
            words[:1] = ["finetune", f"--from={ran['folder']}"]
        ran = vitrail_verb([*words, "--resume=auto", f"--out={folder / str(number)}"])
    return {"accuracy": round(100 * ran["best"]["top1"], 2)}


def step_times(cells: Cells, flags: Sequence[str], steps: int) -> dict[str, float]:
    """Return the time of a step with each of the flags, over that of scratch-small, as far as it is known."""

    def timed(words: str) -> dict[str, float] | None:
        return cells.train(lambda folder: over_recipe(words, steps, folder), flags=words, steps=steps)

    return {words: one["over_recipe"] for (words,), one in at_once(timed, [(words,) for words in flags]) if one}


def accuracies(
    cells: Cells, table: Sequence[Row], times: dict[str, float], seeds: Sequence[int], steps_a_minute: float
) -> list[dict[str, Any]]:
    """Return the rows whose times are known: the steps of each phase, and the accuracy over the seeds."""
    planned = {
        row: [(flags, round(steps_a_minute * minutes / times[flags])) for flags, minutes in row.phases()]
        for row in table
        if all(flags in times for flags, _ in row.phases())
    }

    def trained(row: Row, seed: int) -> dict[str, float] | None:
        phases = planned[row]
        return cells.train(lambda folder: measured(phases, seed, folder), phases=phases, seed=seed)

    found: dict[Row, list[float]] = {row: [] for row in planned}
    runs = sorted(product(planned, seeds), key=lambda run: (run[0].minutes, run[1]))
    for (row, _), one in at_once(trained, runs):
        if one:
            found[row].append(one["accuracy"])
    return [
        {
            **row._asdict(),
            "steps": [steps for _, steps in planned[row]],
            "seeds": len(values),
            **record.over_seeds(values),
        }
        for row, values in found.items()
        if values
    ]


def at_once(compute: Callable[..., Result], arguments: Sequence[Arguments]) -> list[tuple[Arguments, Result]]:
    """Compute the calls, one on each core, and return the results beside their arguments."""
    cores: SimpleQueue[int] = SimpleQueue()
    for core in os.sched_getaffinity(0):
        cores.put(core)

    def keep_one() -> None:
        os.sched_setaffinity(0, {cores.get()})  # for the thread, and the threads and processes that it starts

    with ThreadPoolExecutor(cores.qsize(), initializer=keep_one) as pool:
        return list(zip(arguments, pool.map(lambda one: compute(*one), arguments), strict=True))


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: a row for each setting, a column for each recipe and budget."""
    found = {
        (r["minutes"], r["base"], r["name"]): record.with_deviation(r["mean"], r["deviation"]) for r in document["rows"]
    }
    columns = sorted({column[:2] for column in found})
    without = {"plain": "plain with it", "recipe": "recipe without it"}
    seeds = " or ".join(map(str, sorted({r["seeds"] for r in document["rows"]})))
    header = (
        f"held-out top-1, % ({seeds} seeds)",
        *(f"{without[base]}, {minutes:g} minutes" for minutes, base in columns),
    )
    lines: list[tuple[str, ...]] = [header, ("as it is", *(found.get((*column, ""), "") for column in columns))]
    for name, setting in SETTINGS.items():
        cells = [found.get((*column, name), "") for column in columns]
        if any(cells):
            lines.append((name if setting.off else f"{name}: both with it", *cells))
    return lines


def main() -> None:
    """Run the cells that the log lacks, print the table, write results/ablation.json."""
    parser = arguments(__doc__, LOG)
    parser.add_argument("--minutes", type=float, nargs="+", choices=list(BUDGETS), default=list(BUDGETS))
    parser.add_argument("--base", nargs="+", choices=["plain", "recipe"], default=["plain", "recipe"])
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    options = parser.parse_args()
    timed, steps_a_minute = TIMED_STEPS, STEPS_A_MINUTE
    if options.quick:
        timed, steps_a_minute = 2, 1
    cells, table = Cells.begin(options), rows(options.minutes, options.base, options.only)
    flags = list(dict.fromkeys(words for row in table for words, _ in row.phases() if words))
    times = {"": 1.0, **step_times(cells, flags, timed)}
    document = {
        "step_times": times,
        "rows": accuracies(cells, table, times, options.seeds, steps_a_minute),
        "missing": cells.missing,
    }
    record.print_lines("scratch-small", summary(document))
    cells.say_missing()
    record.save("ablation", options, **document)


if __name__ == "__main__":
    main()
