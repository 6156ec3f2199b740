"""Compare the mean of several networks, and the mean of their weights, with the best one alone.

    python -m benchmarks.several

From each seed, `vitrail/tiny` is fine-tuned several times on the same few photographs with other learning rates. The
runs of a seed hold out the same images, on which the best run is chosen, and on which the greedy soup is made. The test
images choose nothing.

The log holds all finished seeds: the same command continues an interrupted benchmark.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.cells import Cells, arguments
from benchmarks.learn import vitrail_verb

DATA = record.DATA / "flowers12"
LOG = record.RESULTS / "several.jsonl"
COLUMNS = {"top1": "top-1", "nll": "loss", "ece": "calibration error"}
ROWS = ("each run", "best run on validation images", "mean of probabilities", "uniform soup", "greedy soup")


def measured(seed: int, folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Fine-tune, average and return the numbers on the test images: row -> column -> number."""
    data, runs, validation = str(options.data), [], []
    for rate in options.rates:
        flags = [f"--seed={seed}", f"--optim.lr={rate}", f"--out={folder / rate}", "--resume=auto"]
        ran = vitrail_verb(["finetune", data, *flags, *options.training])
        runs.append(ran["folder"])
        validation.append((ran["best"]["top1"], -ran["best"]["nll"]))
    for kind in ("uniform", "greedy"):
        vitrail_verb(["weights", "average", *runs, f"--out={folder / kind}", f"--kind={kind}", "--overwrite"])
    together = vitrail_verb(["evaluate", *runs, data, "--split=test"])
    alone = list(together["networks"].values())
    found = {
        "each run": {name: sum(one[name] for one in alone) / len(alone) for name in COLUMNS},
        "best run on validation images": alone[validation.index(max(validation))],
        "mean of probabilities": together,
        "uniform soup": vitrail_verb(["evaluate", str(folder / "uniform"), data, "--split=test"]),
        "greedy soup": vitrail_verb(["evaluate", str(folder / "greedy"), data, "--split=test"]),
    }
    return {row: {name: numbers[name] for name in COLUMNS} for row, numbers in found.items()}


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table."""
    lines: list[tuple[str, ...]] = [
        (f"{len(document['rates'])} runs, {len(document['seeds'])} seeds", "top-1, %", "loss", "calibration error, %")
    ]
    for row in document["rows"]:
        top1, loss, ece = (row[name] for name in COLUMNS)
        lines.append((row["row"], record.with_deviation(**top1), f"{loss['mean']:.2f}", record.with_deviation(**ece)))
    return lines


def main() -> None:
    """Run the seeds that the log lacks, print the table, write results/several.json."""
    parser = arguments(__doc__, LOG)
    parser.add_argument("--data", type=Path, default=DATA, help="a folder with training and test photographs")
    parser.add_argument("--rates", nargs="+", default=["3e-4", "6e-4", "1.2e-3"], help="learning rates")
    parser.add_argument("--subset", type=int, default=240, help="number of training photographs")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--side", type=int, default=64, help="side of the network's input in pixels")
    options = parser.parse_args()
    if options.quick:
        options.epochs = 1
    options.training = [
        f"--data.subset={options.subset}",
        "--data.holdout=0.5",
        "--evaluate-every=25 %",
        f"--epochs={options.epochs}",
        f"--image-size={options.side}",
        "--preprocess.resize=squash",
    ]
    cells, found = Cells.begin(options, threads=None), []
    for seed in options.seeds:
        key = dict(seed=seed, rates=options.rates, training=options.training)
        found.append(cells.train(lambda folder, seed=seed: measured(seed, folder, options), **key))  # type: ignore[misc]
    rows: list[dict[str, Any]] = []
    for name in ROWS:
        percent = {"top1": 100, "nll": 1, "ece": 100}
        numbers = {column: [percent[column] * one[name][column] for one in found if one] for column in COLUMNS}
        rows.append({"row": name, **{column: record.over_seeds(values) for column, values in numbers.items()}})
    shown = dict(rates=options.rates, seeds=options.seeds, training=options.training)
    record.print_lines("several runs as one", summary({**shown, "rows": rows}))
    cells.say_missing()
    if not options.quick:
        record.save("several", options, **shown, rows=rows)


if __name__ == "__main__":
    main()
