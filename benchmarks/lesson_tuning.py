"""The follow-up's second lesson: accuracy and cost of fine-tuning a part of a network (its Tables 5 and 6).

A network trained on CIFAR-100 is fine-tuned on two other data sets at two resolutions: all weights, the attention
layers, the MLPs, or the classifier only. Each learning rate is chosen with the first seed, on images held out of the
training set. Each seed reads the test images once.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks import compare, tune
from benchmarks.cells import Cells
from benchmarks.compare import Contender
from benchmarks.learn import vitrail_verb
from benchmarks.peers import Architecture
from benchmarks.train_step import Case
from vitrail.costs.figure import COLOURS
from vitrail.device import fast_bf16

SETTINGS = {
    "flowers12": ("--augment.scale", "0.3", "1.0"),
    "digits": ("--augment.scale", "0.75", "1.0", "--augment.no-flip", "--data.subset=720"),
}
"""Settings per data set: the area of a crop; no mirroring of digits; as many digits as there are flowers."""
SAME = ("--batch-size=64", "--data.holdout=0.2", "--augment.crop=inception", "--optim.name=adamw")
SAME += ("--optim.weight-decay=0.05",)
CLASSES = {"flowers12": 12, "digits": 10}
BATCH = 32
"""Images per step when time and memory are measured."""


def finetuned(part: str, data: str, size: int, lr: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune once. Return the held-out and the test top-1 in percent and the bytes of the stored model."""
    path = options.flowers if data == "flowers12" else data
    with tempfile.TemporaryDirectory() as scratch, compare.foreign_load() as foreign:
        words = ["finetune", str(path), f"--from={options.weights}", f"--tune={part}", f"--lr={lr}", f"--seed={seed}"]
        words += [
            *SAME,
            *SETTINGS[data],
            f"--image-size={size}",
            f"--epochs={options.epochs}",
            f"--out={scratch}",
            *options.fewer,
        ]
        trained = vitrail_verb(words)
        stored = (Path(trained["folder"]) / "model" / "best" / "model.safetensors").stat().st_size
    return {
        "validation": 100 * trained["best"]["top1"],
        "test": 100 * trained["test"]["top1"],
        "stored_bytes": stored,
        "seconds": round(trained["seconds"], 1),
        "foreign_load": round(foreign[0], 3),
    }


