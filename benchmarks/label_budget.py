"""Measure what `vitrail data next` gains: accuracy over the number of labelled images, against random images.

    python -m benchmarks.label_budget

A network is trained on the embedded digits 0 to 4 and then frozen. The images are the training images of 5 to 9, whose
labels it has not seen. A linear probe on its features is trained on 10 random images; in each round 10 more are chosen
by one rule, labelled, and the probe is trained again. Accuracy is that on the test images of 5 to 9, the mean over
seeds, which draw the first images and the random ones.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.learn import vitrail_verb

KNOWN = 5
"""Number of classes that the network is trained on."""
STEP = 10
"""Number of images that are labelled in a round."""
RULES = ("random", "uncertainty", "coverage", "both")
STRENGTH = 0.01
"""Penalty of the probe; one value, because there are no images to choose it by."""


def budget(
    rule: str, features: np.ndarray, labels: np.ndarray, test: tuple[np.ndarray, np.ndarray], seed: int, rounds: int
) -> list[float]:
    """Return the accuracy of the probe in percent after each round."""
    import torch

    from vitrail.evaluation.softmax import solve
    from vitrail.transfer.next_images import choose_images, uncertainty

    random, classes = np.random.default_rng(seed), int(labels.max()) + 1
    chosen = random.permutation(len(labels))[:STEP]
    found = []
    for number in range(rounds):
        (solution,) = solve(features, labels, chosen, [STRENGTH], classes=classes)
        right = solution.classifier.logits(torch.from_numpy(test[0])).argmax(dim=1).numpy() == test[1]
        found.append(round(100 * float(right.mean()), 2))
        if number == rounds - 1:
            break
        pool = np.setdiff1d(np.arange(len(labels)), chosen)
        if rule == "random":
            new = random.permutation(len(pool))[:STEP]
        else:
            logits = solution.classifier.logits(torch.from_numpy(features[pool]))
            unsure = uncertainty(logits.softmax(dim=1).numpy())
            new, _ = choose_images(
                unsure,
                STEP,
                rule,  # type: ignore[arg-type]
                lambda rows, pool=pool: features[pool[rows]],
                lambda coverage, chosen=chosen: coverage.cover(features[chosen]),
            )
        chosen = np.append(chosen, pool[new])
    return found


def measured(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Train the network, embed the images, and return the accuracies of each rule."""
    from vitrail.data.item import Subset
    from vitrail.data.sources.open import open_path
    from vitrail.verbs.features import Embedder
    from vitrail.verbs.flags.compute import Compute

    splits = open_path("digits").splits
    known = {name: np.flatnonzero(np.asarray(source.labels) < KNOWN) for name, source in splits.items()}
    train = splits["train"]
    pixels = np.stack([train[row].image for row in known["train"].tolist()])
    np.savez(folder / "known.npz", x_train=pixels, y_train=np.asarray(train.labels)[known["train"]])
    flags = f"--recipe=digits --epochs={options.epochs} --seed=0 --out={folder} --evaluate-every=100%"
    model = vitrail_verb(["train", str(folder / "known.npz"), *flags.split()])["folder"]
    embedder, parts = Embedder(model, Compute()), {}
    for name, source in splits.items():
        found = embedder(Subset(source, np.setdiff1d(np.arange(len(source)), known[name])))
        parts[name] = (found.features, found.labels - KNOWN)
    rows = []
    for rule in RULES:
        each = [budget(rule, *parts["train"], parts["test"], seed, options.budgets) for seed in options.seeds]
        mean = [round(statistics.fmean(values), 2) for values in zip(*each, strict=True)]
        rows.append({"rule": rule, "mean": mean, "each": each})
    return rows


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table."""
    rounds = len(document["rows"][0]["mean"])
    lines: list[tuple[str, ...]] = [
        ("images with a label, accuracy in %", *(str(STEP * number) for number in range(1, rounds + 1)))
    ]
    lines += [(row["rule"], *(f"{value:.1f}" for value in row["mean"])) for row in document["rows"]]
    return lines


def main() -> None:
    """Measure, print the table, write results/label_budget.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=10, help="epochs of the network")
    parser.add_argument("--budgets", type=int, default=8, help=f"numbers of labelled images, {STEP} apart")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.budgets, options.seeds = 1, 2, [0]
    record.prepare(options)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(options, Path(folder))
    record.print_lines("accuracy on the digits 5 to 9, %", summary({"rows": rows}))
    record.save("label_budget", options, epochs=options.epochs, seeds=options.seeds, rows=rows)


if __name__ == "__main__":
    main()
