"""Measure inspection by number of images: seconds and peak memory of attention distance, rollout and relevance.

    python -m benchmarks.inspect --model L/16 --size 384 --images 8 128

Each measurement is a new process, so that its peak is its own: the largest resident memory minus that before the first
image. The rows would show memory that grows with the number of images. The largest intermediate result is the attention
maps of one layer and one batch; its size is printed for comparison. `foreign_load` is the share of the machine that
other processes used meanwhile. Weights and images are random, because neither time nor memory depends on them.
Relevance also takes a backward pass, so it is measured over a quarter of the images.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import compare, record
from benchmarks.cells import Cells

WHAT = ("distance", "rollout", "relevance")


def batches(images: int, batch: int, size: int) -> Iterator[torch.Tensor]:
    """Yield random uint8 images [batch, 3, size, size]; the last batch may be smaller."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, images, batch):
        shape = (min(batch, images - start), 3, size, size)
        yield torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def look(what: str, model: Any, stream: Iterator[torch.Tensor]) -> None:
    """Process each batch as the verb does, and store what the verb stores."""
    from vitrail.inspection.distance import attention_distance
    from vitrail.inspection.relevance import relevance
    from vitrail.inspection.rollout import rollout

    if what == "distance":
        attention_distance(model, stream)
        return
    kept = [relevance(model, images).shares if what == "relevance" else rollout(model, images) for images in stream]
    torch.cat(kept)


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def one(options: argparse.Namespace) -> None:
    """Measure one quantity in this process and print it as JSON."""
    from vitrail.device import fast_float32
    from vitrail.model.build import create

    record.prepare(options)
    model = create(options.model, image_size=options.size).eval()
    before, began = peak_bytes(), time.perf_counter()
    with fast_float32():
        look(options.what, model, batches(options.images[0], options.batch, options.size))
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": round(seconds, 3), "peak_mib": round((peak_bytes() - before) / 2**20, 1)}))


def measured(what: str, images: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row, measured in a new process."""
    words = [f"--model={options.model}", f"--size={options.size}", f"--batch={options.batch}", f"--what={what}"]
    words += [f"--threads={options.threads}"] if options.threads else []
    command = [sys.executable, "-m", "benchmarks.inspect", *words, "--images", str(images)]
    with compare.foreign_load() as foreign:
        done = subprocess.run(command, cwd=record.ROOT, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"what": what, "images": images, **found, "foreign_load": round(foreign[0], 3)}


def main() -> None:
    """Measure all numbers of images and write results/inspect.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default="L/16")
    parser.add_argument("--size", type=int, default=384, help="pixels")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--images", type=int, nargs="+", default=[8, 128])
    parser.add_argument("--log", type=Path, help="finished measurements are kept here, so that it can be stopped")
    parser.add_argument("--what", choices=WHAT, help="measure this alone, in this process")
    options = parser.parse_args()
    if options.quick:
        options.model, options.size, options.images, options.batch = "Ti/16", 64, [2, 4], 2
    if options.what:
        one(options)
        return
    record.prepare(options)
    cells, rows = Cells(options.log), []
    for what in WHAT:
        for images in options.images:
            count = max(options.batch, images // 4) if what == "relevance" else images
            key = dict(what=what, images=count, model=options.model, size=options.size, batch=options.batch)
            rows.append(cells.get(lambda what=what, count=count: measured(what, count, options), **key))
    from vitrail.model.variants import ViTConfig, variant

    config = variant(options.model, image_size=options.size)
    assert isinstance(config, ViTConfig)
    tokens = config.prefix + config.grid[0] * config.grid[1]
    maps = config.heads * tokens**2 * 4 * options.batch / 2**20
    table = Table(title=f"{options.model} at {options.size} px, batch {options.batch}", title_justify="left")
    for column in ("", "images", "seconds", "s/image", "peak MiB"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        cells = (str(row["images"]), f"{row['seconds']:.1f}", f"{row['seconds'] / row['images']:.2f}")
        table.add_row(row["what"], *cells, f"{row['peak_mib']:,.0f}")
    Console(width=110).print(table)
    print(f"maps of one layer of one batch: {maps:,.0f} MiB; of all layers and images: ", end="")
    print(f"{maps * config.depth * max(options.images) / options.batch:,.0f} MiB")
    shown = {"model": options.model, "size": options.size, "batch": options.batch}
    record.save("inspect", options, **shown, one_layers_maps_mib=round(maps, 1), rows=rows)


if __name__ == "__main__":
    main()
