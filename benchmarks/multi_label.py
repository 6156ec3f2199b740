"""Measure two losses for several labels: mean average precision (mAP) on scenes of up to four labels.

    python -m benchmarks.multi_label

A scene of 64 x 64 pixels is composed of four images of CIFAR-100. 20 of its classes are labels; each of the four images
is of one of these with a probability of one half, else of another class. So a scene has about two labels, and one in
sixteen has none. Training scenes are made of CIFAR-100's training images, test scenes of its test images. Both losses
start from the same random weights.
"""

from __future__ import annotations

import csv
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import record
from benchmarks.learn import vitrail_verb

DATA = record.DATA / "cifar100"
LABELS, CLASSES = 20, 100
SETS = {"train": 0, "test": 1}
"""Split -> seed of its scenes."""
NETWORK = "--vit.patch=8 --vit.width=96 --vit.depth=4 --vit.heads=3 --vit.mlp-dim=192 --batch-size=64 --lr=0.004"


def write_scenes(folder: Path, split: str, count: int) -> None:
    """Write scenes as PNG files and a table of their labels, split.csv."""
    from vitrail.data.images.decode import decode
    from vitrail.data.sources.open import open_path

    source, random = open_path(str(DATA)).splits[split], np.random.default_rng(SETS[split])
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


def measured(folder: Path, loss: str, seed: int, epochs: int) -> dict[str, float]:
    """Train on the training scenes, and return the numbers of the test scenes."""
    flags = f"{NETWORK} --objective.loss={loss} --epochs={epochs} --seed={seed} --data.test=none --out={folder}"
    model = vitrail_verb(["train", str(folder / "train.csv"), *flags.split()])["folder"]
    found: dict[str, float] = vitrail_verb(["evaluate", model, str(folder / "test.csv")])
    return found


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table."""
    lines: list[tuple[str, ...]] = [("loss", "mAP on test scenes, %", "of a random ranking, %")]
    for row in document["rows"]:
        lines.append((row["loss"], record.with_deviation(row["map"], row["deviation"]), f"{row['chance']:.1f}"))
    return lines


def main() -> None:
    """Compose the scenes, train with both losses, print the table, write results/multi_label.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--images", type=int, default=2000, help="number of training scenes")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the weights")
    options = parser.parse_args()
    if options.quick:
        options.images, options.epochs, options.seeds = 100, 1, [0]
    record.prepare(options)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_scenes(folder, "train", options.images)
        write_scenes(folder, "test", options.images // 4)
        for loss in ("sigmoid", "asymmetric"):
            found = [measured(folder, loss, seed, options.epochs) for seed in options.seeds]
            values = [100 * result["map"] for result in found]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            chance = 100 * found[0]["chance_map"]
            rows.append({"loss": loss, "map": statistics.fmean(values), "deviation": deviation, "chance": chance})
    record.print_lines("several labels", summary({"rows": rows}))
    record.save("multi_label", options, images=options.images, epochs=options.epochs, seeds=options.seeds, rows=rows)


if __name__ == "__main__":
    main()
