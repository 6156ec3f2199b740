"""Which settings of `scratch-small` pay: each one alone in a plain recipe, and each one in the recipe itself.

    python -m benchmarks.ablation                   all settings with 3 minutes a run, some with 10; three seeds
    python -m benchmarks.ablation --minutes 3 --only early-stem muon

A run is `vitrail train` with a time limit, on a core of its own: a setting that makes a step slower pays for it. Each
core of the machine has a run, and the machine should do nothing else. Accuracy is that on 5,000 training images of
CIFAR-100 that are held out of all runs; the test images are never opened. Whether the settings only serve CIFAR-100 is
measured by benchmarks.transfer, on photographs.

The log holds all finished runs: the same command continues an interrupted benchmark. Minutes of another processor are
others, so compare settings within a column of the table, which names its processor.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.cells import Cells
from benchmarks.learn import vitrail_verb
from vitrail.recipes.small import SHALLOW

DATA = record.DATA / "cifar100"
LOG = record.RESULTS / "ablation.jsonl"


class Setting(NamedTuple):
    """Flags that add a setting to the plain recipe, and those that take it out of `scratch-small` if that has it."""

    on: str
    off: str = ""
    before: str = ""
    """Another recipe that trains the same network first, on the same images without labels, for a third of the time."""


ADAMW = "--optim.name=adamw --optim.lr=0.0015 --batch-size=128"
"""The recipe before Muon. Both learning rates and batches are the best that were tried."""
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
    "mae-before": Setting("", before="mae-small"),
}
PLAIN = (
    f"--vit.stem=linear --progressive.start=1 --vit.pool=cls --objective.smoothing=0 {ADAMW} "
    "--vit.depth=6 --vit.width=192 --vit.heads=6 --vit.mlp-dim=768 --schedule.shape=cosine --vit.layer-scale=none"
)
"""Flags that take everything out of `scratch-small`: MLPs are four times as wide as the tokens, as in the paper."""
SHARE_BEFORE = 1 / 3
SAME_NETWORK = [
    *(f"--vit.{name.replace('_', '-')}={value}" for name, value in SHALLOW.changes().items() if name != "pool"),
    *("--vit.positions=1d", "--objective.mask-after-stem"),
]
"""Flags with which mae-small trains the network of scratch-small."""
UNDISTURBED = 0.85
"""Least share of the steps of another seed; with fewer, the machine had other work."""
LONG = "muon", "mean-pooling", "four-layers", "narrow-mlp", "width-128", "layer-scale", "cutmix", "mae-before"
BUDGETS = {3.0: tuple(SETTINGS), 10.0: LONG}
"""Minutes of a run -> the settings that are measured with it; with more than the first, only in the recipe itself."""


def rows() -> dict[tuple[str, str], str]:
    """Return the flags of each run: (plain or recipe, the setting that is changed, "" for none) -> flags."""
    found = {("plain", ""): PLAIN, ("recipe", ""): ""}
    for name, setting in SETTINGS.items():
        found["plain", name] = f"{PLAIN} {setting.on}"  # a later flag takes the place of an earlier one
        found["recipe", name] = setting.off or setting.on
    return found


def before(name: str) -> str:
    """Return the recipe that trains before, "" for none."""
    return SETTINGS[name].before if name else ""


def is_measured(minutes: float, base: str, name: str) -> bool:
    """Return whether a run is part of the table."""
    short = minutes == min(BUDGETS) and not before(name)
    return name in ("", *BUDGETS[minutes]) and (base == "recipe" or short)


def measured(flags: str, first: str, seed: int, minutes: float, folder: Path) -> dict[str, Any]:
    """Train, first with the recipe `first` if there is one; return accuracy on held-out images, in %, and steps."""
    words = [str(DATA), "--data.holdout=0.1", "--data.test=none", f"--seed={seed}", "--resume=auto"]
    words += ["--evaluate-every=100 %", "--checkpoint-every=100 %"]
    verb = ["train"]
    if first:
        limit, minutes = minutes * SHARE_BEFORE, minutes * (1 - SHARE_BEFORE)
        flagged = [*SAME_NETWORK, f"--recipe={first}", f"--time-limit={limit}", f"--out={folder / first}"]
        verb = ["finetune", f"--from={vitrail_verb(['train', *words, *flagged])['folder']}"]
    words += ["--recipe=scratch-small", f"--time-limit={minutes}", f"--out={folder / 'supervised'}", *flags.split()]
    ran = vitrail_verb([*verb, *words])
    return {"accuracy": round(100 * ran["best"]["top1"], 2), "steps": ran["steps"], "cpu": record.processor()[0]}


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: a row for each setting, in a plain recipe and in the recipe itself."""
    found = {
        (r["minutes"], r["base"], r["name"]): record.with_deviation(r["mean"], r["deviation"]) for r in document["rows"]
    }
    short, long = BUDGETS
    cpus = {(r["minutes"], r["base"]): r["cpu"] for r in document["rows"] if not r["name"]}
    columns = [column for column in ((short, "plain"), (short, "recipe"), (long, "recipe")) if column in cpus]
    header = "held-out top-1, %", *(f"{base}, {minutes:g} minutes, {cpus[minutes, base]}" for minutes, base in columns)
    lines: list[tuple[str, ...]] = [header, ("as it is", *(found.get((*column, ""), "") for column in columns))]
    for name, setting in SETTINGS.items():
        cells = [found.get((*column, name), "") for column in columns]
        if any(cells):
            lines.append((f"{name}{': plain with it, recipe without it' if setting.off else ': both with it'}", *cells))
    return lines


