"""Measure the effect of `keep_freed_memory` on training and prediction, against glibc's default.

Each sample is a new process, and the two settings alternate, because glibc's own adaptation cannot be undone in a
process. Images are random, as in benchmarks/train_step.py.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import resource
from dataclasses import replace
from typing import Any

import torch

from benchmarks import compare, peers, record
from benchmarks.compare import Contender, Measurement
from benchmarks.train_step import CASES, Case, batches, vitrail_step
from vitrail.device import fast_bf16, keep_freed_memory
from vitrail.evaluation.classify import predictor

SIDES = {record.OURS: True, "glibc as it comes": False}
PREDICTED = 64
"""Batch size of `vitrail evaluate`."""


def worker(work: str, case: Case, precision: Any) -> Contender:
    """One case: a network that trains or predicts."""
    model = peers.ours(case.architecture)
    if work == "training":
        return Contender(work, vitrail_step(model, case, precision), case.batch, compare.tuned)
    predict, images = predictor(model, precision=precision), itertools.cycle(batches(case))
    return Contender(work, lambda: predict(next(images)[0]), case.batch, compare.tuned)


def sample(kept: bool, work: str, case: Case, precision: str, threads: int, seconds: float) -> tuple[float, ...]:
    """Return images/s, the share of the machine that other processes used, and this process's peak in MiB."""
    if kept:
        keep_freed_memory()
    torch.set_num_threads(threads)
    (measured,) = compare.race([worker(work, case, precision)], rounds=1, seconds=seconds)
    return measured.rates[0], measured.foreign[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(work: str, case: Case, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return one table: both sides, round by round."""
    measured = {name: Measurement(name) for name in SIDES}
    peaks: dict[str, list[float]] = {name: [] for name in SIDES}
    seconds = 0.1 if options.quick else 6.0
    for turn in range(options.rounds):
        for name in list(SIDES)[:: -1 if turn % 2 else 1]:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                told = pool.apply(sample, (SIDES[name], work, case, precision, torch.get_num_threads(), seconds))
            measured[name].rates.append(told[0])
            measured[name].foreign.append(told[1])
            peaks[name].append(told[2])
    rows = record.rows(list(measured.values()))
    for row in rows:
        row["peak_mib"] = round(max(peaks[row["name"]]))
    record.show(f"{work}, {case.name}, batch {case.batch}, {precision}, images/s", rows)
    return {"work": work, "case": case.name, "batch": case.batch, "precision": precision, "rows": rows}


def main() -> None:
    """Measure and write results/allocator.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    precision = "bf16" if fast_bf16(torch.device("cpu")) else "float32"  # as runs have it here
    work = [("training", case) for case in CASES] + [("predicting", replace(case, batch=PREDICTED)) for case in CASES]
    if options.quick:
        work = [(kind, replace(case, batch=2)) for kind, case in work]
    record.save("allocator", options, results=[measure(kind, case, precision, options) for kind, case in work])


if __name__ == "__main__":
    main()
