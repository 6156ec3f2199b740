"""Measurements for the plan of the paper's largest run: photographs, the index, checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import input_pipeline, reading, record
from benchmarks.paper_input import TOGETHER


def photographs(images: Path) -> dict[str, float]:
    """Return the bytes of a photograph of ImageNet, as published and packed with a short side of 256 pixels."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, packed = Path(scratch) / "files", Path(scratch) / "packed"
        count = input_pipeline.class_folders(images, folder, 1)
        input_pipeline.pack(folder, packed)
        size = sum(file.stat().st_size for file in packed.rglob("*.tar"))
        whole = statistics.fmean(file.stat().st_size for file in images.glob("*.JPEG"))
    return {"images": count, "bytes": whole, "packed_bytes": size / count}


def index(counts: tuple[int, ...]) -> dict[str, Any]:
    """Measure the memory of an opened index by its length, and extrapolate to 300 million images."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["VITRAIL_CACHE"] = str(Path(scratch) / "cache")
        for count in counts:
            folder = Path(scratch) / str(count)
            reading.write_index(folder, count)
            reading.write_index(Path(scratch) / f"{count}-small", 10 * reading.SHARDS)
            size = sum(file.stat().st_size for file in folder.glob("*.arrow"))
            rows.append({"images": count, "index_mb": size / 1e6, **reading.opened(folder, 0.0, TOGETHER)})
            shutil.rmtree(folder)
    lengths = np.array([row["images"] for row in rows], float)
    grown = {
        name: float(np.polyfit(lengths, [row[name] for row in rows], 1)[0]) * 1e6
        for name in ("own_mb", "index_mb", "open_seconds")
    }
    each = {"own_bytes": grown["own_mb"], "index_bytes": grown["index_mb"], "open_microseconds": grown["open_seconds"]}
    return {"rows": rows, **each, "order_bytes": 8 / TOGETHER, "order_bytes_single": 8}


def written() -> dict[str, float]:
    """Return the bytes/s at which a checkpoint is written to the temporary folder, checksums and fsync included."""
    from vitrail.training.checkpoints import checkpoint

    state = {"model": {str(n): torch.randn(1 << 24) for n in range(12)}}
    size = 12 * 4 * 2**24
    with tempfile.TemporaryDirectory() as scratch:
        rates = []
        for step in range(3):
            began = time.perf_counter()
            checkpoint.save(Path(scratch), step, state, keep=1)
            rates.append(size / (time.perf_counter() - began))
    return {"bytes": size, "bytes_per_second": statistics.median(rates)}


def decoding() -> dict[str, Any]:
    """Return the decoded images/s of one core, from results/input_pipeline.json."""
    document = json.loads((record.RESULTS / "input_pipeline.json").read_text())
    rates = {row["name"]: row["images_per_second"] for row in document["rows"]}
    return {"whole": rates["vitrail"], "packed": rates["vitrail, packed"], "date": document["date"]}
