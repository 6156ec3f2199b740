"""Drawn flowers in class folders, for the notebooks: images that need no download."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SHAPES = {"poppy": (4, 0.62), "star": (5, 0.22), "clematis": (8, 0.27), "aster": (18, 0.08)}
"""Name -> number of petals, and width of a petal as a share of its length."""
COLOURS = {
    "white": (236, 232, 224),
    "yellow": (240, 205, 60),
    "red": (205, 60, 60),
    "blue": (85, 110, 215),
    "violet": (160, 85, 185),
}
KINDS = [f"{colour} {shape}" for shape in SHAPES for colour in COLOURS]
"""20 kinds of flowers, such as "red poppy"."""
SIDE = 64
"""Height and width of an image in pixels."""


def draw(kind: str, rng: np.random.Generator) -> Image.Image:
    """Return an RGB image of one flower. Its place, size, angle and light differ from image to image."""
    colour, shape = kind.split()
    petals, width = SHAPES[shape]
    leaves = Image.fromarray(rng.integers(20, 150, (9, 9, 3), dtype=np.uint8)).resize((2 * SIDE,) * 2, Image.BICUBIC)
    image = Image.blend(leaves, Image.new("RGB", leaves.size, (50, 105, 45)), 0.6)
    length = rng.uniform(0.55, 0.78) * SIDE  # drawn at twice the size, then reduced: smooth edges
    middle, turn = rng.uniform(1.1 * length, 2 * SIDE - 1.1 * length, 2), rng.uniform(0, 2 * math.pi)
    petal_colour = tuple(int(value) for value in np.clip(np.array(COLOURS[colour]) + rng.normal(0, 18, 3), 0, 255))
    pen = ImageDraw.Draw(image)
    for angle in turn + 2 * math.pi * np.arange(petals) / petals:
        t = np.linspace(0, 2 * math.pi, 24)
        along, across = length * (0.58 + 0.42 * np.cos(t)), length * width * np.sin(t)
        x, y = along * math.cos(angle) - across * math.sin(angle), along * math.sin(angle) + across * math.cos(angle)
        outline = [(float(a), float(b)) for a, b in zip(middle[0] + x, middle[1] + y, strict=True)]
        pen.polygon(outline, petal_colour, tuple(value * 3 // 4 for value in petal_colour))
    pen.circle((float(middle[0]), float(middle[1])), 0.22 * length, (120, 85, 30))
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, 1.5))).resize((SIDE, SIDE), Image.BOX)
    pixels = np.asarray(image) * rng.uniform(0.65, 1.1) + rng.normal(0, 7, (SIDE, SIDE, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write(folder: str | Path, kinds: Iterable[str], each: int, seed: int = 0) -> Path:
    """Write `each` images of every kind as PNG files, one folder per kind, and return the folder."""
    rng = np.random.default_rng(seed)
    for kind in kinds:
        (Path(folder) / kind).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            draw(kind, rng).save(Path(folder) / kind / f"{number:03}.png")
    return Path(folder)
