"""Compare the settings for rare classes on a long-tailed CIFAR-100.

    python -m benchmarks.long_tail

Class k of K keeps 500 * (1 / factor) ** (k / (K - 1)) training images: with factor 100, from 500 down to 5, 10,847 in
all (Cui et al. 2019; Cao et al. 2019). They are a list that names images of the data set; nothing is copied. The test
images are all 10,000, so that every class counts the same: top-1 is the macro accuracy there. It is also given for the
classes with more than 100 training images (many), 20 to 100 (medium) and fewer than 20 (few), as in Liu et al. 2019.
The settings were not tuned: no image chooses anything, and the newest weights are evaluated.

The log holds all finished runs: the same command continues an interrupted benchmark.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.cells import Cells, arguments
from benchmarks.learn import vitrail_verb

DATA = record.DATA / "cifar100"
LOG = record.RESULTS / "long_tail.jsonl"
OPTIONS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "class weights: balanced": ("--objective.class-weights=balanced",),
    "class weights: effective": ("--objective.class-weights=effective",),
    "sampler: sqrt": ("--data.sampler=sqrt",),
    "sampler: balanced": ("--data.sampler=balanced",),
    "logit adjustment": ("--objective.logit-adjustment=1",),
}
GROUPS = {"many": (101, 10**9), "medium": (20, 100), "few": (0, 19)}
"""Classes by their number of training images."""


def tail(classes: int, most: int, factor: float) -> list[int]:
    """Return the number of training images of each class, from `most` down to `most / factor`."""
    return [int(most * (1 / factor) ** (number / (classes - 1))) for number in range(classes)]


def write_tail(data: str, file: Path, factor: float, seed: int) -> list[int]:
    """Write a list of the long-tailed training images and of all test images; return the images of each class."""
    from vitrail.data.item import Subset
    from vitrail.data.sources.lists import write_list
    from vitrail.data.sources.open import open_path

    found = open_path(data)
    train = found.splits["train"]
    counts = tail(len(train.class_names), int(np.bincount(train.labels).min()), factor)
    mixed = np.random.default_rng(seed).permutation(len(train))
    chosen = [mixed[train.labels[mixed] == klass][:count] for klass, count in enumerate(counts)]
    write_list(file, data, found, {"train": Subset(train, np.concatenate(chosen)), "test": found.splits["test"]})
    return counts


def measured(words: tuple[str, ...], seed: int, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Train with the flags `words`, and return the test numbers in percent."""
    file = folder / "tail.csv"
    counts = np.array(write_tail(str(options.data), file, options.factor, seed))
    flags = [f"--recipe={options.recipe}", "--data.holdout=0", f"--seed={seed}", f"--out={folder / 'runs'}", *words]
    ran = vitrail_verb(["train", str(file), *flags, "--resume=auto", *options.longer])
    found = vitrail_verb(["evaluate", f"{ran['folder']}/model/last", str(file), "--split=test"])
    right = np.array([row["correct"] / row["count"] for row in found["classes"]])
    numbers = {name: 100 * found[name] for name in ("top1", "balanced_accuracy", "macro_f1", "ece")}
    for name, (low, high) in GROUPS.items():
        if (there := (counts >= low) & (counts <= high)).any():
            numbers[name] = 100 * float(right[there].mean())
    return {name: round(value, 2) for name, value in numbers.items()}


COLUMNS = ("balanced_accuracy", "macro_f1", *GROUPS, "ece")


def over_seeds(found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a row for each setting: mean and deviation of its numbers over the seeds."""
    rows = []
    for name, results in found.items():
        row: dict[str, Any] = {"option": name, "seeds": len(results)}
        for column in COLUMNS:
            if values := [result[column] for result in results if column in result]:
                row[column] = record.over_seeds(values)
        rows.append(row)
    return rows


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table."""
    groups = (f"{name} images" for name in GROUPS)
    first = f"long-tailed CIFAR-100, test images, %, {document['duration']}"
    lines: list[tuple[str, ...]] = [(first, "balanced accuracy", "macro F1", *groups, "calibration error")]
    for row in document["rows"]:
        cells = (row.get(column) for column in COLUMNS)  # None if no class is in a group
        lines.append((row["option"], *("" if cell is None else record.with_deviation(**cell) for cell in cells)))
    return lines


def main() -> None:
    """Run the cells that the log lacks, print the table, write results/long_tail.json."""
    parser = arguments(__doc__, LOG)
    parser.add_argument("--data", type=Path, default=DATA, help="CIFAR-100 in the hub's layout")
    parser.add_argument("--factor", type=float, default=100, help="images of the first class per image of the last")
    parser.add_argument("--recipe", default="scratch-small")
    parser.add_argument("--duration", default="20 epochs")
    parser.add_argument("--options", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    options = parser.parse_args()
    if options.quick:
        options.duration = "1 steps"
    options.longer = [f"--duration={options.duration}", "--evaluate-every=100 %"]
    cells, found = Cells.begin(options, threads=None), dict[str, list[dict[str, float]]]()
    for seed in options.seeds:
        for name in options.options:
            words = OPTIONS[name]
            key = dict(words=words, seed=seed, factor=options.factor, recipe=options.recipe, duration=options.duration)
            result = cells.train(lambda folder, words=words, seed=seed: measured(words, seed, folder, options), **key)  # type: ignore[misc]
            if result:
                found.setdefault(name, []).append(result)
    rows = over_seeds(found)
    shown = dict(factor=options.factor, recipe=options.recipe, duration=options.duration, seeds=options.seeds)
    record.print_lines("rare classes", summary({**shown, "rows": rows}))
    cells.say_missing()
    if rows and not options.quick:
        record.save("long_tail", options, **shown, missing=cells.missing, rows=rows)


if __name__ == "__main__":
    main()