def costs(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the time and peak memory of a step for every part at one resolution; the parts alternate."""
    architecture = Architecture(width=0, depth=0, heads=0, patch=1, image_size=size, classes=CLASSES["flowers12"])
    case = Case(f"{size} px", architecture, 2 if options.quick else BATCH)
    precision = "bf16" if fast_bf16(torch.device("cpu")) else "float32"  # as in the runs
    with tempfile.TemporaryDirectory() as scratch, compare.tuned():
        sides = [
            tune.side(part, case, precision, options.weights, Path(scratch), classes=architecture.classes)
            for part in tune.PARTS
        ]
        peaks = {one.part: tune.peak(one) for one in sides if one.step()}
        field = [Contender(one.part, one.step, case.batch, compare.tuned) for one in sides]
        measured = compare.race(field, rounds=options.rounds, seconds=0.1 if options.quick else 2.0)
    by_name = {one.name: one for one in measured}
    return {
        one.part: {
            "step_ms": round(1000 * case.batch / by_name[one.part].median, 2),
            "faster": by_name[one.part].ratio(by_name["all"]).summary(),
            "peak_bytes": peaks[one.part],
            "learning": one.learning,
        }
        for one in sides
    }


def group(part: str, data: str, size: int, cells: Cells, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the summary of one part's runs on one data set at one resolution; None if runs are missing."""
    key: dict[str, Any] = dict(lesson="tuning", weights=options.weights.name, epochs=options.epochs)
    key |= dict(data=data, size=size, part=part)

    def run(lr: float, seed: int) -> dict[str, Any] | None:
        return cells.get(lambda: finetuned(part, data, size, lr, seed, options), **key, lr=lr, seed=seed)

    tried = {lr: run(lr, options.seeds[0]) for lr in options.lrs}
    if any(result is None for result in tried.values()):
        return None
    best = max(options.lrs, key=lambda lr: tried[lr]["validation"])  # type: ignore[index]
    runs = [run(best, seed) for seed in options.seeds]
    if any(one is None for one in runs):
        return None
    test = [one["test"] for one in runs if one]
    return {
        "data": data,
        "size": size,
        "part": part,
        "lr": best,
        "mean": round(statistics.fmean(test), 2),
        "deviation": round(statistics.stdev(test), 2) if len(test) > 1 else None,
        "seeds": [round(value, 2) for value in test],
        "stored_bytes": next(one["stored_bytes"] for one in runs if one),
    }


def measure(cells: Cells, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the complete rows of the table; the smallest images come first, because they cost least."""
    rows = []
    for size in options.sizes:
        key = dict(lesson="costs", weights=options.weights.name, size=size, rounds=options.rounds)
        taken = cells.get(lambda size=size: costs(size, options), **key)  # type: ignore[misc]
        for data in options.data:
            found = [group(part, data, size, cells, options) for part in tune.PARTS]
            rows += [{**row, **(taken[row["part"]] if taken else {})} for row in found if row]
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print one table. Time, memory and storage are relative to tuning all weights."""
    table = Table(title="Fine-tuning a part of a network (follow-up, Tables 5 and 6)", title_justify="left")
    for column in ("", "pixels", "part", "test top-1", "+-", "rate", "step ms", "faster", "peak", "stored"):
        table.add_column(column, justify="left" if column in ("", "part") else "right")
    for row in rows:
        whole = next((r for r in rows if (r["data"], r["size"], r["part"]) == (row["data"], row["size"], "all")), None)
        shares = [f"{row[name] / whole[name]:.2f}" if whole and name in row else "" for name in COUNTED]
        timed = [f"{row['step_ms']:.1f}", f"{row['faster']['median']:.2f}x"] if "step_ms" in row else ["", ""]
        spread = "" if row["deviation"] is None else f"{row['deviation']:.1f}"
        cells = [row["data"], str(row["size"]), row["part"], f"{row['mean']:.1f}", spread, f"{row['lr']:g}"]
        table.add_row(*cells, *timed, *shares)
    Console(width=120).print(table)


RECORDED = ("epochs", "lrs")
"""Settings that the results file lists beside the table."""
COUNTED = ("peak_bytes", "stored_bytes")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy over stored bytes, one panel per data set and resolution."""
    panels = sorted({(row["data"], row["size"]) for row in rows})
    figure = Figure(figsize=(2.6 * len(panels) + 0.6, 3.3), layout="constrained")
    for axes, (data, size) in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        _panel(axes, [row for row in rows if (row["data"], row["size"]) == (data, size)])
        axes.set_title(f"{data}, {size} px", fontsize="medium")
        axes.set_xlabel("stored, MiB")
    figure.axes[0].set_ylabel("test top-1, %")
    figure.suptitle(
        "What is fine-tuned: accuracy (bars: deviation over seeds), and what each task has to store", fontsize="medium"
    )
    figure.savefig(path, dpi=144)


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        colour = COLOURS[tune.PARTS.index(row["part"])]
        stored = row["stored_bytes"] / 2**20
        axes.errorbar(stored, row["mean"], yerr=row["deviation"] or 0, fmt="o", color=colour, capsize=3)
        left = row["part"] == "attention"  # keeps its label away from the MLPs, whose accuracy may be similar
        place, side = (-6, 3) if left else (6, 3), "right" if left else "left"
        axes.annotate(row["part"], (stored, row["mean"]), place, textcoords="offset points", fontsize=8, ha=side)
    axes.grid(alpha=0.2)
    axes.margins(x=0.3, y=0.15)
