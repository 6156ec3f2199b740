"""One optimiser step, ours against timm, transformers and torchvision, on the CPU.

The same architecture, batch, precision and threads for all; AdamW; synthetic images in memory; no clipping, no mixing,
no dropout on any side. vitrail is handed uint8 images as its loader makes them; the others get float images already
normalised, which costs them nothing here. Each side has a process of its own, ours set as `vitrail train` sets it
(`keep_freed_memory`; benchmarks/allocator.py measures what that does). "timm" is timm as it comes: eager, fused
attention, the optimiser its factory builds. The other timm rows are its best settings: compiled or not, either
attention path, fused AdamW; "timm at its best" is the fastest of all of them.

Before the race ours and timm start from the same weights and must have the same losses.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import compare, peers, record
from benchmarks.compare import Contender
from benchmarks.peers import Architecture
from vitrail.device import keep_freed_memory

Step = Callable[[], float]
"""Makes one optimiser step and returns its loss."""
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.05


@dataclass(frozen=True)
class Case:
    """What is trained, and how many images per step."""

    name: str
    architecture: Architecture
    batch: int


CASES = (
    Case("width 192, depth 6, 32 px, patch 4", peers.SMALL_IMAGES, 128),
    Case("S/16, 224 px", peers.S16, 16),
)
PRECISIONS = ("bf16", "float32")
LOSS_TOLERANCE = {"float32": 1e-5, "bf16": 3e-2}

TIMM = {  # name -> fused attention, compiled, fused AdamW
    "timm": (True, False, False),
    "timm, fused AdamW": (True, False, True),
    "timm, explicit attention": (False, False, True),
    "timm, compiled": (True, True, True),
    "timm, compiled, explicit attention": (False, True, True),
}
OTHERS = {"transformers": peers.transformers, "torchvision": peers.torchvision}


def batches(case: Case, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Random uint8 images and labels; several, so that none stays in the cache."""
    side, generator = case.architecture.image_size, torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, 256, (case.batch, 3, side, side), dtype=torch.uint8, generator=generator),
            torch.randint(0, case.architecture.classes, (case.batch,), generator=generator),
        )
        for _ in range(count)
    ]


