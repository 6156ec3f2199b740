"""Watch for growth of memory, open files and threads: half an hour of training and 20,000 served requests.

    python -m benchmarks.soak                                       the measurement in results/soak.json
    python -m benchmarks.soak --minutes 3 --requests 2000           a shorter one

Both are separate processes, started as a user would start them. The training run evaluates and writes checkpoints all
the time, with decoding threads, on photographs of one size (larger images would take more memory). The requests are
good pictures, broken ones and refused ones in turn. The median of the last quarter is compared with that of the second.
The first quarter, in which caches fill, does not count. Threads and files may vary on the way, but there must not be
more of them at the end. `--log` stores a finished half.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.cells import Cells
from benchmarks.serve import form, jpeg, wait

DATA = record.DATA / "flowers12"
SMALL = ("--vit.width=64", "--vit.depth=2", "--vit.heads=2", "--vit.mlp-dim=128", "--image-size=64")
SAMPLES = 120
"""Number of samples per process."""
GROWTH = 0.05
"""Relative difference of resident memory that is allowed at the end, because allocators vary that much."""
Sample = dict[str, float]


def look(process: psutil.Process) -> Sample:
    """Memory, open files and threads of a process at one time."""
    with process.oneshot():
        return {
            "mib": process.memory_info().rss / 2**20,
            "files": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }


@contextmanager
def watched(process: psutil.Process, every: float) -> Iterator[list[Sample]]:
    """Sample a process every `seconds` while the block runs."""
    samples: list[Sample] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every):
            try:
                samples.append(look(process))
            except psutil.Error:  # it has ended
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def compared(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """Return the medians of the second and of the last quarter of each quantity."""
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    found = {}
    for name in samples[0]:
        before, after = (statistics.median(one[name] for one in part) for part in (early, late))
        found[name] = {"early": round(before, 1), "late": round(after, 1), "most": max(one[name] for one in samples)}
    return found


def training(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train for `minutes`, with an evaluation and a checkpoint every few seconds."""
    words = ["train", str(options.data), "--recipe=scratch-photos", *SMALL, "--batch-size=32", "--workers=2"]
    words += [
        "--cache=no",
        "--progressive.start=1",
        f"--time-limit={options.minutes}",
        "--duration=100000 steps",
        "--evaluate-every=100 steps",
    ]
    words += ["--checkpoint-every=100 steps", f"--out={folder}", "--quiet", "--json"]
    command = [sys.executable, "-m", "vitrail", *words]
    started = subprocess.Popen(command, cwd=record.ROOT, stdout=subprocess.PIPE, text=True)
    with watched(psutil.Process(started.pid), 60 * options.minutes / SAMPLES) as samples:
        out, _ = started.communicate()
    if started.returncode:
        raise SystemExit(f"training ended with {started.returncode}")
    ended = json.loads(out)
    return {"steps": ended["steps"], "minutes": round(ended["seconds"] / 60, 1), **_watched(samples)}


def serving(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Send `count` requests: of ten, seven are good, one is not an image, one is truncated, one asks for attention."""
    import vitrail

    vitrail.save(vitrail.create("Ti/16", classes=10, depth=2, image_size=64), folder / "model")
    port = _free_port()
    command = [sys.executable, "-m", "vitrail", "serve", str(folder / "model"), f"--port={port}", "--quiet"]
    started = subprocess.Popen(command, cwd=record.ROOT)
    try:
        wait(port, "/readyz")
        count = options.requests
        statuses: dict[int, int] = {}
        with watched(psutil.Process(started.pid), options.requests / 20_000) as samples:
            began = time.perf_counter()
            for number, status in enumerate(_asked(port, count)):
                statuses[status] = statuses.get(status, 0) + 1
                if number % 5_000 == 4_999:
                    print(f"{number + 1:,} requests", file=sys.stderr, flush=True)
            seconds = time.perf_counter() - began
        return {"requests": count, "per_second": round(count / seconds, 1), "statuses": statuses, **_watched(samples)}
    finally:
        started.terminate()
        started.wait(60)


def _asked(port: int, count: int) -> Iterator[int]:
    """Send the requests over one connection, which is renewed now and then. Yield the status of each response."""
    good, headers = form(jpeg())
    torn, _ = form(jpeg()[:2000])
    kinds: list[Callable[[], tuple[str, bytes, dict[str, str]]]] = [lambda: ("/v1/predict", good, headers)] * 7
    kinds += [
        lambda: ("/v1/predict", b"<html>", {"Content-Type": "text/html"}),
        lambda: ("/v1/predict", torn, headers),
        lambda: ("/v1/attention", good, headers),
    ]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for number in range(count):
        if number % 100 == 99:
            connection.close()
        path, body, given = kinds[number % len(kinds)]()
        connection.request("POST", path, body, given)
        answer = connection.getresponse()
        answer.read()
        yield answer.status
    connection.close()


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _watched(samples: list[Sample]) -> dict[str, Any]:
    held = compared(samples)
    flat = held["mib"]["late"] <= (1 + GROWTH) * held["mib"]["early"]
    flat = flat and all(held[name]["late"] <= held[name]["early"] for name in ("files", "threads"))
    some = samples[:: -(-len(samples) // SAMPLES)]
    return {"flat": flat, "held": held, "samples": [{k: round(v, 1) for k, v in one.items()} for one in some]}


def main() -> None:
    """Run both, print the measurements and write results/soak.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="of training")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--log", type=Path, help="finished halves are kept here")
    parser.add_argument("--data", type=Path, default=DATA, help="images to train on")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.requests = 0.2, 200
    with tempfile.TemporaryDirectory() as scratch:
        cells, folder = Cells(options.log), Path(scratch)
        halves = {
            "serving": cells.get(lambda: serving(options, folder), what="serving", requests=options.requests),
            "training": cells.get(lambda: training(options, folder / "runs"), what="training", minutes=options.minutes),
        }
        found = {name: half for name, half in halves.items() if half is not None}
    table = Table(title="medians of the second and of the last quarter", title_justify="left")
    for column in ("", "MiB", "open files", "threads", ""):
        table.add_column(column)
    for name, row in found.items():
        cells = [f"{held['early']:g} -> {held['late']:g}" for held in row["held"].values()]
        table.add_row(name, *cells, "flat" if row["flat"] else "GROWS")
    Console(width=110).print(table)
    record.save("soak", options, **found)


if __name__ == "__main__":
    main()
