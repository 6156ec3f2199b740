"""`vitrail bench`: how fast networks predict and train on this machine, and what fits into its memory."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.device import ComputePrecision, Precision
from vitrail.disk import writing
from vitrail.errors import UsageError
from vitrail.exports.kinds import EngineName, Installed
from vitrail.files import check_writable, replacing_text
from vitrail.ranges import Count, Seconds, Side, checked
from vitrail.terminal import page, table
from vitrail.verbs.flags.compute import Compute
from vitrail.version import install_extra, need
from vitrail.words import listing, one_line

if TYPE_CHECKING:
    import torch

    from vitrail.costs.measure import Mode, Point
    from vitrail.exports.engines import TimedEngine
    from vitrail.model.variants import ResNetConfig, ViTConfig

log = logging.getLogger("vitrail")
SIZES = (64, 128, 224, 384)
"""Image sizes in pixels; each model takes the nearest smaller multiple of its patch."""
SHARE = 0.8
"""Share of the free memory that a batch may take."""


@dataclass(frozen=True)
class Measured:
    """One model at one image size, predicting or training."""

    model: str
    image_size: int
    mode: Mode
    best: Point
    """The measurement at the batch size where the model is fastest."""
    flops_per_second: float
    """Model FLOPs at that batch size: 2 x MACs, times 3 in training."""
    peak_bytes: int
    """Peak memory at that batch size: weights, optimiser state and all tensors of a step."""
    largest_batch: int
    """Largest batch that fits into memory."""
    points: list[Point]


@one_line
@dataclass(frozen=True)
class Bench:
    """All measurements, and the machine they were made on."""

    device: str
    precision: ComputePrecision
    threads: int
    torch: str
    measured: list[Measured]

    @property
    def machine(self) -> str:
        """The device and its settings in words."""
        return f"{self.device}, {self.precision}, {self.threads} thread{'s' * (self.threads != 1)}, torch {self.torch}"


@one_line
@dataclass(frozen=True)
class EngineBench:
    """The engines of one network, the fastest first, and the machine they were measured on."""

    machine: str
    engines: list[TimedEngine]
    used: Installed | None = None
    """The engine that `--engine auto` takes from now on; None if only one was measured."""


@checked
def bench(
    *models: str,
    image_size: tuple[Side, ...] = (),
    batch_size: tuple[Count, ...] = (),
    mode: Literal["inference", "training", "both"] = "both",
    device: str | None = None,
    precision: Precision = "auto",
    engines: bool = False,
    engine: EngineName = "auto",
    seconds: Seconds = 1.0,
    out: str | Path | None = None,
) -> Bench | EngineBench:
    """Measure images per second, peak memory and the largest batch that fits, by image size (paper, Figure 12).

    Each speed is the highest over batch sizes. Images come from memory, so loading them takes no time.

    With --engines, one trained network is measured on this machine's CPU with each engine that is installed: torch,
    OpenVINO and ONNX Runtime, each in a process of its own. `predict`, `evaluate`, `embed` and `serve` then take the
    fastest. With --engine, only that one is measured.

    Args:
        models: Model names such as B/16, R50x1 or R50+B/16; for engines one network as `vitrail predict` takes it.
        image_size: Side of the square input image in pixels; may be repeated (default: 64, 128, 224 and 384).
        batch_size: Batch size to try; may be repeated (default: 1, 2, 4, ... until larger batches are not faster).
        mode: Whether to measure inference, training or both.
        engines: Compare the engines of a trained network.
        engine: Measure a trained network with this engine only: torch, compiled, openvino, onnx or aoti.
        seconds: Seconds of measuring per batch size.
        out: Folder to write bench.json and the figure bench.png to; for engines, engines.json and engines.png.
    """
    compute = Compute(device=device, precision=precision, engine=engine)
    if not models:
        raise UsageError("no network is given. Name at least one: vitrail bench B/16 (or several: B/16 R50x1)")
    if out is not None:
        check_writable(Path(out), UsageError, folder=True)
        need("matplotlib")
    if engines and engine != "auto":
        raise UsageError(f"--engines measures every engine, and --engine only {engine}: give one of them")
    if engines or engine != "auto":
        if len(models) != 1 or len(image_size) > 1 or batch_size or mode == "training":
            raise UsageError(
                "engines are measured for one network at one --image-size, in inference, in batches of 1 and 8 images"
            )
        return _measure_engines(models[0], image_size[0] if image_size else None, compute, seconds, out)
    import torch

    from vitrail.device import compute_precision, fast_float32

    place = compute.place()
    configs = [(name, config) for name in models for config in _configs(name, image_size or SIZES)]
    chosen = compute_precision(place, precision)
    modes: tuple[Mode, ...] = ("inference", "training") if mode == "both" else (mode,)
    with fast_float32():
        measured = [
            _measure(name, config, one, place, chosen, batch_size, seconds) for name, config in configs for one in modes
        ]
    result = Bench(str(place), chosen, torch.get_num_threads(), str(torch.__version__), measured)
    if out is not None:
        _write(result, Path(out))
    return result


def _measure_engines(
    model: str, image_size: int | None, compute: Compute, seconds: float, out: str | Path | None
) -> EngineBench:
    import torch

    from vitrail.device import fast_float32, processor
    from vitrail.exports.engines import Engines, draw_engines, measure
    from vitrail.verbs.network import load_classifier

    if compute.place().type != "cpu":
        raise UsageError("engines compute on a CPU: add --device cpu")
    found = Engines(load_classifier(model, image_size), compute.precision)
    names = found.names()
    if compute.engine != "auto":
        if compute.engine not in (*names, "aoti", "compiled"):
            raise UsageError(
                f"the engine {compute.engine} is not installed or does not compute in {found.precision}; there are "
                f"{listing(names, quoted=False)}. All engines: {install_extra('engines')}"
            )
        names = [compute.engine]
    with fast_float32():
        rows = measure(model, image_size, found, seconds, names)
    if compute.engine == "auto":
        found.remember(rows)
    threads = torch.get_num_threads()
    used = found.fastest() if compute.engine == "auto" else None
    machine = f"{processor()}, {found.precision}, {threads} thread{'s' * (threads != 1)}, torch {torch.__version__}"
    result = EngineBench(machine, rows, used)
    if out is not None:
        with writing(Path(out), UsageError):
            with replacing_text(Path(out) / "engines.json") as file:
                file.write(json.dumps(as_json(result), indent=1) + "\n")
            draw_engines(rows, Path(out) / "engines.png", f"{model}: {result.machine}")
    return result


def _configs(name: str, sizes: tuple[int, ...]) -> list[ViTConfig | ResNetConfig]:
    """Return the model at each image size, rounded down to whole patches. Raises UsageError for an unknown name."""
    from vitrail.model.variants import variant

    patch = getattr(variant(name), "patch", 1)
    whole = sorted({max(size // patch, 1) * patch for size in sizes})
    return [variant(name, image_size=(size, size)) for size in whole]


def _measure(
    name: str,
    config: ViTConfig | ResNetConfig,
    mode: Mode,
    device: torch.device,
    precision: ComputePrecision,
    batches: tuple[int, ...],
    seconds: float,
) -> Measured:
    from vitrail.costs import measure
    from vitrail.costs.count import macs
    from vitrail.device import free_memory

    timed = measure.TimedNetwork(config, mode, device, precision)
    line = measure.memory_line(timed)
    # the fixed part is allocated already: the rest has to fit into free memory
    largest = line.largest(line.fixed + SHARE * free_memory(device))
    if too_large := [batch for batch in batches if batch > max(largest, 1)]:
        raise UsageError(
            f"a batch of {max(too_large):,} images does not fit into the free memory ({mode} of {name} at "
            f"{config.image_size[0]} px); at most {largest:,} images fit. Choose a smaller --batch-size"
        )
    if batches:
        points = [measure.rate(timed, batch, seconds) for batch in sorted(set(batches))]
    else:
        points = measure.fastest(timed, [batch for batch in measure.BATCHES if batch <= max(largest, 1)], seconds)
    best = measure.best(points)
    flops = (6 if mode == "training" else 2) * macs(config) * best.images_per_second
    side = config.image_size[0]
    log.info("%s, %d px, %s: %.1f images/s at batch %d", name, side, mode, best.images_per_second, best.batch)
    return Measured(name, side, mode, best, flops, line.bytes(best.batch), largest, points)


def _write(result: Bench, folder: Path) -> None:
    from vitrail.costs.figure import Curve, draw_speed

    with writing(folder, UsageError):
        with replacing_text(folder / "bench.json") as file:
            file.write(json.dumps(as_json(result), indent=1) + "\n")
        curves: dict[tuple[str, str], Curve] = {}
        for row in result.measured:
            curve = curves.setdefault((row.model, row.mode), Curve(row.model, row.mode, [], [], []))
            curve.sizes.append(row.image_size)
            curve.images_per_second.append(row.best.images_per_second)
            curve.largest_batch.append(row.largest_batch)
        draw_speed(list(curves.values()), folder / "bench.png", result.machine)


def show(result: Bench | EngineBench) -> Any:
    """Return the result as a table for a terminal."""
    if isinstance(result, EngineBench):
        lines = [
            (
                row.engine,
                f"{row.images_per_second:,.1f}",
                f"{row.latency_ms:,.1f}",
                f"{row.memory_bytes / 2**20:,.0f}",
                f"{row.difference:.1e}",
            )
            for row in result.engines
        ]
        fastest = f"; {result.used} will be used (--engine auto)" if result.used else ""
        note = f"{result.machine}{fastest}"
        return page(table(("engine", "images/s", "ms for one", "MiB", "difference"), lines), note)
    rows = [
        (
            row.model,
            row.image_size,
            row.mode,
            f"{row.best.images_per_second:,.1f}",
            f"{row.best.batch:,}",
            f"{row.flops_per_second / 1e9:,.0f}",
            f"{row.peak_bytes / 2**20:,.0f}",
            f"{row.largest_batch:,}",
        )
        for row in result.measured
    ]
    note = "MiB is the peak memory; fits is the largest batch, extrapolated from the peaks of two small ones"
    return page(
        table(("model", "px", "mode", "images/s", "batch", "GFLOP/s", "MiB", "fits"), rows),
        f"{result.machine}; {note}",
    )


def as_json(result: Bench | EngineBench) -> Any:
    """Return the result as JSON values."""
    return asdict(result)