def vitrail_step(
    model: nn.Module,
    case: Case,
    precision: str,
    data: Iterator[Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    """Our step with labels.

    It trains on `data`, batches of vitrail's loader, or else on random images; None: AdamW.
    """
    from vitrail.data.settings import Augment
    from vitrail.objective.settings import Supervised
    from vitrail.objective.supervised import SupervisedObjective

    objective = SupervisedObjective(model.train(), Supervised(), Augment(), case.architecture.classes, seed=0)
    return objective_step(objective, case, precision, data, optimizer)


def objective_step(
    objective: Any,
    case: Case,
    precision: str,
    data: Iterator[Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    """The step of an objective of ours, of the parts and in the order of `vitrail.training.loop`; the rest as above.

    As in the loop, threads compute micro-batches at the same time where that is the default.
    """
    from vitrail.training.optim.optimizer import build_optimizer
    from vitrail.training.parallel import distribute
    from vitrail.training.run import Optim, Run
    from vitrail.training.step import backward, seed_step

    optimizer = optimizer or build_optimizer(objective, Optim(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY))
    feed = data or itertools.cycle([_batch(images, labels) for images, labels in batches(case)])
    steps, network = itertools.count(), distribute(objective, Run(batch_size=case.batch))

    def step() -> float:
        number = next(steps)
        seed_step(0, number, 0)
        outcome = backward(objective, next(feed), step=number, parts=1, autocast=precision == "bf16", network=network)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return outcome.loss

    return step


def _batch(images: Tensor, labels: Tensor) -> SimpleNamespace:
    return SimpleNamespace(images=images, labels=labels, index=torch.arange(len(labels)))


def peer_step(model: Any, case: Case, optimizer: torch.optim.Optimizer) -> Step:
    """The step a plain training script makes with a model in training mode, compiled or not."""
    feed = itertools.cycle([((i.float() / 255 - 0.5) / 0.5, labels) for i, labels in batches(case)])

    def step() -> float:
        images, labels = next(feed)
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def timm_step(model: nn.Module, case: Case, *, compiled: bool, fused_optimizer: bool) -> Step:
    """timm's model with the optimiser timm's factory builds."""
    from timm.optim import create_optimizer_v2

    more: dict[str, Any] = {"fused": True} if fused_optimizer else {}
    optimizer = create_optimizer_v2(model, "adamw", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **more)
    return peer_step(torch.compile(model) if compiled else model, case, optimizer)


def other_step(model: nn.Module, case: Case) -> Step:
    """transformers' or torchvision's model with torch's AdamW as it comes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return peer_step(model, case, optimizer)


def contender(name: str, case: Case, precision: str) -> Contender:
    """Return one side, ours with this process set as the command line sets it."""
    if name == record.OURS:
        keep_freed_memory()
        step = vitrail_step(peers.ours(case.architecture), case, precision)
        return Contender(name, step, case.batch, compare.tuned)  # the step enters autocast itself
    if name in TIMM:
        fused, compiled, fused_optimizer = TIMM[name]
        model = peers.timm(case.architecture, fused=fused)
        step = timm_step(model, case, compiled=compiled, fused_optimizer=fused_optimizer)
    else:
        step = other_step(OTHERS[name](case.architecture), case)
    return Contender(name, step, case.batch, partial(compare.stock, precision))


def same_losses(case: Case, precision: str, steps: int = 4) -> float:
    """Largest relative difference of the losses of ours and timm's over some steps from the same weights.

    Raises SystemExit where it is more than rounding: a faster step that learns something else is no faster.
    """
    theirs = peers.timm(case.architecture)
    model = peers.ours(case.architecture)
    peers.load_timm(model, theirs)
    our_step = vitrail_step(model, case, precision)
    their_step = timm_step(theirs, case, compiled=False, fused_optimizer=False)
    difference = 0.0
    for _ in range(steps):
        with compare.tuned():
            a = our_step()
        with compare.stock(precision):
            b = their_step()
        difference = max(difference, abs(a - b) / abs(b))
    if difference > LOSS_TOLERANCE[precision]:
        raise SystemExit(f"{case.name}, {precision}: the losses differ by {difference:.1e}")
    return difference


def peak_memory(name: str, case: Case, precision: str, threads: int) -> float | None:
    """MiB that building a model and training three steps adds at its peak, in this (fresh) process."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    torch.set_num_threads(threads)
    contender(name, replace(case, architecture=replace(case.architecture, depth=1)), precision)  # imports
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # start the kernel's high-water mark anew
    side = contender(name, case, precision)
    with side.setting():
        for _ in range(3):
            side.step()
    peak = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return round((peak * 1024 - before) / 2**20, 1)


def memory(case: Case, precision: str, names: list[str]) -> dict[str, float | None]:
    """Peak memory of each contender: the median of three processes, because the allocator varies by some percent."""
    found: dict[str, list[float | None]] = {name: [] for name in names}
    for name in names * 3:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[name].append(pool.apply(peak_memory, (name, case, precision, torch.get_num_threads())))
    return {name: None if None in peaks else statistics.median(peaks) for name, peaks in found.items()}


def measure(case: Case, precision: str, options: argparse.Namespace, peak: float) -> dict[str, Any]:
    """One table: everybody at one size and precision."""
    difference = same_losses(case, precision)
    left_out = [name for name, (_, compiled, _) in TIMM.items() if compiled and options.quick]
    names = [name for name in (record.OURS, *OTHERS, *TIMM) if name not in left_out]
    sides = {name: partial(contender, name, case, precision) for name in names}
    measured = compare.race_apart(sides, rounds=options.rounds, seconds=0.1 if options.quick else 4.0)
    by_name = {m.name: m for m in measured}
    best = max((m for m in measured if m.name in TIMM), key=lambda m: m.median)
    rows = record.rows(measured, flops=3 * case.architecture.flops, peak=peak)  # backward: twice the forward
    record.show(f"{case.name}, batch {case.batch}, {precision}, images/s of training", rows)
    ours = by_name[record.OURS]
    return {
        "case": case.name,
        "batch": case.batch,
        "precision": precision,
        "loss_difference": difference,
        "rows": rows,
        "over_timm": ours.ratio(by_name["timm"]).summary(),
        "timm_at_its_best": best.name,
        "over_timm_at_its_best": ours.ratio(best).summary(),
        "peak_memory_mib": memory(case, precision, [record.OURS, "timm", best.name]),
    }


def main() -> None:
    """Run all sizes and precisions and write results/train_step.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    peak = compare.ceiling(512 if options.quick else 2048)
    print("ceiling, GFLOP/s:", peak)
    results = []
    for case, precision in itertools.product(CASES, PRECISIONS):
        if options.quick:
            case = replace(case, batch=2, architecture=replace(case.architecture, depth=1))
        results.append(measure(case, precision, options, peak[precision]))
        summary = {k: v for k, v in results[-1].items() if k not in ("rows", "case", "batch", "precision")}
        print(*(f"  {key}: {value}" for key, value in summary.items()), sep="\n")
    record.save("train_step", options, results=results)


if __name__ == "__main__":
    main()
