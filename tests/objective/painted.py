"""Images with masks to learn from: a square of a colour, or a disc of another, on noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def paint(folder: Path, counts: dict[str, int], side: int = 32) -> Path:
    """Write images/SPLIT/N.png and masks/SPLIT/N.png of the classes ground, square and disc."""
    random, (rows, columns) = np.random.default_rng(0), np.mgrid[:side, :side]
    for split, count in counts.items():
        for kind in ("images", "masks"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(count):
            y, x = random.integers(side // 4, 3 * side // 4, 2)
            shape = number % 2 + 1
            away = np.maximum(abs(rows - y), abs(columns - x)) if shape == 1 else np.hypot(rows - y, columns - x)
            mask = np.where(away < side // 4, shape, 0).astype(np.uint8)
            colours = np.array([[90, 90, 90], [200, 80, 60], [60, 120, 220]])[mask]
            image = (colours + random.normal(0, 20, colours.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(image).save(folder / "images" / split / f"{number}.png")
            Image.fromarray(mask).save(folder / "masks" / split / f"{number}.png")
    (folder / "classes.txt").write_text("ground\nsquare\ndisc\n", encoding="utf-8")
    return folder
