"""Measure two losses for several labels: mean average precision (mAP) on scenes of up to four labels.

    python -m benchmarks.multi_label

A scene of 64 x 64 pixels is composed of four images of CIFAR-100. 20 of its classes are labels; each of the four images
is of one of these with a probability of one half, else of another class. So a scene has about two labels, and one in
sixteen has none. Training scenes are made of CIFAR-100's training images, test scenes of its test images. Both losses
start from the same random weights.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import record
from benchmarks.learn import vitrail_verb

DATA = Path(os.environ.get("VITRAIL_TEST_DATA", record.ROOT.parent / "shared" / "data")) / "cifar100"
LABELS, CLASSES = 20, 100
SETS = {"train": 0, "test": 1}
"""Split -> seed of its scenes."""
NETWORK = "--model=Ti/8 --vit.width=96 --vit.depth=4 --vit.heads=3 --vit.mlp-dim=192 --augment.crop=pad --lr=0.002"


def write_scenes(folder: Path, split: str, count: int) -> None:
    """Write scenes as PNG files and a table of their labels, split.csv."""
    from vitrail.data.images.decode import decode
    from vitrail.data.sources.open import find

    source, random = find(str(DATA)).splits[split], np.random.default_rng(SETS[split])
    rows = [np.flatnonzero(np.asarray(source.labels) == label) for label in range(CLASSES)]
    (folder / split).mkdir()
    with open(folder / f"{split}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "labels"))
        for number in range(count):
            among = np.where(random.random(4) < 0.5, random.integers(0, LABELS, 4), random.integers(LABELS, CLASSES, 4))
            parts = [decode(source[int(random.choice(rows[label]))].image) for label in among.tolist()]
            scene = np.vstack([np.hstack(parts[:2]), np.hstack(parts[2:])])
            Image.fromarray(scene).save(folder / split / f"{number}.png")
            names = sorted({source.class_names[label] for label in among.tolist() if label < LABELS})
            writer.writerow((f"{split}/{number}.png", "|".join(names)))


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table."""
    lines: list[tuple[str, ...]] = [("loss", "mAP on test scenes, %", "of a random ranking, %")]
    lines += [(row["loss"], f"{row['map']:.1f}", f"{row['chance']:.1f}") for row in document["rows"]]
    return lines


def main() -> None:
    """Compose the scenes, train with both losses, print the table, write results/multi_label.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--images", type=int, default=2000, help="number of training scenes")
    parser.add_argument("--epochs", type=int, default=30)
    options: argparse.Namespace = parser.parse_args()
    if options.quick:
        options.images, options.epochs = 100, 1
    record.prepare(options)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_scenes(folder, "train", options.images)
        write_scenes(folder, "test", options.images // 4)
        for loss in ("sigmoid", "asymmetric"):
            flags = (
                f"{NETWORK} --objective.loss={loss} --epochs={options.epochs} --seed=0 --data.test=none --out={folder}"
            )
            model = vitrail_verb(["train", str(folder / "train.csv"), *flags.split()])["folder"]
            found = vitrail_verb(["evaluate", model, str(folder / "test.csv")])
            rows.append({"loss": loss, "map": 100 * found["map"], "chance": 100 * found["chance_map"]})
    record.print_lines("several labels", summary({"rows": rows}))
    record.save("multi_label", options, images=options.images, epochs=options.epochs, rows=rows)


if __name__ == "__main__":
    main()
