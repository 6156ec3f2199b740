"""Read at scale: open an index of ten million images, and read images over a slow network.

The index is simulated by packed shards that claim their full length but are empty. It is opened in a separate process,
whose memory is read before and after. The network is simulated by a file system that answers every request after a
fixed time. The images are small JPEGs, decoded by one thread on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from fsspec.asyn import AsyncFileSystem

from benchmarks import record

SHARDS, CLASSES, BYTES = 1000, 1000, 40_000


def write_index(folder: Path, images: int) -> None:
    """Write what `pack` would write for `images` images of `BYTES` bytes, with empty files as shards."""
    from vitrail.data.cache import write_arrow
    from vitrail.data.sources.shards import INDEX, index_schema
    from vitrail.data.split import row_digest

    folder.mkdir(parents=True)
    each = images // SHARDS
    shards = [{"name": f"shard-{n:05d}.tar", "bytes": each * (BYTES + 1024) + 1024} for n in range(SHARDS)]
    manifest = {"settings": {}, "class_names": [str(n) for n in range(CLASSES)], "shards": shards, "bad": []}

    def rows(writer: pa.RecordBatchWriter) -> None:
        for number, shard in enumerate(shards):
            with open(folder / str(shard["name"]), "wb") as file:
                file.truncate(int(str(shard["bytes"])))
            labels = [str(image % CLASSES) for image in range(number * each, (number + 1) * each)]
            ids = [f"train/{label}/{number:05d}{place:06d}.jpg" for place, label in enumerate(labels)]
            digests = b"".join(row_digest(id, BYTES, label) for id, label in zip(ids, labels, strict=True))
            columns = [
                np.full(each, number, np.int32),
                512 + np.arange(each) * (BYTES + 1024),
                np.full(each, BYTES),
                labels,
                ids,
                np.frombuffer(digests, ">u8").astype(np.uint64),
            ]
            writer.write_table(pa.Table.from_arrays([pa.array(column) for column in columns], schema=index_schema()))

    write_arrow(folder / INDEX, index_schema().with_metadata({"vitrail": json.dumps(manifest)}), rows)


OPEN = """
import json, sys, time
from pathlib import Path
import torch
from vitrail.data.settings import Data
from vitrail.data.loading.order import EpochOrder
from vitrail.data.sources.open import open_data

def own():  # memory of this process alone; pages of the mapped index belong to the system's cache
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3

def mapped():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) / 1e3

open_data(sys.argv[1] + "-small")  # libraries are imported
own_before, mapped_before, began = own(), mapped(), time.perf_counter()
splits = open_data(Data(path=sys.argv[1], validation="none", holdout=float(sys.argv[2])))
opened, opened_own, opened_mapped = time.perf_counter(), own(), mapped()
order = EpochOrder(len(splits.train), 1024, shuffle=True, drop_last=True, together=int(sys.argv[3]))
permutation = order.permutation(0, 0)
images = [order.image(permutation, place)[0] for place in order.positions(0).tolist()]
assert len({splits.train.id(index) for index in images}) == 1024
ready, ready_own = time.perf_counter(), own()
print(json.dumps({"images": len(splits.train), "open_seconds": opened - began, "order_seconds": ready - opened,
  "own_mb": opened_own - own_before, "mapped_mb": opened_mapped - mapped_before, "order_mb": ready_own - opened_own}))
"""


def opened(folder: Path, holdout: float, together: int) -> dict[str, float]:
    """Open the data in a new process. Return seconds, and the MB beyond those of Python and the libraries."""
    arguments = [sys.executable, "-c", OPEN, str(folder), str(holdout), str(together)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return {name: round(value, 2) for name, value in json.loads(done.stdout).items()}


class Slow(AsyncFileSystem):  # type: ignore[misc]
    """Local files behind a slow network: every answer takes `seconds`, however many requests are open."""

    protocol = "slow"
    cachable = False

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.requests = 0

    async def _cat_file(self, path: str, start: int = 0, end: int | None = None, **_: Any) -> bytes:
        self.requests += 1
        await asyncio.sleep(self.seconds)
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start)


def images(folder: Path, count: int) -> None:
    """Pack random images of 128 x 128 pixels."""
    from vitrail.data.loading.pack import pack
    from vitrail.data.sources.arrays import ArraySource

    noise = np.random.default_rng(0).integers(0, 256, (64, 128, 128, 3), dtype=np.uint8)
    pixels = np.concatenate([noise] * (count // 64))
    pack(ArraySource("s", pixels, np.arange(count) % 2, ["a", "b"]), folder, quality=75, shard_bytes=1 << 24)


def behind(folder: Path, seconds: float, *, ahead: bool, together: int) -> dict[str, float]:
    """Return the images/s of an epoch in a loop without computation, and the number of requests."""
    from vitrail.data.cache import read_arrow
    from vitrail.data.loading.loader import Loader
    from vitrail.data.sources.shard_files import RemoteFiles
    from vitrail.data.sources.shards import INDEX, ShardSource, packed_manifest

    index = read_arrow(folder / INDEX)
    manifest = packed_manifest(index)
    system = Slow(seconds)
    source = ShardSource(
        RemoteFiles(system, [str(folder / shard["name"]) for shard in manifest["shards"]]),
        index,
        manifest["class_names"],
    )
    source.distant = ahead
    loader = Loader(
        source,
        transform=lambda image, _: image,
        image_size=128,
        batch_size=64,
        workers=1,
        together=together,
    )
    began = time.perf_counter()
    batches = len(loader) if ahead else 8  # one by one takes minutes
    seen = sum(len(found.labels) for found in itertools.islice(loader.epoch(0), batches))
    took = time.perf_counter() - began
    loader.close()
    return {"images_per_second": round(seen / took, 1), "requests_per_image": round(system.requests / seen, 3)}


def main() -> None:
    """Measure and write results/reading.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--images", type=int, default=10_000_000)
    options: argparse.Namespace = parser.parse_args()
    record.prepare(options)
    count, shown = (100_000, 256) if options.quick else (options.images, 4096)
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["VITRAIL_CACHE"] = str(Path(scratch) / "cache")
        write_index(Path(scratch) / "index", count)
        write_index(Path(scratch) / "index-small", 10 * SHARDS)
        opening = {
            "all for training": opened(Path(scratch) / "index", 0.0, 1),
            "all for training, 64 together": opened(Path(scratch) / "index", 0.0, 64),
            "1 % held out": opened(Path(scratch) / "index", 0.01, 1),
        }
        for name, figures in opening.items():
            print(name, figures)
        images(Path(scratch) / "images", shown)
        os.sched_setaffinity(0, {max(cores)})
        network = {
            f"{1000 * seconds:g} ms a request, {what}": behind(Path(scratch) / "images", seconds, **how)
            for seconds in (0.0, 0.05)
            for what, how in (
                ("asked one by one", {"ahead": False, "together": 1}),
                ("asked ahead", {"ahead": True, "together": 1}),
                ("asked ahead, 16 together", {"ahead": True, "together": 16}),
            )
            if seconds or how["ahead"]
        }
        os.sched_setaffinity(0, cores)
        for name, figures in network.items():
            print(name, figures)
    record.save("reading", options, opening=opening, network=network)


if __name__ == "__main__":
    main()
