"""Speed, latency and memory of the engines of a network, each in a process of its own, measured in turn."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.device import ComputePrecision, memory_in_use
from vitrail.errors import ExportError, VitrailError
from vitrail.evaluation.classify import Predict, predictor
from vitrail.exports.engine import Engine
from vitrail.exports.engines import BATCHES, Engines, TimedEngine, log
from vitrail.exports.kinds import CARD, Installed
from vitrail.exports.parity import compare, images_to_compare, noise
from vitrail.files import read_json_object, replacing
from vitrail.weights.card import Card
from vitrail.weights.load import load
from vitrail.weights.rebuild import card_of

CPU = torch.device("cpu")

ROUNDS = 3
"""Number of times that each engine is measured; the median counts."""


def measure(
    source: str | Path, image_size: int | None, engines: Engines, seconds: float, names: Sequence[Installed]
) -> list[TimedEngine]:
    """Measure engines for about `seconds` per batch size, and return them, the fastest first.

    An engine that cannot express the network, or computes something else, is left out with a warning; if that leaves
    none, its error is raised.
    """
    differences: dict[Installed, float] = {}
    files: dict[Installed, Path | None] = {}
    for name in names:
        try:
            differences[name] = _difference(engines, name)
        except VitrailError as error:
            if name == names[-1] and not differences:
                raise
            log.warning("%s is left out: %s", name, error)
            continue
        files[name] = None if name == "torch" else engines.program(name).path
    rows = []
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(_EngineProcess(source, image_size, files[name], engines)) for name in files
        }
        found: dict[Installed, list[list[float]]] = {name: [] for name in files}
        for _ in range(ROUNDS):
            for name, process in processes.items():
                found[name].append(process.measure(seconds / ROUNDS))
    for name, rounds in found.items():
        one, many, memory = (statistics.median(column) for column in zip(*rounds, strict=True))
        latency = 1000 * BATCHES[0] / one
        rows.append(TimedEngine(name, engines.precision, many, latency, round(memory), differences[name]))
    return sorted(rows, key=lambda row: -row.images_per_second)


def _difference(engines: Engines, name: Installed) -> float:
    """Return the difference of an engine's outputs from the network's in float32; write its program if necessary."""
    if name != "torch":
        card = engines.program(name).path.parent / CARD
        try:
            return float(read_json_object(card, ExportError)["parity"]["relative"])
        except (LookupError, TypeError, ValueError) as error:
            raise ExportError(f"{card} does not state the difference of the program. Remove its folder") from error
    network = engines.network
    images, _ = images_to_compare((), card_of(network))
    predict = predictor(network, CPU, engines.precision)

    def run(batch: np.ndarray) -> np.ndarray:
        return predict(torch.from_numpy(batch)).numpy()

    return compare(run, network, images, "logits", engines.precision, runtime=name).relative


class _EngineProcess:
    """A process that runs one engine."""

    def __init__(self, source: str | Path, image_size: int | None, file: Path | None, engines: Engines) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, self._theirs = context.Pipe()
        arguments = (self._theirs, str(source), image_size, file, engines.precision, card_of(engines.network))
        self.process = context.Process(target=_run, args=arguments, daemon=True)

    def __enter__(self) -> _EngineProcess:
        self.process.start()
        self._theirs.close()  # so that the pipe ends with the process
        return self

    def measure(self, seconds: float) -> list[float]:
        """Return images/s at each batch size, and the memory of the process in bytes. Raises ExportError if it ends."""
        try:
            self.pipe.send(seconds)
            return self.pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError) as error:
            self.process.join()
            raise ExportError(
                f"the process that measures an engine ended with exit code {self.process.exitcode}. If memory ran out "
                "(exit code -9), close other programs or choose a smaller network"
            ) from error

    def __exit__(self, *problem: object) -> None:
        with suppress(OSError):  # it has ended
            self.pipe.send(None)
        self.process.join()


def _run(
    pipe: Connection,
    source: str,
    image_size: int | None,
    file: Path | None,
    precision: ComputePrecision,
    card: Card,
) -> None:
    predict: Predict
    if file is None:
        network: Any = load(source, image_size=image_size)
        predict = predictor(network, CPU, precision)
        del network
    else:
        predict = Engine(file)
    shape, random = (card.config.channels, *card.preprocess.image_size), np.random.default_rng(0)
    batches = [torch.from_numpy(noise((batch, *shape), card, random)) for batch in BATCHES]
    for images in batches:
        predict(images)
    with suppress(EOFError, OSError):  # the main process has ended
        while (seconds := pipe.recv()) is not None:
            rates = [_rate(predict, images, seconds) for images in batches]
            pipe.send([*rates, memory_in_use(CPU)])


def _rate(predict: Predict, images: torch.Tensor, seconds: float) -> float:
    """Return images/s over at least `seconds` and one call."""
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or not calls:
        predict(images)
        calls += 1
    return calls * len(images) / (time.perf_counter() - began)


def draw(rows: Sequence[TimedEngine], path: Path, title: str) -> None:
    """Draw speed, latency and memory of the engines as bars."""
    from matplotlib.figure import Figure  # of the extra train; measuring does without

    figure = Figure(figsize=(9.6, 1.4 + 0.4 * len(rows)), layout="constrained")
    columns = {
        f"images/s, batch {BATCHES[-1]}": [row.images_per_second for row in rows],
        "ms for one image": [row.latency_ms for row in rows],
        "memory of the process, MiB": [row.memory_bytes / 2**20 for row in rows],
    }
    names = [row.engine for row in rows]
    for axes, (what, values) in zip(figure.subplots(1, 3, sharey=True), columns.items(), strict=True):
        bars = axes.barh(names, values, color="#0072b2")
        axes.bar_label(bars, fmt="{:,.4g}", padding=3)
        axes.set_xlabel(what)
        axes.margins(x=0.25)
    figure.axes[0].invert_yaxis()  # the fastest on top
    figure.suptitle(title, fontsize="medium")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=144, format=path.suffix[1:])
