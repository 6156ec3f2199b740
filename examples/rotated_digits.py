"""Rotated digits and a table of their angles: `python rotated_digits.py FOLDER` (docs/regression.md)."""

import csv
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def write(folder):
    """Write 1,797 images of 32 x 32 pixels and angles.csv; the last 397 are the test split."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = [("path", "angle", "split")]
    for number, digit in enumerate(load_digits().images):
        angle = rng.uniform(-45, 45)
        image = Image.fromarray(np.rint(digit * 255 / 16).astype(np.uint8)).resize((32, 32), Image.BICUBIC)
        image.rotate(angle, resample=Image.BICUBIC).save(folder / f"images/{number:04}.png")
        rows.append((f"images/{number:04}.png", f"{angle:.2f}", "train" if number < 1400 else "test"))
    with open(folder / "angles.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
