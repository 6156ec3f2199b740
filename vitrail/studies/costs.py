"""Estimate the cost of a study, training by training. Nothing is trained, and no data are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.costs.count import training_flops
from vitrail.costs.devices import DEVICES, device_days, dollars
from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.durations import Epochs
from vitrail.studies.measure import config_of
from vitrail.studies.study import COUNTED, Cell, LaptopData, Scale, Stage, Study
from vitrail.studies.table import column
from vitrail.words import four_digits, one_line

CORE = DEVICES["tpu-v3"]
IMAGES = {"down": 10_000, "all": 50_000, "digits": 1_438}
"""Number of training images at laptop scale if no data are given: those of CIFAR-100, and of digits."""
OTHER = 1_000
"""Number of images assumed for a data set that is not opened."""


@dataclass(frozen=True)
class PlannedStage:
    """One training with its cost."""

    cell: Cell
    """The first cell that needs it."""
    stage: Stage
    data: str
    images: float
    """Number of images seen in training."""
    flops: float
    repeated: bool
    """Whether every seed needs it; the first seed alone trains the others, and chooses one of them."""

    @property
    def name(self) -> str:
        """The training in words."""
        how = "fine-tuning on" if self.stage.start is not None else "training on"
        rate = f" at rate {self.stage.run.optim.lr:g}" if self.cell.others else ""
        return f"{self.cell.row}, {column(self.cell.at)}: {how} {self.data}{rate}"

    @property
    def core_days(self) -> float:
        """TPUv3-core-days."""
        return device_days(self.flops, CORE)


@one_line
@dataclass(frozen=True)
class Planned:
    """All trainings of a study at one scale, each once."""

    study: Study
    scale: Scale
    seeds: int
    cells: Sequence[Cell]
    stages: Sequence[PlannedStage]

    @property
    def flops(self) -> float:
        """FLOPs of all trainings and seeds, as if the first training of each cell were the best."""
        return sum(one.flops * (self.seeds if one.repeated else 1) for one in self.stages)

    @property
    def trainings(self) -> int:
        """Number of trainings with all seeds."""
        return sum(self.seeds if one.repeated else 1 for one in self.stages)

    def lines(self) -> list[str]:
        """Return the plan as lines."""
        found = [f"{self.study.where}: {self.study.title}, at {self.scale} scale", ""]
        for one in self.stages:
            cost = f"{four_digits(one.flops / 1e15)} petaFLOPs"
            if self.scale == "paper":
                cost = f"{four_digits(one.flops / 1e18)} exaFLOPs, {four_digits(one.core_days)} TPUv3-core-days"
            found.append(f"{one.name}, {four_digits(one.images / 1e6)} million images, {cost}")
        days = device_days(self.flops, CORE)
        total = f"{self.trainings} trainings, {self.seeds} seeds: {four_digits(self.flops / 1e18)} exaFLOPs"
        found += ["", f"{total}, {four_digits(days)} TPUv3-core-days, ${dollars(days, CORE.usd_per_hour or 0):,.0f}"]
        if count := sum(cell.metric in COUNTED for cell in self.cells):
            found.append(f"{count} numbers of speed, memory and size, measured without training")
        needed = sorted({one.data for one in self.stages if one.data in CATALOG})
        found += [f"{name}: {CATALOG[name].source}" for name in needed]
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "study": self.study.name,
            "scale": self.scale,
            "seeds": self.seeds,
            "exaflops": self.flops / 1e18,
            "cells": [{"table": cell.table, "row": cell.row, "at": cell.at} for cell in self.cells],
            "trainings": [
                {"row": one.cell.row, "at": one.cell.at, "data": one.data, "images": one.images, "flops": one.flops}
                for one in self.stages
            ],
        }


def study_cost(study: Study, scale: Scale, cells: Sequence[Cell], given: LaptopData, seeds: int) -> Planned:
    """Return the cost of these cells of a study."""
    learned = [cell for cell in cells if cell.metric not in COUNTED]
    first: dict[Stage, Cell] = {}
    for cell in learned:
        for stage in (one for tried in cell.tried for one in tried.chain()):
            first.setdefault(stage, cell)
    repeated = {stage for cell in learned for stage in cell.stage.chain()}
    ordered = sorted(first.items(), key=lambda item: item[0].depth)
    stages = [_planned(cell, stage, given, stage in repeated) for stage, cell in ordered]
    return Planned(study, scale, seeds, cells, stages)


def _planned(cell: Cell, stage: Stage, given: LaptopData, repeated: bool) -> PlannedStage:
    run, name, part = stage.run, stage.run.data.path, stage.run.data.subset
    whole = CATALOG[name].splits["train"] if name in CATALOG else {"up": given.images, **IMAGES}.get(name, OTHER)
    images = whole * part if isinstance(part, float) else part or whole
    batch = run.batch_size or 1
    assert run.duration is not None  # no stage has a time limit
    steps = run.duration.steps(per_epoch=max(int(images // batch), 1), batch_size=batch)
    seen = float(images * run.duration.value if isinstance(run.duration, Epochs) else steps * batch)
    return PlannedStage(cell, stage, name, seen, training_flops(config_of(stage)) * seen, repeated)
