"""Photographs in a minute and a half: fine-tuned from a network trained on CIFAR-100, or trained from scratch.

    python -m benchmarks.learn --side vitrail --keep runs     trains the networks to start from, one per seed
    python -m benchmarks.transfer runs/scratch-small-*        one seed per network

Two sets of photographs: 12 kinds of flowers, and tiles of 72 photographs (benchmarks/photo_tiles.py). All sides train
for the same time on the same machine, one process at a time. They choose their best weights on images held out of the
training set, and the test images are read once, after training. "from scratch" is the recipe for photographs as it is,
with 96 pixels; "from scratch, AdamW, six layers" is what that recipe was before it took Muon.

The log holds all finished runs: the same command continues an interrupted benchmark.
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import compare, photo_tiles, record
from benchmarks.cells import Cells
from benchmarks.learn import summarise, vitrail_verb

DATA = record.DATA
SETS = {"flowers12": "12 kinds of flowers", "tiles": "tiles of 72 photographs"}
FINE_TUNED, SCRATCH, BEFORE = "fine-tuned", "from scratch", "from scratch, AdamW, six layers"
HELD_OUT = "--data.holdout=0.2"
FLAGS = {
    # chosen on held-out images: after a minute, the paper's SGD (rate 0.03) reached 78 %, AdamW 83 %
    FINE_TUNED: "--image-size=64 --batch-size=64 --augment.crop=inception --augment.scale 0.3 1.0 "
    "--optim.name=adamw --optim.weight-decay=0.05 --lr=1e-3",
    SCRATCH: "--recipe=scratch-photos",
    BEFORE: "--recipe=scratch-photos --vit.width=128 --vit.depth=6 --vit.heads=4 --vit.mlp-dim=512 "
    "--vit.layer-scale=none --optim.name=adamw --lr=1.5e-3 --schedule.shape=cosine",
}


def measured(data: Path, side: str, seed: int, weights: Path, minutes: float, out: Path) -> dict[str, Any]:
    """Train one side with one seed and evaluate its model on the test images."""
    verb = ["finetune", str(data), f"--from={weights}"] if side == FINE_TUNED else ["train", str(data)]
    words = [*verb, *FLAGS[side].split(), HELD_OUT, f"--time-limit={minutes}", f"--seed={seed}"]
    with compare.foreign_load() as foreign:
        trained = vitrail_verb([*words, f"--out={out}"])
        tested = vitrail_verb(["evaluate", trained["folder"], str(data), "--split=test"])
    return {
        "accuracy": 100 * tested["top1"],
        "validation": trained["best"],
        "steps": trained["steps"],
        "training_minutes": round(trained["seconds"] / 60, 2),
        "command": "vitrail " + " ".join(words),
        "foreign_load": round(foreign[0], 3),
    }


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: a row for each side, a column for each set."""
    names = [name for name in SETS if name in document["summary"]]
    lines: list[tuple[str, ...]] = [(f"test top-1, %, {document['minutes']:g} minutes", *(SETS[n] for n in names))]
    for side in FLAGS:
        found = (document["summary"][name][side] for name in names)
        lines.append((side, *(record.with_deviation(row["mean"], row["deviation"]) for row in found)))
    return lines


def main() -> None:
    """Run all sets, sides and seeds, print the table and write results/transfer.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("weights", type=Path, nargs="+", help="run folders to start from, one for each seed")
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of flowers12 and imagenet-samples")
    parser.add_argument("--log", type=Path, help="file of finished runs")
    parser.add_argument("--keep", type=Path, help="folder to store the runs in, for benchmarks.int8")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.weights = 0.02, options.weights[:1]
    cells = Cells(options.log)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        tiles = photo_tiles.cut(options.data / "imagenet-samples", Path(scratch) / "tiles")
        places = {"flowers12": options.data / "flowers12", "tiles": tiles}
        for (seed, weights), name, side in product(enumerate(options.weights), SETS, FLAGS):
            out = (options.keep if options.keep and side != BEFORE else Path(scratch) / "runs") / name
            key = {"set": name, "side": side, "seed": seed, "minutes": options.minutes}
            run = partial(measured, places[name], side, seed, weights, options.minutes, out)
            runs.append({**key, **(cells.get(run, **key, flags=FLAGS[side]) or {})})
    totals = {name: summarise([row for row in runs if row["set"] == name]) for name in SETS}
    document = {"minutes": options.minutes, "summary": totals, "runs": runs}
    record.print_lines("photographs", summary(document))
    record.save("transfer", options, **document)


if __name__ == "__main__":
    main()
