"""Engines: torch, or a program of another runtime that computes the same network on this machine, perhaps faster.

`compiled` is torch with torch.compile, and `graphs` torch with CUDA graphs.
On a CPU these are OpenVINO and ONNX Runtime. AOTInductor compiles for a CPU and for a GPU, where ONNX Runtime has
TensorRT and CUDA if it is installed with them. On a GPU `auto` is torch, or compiled for many images, because no engine
was measured on one yet.

Programs are written at first use into the cache folder, under a name that stands for the network, the processor and the
versions of the runtimes. Each of them has passed its parity check on this machine. `auto` takes the fastest that
`vitrail bench MODEL --engines` has measured on this machine, and torch if none was measured. Each engine is measured in
a process of its own, in turn.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from vitrail.data.cache import cache_folder
from vitrail.device import ComputePrecision, Precision, available_cores, memory_in_use, prediction_precision, processor
from vitrail.errors import ExportError, UsageError, VitrailError
from vitrail.evaluation.classify import Predict, predictor
from vitrail.exports.engine import Engine
from vitrail.exports.kinds import CARD, KINDS, EngineName, Installed, ProgramPrecision, RuntimeName
from vitrail.exports.parity import compare_outputs, images_to_compare, noise
from vitrail.files import read_json_object, replacing_text
from vitrail.model.own_part import own_parts
from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT
from vitrail.plots import COLOURS, save_figure
from vitrail.weights.card import Card
from vitrail.weights.load import load
from vitrail.weights.rebuild import card_of
from vitrail.weights.store import checksum
from vitrail.words import time_span

log = logging.getLogger("vitrail")
RUNTIMES: tuple[RuntimeName, ...] = ("openvino", "onnx")
CPU = torch.device("cpu")
MEASURED = "engines.json"
GPU_RATE = 300e12
"""FLOP/s that a fast GPU reaches in prediction without compilation. On a slower one it takes longer."""
COMPILED_FROM = 300.0
"""Seconds of prediction from which a GPU compiles the blocks: it takes about half a minute, and saves about a fifth."""
GAIN = 1.03
"""An engine replaces torch if it is faster by this factor."""
BATCHES = (1, 8)
"""Batch sizes that are measured: the first for latency, the last for speed."""


@dataclass(frozen=True)
class TimedEngine:
    """One engine, measured on this machine."""

    engine: Installed
    precision: ComputePrecision
    images_per_second: float
    """Speed with batches of 8 images."""
    latency_ms: float
    """Time for a single image."""
    memory_bytes: int
    """Memory of a process that only computes this network, with its libraries."""
    difference: float
    """Largest difference from the network in float32, relative to its largest output."""


class Engines:
    """The engines of one network on a device of this machine, its CPU by default, in one precision."""

    def __init__(self, network: ViT | ResNet, precision: Precision = "auto", device: torch.device = CPU) -> None:
        self.network, self.device = network, device
        self.precision = prediction_precision(device, precision)

    @cached_property
    def folder(self) -> Path:
        """The folder of the programs and the measurements."""
        packages = sorted({package for name in RUNTIMES for package in KINDS[name].packages})
        about = {
            "weights": checksum(self.network.state_dict()),
            "card": card_of(self.network).to_dict(),
            "precision": self.precision,
            "machine": [processor(), available_cores(), torch.get_num_threads(), *self._gpu],
            "versions": [_version(package) for package in ("vitrail", "torch", *packages)],
        }
        text = json.dumps(about, sort_keys=True, default=str)
        return _all_engines() / hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    @property
    def _gpu(self) -> list[str]:
        return [torch.cuda.get_device_name(self.device)] if self.device.type == "cuda" else []

    def stored(self, name: RuntimeName) -> ProgramPrecision:
        """Return the precision of the program of a runtime: float16 on a GPU where its runtime has no bfloat16.

        Raises UsageError for a runtime that computes in neither.
        """
        precisions = KINDS[name].precisions
        if self.precision in precisions:
            return self.precision
        if self.device.type != "cpu" and "float16" in precisions:
            return "float16"
        raise UsageError(f"the engine {name} does not compute in {self.precision}: add --precision float32")

    def program(self, name: RuntimeName, *, features: bool = False) -> Engine:
        """Return the program of a runtime, written at first use. Raises UsageError and ExportError if there is none."""
        output: Literal["features", "logits"] = "features" if features else "logits"
        precision, device = self.stored(name), str(self.device)
        place = self.folder / f"{name}-{output}"
        file = place / KINDS[name].file
        if file.is_file():
            try:
                return Engine(file, output, device, trusted=True)  # written by this user
            except ExportError as error:
                log.warning("a program in the cache cannot be used and is written again: %s", error)
        from vitrail.exports.write import export_model  # torch.export takes a while to import

        log.info("writing a program for %s, once: %s", name, place)
        export_model(self.network, place, name, output=output, precision=precision, device=device, overwrite=True)
        return Engine(file, output, device, trusted=True)

    def names(self) -> list[Installed]:
        """Return the engines that are installed and compute in this precision."""
        able = [name for name in RUNTIMES if self.precision in KINDS[name].precisions]
        return ["torch", *(name for name in able if all(_version(package) for package in KINDS[name].packages))]

    def measurements(self) -> list[TimedEngine]:
        """Return what was measured here, the fastest first; empty if nothing was, or if the file is damaged."""
        if not _all_engines().is_dir() or not (file := self.folder / MEASURED).is_file():
            return []
        try:
            found = [TimedEngine(**row) for row in read_json_object(file, UsageError)["engines"]]
            if not all(row.engine in get_args(Installed) and row.images_per_second > 0 for row in found):
                raise ValueError("a value that is not valid")
        except (UsageError, LookupError, TypeError, ValueError) as error:
            log.warning("%s is not used (%s). Measure again: vitrail bench MODEL --engines", file, error)
            return []
        return sorted(found, key=lambda row: -row.images_per_second)

    def remember(self, rows: Sequence[TimedEngine]) -> None:
        """Store the measurements, by which `auto` chooses."""
        with replacing_text(self.folder / MEASURED) as file:
            file.write(json.dumps({"engines": [asdict(row) for row in rows]}, indent=1) + "\n")

    def chosen(self, images: Callable[[], int]) -> Installed:
        """Return the engine of `auto`: the fastest on a CPU, torch on a GPU, or compiled for many images."""
        if self.device.type == "cpu":
            return self.fastest()
        return _for_many(self.network, images()) if self.device.type == "cuda" else "torch"

    def fastest(self) -> Installed:
        """Return the fastest measured engine, and log the reason; torch if none was measured."""
        rows = {row.engine: row for row in self.measurements() if row.engine in self.names()}
        if not rows or "torch" not in rows:
            log.debug("engine: torch, because no other was measured here (vitrail bench MODEL --engines)")
            return "torch"
        best, torch_row = next(iter(rows.values())), rows["torch"]
        if best.images_per_second < GAIN * torch_row.images_per_second:
            best = torch_row
        others = [f"{row.engine} {row.images_per_second:.1f}" for row in rows.values() if row is not best]
        log.info("engine %s: %.1f images/s here (%s)", best.engine, best.images_per_second, ", ".join(others))
        return best.engine


def engine_predictor(
    network: ViT | ResNet | Engine,
    device: torch.device,
    precision: Precision = "auto",
    *,
    engine: EngineName = "auto",
    features: bool = False,
    images: Callable[[], int] = lambda: 0,
) -> Predict:
    """Return images -> float32 logits, or features, of a network, computed by an engine.

    An exported program in place of a network computes what it was exported for. If the engine that `auto` chose cannot
    be used, torch computes, with a warning. images: Returns their number, if it is known; for many `auto` compiles on a
    GPU. Raises UsageError for an engine that is not installed or cannot compute in this precision or on this device,
    and ExportError if its outputs differ from the network's.
    """
    if isinstance(network, Engine):
        return network.features if features else network
    if device.type != "cpu" and engine == "openvino":
        raise UsageError(f"the engine {engine} computes on a CPU, and the device is {device}: add --device cpu")
    engines = Engines(network, precision, device)
    chosen = engines.chosen(images) if engine == "auto" else engine
    if chosen == "graphs" and device.type != "cuda":
        raise UsageError(f"the engine graphs is for CUDA, and the device is {device}: choose another engine")
    if chosen == "torch" or chosen == "compiled" or chosen == "graphs":  # mypy narrows no tuple
        return predictor(network, device, precision, features=features, how=chosen)
    engines.stored(chosen)
    try:
        return engines.program(chosen, features=features)
    except (ExportError, UsageError) as error:
        if engine != "auto":
            raise
        log.warning("engine torch, because the engine %s cannot be used: %s", chosen, error)
        return predictor(network, device, precision, features=features)


def _for_many(network: ViT | ResNet, images: int) -> Installed:
    """Return the engine that a GPU takes for a number of images, and log the reason if it compiles the network."""
    from vitrail.costs.count import macs  # a tenth of a second, which only a GPU pays

    seconds = images * 2 * macs(network.config) / GPU_RATE
    if seconds < COMPILED_FROM or not isinstance(network, ViT) or own_parts(network.config):
        return "torch"
    log.info(
        "engine compiled: at least %s of computing, and compiling pays from %g min on",
        time_span(seconds),
        COMPILED_FROM / 60,
    )
    return "compiled"


def _all_engines() -> Path:
    return cache_folder() / "engines"


def _version(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


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
        files[name] = None if name == "torch" or name == "compiled" or name == "graphs" else engines.program(name).path
    rows = []
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(_EngineProcess(name, source, image_size, files[name], engines)) for name in files
        }
        rounds_of: dict[Installed, list[list[float]]] = {name: [] for name in files}
        for _ in range(ROUNDS):
            for name, process in processes.items():
                rounds_of[name].append(process.measure(seconds / ROUNDS))
    for name, rounds in rounds_of.items():
        one, many, memory = (statistics.median(column) for column in zip(*rounds, strict=True))
        latency = 1000 * BATCHES[0] / one
        rows.append(TimedEngine(name, engines.precision, many, latency, round(memory), differences[name]))
    return sorted(rows, key=lambda row: -row.images_per_second)


def _difference(engines: Engines, name: Installed) -> float:
    """Return the difference of an engine's outputs from the network's in float32; write its program if necessary."""
    if name != "torch" and name != "compiled" and name != "graphs":
        card = engines.program(name).path.parent / CARD
        try:
            return float(read_json_object(card, ExportError)["parity"]["relative"])
        except (LookupError, TypeError, ValueError) as error:
            raise ExportError(f"{card} does not state the difference of the program. Remove its folder") from error
    network = engines.network
    images, _ = images_to_compare((), card_of(network))
    predict = predictor(network, CPU, engines.precision, how=name)

    def run(batch: np.ndarray) -> np.ndarray:
        return predict(torch.from_numpy(batch)).numpy()

    return compare_outputs(run, network, images, "logits", engines.precision, runtime=name).relative


class _EngineProcess:
    """A process that runs one engine."""

    def __init__(
        self, name: Installed, source: str | Path, image_size: int | None, file: Path | None, engines: Engines
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, self._theirs = context.Pipe()
        arguments = (self._theirs, name, str(source), image_size, file, engines.precision, card_of(engines.network))
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
    name: Installed,
    source: str,
    image_size: int | None,
    file: Path | None,
    precision: ComputePrecision,
    card: Card,
) -> None:
    predict: Predict
    if file is None:
        network: Any = load(source, image_size=image_size)
        predict = predictor(network, CPU, precision, how="compiled" if name == "compiled" else "torch")
        del network
    else:
        predict = Engine(file, trusted=True)
    shape, random = (card.config.channels, *card.preprocess.size), np.random.default_rng(0)
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


def draw_engines(rows: Sequence[TimedEngine], path: Path, title: str) -> None:
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
        bars = axes.barh(names, values, color=COLOURS[0])
        axes.bar_label(bars, fmt="{:,.4g}", padding=3)
        axes.set_xlabel(what)
        axes.margins(x=0.25)
    figure.axes[0].invert_yaxis()  # the fastest on top
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, path)
