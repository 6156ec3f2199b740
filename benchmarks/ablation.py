"""Which settings of `scratch-small` pay: each one alone in a plain recipe, and each one in the recipe itself.

    python -m benchmarks.ablation                                  all settings, 3 minutes a run, three seeds
    python -m benchmarks.ablation --minutes 10 --only early-stem muon

A run is `vitrail train` with a time limit, on a core of its own: a setting that makes a step slower pays for it. Each
core of the machine has a run, and the machine should do nothing else. Accuracy is that on training images held out of
all runs; the test images are never opened. The second set of images shows whether a setting only serves the first:
photographs of flowers, squeezed to 64 pixels.

The log holds all finished runs: the same command continues an interrupted benchmark.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.cells import Cells
from benchmarks.learn import vitrail_verb

DATA = Path(os.environ.get("VITRAIL_TEST_DATA", record.ROOT.parent / "shared" / "data"))
LOG = record.RESULTS / "ablation.jsonl"
SETS = {
    "CIFAR-100": ("cifar100", "--data.holdout=0.1"),
    "flowers12": ("flowers12", "--data.holdout=0.2 --image-size=64"),
}
"""Name -> its folder, and what holds training images out."""


class Setting(NamedTuple):
    """Flags that switch a setting on and off. The recipe has it on if `kept`."""

    on: str
    off: str
    kept: bool


ADAMW = "--optim.name=adamw --optim.lr=0.0015 --batch-size=128"
"""The recipe before Muon. Both learning rates and batches are the best that were tried."""
SETTINGS = {
    "early-stem": Setting("--vit.stem=early", "--vit.stem=linear", True),
    "growing-images": Setting("--progressive.start=0.25 --progressive.until=80%", "--progressive.start=1", True),
    "mean-pooling": Setting("--vit.pool=gap", "--vit.pool=cls", True),
    "smoothing": Setting("--objective.smoothing=0.1", "--objective.smoothing=0", True),
    "muon": Setting("--optim.name=muon --optim.lr=0.008 --batch-size=256", ADAMW, True),
    "four-layers": Setting("--vit.depth=4", "--vit.depth=6", True),
    "narrow-mlp": Setting("--vit.mlp-dim=384", "--vit.mlp-dim=768", True),
    "linear-decay": Setting("--schedule.shape=linear", "--schedule.shape=cosine", True),
    "narrower": Setting("--vit.width=128 --vit.heads=4 --vit.mlp-dim=256", "", False),
    "attention-pooling": Setting("--vit.pool=map", "", False),
    "layer-scale": Setting("--vit.layer-scale=0.1", "", False),
    "sine-positions": Setting("--vit.positions=sincos", "", False),
    "average-of-weights": Setting("--average.kind=ema --average.decay=0.99", "", False),
    "batch-512": Setting("--batch-size=512", "", False),
    "cutmix": Setting("--augment.cutmix=1 --augment.mixup=0.2", "", False),
    "half-the-rate": Setting("--optim.lr=0.004", "", False),
}


def rows() -> dict[str, str]:
    """Return the flags of each row of the table."""
    plain = {name: setting.off for name, setting in SETTINGS.items() if setting.kept}
    found = {"plain": " ".join(plain.values())}
    for name, setting in SETTINGS.items():
        others = [off for other, off in plain.items() if other != name]
        found[f"plain + {name}"] = " ".join([*others, setting.on])
    found["recipe"] = ""
    for name, setting in SETTINGS.items():
        found[f"recipe {'-' if setting.kept else '+'} {name}"] = setting.off if setting.kept else setting.on
    return found


def measured(images: str, flags: str, seed: int, minutes: float, folder: Path) -> dict[str, float]:
    """Train, and return the accuracy on the images held out, in percent."""
    place, held_out = SETS[images]
    words = f"{held_out} --seed={seed} --time-limit={minutes} --data.test=none --resume=auto {flags}".split()
    every = ["--evaluate-every=100 %", "--checkpoint-every=100 %", f"--out={folder}"]
    ran = vitrail_verb(["train", str(DATA / place), "--recipe=scratch-small", *words, *every])
    return {"accuracy": round(100 * ran["best"]["top1"], 2), "steps": ran["steps"]}


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table."""
    sets = list(dict.fromkeys(row["set"] for row in document["rows"]))
    cells: dict[str, dict[str, str]] = {}
    for row in document["rows"]:
        cells.setdefault(row["name"], {})[row["set"]] = record.with_deviation(row["mean"], row["deviation"])
    lines = [(name, *(found.get(images, "") for images in sets)) for name, found in cells.items()]
    return [("held-out accuracy, %", *sets), *lines]


def main() -> None:
    """Run the cells that the log lacks, print the table, write results/ablation.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--log", type=Path, default=LOG, help="file of finished runs")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="start no run after this time")
    options = parser.parse_args()
    at_once = os.cpu_count() or 1
    if options.quick:
        options.minutes, options.seeds, options.log = 0.02, [0], Path(tempfile.mkdtemp()) / "log.jsonl"
    os.environ["OMP_NUM_THREADS"] = "1"  # of all children
    chosen = {name: flags for name, flags in rows().items() if name.split()[-1] in ("plain", "recipe", *options.only)}
    cells = Cells(options.log, options.stop_after)
    every = list(product(options.seeds, chosen, options.sets))

    def cell(seed: int, name: str, images: str) -> dict[str, float] | None:
        key = dict(images=images, flags=chosen[name], seed=seed, minutes=options.minutes, at_once=at_once)
        return cells.train(lambda folder: measured(images, chosen[name], seed, options.minutes, folder), **key)

    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(lambda one: cell(*one), every))
    table: list[dict[str, Any]] = []
    for name, images in product(chosen, options.sets):
        same = zip(every, results, strict=True)
        values = [found["accuracy"] for (_, *where), found in same if found and where == [name, images]]
        if values:
            deviation = round(statistics.stdev(values), 2) if len(values) > 1 else None
            mean = round(statistics.fmean(values), 2)
            table.append({"name": name, "set": images, "mean": mean, "deviation": deviation, "seeds": len(values)})
    record.print_lines("scratch-small", summary({"rows": table}))
    if cells.missing:
        print(f"{cells.missing} runs are missing: the same command continues with them")
    if table and not options.quick:
        record.save("ablation", options, minutes=options.minutes, at_once=at_once, missing=cells.missing, rows=table)


if __name__ == "__main__":
    main()
