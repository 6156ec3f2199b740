"""Make images with masks out of real images, to try `vitrail probe segment`: discs of objects on photographs.

    python -m benchmarks.pasted_discs CIFAR100 FLOWERS OUT

They are synthetic: two discs, cut from CIFAR-100's images of five classes and enlarged, are pasted on each photograph,
and the paste is the mask. CIFAR100 is a folder that `datasets` reads, FLOWERS has train/CLASS and test/CLASS. Training
images are made of training images only. OUT gets 240 images to train on, 60 to measure on, and classes.txt.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("apple", "clock", "orange", "plate", "pickup_truck")
SIDE = 128
"""Height and width of an image in pixels."""
DISCS = 2
IMAGES = {"train": 240, "val": 60}
SPLITS = {"train": "train", "val": "test"}
"""Split that is made -> the split of both data sets that it is made of."""
POOL = 150
"""Maximum number of CIFAR-100's images of each class."""


def objects(folder: Path, split: str) -> list[list[Image.Image]]:
    """Return images of each class in `CLASSES`."""
    import datasets

    images = datasets.load_dataset(str(folder), split=split)
    names, labels = images.features["fine_label"].names, np.array(images["fine_label"])
    rows = [np.flatnonzero(labels == names.index(name))[:POOL] for name in CLASSES]
    return [[images[int(row)]["img"].convert("RGB") for row in each] for each in rows]


def paste(photo: Path, pools: list[list[Image.Image]], random: np.random.Generator) -> tuple[Image.Image, Image.Image]:
    """Return an image and its mask: 0 is the photograph, 1 to 5 are the classes."""
    image, mask = Image.open(photo).convert("RGB").resize((SIDE, SIDE)), Image.new("L", (SIDE, SIDE), 0)
    for _ in range(DISCS):
        label, side = int(random.integers(len(CLASSES))), int(random.integers(44, 64))
        place: Any = tuple(int(value) for value in random.integers(0, SIDE - side, 2))
        disc = Image.new("L", (side, side), 0)
        ImageDraw.Draw(disc).ellipse((0, 0, side - 1, side - 1), fill=255)
        thing = pools[label][int(random.integers(len(pools[label])))]
        image.paste(thing.resize((side, side)), place, disc)
        mask.paste(label + 1, place, disc)
    return image, mask


def main() -> None:
    """Make the images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cifar100", "flowers", "out"):
        parser.add_argument(name, type=Path)
    asked = parser.parse_args()
    random = np.random.default_rng(0)
    for split, count in IMAGES.items():
        pools = objects(asked.cifar100, SPLITS[split])
        photos = sorted((asked.flowers / SPLITS[split]).glob("*/*.jpg"))
        for kind in ("images", "masks"):
            (asked.out / kind / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            made = paste(photos[int(random.integers(len(photos)))], pools, random)
            for kind, picture in zip(("images", "masks"), made, strict=True):
                picture.save(asked.out / kind / split / f"{number:04d}.png")
    (asked.out / "classes.txt").write_text("\n".join(["background", *CLASSES]) + "\n")


if __name__ == "__main__":
    main()