def over_seeds(runs: list[tuple[float, str, str, int]], results: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return a row for each setting: accuracy over the seeds, least and most steps of a seed, and the processor."""
    finished: dict[tuple[float, str, str], list[dict[str, Any]]] = {}
    for (*setting, _), found in zip(runs, results, strict=True):
        if found:
            finished.setdefault(tuple(setting), []).append(found)
    rows = []
    for (minutes, base, name), found in finished.items():
        steps = [one["steps"] for one in found]
        cpu = " and ".join(sorted({one["cpu"] for one in found}))
        row = {"minutes": minutes, "base": base, "name": name, "seeds": len(found), "cpu": cpu}
        accuracy = record.over_seeds([one["accuracy"] for one in found])
        rows.append({**row, "steps": [min(steps), max(steps)], **accuracy})
    return rows


def main() -> None:
    """Run the cells that the log lacks, print the table, write results/ablation.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--minutes", type=float, nargs="+", choices=list(BUDGETS), default=list(BUDGETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--log", type=Path, default=LOG, help="file of finished runs")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="start no run after this time")
    options = parser.parse_args()
    at_once = os.cpu_count() or 1
    if options.quick:
        options.seeds, options.log = [0], Path(tempfile.mkdtemp()) / "log.jsonl"
    os.environ["OMP_NUM_THREADS"] = "1"  # of all children
    cells, flags = Cells(options.log, options.stop_after), rows()
    every = [
        (minutes, base, name, seed)
        for minutes, seed, (base, name) in product(options.minutes, options.seeds, flags)
        if is_measured(minutes, base, name) and name in ("", *options.only)
    ]

    def cell(minutes: float, base: str, name: str, seed: int) -> dict[str, Any] | None:
        key = dict(flags=flags[base, name], before=before(name), seed=seed, minutes=minutes, at_once=at_once)
        length = 0.02 if options.quick else minutes
        return cells.train(lambda folder: measured(flags[base, name], before(name), seed, length, folder), **key)

    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(lambda one: cell(*one), every))
    table = over_seeds(every, results)
    document = {"at_once": at_once, "missing": cells.missing, "rows": table}
    record.print_lines("scratch-small", summary(document))
    for row in table:
        if row["steps"][0] < UNDISTURBED * row["steps"][1]:
            print(f"{row}: a run made far fewer steps than another: remove its line from {options.log}, and repeat it")
    if cells.missing:
        print(f"{cells.missing} runs are missing: the same command continues with them")
    record.save("ablation", options, **document)


if __name__ == "__main__":
    main()
