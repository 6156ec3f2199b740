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
"""Image sizes in pixels; each model takes the nearest smaller multiple of its patch."""
SHARE = 0.8
"""Share of a CPU's free memory that a batch may take."""


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


@dataclass(frozen=True)
class Bench:
    """All measurements, and the machine they were made on."""

    device: str
    precision: Precision
    threads: int
    torch: str
    largest_batch_is: str
    measured: list[Measured]

    @property
    def machine(self) -> str:
        """The device and its settings in words."""
        return f"{self.device}, {self.precision}, {self.threads} threads, torch {self.torch}"


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
    """Measure images per second, peak memory and the largest batch that fits, by image size (paper, Figure 12).

    Each speed is the highest over batch sizes. Images come from memory, so loading them takes no time.

    Args:
        models: Model names such as B/16, R50x1 or R50+B/16.
        image_size: Side of the square input image in pixels; may be repeated (default: 64, 128, 224 and 384).
        batch_size: Batch size to try; may be repeated (default: 1, 2, 4, ... until larger batches are not faster).
        mode: Whether to measure inference, training or both.
        device: Device to measure: cpu, cuda, cuda:1 or mps (default: the best one of this machine).
        precision: Precision of the computation; auto is bf16 where the device computes fast in it.
        seconds: Seconds of measuring per batch size.
        out: Folder to write bench.json and the figure bench.png to.
    """
    if not models:
        raise UsageError("which networks? Name at least one: vitrail bench B/16 (or several: vitrail bench B/16 R50x1)")
    if min((*image_size, *batch_size), default=1) < 1 or not seconds > 0:
        raise UsageError("image sizes, batch sizes and seconds must be above 0")
    import torch

    from vitrail.device import choose_device, fast_bf16, fast_float32

    place = choose_device(device)
    configs = [(name, config) for name in models for config in _configs(name, image_size or SIZES)]
    chosen: Precision = ("bf16" if fast_bf16(place) else "float32") if precision == "auto" else precision
    modes: tuple[Mode, ...] = ("inference", "training") if mode == "both" else (mode,)
    with fast_float32():
        measured = [
            _measure(name, config, one, place, chosen, batch_size, seconds) for name, config in configs for one in modes
        ]
    fitting = "tried" if place.type == "cuda" else "extrapolated from the peaks of two small batches"
    result = Bench(str(place), chosen, torch.get_num_threads(), str(torch.__version__), fitting, measured)
    if out is not None:
        _write(result, Path(out))
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
    precision: Precision,
    batches: tuple[int, ...],
    seconds: float,
) -> Measured:
    from vitrail.costs import measure
    from vitrail.costs.count import macs

    trial = measure.Trial(config, mode, device, precision)
    line = measure.memory_line(trial)
    largest = _largest(trial, line)
    at = partial(measure.rate, trial, seconds=seconds)
    if batches:
        points = [at(batch) for batch in sorted(set(batches))]
    else:
        points = measure.sweep(at, [batch for batch in measure.BATCHES if batch <= max(largest, 1)])
    best = measure.best(points)
    flops = (6 if mode == "training" else 2) * macs(config) * best.images_per_second
    side = config.image_size[0]
    log.info("%s, %d px, %s: %.1f images/s at batch %d", name, side, mode, best.images_per_second, best.batch)
    return Measured(name, side, mode, best, flops, line.bytes(best.batch), largest, points)


def _largest(trial: Trial, line: Line) -> int:
    from vitrail.costs import measure
    from vitrail.device import free_memory

    if trial.device.type == "cuda":
        return measure.search_largest(partial(measure.step_fits, trial))
    # the fixed part is allocated already: the rest has to fit into free memory
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
        draw(list(curves.values()), folder / "bench.png", result.machine)
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
        numbers = (
            f"{row.best.images_per_second:,.1f}",
            f"{row.best.batch:,}",
            f"{row.flops_per_second / 1e9:,.0f}",
            f"{row.peak_bytes / 2**20:,.0f}",
            f"{row.largest_batch:,}",
        )
        table.add_row(row.model, str(row.image_size), row.mode, *numbers)
    note = f"MiB is the peak memory; fits is the largest batch, {result.largest_batch_is}"
    return Group(table, Text(f"{result.machine}; {note}"))


def as_json(result: Bench) -> Any:
    """Return the result as JSON values."""
    return asdict(result)
