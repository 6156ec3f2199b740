"""Folders as the authors of ImageNet's test sets publish them, filled with a few real or made-up pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

# as ObjectNet's authors publish: folder, class, ImageNet labels, and the numbers of these by their
# imagenet_pytorch_id_to_objectnet_id.json
OVERLAP = {
    "alarm_clock": ("Alarm clock", "analog clock; digital clock", (409, 530)),
    "banana": ("Banana", "banana", (954,)),
    "chair": ("Chair", "barber chair; folding chair; rocking chair, rocker", (423, 559, 765)),
    "coffee_french_press": ("Coffee/French press", "espresso maker", (550,)),
    "mug": ("Mug", "coffee mug", (504,)),
}
OTHERS = {"air_freshener": "Air freshener", "coin_money": "Coin (money)"}
RED = (255, 0, 0)


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (24, 20)) -> Path:
    """Write noise of this width and height, lossless."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    return path


def objectnet(root: Path, images: int = 2) -> Path:
    """objectnet-1.0/ with some of its classes; its lines of labels are in an order of their own."""
    mappings = root / "mappings"
    mappings.mkdir(parents=True)
    line_of = np.random.default_rng(0).permutation(1000)
    lines = [""] * 1000
    for number in range(1000):
        lines[line_of[number]] = f"class {number}"
    for _, labels, numbers in OVERLAP.values():
        for label, number in zip(labels.split("; "), numbers, strict=True):
            lines[line_of[number]] = label
    (mappings / "imagenet_to_label_2012_v2").write_text("\n".join(lines) + "\n")
    numbers = {str(number): int(line) for number, line in enumerate(line_of)}
    (mappings / "pytorch_to_imagenet_2012_id.json").write_text(json.dumps(numbers))
    overlap = {name: text for name, text, _ in OVERLAP.values()}
    (mappings / "objectnet_to_imagenet_1k.json").write_text(json.dumps(overlap))
    folders = {**{folder: name for folder, (name, _, _) in OVERLAP.items()}, **OTHERS}
    (mappings / "folder_to_objectnet_label.json").write_text(json.dumps(folders))
    for number, folder in enumerate(sorted(folders)):
        for i in range(images):
            inner = picture(root / "images" / folder / f"{folder}{i}.png", 10 * number + i)
            with Image.open(inner) as image:
                framed = Image.new("RGB", (image.width + 4, image.height + 4), RED)
                framed.paste(image, (2, 2))
            framed.save(inner)
    return root
