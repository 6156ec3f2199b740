"""Measure `vitrail data dedup`: precision and recall on copies made from real images, among images that look alike.

    python -m benchmarks.dedup

Every set has originals, which all differ, and copies of some of them: compressed again, resized, cropped at random
places, mirrored and recoloured. A found pair is right if it is a copy and its own original. Look-alikes do not count as
found. The sets are photographs (flowers and ImageNet), CIFAR-100, handwritten digits, and dark grey scans of one kind.
The scans are made from photographs: each one is the same body, with a faint photograph as its tissue. `--folders` adds
sets of your own, such as neighbouring slices of scans; of each, the first images in the order of their names are taken.

Originals that the data sets hold twice are left out first, by the mean difference of their pixels. So no part of
`vitrail data dedup` decides what is right.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks import record

DATA = record.DATA
TWICE = 3.0
"""Mean difference in grey levels, at 48 x 48 pixels, of two images that count as one that is stored twice."""


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    """Return the image after JPEG compression."""
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return Image.open(stream)


def resized(image: Image.Image, factor: float) -> Image.Image:
    """Return the image at another size."""
    return image.resize([max(4, round(factor * side)) for side in image.size], Image.Resampling.BICUBIC)


def cropped(image: Image.Image, share: float, random: np.random.Generator) -> Image.Image:
    """Return the image without `share` of its height and width, taken off at random on both sides."""
    lost = [side * share for side in image.size]
    left, top = (random.uniform(0, part) for part in lost)
    box = (left, top, left + image.width - lost[0], top + image.height - lost[1])
    size = [max(4, round(side - part)) for side, part in zip(image.size, lost, strict=True)]
    return image.resize(size, Image.Resampling.BICUBIC, box=box)


def recoloured(image: Image.Image) -> Image.Image:
    """Return the image in other colours: red and blue exchanged by a third, brighter, with less contrast."""
    red, green, blue = np.moveaxis(np.asarray(image, np.float32), 2, 0)
    mixed = np.stack([0.7 * red + 0.3 * blue, green, 0.7 * blue + 0.3 * red], axis=2)
    return Image.fromarray((20 + 0.85 * mixed).clip(0, 255).astype(np.uint8))


Copying = Callable[[Image.Image, np.random.Generator], Image.Image]
KINDS: dict[str, Copying] = {
    "JPEG 90": lambda image, random: jpeg(image, 90),
    "JPEG 50": lambda image, random: jpeg(image, 50),
    "JPEG 20": lambda image, random: jpeg(image, 20),
    "half size": lambda image, random: resized(image, 0.5),
    "double size": lambda image, random: resized(image, 2),
    "crop 5 %": lambda image, random: cropped(image, 0.05, random),
    "crop 10 %": lambda image, random: cropped(image, 0.10, random),
    "crop 20 %": lambda image, random: cropped(image, 0.20, random),
    "mirrored crop 15 %": lambda image, random: cropped(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), 0.15, random),
    "mirrored": lambda image, random: jpeg(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), 80),
    "recoloured": lambda image, random: recoloured(image),
    "grey": lambda image, random: jpeg(image.convert("L").convert("RGB"), 80),
}


DISTANCES = (6, 10)
"""Distances that are measured: the default, and a wider one."""


def images_of(place: str, split: str, most: int) -> list[Image.Image]:
    """Return at most `most` images of a data set, evenly spaced."""
    from vitrail.data.images.decode import decode
    from vitrail.data.sources.open import open_path

    source = open_path(place).splits[split]
    chosen = np.unique(np.linspace(0, len(source) - 1, min(most, len(source))).round().astype(int))
    stored = [source[int(index)].image for index in chosen]
    return [Image.fromarray(decode(one) if isinstance(one, bytes) else one) for one in stored]


def photographs(most: int) -> list[Image.Image]:
    """Return flowers, and ImageNet photographs at half their size."""
    from vitrail.data.images.decode import decode

    files = sorted((DATA / "imagenet-samples").glob("*.JPEG"))[:most]
    others = [resized(Image.fromarray(decode(file.read_bytes())), 0.5) for file in files]
    return images_of(str(DATA / "flowers12"), "train", most) + others


def scans(most: int) -> list[Image.Image]:
    """Return dark grey scans: a body of blurred light and shade, and a photograph as its tissue."""
    side = np.linspace(-1, 1, 224)
    radius = np.hypot(side[:, None] / 0.9, side / 0.75)
    inside, shell = 1 / (1 + np.exp((radius - 0.9) * 25)), np.exp(-np.square((radius - 0.86) / 0.05))
    random, found = np.random.default_rng(0), []
    for photograph in different(photographs(most)):
        tissue = np.asarray(photograph.convert("L").resize((224, 224), Image.Resampling.BICUBIC), np.float64)
        tissue = (tissue - tissue.mean()) / tissue.std()
        body = 90 * shell + inside * (45 + 25 * np.cos(4 * radius) + 6 * tissue)
        noisy = body + random.normal(0, 1, body.shape)
        found.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert("RGB"))
    return found


SETS: dict[str, Callable[[int], list[Image.Image]]] = {
    "photographs": photographs,
    "CIFAR-100": lambda most: images_of(str(DATA / "cifar100"), "test", 3 * most),
    "digits": lambda most: images_of("digits", "train", 2 * most),
    "grey scans": scans,
}


def folder(path: Path, most: int) -> list[Image.Image]:
    """Return the first images below a folder in the order of their numbers, so that neighbours are among them."""
    files = [file for file in path.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png")]
    files.sort(key=lambda file: (file.parent, len(file.name), file.name))
    return [Image.open(file).convert("RGB") for file in files[: 3 * most]]


def different(images: list[Image.Image]) -> list[Image.Image]:
    """Return the images without those that resemble an earlier one pixel by pixel."""
    small = [np.asarray(image.convert("L").resize((48, 48), Image.Resampling.BOX), np.float32) for image in images]
    flat, kept = np.stack(small).reshape(len(images), -1), list[int]()
    for number in range(len(images)):
        if not kept or np.abs(flat[kept] - flat[number]).mean(axis=1).min() > TWICE:
            kept.append(number)
    return [images[number] for number in kept]


def write(images: list[Image.Image], folder: Path) -> Any:
    """Write images to a folder and return their hashes."""
    from vitrail.data.copies.dedup import HashedImages, hashed
    from vitrail.data.sources.open import open_path

    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        image.save(folder / f"{number:05}.png", compress_level=1)
    return HashedImages(hashed(str(folder.parent), open_path(str(folder.parent), labels=False), [""]))


def measured(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield precision and recall of the hashes alone, with the pixels, and with windows too, at each distance."""
    from vitrail.data.copies.confirm import find_copies, pairs_sheet
    from vitrail.data.copies.dedup import candidates

    ways = {"hashes": candidates, "hashes and pixels": find_copies, "with --crops": partial(find_copies, crops=True)}

    images = SETS[name](options.images) if name in SETS else folder(Path(name), options.images)
    images = images if name == "grey scans" else different(images)
    random = np.random.default_rng(0)
    chosen = random.permutation(len(images))[: options.copied]
    kinds = np.repeat(list(KINDS), len(chosen))
    copies = [copying(images[number], random).convert("RGB") for copying in KINDS.values() for number in chosen]
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["VITRAIL_CACHE"] = f"{scratch}/cache"
        left, right = (write(one, Path(scratch) / place / "x") for one, place in ((copies, "copies"), (images, "all")))
        for distance in DISTANCES:
            for how, find in ways.items():
                pairs = find(left, right, distance=distance, mirrored=True)
                pairs = pairs if find is candidates else pairs.rows_at(pairs.copy)
                own = np.tile(chosen, len(KINDS))[pairs.left] == pairs.right
                found = np.isin(np.arange(len(copies)), pairs.left[own])
                recall = {kind: round(float(found[kinds == kind].mean()), 3) for kind in KINDS}
                counts = dict(originals=len(images), copies=len(copies), pairs=len(pairs), wrong=int((~own).sum()))
                precision = round(float(own.mean()), 3) if len(own) else None
                yield dict(set=name, distance=distance, how=how, **counts, precision=precision, recall=recall)
            if options.sheets:
                pairs_sheet(options.sheets / f"{name} {distance}.png", left, right, pairs.rows_at(~own))


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of precision and recall: whole copies of all kinds together, then each crop."""
    crops = [kind for kind in KINDS if "crop" in kind]
    lines: list[tuple[str, ...]] = [("copies found, %", "bits", "by", "wrong pairs", "precision", "whole", *crops)]
    for row in document["rows"]:
        recall = row["recall"]
        whole = [recall[kind] for kind in KINDS if kind not in crops]
        shares = (row["precision"], sum(whole) / len(whole), *(recall[kind] for kind in crops))
        numbers = (f"{100 * share:.1f}" for share in shares)
        lines.append((row["set"], str(row["distance"]), row["how"], str(row["wrong"]), *numbers))
    return lines


def main() -> None:
    """Measure every set, print the table, write results/dedup.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--images", type=int, default=300, help="a measure of the number of originals of each set")
    parser.add_argument("--copied", type=int, default=40, help="number of originals of each set that are copied")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--sheets", type=Path, help="folder for contact sheets of the wrong pairs")
    parser.add_argument("--folders", nargs="+", default=[], metavar="DIR", help="folders of images that look alike")
    options = parser.parse_args()
    if options.quick:
        options.images, options.copied = 20, 3
    rows, shown = [], Table(title="copies among images that look alike, %", title_justify="left")
    for column in ("set", "bits", "by", "pairs", "wrong", "precision", *KINDS):
        shown.add_column(column)
    for name in (*options.sets, *options.folders):
        for row in measured(name, options):
            rows.append(row)
            cells = [f"{100 * row['recall'][kind]:.0f}" for kind in KINDS]
            precision = "" if row["precision"] is None else f"{100 * row['precision']:.1f}"
            numbers = (str(row[key]) for key in ("pairs", "wrong"))
            shown.add_row(name, str(row["distance"]), row["how"], *numbers, precision, *cells)
    Console(width=170).print(shown)
    record.save("dedup", options, images=options.images, copied=options.copied, rows=rows)


if __name__ == "__main__":
    main()
