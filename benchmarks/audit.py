"""Measure `vitrail data audit`: the share of wrong labels that it finds if 5 % of the labels are flipped.

    python -m benchmarks.audit
    python -m benchmarks.learn --side vitrail --seeds 0 --keep runs             trains a good network first, ten minutes
    python -m benchmarks.audit --network runs/scratch-small-1

The images are the 10,000 test images of CIFAR-100 and the 720 training images of flowers12. Each flipped label is
another class, at random. Features are those of a network of random weights after one step, of one that was trained
for a few minutes on CIFAR-100's training images, whose labels are not flipped and which are not examined, and of
vitrail/tiny; with `--network`, also those of a network that `benchmarks.learn` has kept.

recall: share of the flipped labels among all suspects. precision: share of the suspects that are flipped. first: share
of the flipped labels among as many first suspects as there are flipped labels.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.learn import vitrail_verb

DATA = record.DATA
SETS = {"CIFAR-100": ("cifar100", "test"), "flowers12": ("flowers12", "train")}
NUMBERS = ("accuracy", "recall", "precision", "first")


def flipped(labels: np.ndarray, classes: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return labels of which a share is wrong, and bool [N]: which ones."""
    random = np.random.default_rng(seed)
    wrong = np.zeros(len(labels), bool)
    wrong[random.permutation(len(labels))[: round(share * len(labels))]] = True
    return np.where(wrong, (labels + random.integers(1, classes, len(labels))) % classes, labels), wrong


def trained(steps: int, out: Path) -> str:
    """Return the run folder of a network trained for this number of steps on CIFAR-100's training images."""
    flags = ["--recipe=scratch-small", "--data.test=none", "--data.holdout=0.02", f"--out={out}", "--seed=0"]
    long = [f"--duration={steps} steps", "--evaluate-every=100 %"]
    return str(vitrail_verb(["train", str(DATA / "cifar100"), *flags, *long])["folder"])


def measured(model: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the mean of each number over the seeds, in percent."""
    from vitrail.data.item import Subset
    from vitrail.data.sources.open import open_path
    from vitrail.transfer.audit import folds_of, out_of_fold, suspects
    from vitrail.verbs.features import Embedder
    from vitrail.verbs.flags.compute import Compute

    folder, split = SETS[name]
    source = open_path(str(DATA / folder)).splits[split]
    some = np.arange(len(source))[:: 1 if not options.quick else len(source) // 60]
    found = Embedder(model, Compute())(Subset(source, some))
    results: dict[str, list[float]] = {number: [] for number in NUMBERS}
    for seed in options.seeds:
        given, wrong = flipped(found.labels, len(found.class_names), options.share, seed)
        probabilities = out_of_fold(found.features, given, len(found.class_names), folds_of(given, seed=seed))
        rows = suspects(probabilities, given).rows
        hits, count = wrong[rows], max(1, int(wrong.sum()))
        right = (probabilities.argmax(axis=1) == found.labels).mean()
        shares = (right, hits.sum() / count, hits.mean() if len(hits) else 0, hits[:count].sum() / count)
        for number, share in zip(NUMBERS, shares, strict=True):
            results[number].append(100 * float(share))
    return {number: round(statistics.fmean(values), 1) for number, values in results.items()}


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table."""
    lines: list[tuple[str, ...]] = [(f"{100 * document['share']:g} % of the labels flipped, %", "features", *NUMBERS)]
    for row in document["rows"]:
        lines.append((row["set"], row["network"], *(f"{row[number]:.1f}" for number in NUMBERS)))
    return lines


def main() -> None:
    """Train the network, measure both sets, print the table, write results/audit.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=250, help="training steps of the trained network")
    parser.add_argument("--share", type=float, default=0.05, help="share of the labels that are flipped")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the flipped labels and folds")
    parser.add_argument("--network", type=Path, help="run folder that benchmarks.learn has kept")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = 1, [0]
    record.prepare(options)
    rows, shown = [], Table(title="wrong labels, %", title_justify="left")
    for column in ("set", "features", *NUMBERS):
        shown.add_column(column)
    with tempfile.TemporaryDirectory() as scratch:
        networks = {}
        for network, steps in (("random weights, one step", 1), (f"trained for {options.steps} steps", options.steps)):
            networks[network] = trained(steps, Path(scratch))
        networks["vitrail/tiny"] = "vitrail/tiny"
        if options.network is not None:
            networks["of benchmarks.learn"] = str(options.network)
        for network, model in networks.items():
            for name in SETS:
                rows.append({"set": name, "network": network, **measured(model, name, options)})
                shown.add_row(name, network, *(f"{rows[-1][number]:.1f}" for number in NUMBERS))
    Console(width=110).print(shown)
    record.save("audit", options, steps=options.steps, share=options.share, seeds=options.seeds, rows=rows)


if __name__ == "__main__":
    main()
