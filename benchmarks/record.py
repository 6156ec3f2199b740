"""Record a measurement: the machine, the versions, the ceiling, the command."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import compare
from benchmarks.compare import Measurement
from vitrail.device import has_amx

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
DATA = Path(os.environ.get("VITRAIL_TEST_DATA", ROOT.parent / "shared" / "data"))
"""Folder of the real images."""
OURS = "vitrail"

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile", "asimd", "bf16")
PACKAGES = (
    *("torch", "timm", "transformers", "torchvision", "numpy", "pillow", "simplejpeg"),
    *("onnxruntime", "openvino"),
)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only check that it runs; the figures mean nothing")
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds (at least 5 for figures to keep)")
    parser.add_argument("--threads", type=int, default=None, help="number of torch threads on both sides")
    return parser


def prepare(options: argparse.Namespace) -> None:
    """Set the same number of threads for all sides, and few rounds for a quick run."""
    torch.set_num_threads(options.threads or psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    torch.manual_seed(0)
    if options.quick:
        options.rounds = 2


def as_installed() -> dict[str, str]:
    """Return the environment of a process whose start is measured: compiled modules are kept, as by an installation."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT)}


def processor() -> tuple[str, set[str]]:
    """Return the name of the processor and its flags."""
    model, flags = platform.processor(), set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
    return model, flags


def machine(*, speed: bool = True) -> dict[str, Any]:
    """Return the processor, its relevant flags, with `speed` its measured GFLOP/s, the memory, threads and versions."""
    model, flags = processor()
    return {
        "cpu": model,
        **({"gflops": compare.ceiling(2048)} if speed else {}),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "MKL_", "KMP_"))},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def rows(measured: list[Measurement], *, ours: str = OURS, flops: float = 0, peak: float = 0) -> list[dict[str, Any]]:
    """Return one row per contender: images/s, share of the ceiling, and the ratio of our speed to its speed.

    `flops` is per image, `peak` in GFLOP/s; 0 leaves out the share.
    """
    by_name = {m.name: m for m in measured}
    result = []
    for m in measured:
        row: dict[str, Any] = {
            "name": m.name,
            "images_per_second": round(m.median, 2),
            "low": round(min(m.rates), 2),
            "high": round(max(m.rates), 2),
            "disturbed_rounds": m.disturbed,
            "rounds": [round(rate, 3) for rate in m.rates],
        }
        if flops and peak:
            row["share_of_ceiling"] = round(m.median * flops / (peak * 1e9), 3)
        if ours in by_name and m.name != ours:
            row["ours_over_this"] = by_name[ours].ratio(m).summary()
        result.append(row)
    return result


def kept(name: str, results: Path) -> list[Path]:
    """Return where results of a benchmark can be: those of the release's machine, and those with AMX."""
    return [results / f"{name}.json", results / "amx" / f"{name}.json"]


def save(name: str, options: argparse.Namespace, *, by_amx: bool = False, **content: Any) -> Path | None:
    """Write results/NAME.json and return its path; a quick run writes nothing, because its figures mean nothing.

    by_amx: Whether vitrail does something else with AMX. Then such results are kept apart, in results/amx.
    """
    document = {
        "benchmark": name,
        "command": f"python -m benchmarks.{name}" + "".join(f" {a}" for a in sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        **content,
    }
    if options.quick:
        print("quick run: nothing written", file=sys.stderr)
        json.dumps(document)  # raises where writing would
        return None
    path = kept(name, RESULTS)[by_amx and has_amx()]
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)
    return path


def commit() -> str:
    """Return the commit of this source, "-dirty" if files have changed; empty where git does not know it."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:  # a copy on a machine without git
        return ""
    return done.stdout.strip()


def show(title: str, results: list[dict[str, Any]]) -> None:
    """Print the rows as a table: rates and ratios with their spreads."""
    table = Table(title=title, title_justify="left")
    for column in ("", "images/s", "spread", "of ceiling", "ours / this", "spread", "disturbed"):
        table.add_column(column, justify="left" if not column else "right")
    for row in results:
        share, ratio = row.get("share_of_ceiling"), row.get("ours_over_this")
        table.add_row(
            row["name"],
            f"{row['images_per_second']:.1f}",
            f"{row['low']:.1f} - {row['high']:.1f}",
            f"{share:.0%}" if share else "",
            f"{ratio['median']:.2f}x" if ratio else "",
            f"{ratio['low']:.2f} - {ratio['high']:.2f}" if ratio else "",
            str(row["disturbed_rounds"] or ""),
        )
    Console(width=110).print(table)


def over_seeds(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and standard deviation, rounded; there is no deviation of a single value."""
    deviation = round(statistics.stdev(values), 2) if len(values) > 1 else None
    return {"mean": round(statistics.fmean(values), 2), "deviation": deviation}


def with_deviation(mean: float, deviation: float | None) -> str:
    """Return "mean ± deviation" with one decimal; the mean alone if there is one seed."""
    return f"{mean:.1f}" + ("" if deviation is None else f" ± {deviation:.1f}")


def seeds_table(
    rows: Sequence[dict[str, Any]], keys: dict[str, str], column: str, columns: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return a table of the accuracy of rows, as mean and standard deviation over seeds; its header comes first.

    keys: Name in a row -> its header, for what has a line of its own. column: Name of what has a column of its own.
    """
    scores: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in rows:
        line = scores.setdefault(tuple(str(row[name]) for name in keys), {name: [] for name in columns})
        line[row[column]].append(row["accuracy"])
    lines: list[tuple[str, ...]] = [(*keys.values(), *columns)]
    for key, found in scores.items():
        lines.append((*key, *(with_deviation(**over_seeds(some)) if some else "" for some in found.values())))
    return lines


def print_lines(title: str, lines: Sequence[tuple[str, ...]]) -> None:
    """Print the table of a document; the first line is its header."""
    first, *others = lines
    table = Table(*first, title=title)
    for line in others:
        table.add_row(*line)
    Console(width=110).print(table)
