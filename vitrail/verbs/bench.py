"""`vitrail bench`: how fast networks predict and train on this machine, and what fits into its memory."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import UsageError

if TYPE_CHECKING:
    import torch

    from vitrail.costs.count import Precision
    from vitrail.costs.measure import Line, Mode, Point, Trial
    from vitrail.model.variants import ResNetConfig, ViTConfig

log = logging.getLogger("vitrail")
SIZES = (64, 128, 224, 384)
"""Pixels; each model takes the nearest smaller multiple of its patch."""
SHARE = 0.8
"""Of the free memory of a CPU."""


@dataclass(frozen=True)
class Measured:
    """One model at one image size, predicting or training."""

    model: str
    image_size: int
    mode: Mode
    best: Point
    """At the batch size where it is fastest."""
    flops_per_second: float
    """Model FLOPs there: 2 x MACs, times 3 in training."""
    peak_bytes: int
    """Of memory, there: weights, optimiser state and all tensors of a step."""
    largest_batch: int
    """That fits."""
    points: list[Point]


@dataclass(frozen=True)
class Bench:
    """All measurements, and where they were made."""

    device: str
    precision: Precision
    threads: int
    torch: str
    largest_batch_is: str
    measured: list[Measured]


def bench(
    *models: str,
    image_size: tuple[int, ...] = (),
    batch_size: tuple[int, ...] = (),
    mode: Literal["inference", "training", "both"] = "both",
    device: str | None = None,
    precision: Literal["auto", "bf16", "float32"] = "auto",
    seconds: float = 1.0,
    out: str | Path | None = None,
) -> Bench:
    """Measure images per second, peak memory and the largest batch that fits, over image sizes (paper, Figure 12).

    Each speed is the highest over batch sizes. Images come from memory, so loading is not in it.

    Args:
        models: Names such as B/16, R50x1 or R50+B/16.
        image_size: Side of the square input in pixels; may be repeated; left out: 64, 128, 224 and 384.
        batch_size: Batch size to try; may be repeated; left out: 1, 2, 4, ... until they are no faster.
        mode: inference, training or both.
        device: cpu, cuda, cuda:1 or mps; left out: the best there is.
        precision: auto, bf16 or float32.
        seconds: Time for each batch size.
        out: Also write bench.json and the figure, bench.png, to this folder.
    """
    if not models:
        raise UsageError("measure which networks? vitrail bench B/16 (or several: vitrail bench B/16 R50x1)")
    if min((*image_size, *batch_size), default=1) < 1 or not seconds > 0:
        raise UsageError("image sizes, batch sizes and seconds must be above 0")
    import torch

    from vitrail.evaluation.classify import fast_bf16
    from vitrail.model.process import prepare_process
    from vitrail.training.resolve import choose_device

    place = choose_device(device)
    configs = {(name, size): config for name in models for size, config in _configs(name, image_size or SIZES).items()}
    chosen: Precision = ("bf16" if fast_bf16(place) else "float32") if precision == "auto" else precision
    prepare_process()
    modes: tuple[Mode, ...] = ("inference", "training") if mode == "both" else (mode,)
    measured = [
        _measure(name, config, one, place, chosen, batch_size, seconds)
        for (name, _), config in configs.items()
        for one in modes
    ]
    fitting = "tried" if place.type == "cuda" else "extrapolated from the peaks of two small batches"
    result = Bench(str(place), chosen, torch.get_num_threads(), str(torch.__version__), fitting, measured)
    if out is not None:
        _write(result, Path(out))
    return result


def _configs(name: str, sizes: tuple[int, ...]) -> dict[int, ViTConfig | ResNetConfig]:
    """The model at each image size, rounded down to whole patches. Raises UsageError for an unknown name."""
    from vitrail.model.variants import variant

    patch = getattr(variant(name), "patch", 1)
    whole = sorted({max(size // patch, 1) * patch for size in sizes})
    return {size: variant(name, image_size=(size, size)) for size in whole}


def _measure(
    name: str,
    config: ViTConfig | ResNetConfig,
    mode: Mode,
    device: torch.device,
    precision: Precision,
    batches: tuple[int, ...],
    seconds: float,
) -> Measured:
    from vitrail.costs import measure
    from vitrail.costs.count import macs

    trial = measure.Trial(config, mode, device, precision)
    line = measure.memory_line(trial)
    largest = _largest(trial, line)
    tried = sorted(set(batches)) or [batch for batch in measure.BATCHES if batch <= max(largest, 1)]
    at = partial(measure.rate, trial, seconds=seconds)
    points = [at(batch) for batch in tried] if batches else measure.sweep(at, tried)
    best = measure.best(points)
    flops = (6 if mode == "training" else 2) * macs(config) * best.images_per_second
    side = config.image_size[0]
    log.info("%s, %d px, %s: %.1f images/s at batch %d", name, side, mode, best.images_per_second, best.batch)
    return Measured(name, side, mode, best, flops, line.bytes(best.batch), largest, points)


def _largest(trial: Trial, line: Line) -> int:
    from vitrail.costs import measure
    from vitrail.training.batch_size import free_memory

    if trial.device.type == "cuda":
        return measure.search_largest(partial(measure.step_fits, trial))
    # what is fixed is there already: the rest has to fit into what is free
    return line.largest(line.fixed + SHARE * free_memory(trial.device))


def _write(result: Bench, folder: Path) -> None:
    from vitrail.costs.figure import Curve, draw

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(as_json(result), indent=1) + "\n", encoding="utf-8")
        curves: dict[tuple[str, str], Curve] = {}
        for row in result.measured:
            curve = curves.setdefault((row.model, row.mode), Curve(row.model, row.mode, [], [], []))
            curve.sizes.append(row.image_size)
            curve.images_per_second.append(row.best.images_per_second)
            curve.largest_batch.append(row.largest_batch)
        title = f"{result.device}, {result.precision}, {result.threads} threads, torch {result.torch}"
        draw(list(curves.values()), folder / "bench.png", title)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror or error}") from None


def show(result: Bench) -> Any:
    """Return the result as a table for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for column in ("model", "px", "mode", "images/s", "batch", "GFLOP/s", "MiB", "fits"):
        table.add_column(column, justify="left" if column in ("model", "mode") else "right", no_wrap=True)
    for row in result.measured:
        best = row.best
        numbers = (
            f"{best.images_per_second:,.1f}",
            f"{best.batch:,}",
            f"{row.flops_per_second / 1e9:,.0f}",
            f"{row.peak_bytes / 2**20:,.0f}",
            f"{row.largest_batch:,}",
        )
        table.add_row(row.model, str(row.image_size), row.mode, *numbers)
    where = f"{result.device}, {result.precision}, {result.threads} threads, torch {result.torch}"
    return Group(table, Text(f"{where}; MiB is the peak; what fits is {result.largest_batch_is}"))


def as_json(result: Bench) -> Any:
    """Return the result as JSON values."""
    return asdict(result)
