"""Compare all ways to use a trained network on new data in one table, like Table 2: from CIFAR-100 to flowers.

    python -m benchmarks.learn --side vitrail --seeds 0 --keep runs     trains the network to start from
    python -m benchmarks.protocols runs/scratch-small-1

All of them use the command line, as a user would: few-shot, nearest neighbours, linear, attention only, all weights.
The seeds draw the shots, order the images and initialise the classifiers; nearest neighbours do not depend on them.
Settings are chosen on images held out of the training set, and the test images are read once, at the end of each run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.learn import vitrail_verb

DATA = Path(os.environ.get("VITRAIL_TEST_DATA", record.ROOT.parent / "shared" / "data")) / "flowers12"
SHOTS = (1, 5, 10, 25)
SIDE = 64
"""Image size in pixels: twice that of training (fine-tuning at a higher resolution, section 3.2)."""
FINETUNE = ("--batch-size=64", "--data.holdout=0.2", "--augment.crop=inception", "--optim.name=adamw", "--lr=1e-3")
FINETUNE += ("--augment.scale", "0.3", "1.0", "--optim.weight-decay=0.05")
"""Chosen on the held-out images in benchmarks/transfer.py."""


def probes(model: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the test top-1 in percent of all evaluations of the frozen features, by protocol and seed."""
    common = [str(model), str(options.data), f"--image-size={options.image_size}"]
    shots = [str(count) for count in SHOTS]
    few = vitrail_verb(
        ["probe", "fewshot", *common, "--shots", *shots, "--seeds", str(options.seeds), "--prepare=model"]
    )
    found = {f"{row['shots']}-shot": [100 * top1 for top1 in row["seeds"]] for row in few["results"]}
    near = vitrail_verb(["probe", "knn", *common])
    found[f"{near['results'][0]['k']} nearest neighbours"] = [100 * near["results"][0]["top1"]]
    lines = [vitrail_verb(["probe", "linear", *common, f"--seed={seed}"]) for seed in range(options.seeds)]
    return found | {"linear": [100 * line["top1"] for line in lines]}


def tuned(model: Path, part: str, seed: int, options: argparse.Namespace) -> float:
    """Return the test top-1 in percent after fine-tuning all or a part of the network."""
    with tempfile.TemporaryDirectory() as scratch:
        words = ["finetune", str(options.data), f"--from={model}", f"--tune={part}", f"--seed={seed}", *FINETUNE]
        words += [f"--image-size={options.image_size}", f"--epochs={options.epochs}", f"--out={scratch}"]
        trained: dict[str, Any] = vitrail_verb(words)
        return 100 * float(trained["test"]["top1"])


def main() -> None:
    """Run every protocol, print the table and write results/protocols.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("model", type=Path, help="the network to start from, a run folder")
    parser.add_argument("--data", type=Path, default=DATA, help="a folder of classes with a test split")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20, help="of fine-tuning")
    parser.add_argument("--image-size", type=int, default=SIDE)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 2, 1
    found = probes(options.model, options)
    for part in ("attention", "all"):
        name = "attention fine-tuned" if part == "attention" else "everything fine-tuned"
        found[name] = [tuned(options.model, part, seed, options) for seed in range(options.seeds)]
    rows = [
        {
            "protocol": name,
            "mean": round(statistics.fmean(values), 2),
            "deviation": round(statistics.stdev(values), 2) if len(values) > 1 else None,
            "seeds": [round(value, 2) for value in values],
        }
        for name, values in found.items()
    ]
    table = Table(title=f"{options.data.name}, {options.image_size} px, test top-1", title_justify="left")
    for column in ("", "mean", "+-", "each"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["protocol"], str(row["mean"]), str(row["deviation"] or ""), ", ".join(map(str, row["seeds"])))
    Console(width=110).print(table)
    record.save("protocols", options, epochs=options.epochs, image_size=options.image_size, rows=rows)


if __name__ == "__main__":
    main()
