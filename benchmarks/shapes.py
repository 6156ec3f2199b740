"""Compare ways of bringing photographs of mixed shapes into one batch: squashed, padded, and in their own shapes.

    python -m benchmarks.photo_sets clones/ sets/
    python -m benchmarks.shapes --sets sets/            continues where it was interrupted

A small Vision Transformer is trained from scratch on the photographs of flowers5, 500 of each of five classes, and
measured on 100 others of each class. Squashed and padded images have 64 patches of 8 pixels. Images in their own shapes
have as many ("native"), or 42 ("native, 42 patches"), at which the median image, of 4:3, has nearly the scale that it
has when padded. A seed draws the images and is that of the run. Then the same steps are timed in turns, in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from PIL import Image

import vitrail
from benchmarks import compare, record
from benchmarks.adviser import write_images, write_list
from benchmarks.cells import Cell, Cells, arguments
from benchmarks.finetune_default import CACHE
from benchmarks.learn import vitrail_verb
from vitrail.data.images.ops import eval_transform
from vitrail.data.settings import Preprocess

LOG = record.RESULTS / "shapes.jsonl"
SET, EACH = "flowers5", 500
NETWORK = ("--model", "Ti/8", "--vit.width", "128", "--vit.depth", "4", "--vit.heads", "2", "--vit.mlp-dim", "256")
HOW = ("--batch-size", "32", "--progressive.start", "1", "--checkpoint-every", "100 %", "--device", "cpu")
WAYS = {
    "squash": ("squash", (64, 64)),
    "pad": ("pad", (64, 64)),
    "native": ("native", (64, 64)),
    "native, 42 patches": ("native", (56, 48)),
}
TIMED = 64
"""Images of a timed step."""
SMALL = dict(width=128, depth=4, heads=2, mlp_dim=256)
TIMED_NETWORKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "the network that was trained": ("Ti/8", 1, SMALL),
    "Ti/16, images four times as large": ("Ti/16", 4, {}),
}
"""Networks whose steps are timed: name, factor of the sizes, and what is changed in them."""


def flags(way: str) -> list[str]:
    """Return the flags of a way."""
    resize, size = WAYS[way]
    return ["--preprocess.resize", resize, "--image-size", *map(str, size)]


def measured(way: str, data: Path, epochs: float, seed: int, folder: Path) -> Cell:
    """Train, and return the accuracy on the test images in percent."""
    given = ["--epochs", str(epochs), f"--seed={seed}", f"--out={folder}"]
    ran = vitrail_verb(["train", str(data), *NETWORK, *HOW, *flags(way), *given])
    settings = yaml.safe_load((Path(ran["folder"]) / "config.yaml").read_text())
    assert settings["preprocess"]["resize"] == WAYS[way][0]
    return {"accuracy": round(100 * ran["test"]["top1"], 2), "steps": ran["steps"]}


def step_of(way: str, name: str, larger: int, changes: dict[str, Any], images: Path) -> Callable[[], object]:
    """Return a function that does one training step in bfloat16, of a network and of the same photographs.

    larger: Factor of the sizes of `WAYS`.
    """
    resize, sides = WAYS[way]
    size = (larger * sides[0], larger * sides[1])
    native = resize == "native"
    model = vitrail.create(name, image_size=size, classes=5, native=native, **changes)
    how = Preprocess(size, resize=resize, patch=model.config.patch if native else None)  # type: ignore[arg-type]
    prepare, random = eval_transform(how), np.random.default_rng(0)
    files = sorted(images.glob("*/*"))
    some = [files[place] for place in random.permutation(len(files))[:TIMED]]
    pixels = np.stack([prepare(np.asarray(Image.open(file).convert("RGB")), random) for file in some])
    batch, labels = torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.arange(TIMED) % 5
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(images: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the images per second of a training step each way, in turns, and its ratio to padding."""
    found = []
    for name, (model, larger, changes) in TIMED_NETWORKS.items():
        steps = [compare.Contender(way, step_of(way, model, larger, changes, images), TIMED) for way in WAYS]
        each = {one.name: one for one in compare.race(steps, rounds=rounds)}
        for way, one in each.items():
            ratio = one.ratio(each["pad"]).summary()
            found.append({"network": name, "way": way, "images_per_second": round(one.median, 1), "over_pad": ratio})
    return found


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: mean and standard deviation of the accuracy over seeds."""
    return record.seeds_table(document["rows"], {"set": "set"}, "way", list(WAYS))


def main() -> None:
    """Run what the log lacks, time the steps, print the tables and write results/shapes.json."""
    parser = arguments(__doc__, LOG)
    parser.add_argument("--sets", type=Path, required=True, help="folder that benchmarks.photo_sets made")
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the images")
    options = parser.parse_args()
    if options.quick:
        options.epochs = 0.05
    cells, images = Cells.begin(options), options.cache / SET
    if not images.exists():
        write_images(SET, options.sets, images)
    rows = []
    for seed in options.seeds:
        data = options.cache / f"{SET} {EACH} {seed}.csv"
        if not data.exists():
            write_list(images, EACH, seed, data)
        for way in WAYS:
            key = {"set": SET, "way": way, "seed": seed}
            found = cells.train(partial(measured, way, data, options.epochs, seed), **key, epochs=options.epochs)
            rows.append({**key, **(found or {})})
    record.print_lines("accuracy on the test images, %", summary({"rows": rows}))
    record.prepare(options)
    speeds = timed(images, options.rounds)
    for one in speeds:
        print(f"{one['network']}, {one['way']}: {one['images_per_second']} images/s, {one['over_pad']} of pad's")
    cells.say_missing()
    record.save("shapes", options, rows=rows, speeds=speeds)


if __name__ == "__main__":
    main()
