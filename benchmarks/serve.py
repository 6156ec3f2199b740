"""Serving ViT-B/16 at 224 px: `vitrail serve` beside LitServe with the same network, 64 clients each.

Both servers are processes of their own on this machine, one at a time, given the same frozen network, threads,
largest batch and decoder; what differs is the server. The clients send one JPEG of 500 x 375 pixels after the
other over connections they keep, from a third process, on the cores that the server also has: so does everybody
who tries this. A round is thrown out where any answer was not 200. LitServe has no bound on its queue; ours is
set above the number of clients, so that neither refuses. Also: memory of our server over 2,000 requests.
"""

from __future__ import annotations

import argparse
import http.client
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from benchmarks import peers, record

CLIENTS = 64
BATCH = 8
FLAT = 2_000


@dataclass(frozen=True)
class Load:
    """What the clients saw in one round."""

    seconds: list[float]
    """Of each answer."""
    wall: float

    def row(self) -> dict[str, float]:
        """Images/s, and latency in milliseconds."""
        p50, p95, p99 = np.percentile(self.seconds, [50, 95, 99]) * 1000
        rate = len(self.seconds) / self.wall
        return {
            name: round(float(v), 1)
            for name, v in zip(("images_s", "p50", "p95", "p99"), (rate, p50, p95, p99), strict=True)
        }


def jpeg() -> bytes:
    """A picture of ordinary size with some content."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def model_folder(folder: Path, architecture: peers.Architecture) -> Path:
    """The network on disk; its weights do not matter."""
    from vitrail.data.config import Preprocess
    from vitrail.weights.card import Card
    from vitrail.weights.store import save_model

    model: Any = peers.ours(architecture)
    size = (architecture.image_size, architecture.image_size)
    save_model(folder, model, Card(model.config, preprocess=Preprocess(image_size=size)))
    return folder


def form(image: bytes) -> tuple[bytes, dict[str, str]]:
    """The request both servers read."""
    head = b'--edge\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n'
    head += b"Content-Type: image/jpeg\r\n\r\n"
    return head + image + b"\r\n--edge--\r\n", {"Content-Type": "multipart/form-data; boundary=edge"}


def load(port: int, path: str, clients: int, seconds: float | None, count: int | None = None) -> Load:
    """Answers to `clients` at once for some seconds, or until there are `count`. Raises SystemExit for any but 200."""
    body, headers = form(jpeg())
    taken: list[float] = []
    wrong: list[int] = []
    began = time.perf_counter()

    def more() -> bool:
        return time.perf_counter() - began < seconds if seconds is not None else len(taken) < (count or 0)

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while more() and not wrong:
            start = time.perf_counter()
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            answer.read()
            taken.append(time.perf_counter() - start)
            if answer.status != 200:
                wrong.append(answer.status)
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
    """A server that answers; its process and the path to post to."""
    if name == record.OURS:
        flags = ["--port", str(port), "--batch-size", str(BATCH), "--queue", "256", "--device", "cpu"]
        flags += ["--deadline", "120"]
        command, path = [sys.executable, "-m", "vitrail", "serve", str(folder), *flags], "/v1/predict"
    else:
        command, path = [sys.executable, "-m", "benchmarks.serve", "--litserve", str(folder), str(port)], "/predict"
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, env=environment)
    try:
        _wait(port, "/readyz" if name == record.OURS else "/health")
        yield psutil.Process(process.pid), path
    finally:
        process.terminate()
        process.wait(60)


def _wait(port: int, path: str) -> None:
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


def litserve(folder: str, port: int) -> None:
    """Serve the same network with LitServe, the way its documentation shows."""
    import litserve as ls

    from vitrail.data.decode import decode
    from vitrail.data.ops import eval_transform
    from vitrail.evaluate.classify import predictor
    from vitrail.model.attention import fast_math
    from vitrail.weights.load import load as load_network

    class Classifier(ls.LitAPI):
        def setup(self, device: str) -> None:
            fast_math()
            network: Any = load_network(folder)
            self.transform, self.ask = eval_transform(network.card.preprocess), predictor(network, "cpu")

        def decode_request(self, request: Any) -> np.ndarray:
            return self.transform(decode(request["image"].file.read()), np.random.default_rng(0))

        def batch(self, inputs: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.stack(inputs)).permute(0, 3, 1, 2)

        def predict(self, images: torch.Tensor) -> Any:
            return self.ask(images).softmax(1).topk(5)

        def unbatch(self, output: Any) -> list[Any]:
            return list(zip(output.values.tolist(), output.indices.tolist(), strict=True))

        def encode_response(self, output: Any) -> Any:
            return {"top": [{"class": str(c), "probability": p} for p, c in zip(*output, strict=True)]}

    api = Classifier(max_batch_size=BATCH, batch_timeout=0.005)
    ls.LitServer(api, accelerator="cpu", timeout=120).run(port=port, host="127.0.0.1", generate_client_file=False)


def memory(folder: Path, port: int, threads: int, count: int) -> list[float]:
    """MiB of our server after each fifth of `count` requests."""
    with server(record.OURS, folder, port, threads) as (process, path):
        found = []
        for _ in range(5):
            load(port, path, 8, None, count // 5)
            found.append(round(process.memory_info().rss / 2**20, 1))
        return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Rounds that alternate between the servers."""
    seconds = 2.0 if options.quick else 20.0
    found: dict[str, list[dict[str, float]]] = {record.OURS: [], "LitServe": []}
    threads = torch.get_num_threads()
    for number in range(options.rounds):
        for name in found if number % 2 == 0 else reversed(list(found)):
            with server(name, folder, options.port, threads) as (_, path):
                load(options.port, path, CLIENTS, 1.0 if options.quick else 5.0)  # warm
                found[name].append(load(options.port, path, CLIENTS, seconds).row())
                print(name, found[name][-1])
    return found


def main() -> None:
    """Run everything and write results/serve.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--litserve", nargs=2, metavar=("FOLDER", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.litserve:
        litserve(options.litserve[0], int(options.litserve[1]))
        return
    record.prepare(options)
    architecture = peers.SMALL_IMAGES if options.quick else peers.B16
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(Path(root) / "model", architecture)
        rounds = measure(options, folder)
        medians = {
            name: {key: round(float(np.median([row[key] for row in rows])), 1) for key in rows[0]}
            for name, rows in rounds.items()
        }
        print(medians)
        mib = memory(folder, options.port, torch.get_num_threads(), 100 if options.quick else FLAT)
        print("MiB after each fifth:", mib)
    record.save("serve", options, clients=CLIENTS, batch=BATCH, medians=medians, rounds=rounds, memory_mib=mib)


if __name__ == "__main__":
    main()
