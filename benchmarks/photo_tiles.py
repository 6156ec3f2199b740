"""Cut large photographs into tiles: a second set of photographs, whose classes are the photographs themselves.

    python -m benchmarks.photo_tiles PHOTOGRAPHS OUT

Each photograph becomes `GRID` x `GRID` tiles, which share no pixel. Four of them, drawn at random, are test images. The
question is which photograph a tile is a part of.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

GRID = 4
TEST = 4
"""Number of tiles of a photograph that are test images."""


def cut(photographs: Path, out: Path) -> Path:
    """Write the tiles to out/train/CLASS and out/test/CLASS, and return `out`."""
    for number, file in enumerate(sorted(photographs.glob("*.JPEG"))):
        photograph = Image.open(file).convert("RGB")
        width, height = photograph.width // GRID, photograph.height // GRID
        tested = np.random.default_rng(number).permutation(GRID**2)[:TEST]
        for tile in range(GRID**2):
            left, top = width * (tile % GRID), height * (tile // GRID)
            folder = out / ("test" if tile in tested else "train") / file.stem
            folder.mkdir(parents=True, exist_ok=True)
            photograph.crop((left, top, left + width, top + height)).save(folder / f"{tile}.jpg", quality=95)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    cut(given.photographs, given.out)
