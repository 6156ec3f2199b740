"""The table of the shipped networks: size, accuracy, speed, and what a linear probe of them reaches on sets of images.

    python -m benchmarks.shipped --tiny-imagenet clones/tiny-imagenet-200 --data sets/clothing sets/pets ...

Tiny ImageNet is measured without training, on its own validation images and among its classes, which the network
knows. CIFAR-100 and each set of --data are measured by `vitrail probe linear vitrail/NAME DIR`, on the test images, or
where there are none on the images that training holds out. What fine-tuning reaches is in results/first_run.json. The
speed is that of `vitrail bench vitrail/NAME`. The log holds all finished parts, and the same command continues.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitrail
from benchmarks import record
from benchmarks.cells import Cell, Cells
from benchmarks.first_run import name_of, over_seeds
from benchmarks.learn import vitrail_verb
from vitrail.data.images.ops import eval_transform
from vitrail.data.sources.open import open_data
from vitrail.evaluation.classify import predictor
from vitrail.weights.load import SHIPPED
from vitrail.weights.store import WEIGHTS

LOG = record.RESULTS / "shipped.jsonl"
BATCH = 128


def tiny_imagenet(network: str, folder: Path, limit: int | None) -> Cell:
    """Return the top-1 accuracy in percent on the validation images, in the folder that its authors made."""
    model = vitrail.load(network)
    words = dict(line.split("\t") for line in (folder / "words.txt").read_text().splitlines())
    classes = {}  # WordNet number -> output of the network
    for number in (folder / "wnids.txt").read_text().split():
        title = words[number].split(",")[0]
        known = model.card.class_names
        classes[number] = known.index(title if title in known else f"{title} ({number})")
    outputs, right = torch.tensor(list(classes.values())), 0
    with (folder / "val" / "val_annotations.txt").open() as file:
        rows = [row[:2] for row in csv.reader(file, delimiter="\t")][:limit]
    predict = predictor(model)
    transform, rng = eval_transform(model.card.preprocess), np.random.default_rng(0)  # which nothing draws from
    for begin in range(0, len(rows), BATCH):
        part = rows[begin : begin + BATCH]
        images = [np.asarray(Image.open(folder / "val" / "images" / name).convert("RGB")) for name, _ in part]
        pixels = torch.from_numpy(np.stack([transform(image, rng) for image in images]))
        logits = predict(pixels.permute(0, 3, 1, 2))[:, outputs]
        answers = torch.tensor([classes[number] for _, number in part])
        right += int((outputs[logits.argmax(1)] == answers).sum())
    return {"top1": round(100 * right / len(rows), 2), "images": len(rows)}


def probe(network: str, data: str) -> Cell:
    """Return the accuracy in percent of a linear probe."""
    found = vitrail_verb(["probe", "linear", network, data])
    return {"top1": round(100 * found["top1"], 2), "images": found["test_images"], "train": found["train_images"]}


def facts(network: str, file: Path) -> dict[str, Any]:
    """Return the parameters and the megabytes of a network, and its speed on this machine."""
    (engine,) = vitrail_verb(["bench", network, "--engine", "torch"])["engines"]
    return {
        "parameters": sum(parameter.numel() for parameter in vitrail.load(network).parameters()),
        "megabytes": round(file.stat().st_size / 1e6, 2),
        "images_per_second": round(engine["images_per_second"], 1),
        "seconds_an_image": round(engine["latency_ms"] / 1000, 4),
        "precision": engine["precision"],
    }


def table(document: dict[str, Any], first_runs: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of the networks: a line for each accuracy, with that of three minutes of fine-tuning beside it.

    first_runs: The document of `benchmarks.first_run`.
    """
    lines: list[tuple[str, ...]] = [
        ("network and set", "images", "without training or by a linear probe, top-1 in %", "fine-tuned")
    ]
    for row in document["rows"]:
        size = f"{row['parameters'] / 1e6:.2f} M parameters, {row['megabytes']} MB"
        speed = f"{row['seconds_an_image']} s an image, {row['images_per_second']:,.0f} images/s"
        lines.append((f"**{row['network']}**: {size}, {speed}", "", "", ""))
        for name, found in row["accuracy"].items():
            tuned = [
                one["top1"]
                for one in first_runs["rows"]
                if one["set"] == name and one["side"].startswith("vitrail") and one["threads"] == 1 and not one["busy"]
            ]
            after = over_seeds(tuned) if tuned else ""
            lines.append((name, f"{found['images']:,}", f"{found['top1']:.1f}", after))
    return lines


def main() -> None:
    """Measure what the log lacks, print the table and write results/shipped.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--data", nargs="*", default=[], metavar="DIR", help="folders, or anything that vitrail takes")
    parser.add_argument("--tiny-imagenet", type=Path, metavar="DIR", help="folder tiny-imagenet-200 of its authors")
    parser.add_argument("--log", type=Path, default=LOG, help="file of finished parts")
    options = parser.parse_args()
    record.prepare(options)
    cells, rows = Cells(None if options.quick else options.log), []
    for network in [f"vitrail/{folder.name}" for folder in sorted(SHIPPED.iterdir()) if folder.is_dir()]:
        rows.append({"network": network, **measured(network, options, cells)})
    record.print_lines("shipped networks", table({"rows": rows}, {"rows": []}))
    record.save("shipped", options, rows=rows)


def measured(network: str, options: argparse.Namespace, cells: Cells) -> dict[str, Any]:
    """Return the row of a network."""
    file = SHIPPED / network.partition("/")[2] / WEIGHTS
    key = {"network": network, "weights": hashlib.sha256(file.read_bytes()).hexdigest()[:16]}
    accuracy: dict[str, Cell | None] = {}
    if options.tiny_imagenet:
        limit = BATCH if options.quick else None
        untrained = partial(tiny_imagenet, network, options.tiny_imagenet, limit)
        accuracy["Tiny ImageNet, without training"] = cells.get(untrained, what="Tiny ImageNet", **key)
    for data in [] if options.quick else [str(record.DATA / "cifar100"), *options.data]:
        name, mark = name_of(data), open_data(data).fingerprint
        accuracy[name] = cells.get(partial(probe, network, data), what="probe", data=mark, **key)
    return {**facts(network, file), "accuracy": accuracy}


if __name__ == "__main__":
    main()
