"""Serve ViT-B/16 at 224 px: `vitrail serve` and LitServe with the same network, 64 clients each.

Each server is a separate process on this machine; they run one at a time, with the same frozen network, threads,
largest batch and decoder. Only the server differs. The clients, in a third process on the same cores, send one JPEG of
500 x 375 pixels after the other over persistent connections. Any response other than 200 stops the measurement.
LitServe has no limit on its queue; ours is above the number of clients, so that neither refuses a request. Afterwards
the memory of our server is measured over 2,000 requests.
"""

from __future__ import annotations

import argparse
import http.client
import io
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from benchmarks import peers, record
from benchmarks.compare import Ratio

CLIENTS = 64
BATCH = 8
REQUESTS = 2_000
PEER = "LitServe"
COLUMNS = ("images_per_second", "p50", "p95", "p99")


@dataclass(frozen=True)
class Load:
    """Measurements of the clients in one round."""

    seconds: list[float]
    """Seconds of each response."""
    wall: float

    def row(self) -> dict[str, float]:
        """Return images/s, and percentiles of the response time in seconds."""
        values = (len(self.seconds) / self.wall, *np.percentile(self.seconds, (50, 95, 99)))
        return dict(zip(COLUMNS, (round(float(value), 4) for value in values), strict=True))


def jpeg() -> bytes:
    """Return a picture of ordinary size with some content."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def model_folder(folder: Path, architecture: peers.Architecture) -> Path:
    """Save the network; its weights are random, because the time does not depend on them."""
    from vitrail.data.settings import Preprocess
    from vitrail.weights.card import Card
    from vitrail.weights.store import save_model

    model: Any = peers.ours(architecture)
    size = (architecture.image_size, architecture.image_size)
    save_model(folder, model, Card(model.config, preprocess=Preprocess(image_size=size)))
    return folder


def form(image: bytes) -> tuple[bytes, dict[str, str]]:
    """Return the request that both servers understand."""
    head = b'--edge\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n'
    head += b"Content-Type: image/jpeg\r\n\r\n"
    return head + image + b"\r\n--edge--\r\n", {"Content-Type": "multipart/form-data; boundary=edge"}


def load(port: int, path: str, clients: int, enough: Callable[[int, float], bool]) -> Load:
    """Send requests from `clients` threads until `enough(answers, seconds)`. Raises SystemExit for a response other
    than 200.
    """
    body, headers = form(jpeg())
    taken: list[float] = []
    wrong: list[str] = []
    began = time.perf_counter()

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while not wrong and not enough(len(taken), time.perf_counter() - began):
            start = time.perf_counter()
            try:
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
            except OSError as error:
                wrong.append(repr(error))
                return
            taken.append(time.perf_counter() - start)
            if answer.status != 200:
                wrong.append(f"{answer.status} {content[:200]!r}")
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise SystemExit(f"{path} answered {wrong[0]}")
    return Load(taken, time.perf_counter() - began)


@contextmanager
def server(name: str, folder: Path, port: int, threads: int) -> Iterator[tuple[psutil.Process, str]]:
    """Start a server. Yield its process and the path to post to."""
    if name == record.OURS:
        flags = ["--port", str(port), "--batch-size", str(BATCH), "--queue", "256", "--deadline", "120"]
        command, path = (
            [sys.executable, "-m", "vitrail", "serve", str(folder), "--device", "cpu", *flags],
            "/v1/predict",
        )
    else:
        command, path = [sys.executable, "-m", "benchmarks.serve_litserve", str(folder), str(port)], "/predict"
    # threads that wait give their core away soon: `vitrail` asks for that itself, and LitServe is to have it, too
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "1000"}
    process = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        wait(port, "/readyz" if name == record.OURS else "/health")
        yield process, path
    finally:
        workers = process.children(recursive=True)
        process.terminate()
        process.wait(60)
        for worker in psutil.wait_procs(workers, timeout=10)[1]:
            worker.kill()


def wait(port: int, path: str) -> None:
    """Return when the server at `port` answers 200 at `path`. Raises SystemExit after three minutes."""
    until = time.monotonic() + 180
    while time.monotonic() < until:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"no server at port {port}")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return rounds that alternate between the servers, each of which is started anew."""
    warm, seconds = (1.0, 2.0) if options.quick else (4.0, 10.0)
    found: dict[str, list[dict[str, float]]] = {record.OURS: [], PEER: []}
    threads = torch.get_num_threads()
    for number in range(options.rounds):
        for name in list(found) if number % 2 == 0 else reversed(list(found)):
            with server(name, folder, options.port, threads) as (_, path):
                load(options.port, path, CLIENTS, lambda _, passed: passed > warm)
                found[name].append(load(options.port, path, CLIENTS, lambda _, passed: passed > seconds).row())
                print(name, found[name][-1])
    return found


def memory(folder: Path, port: int, threads: int, count: int) -> list[float]:
    """MiB of our server after each fifth of `count` requests."""
    with server(record.OURS, folder, port, threads) as (process, path):
        found = []
        for _ in range(5):
            load(port, path, BATCH, lambda answers, _: answers >= count // 5)
            found.append(round(process.memory_info().rss / 2**20, 1))
        return found


def main() -> None:
    """Run everything and write results/serve.json."""
    parser = record.arguments(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    record.prepare(options)
    architecture = peers.SMALL_IMAGES if options.quick else peers.B16
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(Path(root) / "model", architecture)
        rounds = measure(options, folder)
        mib = memory(folder, options.port, torch.get_num_threads(), 100 if options.quick else REQUESTS)
    rows = [summary(name, each) for name, each in rounds.items()]
    pairs = list(zip(rounds[record.OURS], rounds[PEER], strict=True))
    over = {column: Ratio([ours[column] / theirs[column] for ours, theirs in pairs]).summary() for column in COLUMNS}
    print(*rows, over, f"MiB after each fifth: {mib}", sep="\n")
    versions = {name: metadata.version(name) for name in ("litserve", "fastapi", "uvicorn")}
    content = {"clients": CLIENTS, "batch": BATCH, "rows": rows, "ours_over_peer": over, "memory_mib": mib}
    record.save("serve", options, **content, servers=versions)


def summary(name: str, each: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median of each column, and all rounds."""
    columns = {column: [row[column] for row in each] for column in COLUMNS}
    rates, seconds = columns["images_per_second"], {c: v for c, v in columns.items() if c != "images_per_second"}
    medians = {column: statistics.median(values) for column, values in columns.items()}
    return {"name": name, **medians, "rounds": rates, "seconds_of_rounds": seconds}


if __name__ == "__main__":
    main()
