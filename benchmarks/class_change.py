"""Add 20 classes of CIFAR-100 to a network that knows the other 80, with and without images of these.

    python -m benchmarks.class_change           four ways, three seeds

The network is that of `benchmarks.finetune_default`, in the same folder `--cache`. It gets 100 images of each new class
and, with old images, 20 of each old one, which it has seen before. Accuracy is that on the test images, 8,000 of the 80
old and 2,000 of the new classes. Validation images of the old classes are those of the network's own run; they choose
the bias of the new classes and the best model. The log holds all finished runs: the same command continues.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from benchmarks import record
from benchmarks.cells import Cell, Cells, arguments
from benchmarks.finetune_default import CACHE, DATA, EPOCHS, pretrained, unseen
from benchmarks.learn import vitrail_verb

NEW_IMAGES, OLD_IMAGES = 100, 20
"""Number of training images per class."""
WAYS: dict[str, tuple[str, list[str]]] = {
    "no old images": ("new.npz", ["--classes=add"]),
    "no old images, no distillation": ("new.npz", ["--classes=add", "--distill.weight=0"]),
    "no old images, classifier alone": ("new.npz", ["--classes=add", "--tune=head"]),
    f"{OLD_IMAGES} images of each old class": ("both.npz", ["--classes=add"]),
}
"""Way -> its images, and its flags."""


def images(split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images of CIFAR-100, the number of each one's class, and its name: old ones are numbers in the network."""
    table = pq.read_table(sorted((DATA / "cifar100" / "data").glob(f"{split}-*.parquet")))
    pixels = [np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB")) for image in table["img"].to_pylist()]
    labels = table["fine_label"].to_numpy()
    order = np.arange(100)
    old, new = order[~unseen(order)].tolist(), order[unseen(order)].tolist()
    names = {label: str(number) for number, label in enumerate(old)} | {label: f"new {label}" for label in new}
    return np.stack(pixels), labels, np.array([names[label] for label in labels.tolist()])


def write(folder: Path, seed: int) -> None:
    """Write new.npz and both.npz with the images of a seed."""
    pixels, labels, names = images("train")
    test = images("test")
    rng, rows = np.random.default_rng(seed), []
    for label in range(100):
        count = NEW_IMAGES if unseen(np.array(label)) else OLD_IMAGES
        rows.append(rng.permutation(np.flatnonzero(labels == label))[:count])
    for name, chosen in (("new", rows[4::5]), ("both", rows)):
        every = np.concatenate(chosen)
        np.savez(folder / name, x_train=pixels[every], y_train=names[every], x_test=test[0], y_test=test[2])


def measured(way: str, network: Path, seed: int, epochs: float, folder: Path) -> Cell:
    """Add the classes, and return the accuracy on the test images."""
    file, flags = WAYS[way]
    write(folder, seed)
    words = ["finetune", f"{folder / file}", f"--from={network}", f"--seed={seed}", f"--epochs={epochs}"]
    ran = vitrail_verb([*words, *flags, f"--out={folder}", "--evaluate-every=20 %", "--checkpoint-every=100 %"])
    numbers = {name: round(100 * ran["test"][name], 2) for name in ("old_top1", "new_top1", "top1")}
    return {**numbers, "before": round(100 * ran["before"]["old_top1"], 2), "step": ran["best"]["step"]}


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: mean and standard deviation over seeds of each accuracy."""
    lines: list[tuple[str, ...]] = [("accuracy on the test images, %", "80 old classes", "20 new classes", "all")]
    for way in WAYS:
        each = [
            [row[name] for row in document["rows"] if row["way"] == way] for name in ("old_top1", "new_top1", "top1")
        ]
        lines.append((way, *(record.with_deviation(**record.over_seeds(one)) if one else "" for one in each)))
    return lines


def main() -> None:
    """Run what the log lacks, print the table and write results/class_change.json."""
    parser = arguments(__doc__, record.RESULTS / "class_change.jsonl")
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the network")
    options = parser.parse_args()
    if options.quick:
        options.epochs = 0.1
    network = pretrained(options.cache, "64 tokens", 0.02 if options.quick else EPOCHS)
    cells, rows = Cells.begin(options), list[dict[str, Any]]()
    for seed in options.seeds:
        for way in WAYS:
            run = partial(measured, way, network, seed, options.epochs)
            if found := cells.train(run, way=way, seed=seed, epochs=options.epochs):
                rows.append({"way": way, "seed": seed, **found})
    record.print_lines("classes that are added", summary({"rows": rows}))
    cells.say_missing()
    record.save("class_change", options, rows=rows)


if __name__ == "__main__":
    main()
