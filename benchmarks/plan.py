"""Compare the predictions of `vitrail plan` with what then happens.

    python -m benchmarks.plan                                    a few hundred of the embedded digits, a tiny network
    python -m benchmarks.plan --data photos/ --weights runs/x    any images, from any weights

It plans in a new process, as a user would, runs every printed command one after another, and compares the seconds from
the command to the prompt. A prediction is good within 25 %. The measured memory is the largest resident memory of the
process, minus that of a process that only imports the libraries (probes), or that takes one step with a minimal network
and writes its report (training).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import compare, record

GOOD = 0.25
"""Relative error of a prediction up to which it counts as good."""
IMPORTS = "import vitrail.evaluation.linear_probe, vitrail.verbs.probe"
LEAST = "--recipe digits --vit.patch 8 --image-size 8 --vit.width 8 --vit.heads 1 --vit.depth 1 --vit.mlp-dim 8"
LEAST += " --batch-size 2 --duration 1"
STEPS = ("--duration", "2 steps")
"""Settings of a quick run."""


class Ended(NamedTuple):
    """Time and memory of a finished process."""

    seconds: float
    output: str
    memory: int
    """Largest resident memory in bytes."""


def run(words: list[str], folder: Path) -> Ended:
    """Run Python with the arguments `words` in `folder`."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, *words], cwd=folder, stdout=output, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        log.seek(0)
        if process.returncode:
            raise SystemExit(f"{shlex.join(words)} ended with {process.returncode}:\n{log.read()}")
        return Ended(seconds, output.read(), 1024 * usage.ru_maxrss)


def digits(path: Path, images: int) -> Path:
    """Write this many of the embedded digits, and half as many to test, as arrays."""
    from vitrail.data.sources.open import open_data

    splits = open_data("digits")
    arrays: dict[str, np.ndarray] = {}
    for name, source, count in (("train", splits.train, images), ("test", splits.test, images // 2)):
        assert source is not None
        items = [source[i] for i in range(min(count, len(source)))]
        arrays |= {f"x_{name}": np.stack([item.image for item in items])}  # type: ignore[misc]
        arrays |= {f"y_{name}": np.array([item.label for item in items])}
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def weights(folder: Path) -> Path:
    """Save a tiny network with random weights, because the time does not depend on them."""
    from vitrail.data.settings import Preprocess
    from vitrail.model.build import create
    from vitrail.weights.card import Card
    from vitrail.weights.store import save_model

    model = create("Ti/4", width=64, depth=4, heads=2, mlp_dim=256, image_size=(16, 16), classes=10)
    save_model(folder, model, Card(model.config, preprocess=Preprocess((16, 16))))
    return folder


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Plan, run every way, and return predictions and measurements."""
    start = options.weights.absolute() if options.weights else weights(folder / "weights")
    data = options.data.absolute() if options.data else digits(folder / "digits.npz", options.images)
    size = [] if options.image_size is None else ["--image-size", str(options.image_size)]
    words = ["plan", str(data), "--from", str(start), *size, "--seconds", str(options.seconds), "--json", "--quiet"]
    nothing = run(["-c", IMPORTS], folder).memory
    least = run(["-m", "vitrail", "train", str(data), *LEAST.split(), "--quiet"], folder).memory
    planning = run(["-m", "vitrail", *words], folder)
    planned = json.loads(planning.output)
    rows = []
    for option in planned["options"]:
        command = shlex.split(option["command"])[1:] + (list(STEPS) if options.quick and option["steps"] else [])
        with compare.foreign_load() as foreign:
            ended = run(["-m", "vitrail", *command, "--quiet"], folder)
        rows.append(
            {
                "name": option["name"],
                "command": option["command"],
                "predicted_seconds": round(option["seconds"], 2),
                "seconds": round(ended.seconds, 2),
                "ratio": round(option["seconds"] / ended.seconds, 3),
                "parts": option["parts"],
                "steps": option["steps"],
                "predicted_mib": round(option["memory_bytes"] / 2**20, 1),
                "mib": round((ended.memory - (least if option["steps"] else nothing)) / 2**20, 1),
                "foreign_load": round(foreign[0], 3),
            }
        )
    return {
        "recommended": planned["recommended"],
        "planning_seconds": round(planning.seconds, 2),
        "importing_mib": round(nothing / 2**20, 1),
        "least_training_mib": round(least / 2**20, 1),
        "within_25_percent": sum(abs(row["ratio"] - 1) <= GOOD for row in rows),
        "rows": rows,
    }


def main() -> None:
    """Plan, run, print predictions and measurements, write results/plan.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--data", type=Path, help="images; left out: some of the embedded digits")
    parser.add_argument("--images", type=int, default=120, help="how many digits to train on")
    parser.add_argument("--weights", type=Path, help="what to start from; left out: a tiny network, untrained")
    parser.add_argument("--image-size", type=int, help="pixels; left out: the weights' own, the recipe's")
    parser.add_argument("--seconds", type=float, default=10.0, help="for timing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(options, Path(scratch))
    subject = str(options.data or f"{options.images} digits")
    table = Table(title=f"{subject}: predicted, and what happened", title_justify="left")
    for column in ("", "predicted s", "s", "ratio", "predicted MiB", "MiB", ""):
        table.add_column(column, justify="right" if column else "left")
    for row in found["rows"]:
        verdict = "" if abs(row["ratio"] - 1) <= GOOD else f"off by more than {GOOD:.0%}"
        numbers = [f"{row[name]:.1f}" for name in ("predicted_seconds", "seconds", "ratio", "predicted_mib", "mib")]
        numbers[2] = f"{row['ratio']:.2f}"
        table.add_row(row["name"], *numbers, verdict)
    Console(width=110).print(table)
    record.save("plan", options, data=subject, **found)


if __name__ == "__main__":
    main()
