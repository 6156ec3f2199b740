"""Compare the default of `vitrail finetune` with the paper's protocol and with finetune-small, by the clock.

    python -m benchmarks.finetune_default           2, 10 and 40 minutes, three seeds

Published weights are not needed: two small networks are trained once on 80 classes of CIFAR-100, in the folder
`--cache`. They are then fine-tuned on four sets of real images that they have not seen: the other 20 classes with 100
and with 10 images each, 12 kinds of flowers, and handwritten digits. Accuracy is that on training images held out of
each set, which no run uses; the test images of the data sets are never opened.

A run is `vitrail finetune`, on a core of its own; each core of the machine has a run, and the machine should do nothing
else. A run of a named recipe that ends before its time limit would do the same with more time, so it is not repeated.
The log holds all finished runs: the same command continues an interrupted benchmark.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from benchmarks import record
from benchmarks.cells import Cell, Cells, arguments
from benchmarks.learn import vitrail_verb
from vitrail.durations import Epochs, Percent
from vitrail.recipes import finetune_by_data
from vitrail.recipes.registry import recipe
from vitrail.training.loop import fit
from vitrail.training.run import Model, Run

DATA = record.DATA
LOG = record.RESULTS / "finetune_default.jsonl"
CACHE = Path.home() / ".cache" / "vitrail-benchmarks" / "finetune_default"
NETWORKS = {
    "64 tokens": ("Ti/4", Model(width=128, depth=4, heads=4, mlp_dim=256, pool="gap", stem="early")),
    "16 tokens": ("Ti/8", Model(width=96, depth=4, heads=3, mlp_dim=192, pool="gap", stem="early")),
}
"""The networks by the length of the sequence at 32 pixels."""
EPOCHS = 10
DEFAULT, PAPER, SMALL = "default", "finetune", "finetune-small"
DONE = "all steps done"
SIDES = (DEFAULT, PAPER, SMALL)
"""The default, and the recipes that it is compared with."""
HELD_OUT = 40
"""Number of images per class that accuracy is measured on."""
FLOWERS_SIDE = 128
"""Side in pixels to which photographs are reduced once, so that decoding them is no part of the measurement."""

Images = tuple[np.ndarray, np.ndarray]


def cifar() -> Images:
    """Return the training images of CIFAR-100 and their classes."""
    import pyarrow.parquet as pq

    table = pq.read_table(sorted((DATA / "cifar100" / "data").glob("train-*.parquet")))
    pixels = [np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB")) for image in table["img"].to_pylist()]
    return np.stack(pixels), table["fine_label"].to_numpy()


def unseen(labels: np.ndarray) -> np.ndarray:
    """Return which of these images of CIFAR-100 are of the 20 classes that the network has not seen."""
    return np.asarray(labels % 5 == 4)


def flowers() -> Images:
    """Return the training photographs of 12 kinds of flowers and their classes."""
    files = sorted((DATA / "flowers12" / "train").glob("*/*.jpg"))
    names = sorted({file.parent.name for file in files})
    size = (FLOWERS_SIDE, FLOWERS_SIDE)
    pixels = [np.asarray(Image.open(file).convert("RGB").resize(size, Image.Resampling.BICUBIC)) for file in files]
    return np.stack(pixels), np.array([names.index(file.parent.name) for file in files])


def digits() -> Images:
    """Return the training images of the embedded digits and their classes."""
    from vitrail.data.sources.open import open_path

    train = open_path("digits").splits["train"]
    pixels = np.stack([np.asarray(train[row].image) for row in range(len(train))])
    return np.broadcast_to(pixels, (*pixels.shape[:3], 3)).copy(), np.asarray(train.labels)


def unseen_cifar() -> Images:
    """Return the images of the classes that the network has not seen."""
    pixels, labels = cifar()
    return pixels[unseen(labels)], labels[unseen(labels)]


SETS: dict[str, tuple[Callable[[], Images], int | None]] = {
    "cifar20": (unseen_cifar, 100),
    "cifar20-few": (unseen_cifar, 10),
    "flowers": (flowers, None),
    "digits": (digits, None),
}
"""Name -> its training images, and the largest number of them per class to train on."""


def write(place: Path, source: Callable[[], Images], each: int | None) -> None:
    """Write a data set to the file `place`: at most `each` images per class to train on, and the held-out images."""
    pixels, labels = source()
    _, labels = np.unique(labels, return_inverse=True)
    train, held_out = [], []
    for label in range(int(labels.max()) + 1):
        rows = np.random.default_rng(label).permutation(np.flatnonzero(labels == label))
        rows, measured = rows[HELD_OUT:], rows[:HELD_OUT]
        train += rows[:each].tolist()
        held_out += measured.tolist()
    place.parent.mkdir(parents=True, exist_ok=True)
    both = {"train": train, "test": held_out}
    values: dict[str, Any] = {f"x_{name}": pixels[rows] for name, rows in both.items()}
    values |= {f"y_{name}": labels[rows] for name, rows in both.items()}
    np.savez(place, **values)


def pretrained(cache: Path, name: str, epochs: float) -> Path:
    """Return the run folder of a network to start from; it is trained if `cache` does not hold it."""
    out = cache / f"{name.replace(' ', '-')}-{epochs:g}"
    place = out / "images.npz"
    if not place.exists():
        out.mkdir(parents=True, exist_ok=True)
        pixels, labels = cifar()
        seen = ~unseen(labels)
        np.savez(place, x_train=pixels[seen], y_train=np.unique(labels[seen], return_inverse=True)[1])
    if found := sorted(out.glob("*/report.json")):
        return found[0].parent
    model, vit = NETWORKS[name]
    base = replace(recipe("scratch-small"), model=model, vit=vit, image_size=32, progressive=Run().progressive)
    run = replace(base, data=replace(base.data, path=str(place), holdout=0.02), duration=Epochs(epochs), out=str(out))
    unfinished = sorted(out.glob("*/checkpoints"))
    result = fit(
        replace(run, name="network", checkpoint_every=Percent(10), evaluate_every=Percent(100)),
        resume=unfinished[0].parent if unfinished else None,
    )
    (result.folder / "report.json").write_text("{}\n")
    return result.folder


def rule(side: str) -> str:
    """Return a fingerprint of what a side decides by, so that results of another rule are not taken for those of this.

    That of the default is the source of its module.
    """
    text = Path(finetune_by_data.__file__).read_text() if side == DEFAULT else repr(recipe(side))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def measured(side: str, data: Path, weights: Path, seed: int, minutes: float, folder: Path) -> Cell:
    """Fine-tune, and return the accuracy on the held-out images, why the run ended, and what differs between sides."""
    words = ["finetune", str(data), f"--from={weights}", f"--seed={seed}", f"--time-limit={minutes}", f"--out={folder}"]
    words += ["--evaluate-every=50 %", "--checkpoint-every=100 %"]
    ran = vitrail_verb(words if side == DEFAULT else [*words, f"--recipe={side}"])
    settings = yaml.safe_load((Path(ran["folder"]) / "config.yaml").read_text())
    return {
        "accuracy": round(100 * ran["test"]["top1"], 2),
        "ended": ran["ended"],
        "steps": ran["steps"],
        "seconds": round(ran["seconds"], 1),
        **{name: settings[name] for name in ("batch_size", "tune", "image_size", "duration")},
    }


def over_budgets(cells: Cells, options: argparse.Namespace, one: tuple[str, int, str, str]) -> list[Cell]:
    """Return a row for each budget of one network, seed, set and side, with the shortest first."""
    network, seed, name, side = one
    weights = pretrained(options.cache, network, options.epochs)
    rows: list[Cell] = []
    for minutes in sorted(options.minutes):
        key = {"network": network, "set": name, "side": side, "budget": f"{minutes:g} minutes", "seed": seed}
        if side != DEFAULT and rows and rows[-1]["ended"] == DONE:
            rows.append({**rows[-1], **key})
            continue
        length = 0.02 if options.quick else minutes
        run = partial(measured, side, options.cache / f"{name}.npz", weights, seed, length)
        found = cells.train(run, **key, epochs=options.epochs, rule=rule(side), at_once=os.cpu_count())
        if found is None:
            break
        rows.append({**key, **found})
    return rows


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: mean and standard deviation of the accuracy over seeds, by network, set and budget."""
    keys = {"network": "network", "set": "held-out images, %", "budget": "budget"}
    return record.seeds_table(document["rows"], keys, "side", SIDES)


def main() -> None:
    """Run what the log lacks, print the table and write results/finetune_default.json."""
    parser = arguments(__doc__, LOG)
    parser.add_argument("--minutes", type=float, nargs="+", default=[2, 10, 40])
    parser.add_argument("--epochs", type=float, default=EPOCHS, help="epochs of the networks to start from")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the networks and the data sets")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.minutes = 0.02, [2]
    cells = Cells.begin(options)
    for name in NETWORKS:
        pretrained(options.cache, name, options.epochs)
    for name, made in SETS.items():
        if not (place := options.cache / f"{name}.npz").exists():
            write(place, *made)
    every = itertools.product(NETWORKS, options.seeds, SETS, SIDES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(partial(over_budgets, cells, options), every)
        rows = [row for some in found for row in some]
    record.print_lines("accuracy on held-out images, %", summary({"rows": rows}))
    cells.say_missing()
    record.save("finetune_default", options, missing=cells.missing, rows=rows)


if __name__ == "__main__":
    main()
