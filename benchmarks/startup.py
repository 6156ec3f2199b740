"""How long a user waits before anything happens: `vitrail --help`, and what importing costs.

Each command runs in a fresh process, alternating; times are wall-clock seconds of the whole process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record

LIMIT = 0.8
"""Seconds in which `vitrail --help` has to answer."""

HELP = (
    sys.executable,
    "-c",
    "import sys; sys.argv = ['vitrail', '--help']; from vitrail.cli import main; main()",
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "vitrail --help": HELP,
    "python alone": (sys.executable, "-c", "pass"),
    "import vitrail": (sys.executable, "-c", "import vitrail"),
    "import torch": (sys.executable, "-c", "import torch"),
    "import timm": (sys.executable, "-c", "import timm"),
    "import transformers' ViT": (sys.executable, "-c", "from transformers import ViTForImageClassification"),
    "create a Ti/16": (sys.executable, "-c", "from vitrail.model.build import create; create('Ti/16')"),
    "create timm's Ti/16": (sys.executable, "-c", "import timm; timm.create_model('vit_tiny_patch16_224')"),
}


def seconds(command: tuple[str, ...]) -> float:
    """Wall-clock seconds of one run; raises CalledProcessError where it fails."""
    start = time.perf_counter()
    subprocess.run(command, cwd=record.ROOT, env=record.as_installed(), check=True, capture_output=True)
    return time.perf_counter() - start


def slowest_imports(count: int = 8) -> list[dict[str, Any]]:
    """The modules that `vitrail --help` spends most time importing, each with what it imports in turn."""
    command = (HELP[0], "-X", "importtime", *HELP[1:])
    done = subprocess.run(command, cwd=record.ROOT, check=True, capture_output=True, text=True)
    found: list[dict[str, Any]] = []
    for line in done.stderr.splitlines():
        fields = line.removeprefix("import time:").split("|")
        if len(fields) == 3 and fields[1].strip().isdigit():
            found.append({"module": fields[2].strip(), "milliseconds": int(fields[1]) / 1000})
    return sorted(found, key=lambda entry: -entry["milliseconds"])[:count]


def imports_torch() -> bool:
    """Does `vitrail --help` import torch?"""
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); "
    command = (HELP[0], "-c", check + HELP[2])
    done = subprocess.run(command, cwd=record.ROOT, check=True, capture_output=True, text=True)
    return done.stderr.strip().endswith("True")


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median, lowest and highest seconds of each command over alternating rounds."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds + 1):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    # the first round reads the files from disk, and compiles ours
    return {
        name: {"median": round(statistics.median(t), 3), "low": round(min(t), 3), "high": round(max(t), 3)}
        for name, (_, *t) in times.items()
    }


def main() -> None:
    """Measure and write results/startup.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    results = measure(options)
    table = Table(title="seconds from the prompt back to the prompt", title_justify="left")
    for column in ("", "median", "spread"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in results.items():
        table.add_row(name, f"{row['median']:.2f}", f"{row['low']:.2f} - {row['high']:.2f}")
    Console(width=110).print(table)
    torch_imported = imports_torch()
    print(f"vitrail --help imports torch: {torch_imported}; limit {LIMIT} s")
    imports = slowest_imports()
    for entry in imports:
        print(f"  {entry['milliseconds']:8.1f} ms  {entry['module']}")
    record.save("startup", options, results=results, limit=LIMIT, imports_torch=torch_imported, imports=imports)


if __name__ == "__main__":
    main()
