"""Measure which method of learning is best for how many images per class: the evidence for the rule of `vitrail plan`.

    python -m benchmarks.photo_sets clones/ sets/
    python -m benchmarks.adviser --sets sets/           continues where it was interrupted

The methods are those that `plan` chooses from, each by its own command: few-shot, a linear probe, fine-tuning of the
attention and of everything. They learn from 5, 20, 100 and 500 images per class (or all, where a set has fewer) of
three sets of photographs and of ten classes of CIFAR-100, and are measured on 100 other images of each class. They
start from the weights in the box, from a small network that is trained here on 80 other classes of CIFAR-100, and, as a
control, from the random weights of that network. A seed draws the images and is that of the run.

Photographs are reduced once, so that decoding them takes little time. A run has a core of its own.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageOps

from benchmarks import record
from benchmarks.cells import Cell, Cells, arguments
from benchmarks.finetune_default import CACHE, EPOCHS, NETWORKS, pretrained, unseen_cifar
from benchmarks.learn import vitrail_verb

LOG = record.RESULTS / "adviser.jsonl"
NETWORK = "64 tokens"
"""The network that is trained here."""
WEIGHTS = ("vitrail/tiny", "trained here", "random")
PHOTOGRAPHS = ("flowers5", "satellite7", "trashnet")
CIFAR, CIFAR_CLASSES = "cifar10 of 100", 10
SETS = (*PHOTOGRAPHS, CIFAR)
EACH = (5, 20, 100, 500)
FEWER = {("trashnet", 100): "37 to 100", ("satellite7", 500): "300 (all)", ("trashnet", 500): "37 to 494 (all)"}
"""Set, number of images per class -> those that its classes have where some have fewer."""
METHODS = {
    "few-shot": ["probe", "fewshot"],
    "linear probe": ["probe", "linear"],
    "attention-only": ["finetune", "--tune", "attention"],
    "full fine-tuning": ["finetune", "--tune", "all"],
}
TESTED = 100
"""Number of test images per class."""
SIDE = 160
"""Shorter side in pixels to which photographs are reduced."""


def write_images(name: str, sets: Path, place: Path) -> None:
    """Write the images of a set to `place`, in a folder for each class."""
    if name == CIFAR:
        pixels, labels = unseen_cifar()
        some = np.unique(labels)[:CIFAR_CLASSES]
        pairs: Iterable[tuple[str, str, Image.Image]] = (
            (str(label), f"{row}.png", Image.fromarray(pixels[row]))
            for label in some
            for row in np.flatnonzero(labels == label).tolist()
        )
    else:
        files = sorted(file for file in (sets / name).glob("*/*") if file.is_file())
        pairs = ((file.parent.name, f"{file.stem}.jpg", reduced(file)) for file in files)
    for label, file, image in pairs:
        (place / label).mkdir(parents=True, exist_ok=True)
        image.save(place / label / file, quality=95)


def reduced(file: Path) -> Image.Image:
    """Return a photograph whose shorter side has `SIDE` pixels, or its own number if that is smaller."""
    with Image.open(file) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    factor = SIDE / min(image.size)
    return image.resize((round(image.width * factor), round(image.height * factor))) if factor < 1 else image


def write_list(images: Path, each: int, seed: int, place: Path) -> None:
    """Write a list of test images, the same for all seeds, and of `each` training images per class, drawn by `seed`."""
    with place.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("image", "label", "split"))
        for number, folder in enumerate(sorted(images.iterdir())):
            names = np.random.default_rng(number).permutation(sorted(path.name for path in folder.iterdir()))
            train = np.random.default_rng((seed, number)).permutation(names[TESTED:])[:each]
            for split, some in (("test", names[:TESTED]), ("train", train)):
                rows.writerows((folder / name, folder.name, split) for name in some)


def network(name: str, options: argparse.Namespace) -> str:
    """Return what --from takes for weights of the table, which are made where `--cache` lacks them."""
    import vitrail

    if name == "trained here":
        return str(pretrained(options.cache, NETWORK, options.epochs))
    if name == "random":
        place = options.cache / "random"
        if not place.exists():
            model, vit = NETWORKS[NETWORK]
            vitrail.save(vitrail.create(model, image_size=(32, 32), **vit.changes()), place)
        return str(place)
    return name


def measured(method: str, data: Path, weights: str, each: int, seed: int, folder: Path) -> Cell:
    """Learn by a method, and return the accuracy on the test images in percent, and how the method did it."""
    verb, *words = METHODS[method]
    if verb == "probe":
        shots = ["--shots", str(each), "--seeds", "1"] if method == "few-shot" else []
        found = vitrail_verb([verb, *words, weights, str(data), *shots])
        score = found["results"][0]["top1"] if method == "few-shot" else found["top1"]
        return {"accuracy": round(100 * score, 2)}
    given = [f"--from={weights}", f"--seed={seed}", f"--out={folder}", "--checkpoint-every=100 %"]
    ran = vitrail_verb([verb, str(data), *words, *given])
    settings = yaml.safe_load((Path(ran["folder"]) / "config.yaml").read_text())
    return {
        "accuracy": round(100 * ran["test"]["top1"], 2),
        "steps": ran["steps"],
        "seconds": round(ran["seconds"], 1),
        **{name: settings[name] for name in ("batch_size", "tune", "image_size", "duration")},
    }


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: mean and standard deviation of the accuracy over seeds."""
    keys = {"weights": "weights", "set": "set", "each": "images per class"}
    rows = [{**row, "each": FEWER.get((row["set"], row["each"]), row["each"])} for row in document["rows"]]
    return record.seeds_table(rows, keys, "method", list(METHODS))


def main() -> None:
    """Run what the log lacks, print the table and write results/adviser.json."""
    parser = arguments(__doc__, LOG)
    parser.add_argument("--sets", type=Path, required=True, help="folder that benchmarks.photo_sets made")
    parser.add_argument("--each", type=int, nargs="+", default=list(EACH), help="numbers of images per class")
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--epochs", type=float, default=EPOCHS, help="epochs of the network that is trained here")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="number of runs at the same time")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the networks and the images")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.each = 0.02, [5]
    cells = Cells.begin(options)
    weights = {name: network(name, options) for name in options.weights}
    for name in SETS:
        if not (images := options.cache / name).exists():
            write_images(name, options.sets, images)

    def row(one: tuple[int, int, str, str, str]) -> Cell | None:
        each, seed, source, name, method = one
        data = options.cache / f"{name} {each} {seed}.csv"
        if not data.exists():
            write_list(options.cache / name, each, seed, data)
        key = {"weights": source, "set": name, "each": each, "method": method, "seed": seed}
        run = partial(measured, method, data, weights[source], each, seed)
        found = cells.train(run, **key, epochs=options.epochs)
        return None if found is None else {**key, **found}

    every = itertools.product(options.each, options.seeds, options.weights, SETS, METHODS)
    with ThreadPoolExecutor(options.at_once) as pool:
        rows = [found for found in pool.map(row, every) if found is not None]
    record.print_lines("accuracy on the test images, %", summary({"rows": rows}))
    cells.say_missing()
    record.save("adviser", options, missing=cells.missing, rows=rows)


if __name__ == "__main__":
    main()
