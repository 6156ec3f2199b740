"""Measure what tuning a part of a network saves: all weights, attention, MLPs or classifier (follow-up, section 4).

One training step of each alternates in one process, from the same weights, on the same synthetic images, with AdamW.
Besides speed, it measures: the memory that autograd holds per image between the forward and the backward pass; the peak
memory of a step (weights, gradients, optimiser state and images included); the optimiser's state; and the file that
`vitrail finetune --tune` stores. The follow-up reports for attention: 10 % faster, 10 % less memory, 66 % less storage.

All sides must have the same loss before they are timed.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import compare, peers, record, train_step
from benchmarks.compare import Contender
from benchmarks.train_step import Case, Step
from vitrail.costs.count import LiveTensors, kept_bytes
from vitrail.training.optim.optimizer import build_optimizer
from vitrail.training.optim.tune import tune
from vitrail.training.run import Optim, Run, Tune
from vitrail.weights.load import load
from vitrail.weights.save import card_of, save
from vitrail.weights.store import WEIGHTS, save_model

CASE = Case("S/16, 224 px", peers.S16, 16)
PARTS: tuple[Tune, ...] = ("all", "attention", "ffn", "head")
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Side:
    """One tuned part, ready to take steps."""

    part: Tune
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    learning: int
    """Number of trainable parameters."""
    stored: int
    """Bytes of the file that stores them."""

    def state(self) -> Iterator[Tensor]:
        """Yield the optimiser's tensors."""
        for values in self.optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))


def start(case: Case, folder: Path) -> Path:
    """Save the network that all sides start from. Its classifier is not zero, so that the losses can be compared."""
    model = peers.ours(case.architecture)
    nn.init.normal_(model.get_submodule("head").weight, std=0.02)  # type: ignore[arg-type]
    return save(model, folder / "base").path


def side(
    part: Tune, case: Case, precision: str, base: Path, folder: Path | None = None, classes: int | None = None
) -> Side:
    """Load the base with a new head for `classes` classes, and freeze the rest, as `vitrail finetune --tune` does.

    The tuned part is stored in `folder`; None: beside the base.
    """
    model = load(base)
    if classes is not None:
        model.reset_head(classes)  # type: ignore[operator]
    tuned, _ = tune(model, Run(weights=str(base), tune=part))
    optimizer = build_optimizer(model, Optim(lr=train_step.LEARNING_RATE, weight_decay=train_step.WEIGHT_DECAY))
    step = train_step.vitrail_step(model, case, precision, optimizer=optimizer)
    place = (folder or base.parent) / f"{part}-{precision}"
    save_model(place, model, card_of(model), tuned.base)
    return Side(part, model, optimizer, step, tuned.parameters, (place / WEIGHTS).stat().st_size)


def kept(one: Side, case: Case, precision: str) -> float:
    """Return the bytes per image that autograd holds."""
    side = case.architecture.image_size

    def forward(number: int) -> Tensor:
        with compare.autocast(precision):
            return one.model(torch.zeros(number, 3, side, side, dtype=torch.uint8))

    return kept_bytes(forward)


def peak(one: Side) -> int:
    """Return the peak bytes of tensors during a step, after the optimiser has created its state."""
    with LiveTensors([*one.model.parameters(), *one.model.buffers(), *one.state()]) as live:
        one.step()
    return live.peak


def same_losses(sides: list[Side], case: Case) -> None:
    """Raise SystemExit if the first losses differ, since tuning a part does not change the forward pass."""
    losses = {one.part: one.step() for one in sides}
    if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * max(losses.values()):
        raise SystemExit(f"{case.name}: the losses of the first step differ: {losses}")


def measure(case: Case, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return one table: every tuned part at one size and precision."""
    with tempfile.TemporaryDirectory() as folder:
        base = start(case, Path(folder))
        sides = [side(part, case, precision, base) for part in PARTS]
        with compare.tuned():
            same_losses(sides, case)
            counted = {
                one.part: {
                    "learning": one.learning,
                    "kept_bytes_per_image": round(kept(one, case, precision)),
                    "peak_bytes": peak(one),
                    "optimizer_bytes": sum(value.nbytes for value in one.state()),
                    "stored_bytes": one.stored,
                }
                for one in sides
            }
        field = [Contender(one.part, one.step, case.batch, compare.tuned) for one in sides]
        measured = compare.race(field, rounds=options.rounds, seconds=0.1 if options.quick else 4.0)
    by_name = {m.name: m for m in measured}
    over_all = {part: by_name[part].ratio(by_name["all"]).summary() for part in PARTS}
    rows = [{**row, **counted[row["name"]], "over_all": over_all[row["name"]]} for row in record.rows(measured)]
    return {"case": case.name, "batch": case.batch, "precision": precision, "rows": rows}


def show(result: dict[str, Any]) -> None:
    """Print one table. Each figure is relative to tuning all weights."""
    title = f"{result['case']}, batch {result['batch']}, {result['precision']}: of tuning all of it"
    table = Table(title=title, title_justify="left")
    for column in ("", "images/s", "faster", "kept", "peak", "optimiser", "stored", "disturbed"):
        table.add_column(column, justify="left" if not column else "right")
    whole = result["rows"][0]
    for row in result["rows"]:
        shares = [f"{row[name] / whole[name]:.2f}" for name in COUNTED]
        rate, faster = f"{row['images_per_second']:.1f}", f"{row['over_all']['median']:.2f}x"
        table.add_row(row["name"], rate, faster, *shares, str(row["disturbed_rounds"] or ""))
    Console(width=110).print(table)


COUNTED = ("kept_bytes_per_image", "peak_bytes", "optimizer_bytes", "stored_bytes")


def main() -> None:
    """Run both precisions and write results/tune.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    results = []
    for case, precision in itertools.product((CASE,), train_step.PRECISIONS):
        if options.quick:
            case = replace(case, batch=2, architecture=replace(case.architecture, depth=1))
        results.append(measure(case, precision, options))
        show(results[-1])
    record.save("tune", options, results=results)


if __name__ == "__main__":
    main()
