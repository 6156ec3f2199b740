"""Time the linear probe's solver against scikit-learn's LogisticRegression on the same features, in one process.

    OMP_NUM_THREADS=2 python -m benchmarks.probe --threads 2

Both sides standardise the features and fit one strength of the penalty, from scratch, with their default tolerance;
"vitrail, all strengths" fits the whole default grid. The sides alternate, round after round. Features are random:
classes of Gaussian clouds whose variances fall off like those of a network's features. Before the clock, the objective
of both solutions is computed in float64: ours must be at most 0.1 % above scikit-learn's.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.special import log_softmax
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from benchmarks import compare, record
from benchmarks.compare import Measurement
from vitrail.evaluation.linear_probe import STRENGTHS
from vitrail.evaluation.softmax import solve

IMAGES, WIDTH, CLASSES, L2 = 20_000, 768, 100, 1e-3
PEER, DEFAULTS = "scikit-learn", "scikit-learn, its defaults"
"""The same strength until it converges; and C = 1, 100 iterations at most."""
QUICK = 500
"""Number of images of a quick run."""
NOISE = 1.2
"""Deviation within a class over that of the class means. At 1.2, a few test images in ten are classified wrong."""
TOLERANCE = 1e-3


def features(images: int, width: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features float32 [images, width] and labels."""
    rng = np.random.default_rng(0)
    scale = np.arange(1, width + 1) ** -0.5
    rotation = np.linalg.qr(rng.standard_normal((width, width)))[0]
    labels = rng.integers(0, classes, images)
    clouds = rng.standard_normal((classes, width))[labels] * scale**2
    x = (clouds + NOISE * rng.standard_normal((images, width)) * scale) @ rotation
    return x.astype(np.float32), labels


def sides(x: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, Callable[[], Any]]:
    """Return what each contender does: fit features [N, D] with labels [N]."""

    def ours(strengths: tuple[float, ...]) -> Any:
        return list(solve(x, labels, np.arange(len(x)), strengths, classes=classes))[-1]

    def theirs(**how: Any) -> Any:
        standard = StandardScaler().fit_transform(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return LogisticRegression(**how).fit(standard, labels)

    return {
        record.OURS: lambda: ours((L2,)),
        "vitrail, all strengths": lambda: ours(STRENGTHS),
        PEER: lambda: theirs(C=1 / (len(x) * L2), max_iter=10_000),
        DEFAULTS: theirs,
    }


def objectives(steps: dict[str, Callable[[], Any]], x: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the objective in float64 of both solutions for one strength. Raises SystemExit if ours is worse."""
    scaler = StandardScaler().fit(x.astype(np.float64))
    standard, found = scaler.transform(x.astype(np.float64)), {}
    for name in (record.OURS, PEER):
        model = steps[name]()
        if name == record.OURS:
            weight, bias = (
                model.classifier.weight.double().numpy() * scaler.scale_,
                model.classifier.bias.double().numpy(),
            )
        else:
            weight, bias = model.coef_, model.intercept_
        logits = log_softmax(standard @ weight.T + bias, axis=1)
        found[name] = float(L2 / 2 * np.square(weight).sum() - logits[np.arange(len(x)), labels].mean())
    print({name: round(value, 6) for name, value in found.items()})
    if found[record.OURS] > (1 + TOLERANCE) * found[PEER]:
        raise SystemExit("the optimum is worse than scikit-learn's")
    return found


def race(steps: dict[str, Callable[[], Any]], rounds: int) -> tuple[list[Measurement], list[Measurement]]:
    """Return the fits of each side per second, and per second of the process's CPU time; a round is one fit of each.

    On a busy machine with one thread, the CPU time is the more reliable of the two.
    """
    wall, cpu = ({name: Measurement(name) for name in steps} for _ in range(2))
    names = list(steps)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            with compare.foreign_load() as foreign:
                began, used = time.perf_counter(), time.process_time()
                steps[name]()
                cpu[name].rates.append(1 / (time.process_time() - used))
                wall[name].rates.append(1 / (time.perf_counter() - began))
            wall[name].foreign.append(foreign[0])
        print({name: f"{1 / one.rates[-1]:.1f} CPU s" for name, one in cpu.items()}, flush=True)
    return list(wall.values()), list(cpu.values())


def rows(wall: list[Measurement], cpu: list[Measurement]) -> list[dict[str, Any]]:
    """Return the seconds of a fit, and the speeds of ours (one strength, all strengths) over each of theirs."""
    found: list[dict[str, Any]] = []
    for number, (elapsed, used) in enumerate(zip(wall, cpu, strict=True)):
        row: dict[str, Any] = {"name": elapsed.name, "seconds": round(1 / elapsed.median, 2)}
        row |= {"cpu_seconds": round(1 / used.median, 2), "disturbed_rounds": elapsed.disturbed}
        if number > 1:
            row["ours_over_this"] = wall[0].ratio(elapsed).summary()
            row["ours_over_this_by_cpu_time"] = cpu[0].ratio(used).summary()
            row["all_strengths_over_this_by_cpu_time"] = cpu[1].ratio(used).summary()
        found.append(row)
    return found


def show(results: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    table = Table(title="linear probe, one fit", title_justify="left")
    columns = ("ours_over_this", "ours_over_this_by_cpu_time", "all_strengths_over_this_by_cpu_time")
    for column in ("", "seconds", "CPU seconds", "ours / this", "by CPU time", "all strengths / this", "disturbed"):
        table.add_column(column, justify="right" if column else "left")
    for row in results:
        ratios = [f"{row[key]['median']:.2f}x" if key in row else "" for key in columns]
        times = (f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}")
        table.add_row(row["name"], *times, *ratios, str(row["disturbed_rounds"] or ""))
    Console(width=110).print(table)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the solutions, then the times."""
    x, labels = features(QUICK if options.quick else options.images, WIDTH, CLASSES)
    steps = sides(x, labels, CLASSES)
    found = objectives(steps, x, labels)
    results = rows(*race(steps, options.rounds))
    show(results)
    return dict(images=len(x), width=WIDTH, classes=CLASSES, l2=L2, objectives=found, seconds=results)


def main() -> None:
    """Measure and write results/probe.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--images", type=int, default=IMAGES, help="number of training images")
    options = parser.parse_args()
    record.prepare(options)
    record.save("probe", options, **measure(options))


if __name__ == "__main__":
    main()
