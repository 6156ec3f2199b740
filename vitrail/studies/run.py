"""Run a whole study: divide its data, train, measure."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.durations import Percent, Steps
from vitrail.errors import UsageError, VitrailError
from vitrail.studies.costs import Planned, study_cost
from vitrail.studies.known import EarlierNumbers, number_key, stages_of
from vitrail.studies.measure import DRAWS, SHOTS, Probes, count_cost
from vitrail.studies.sets import Sets, divide, published_sets
from vitrail.studies.study import COUNTED, Cell, LaptopData, Scale, Stage, Study, at_rate, with_data
from vitrail.studies.table import CellResult, Tables, column
from vitrail.studies.training import Training, ranked
from vitrail.transfer.sweep import Executor
from vitrail.words import counted, listing

log = logging.getLogger("vitrail")
FURTHER_RATES = 3
"""How often rates beyond the best are tried."""


@dataclass(frozen=True)
class StudyRequest:
    """Which part of a study to run, on which data, and for how long."""

    data: str | None
    """The images at laptop scale, the folder of the data sets at the paper's; None if nothing is trained."""
    scale: Scale = "laptop"
    transfer: Sequence[str] = ()
    """More data sets to transfer to, at laptop scale."""
    seeds: Sequence[int] = (0, 1)
    """Each divides the classes anew, so that the spread is not of training alone. The first chooses settings."""
    minutes: float | None = None
    """Time after which nothing more is trained."""
    longer: float = 1.0
    """Factor of the length of each training."""
    rows: Sequence[str] = ()
    """The rows to run; empty: all."""
    known: Sequence[str] = ()
    """The .json files of earlier studies, whose numbers are not measured again."""
    limit_images: int | None = None
    """To try a grid quickly: maximum number of images of each data set, and of each step."""
    limit_steps: int | None = None
    """To try a grid quickly: maximum number of steps."""

    @property
    def changes(self) -> list[str]:
        """How its trainings differ from those that the labels of the grid name, in words."""
        found = [f"every training {self.longer:g} times as long as its label says"] * (self.longer != 1)
        if self.limit_images is not None:
            found.append(f"at most {counted(self.limit_images, 'image')}")
        return found + ([] if self.limit_steps is None else [f"{counted(self.limit_steps, 'step')} each"])


def run_study(study: Study, asked: StudyRequest, folder: Path, execute: Executor) -> tuple[Tables, dict[str, Any]]:
    """Return the tables of a study, and a description of what they were made from.

    Raises DataError and UsageError before anything is trained; Interrupted after a signal: the same call continues.
    """
    by_seed = place(asked, folder)
    sets = by_seed[asked.seeds[0]]
    cells = grid(study, asked, sets.given)
    known = EarlierNumbers.read(asked.known)
    until = None if asked.minutes is None else time.monotonic() + 60 * asked.minutes
    training = Training(by_seed, folder, execute, until)
    results = measure_cells(cells, asked.seeds, training, known, FURTHER_RATES if asked.scale == "laptop" else 0)
    about = {
        "data": Path(str(asked.data)).name,
        "scale": asked.scale,
        "rows": list(asked.rows),
        "changes": asked.changes,
        "seeds": list(asked.seeds),
        "images": sets.images,
        "sets": list(sets.given.sets),
        "few-shot": {"shots": SHOTS, "draws": DRAWS},
    }
    return Tables(study, results, asked.scale, not asked.rows), about


def planned(study: Study, asked: StudyRequest) -> Planned:
    """Return the cost of a study. Raises the errors of opening the data, which may be None."""
    given = LaptopData()
    if asked.data is not None and asked.scale == "laptop":
        with tempfile.TemporaryDirectory() as scratch:
            given = place(replace(asked, seeds=asked.seeds[:1]), Path(scratch))[asked.seeds[0]].given
    seeds = 1 if asked.scale == "paper" else len(asked.seeds)
    return study_cost(study, asked.scale, grid(study, asked, given), given, seeds)


def place(asked: StudyRequest, folder: Path) -> dict[int, Sets]:
    """Return the data sets by name for each seed."""
    data = str(asked.data)
    if asked.scale == "paper":
        return dict.fromkeys(asked.seeds, published_sets(data))
    return {seed: divide(data, folder / f"data-{seed}", seed, asked.transfer) for seed in asked.seeds}


def grid(study: Study, asked: StudyRequest, given: LaptopData) -> list[Cell]:
    """Return the cells to run. Raises UsageError for rows that the study does not have."""
    cells = study.cells(asked.scale, given)
    known = dict.fromkeys(cell.row for cell in cells)
    if unknown := [row for row in asked.rows if row not in known]:
        raise UsageError(f"{study.name} has no row {', '.join(map(repr, unknown))}. Valid: {', '.join(known)}")
    cells = [cell for cell in cells if not asked.rows or cell.row in asked.rows]
    return [
        replace(cell, stage=limited(cell.stage, asked), others=[limited(stage, asked) for stage in cell.others])
        for cell in cells
    ]


def limited(stage: Stage, asked: StudyRequest) -> Stage:
    """Return a stage, and those before it, made longer or shorter as asked."""
    run, images, steps = stage.run, asked.limit_images, asked.limit_steps
    if images is not None:
        batch = min(run.batch_size or images, images)
        run = replace(with_data(run, subset=images), batch_size=batch)
    if steps is not None:
        every = Percent(100)
        run = replace(run, duration=Steps(steps), checkpoint_every=every, evaluate_every=every)
        run = replace(run, schedule=replace(run.schedule, warmup=Percent(10)))
    elif asked.longer != 1:
        assert run.duration is not None  # no stage has a time limit
        run = replace(run, duration=replace(run.duration, value=asked.longer * run.duration.value))
    start, tokenizer = (None if one is None else limited(one, asked) for one in (stage.start, stage.tokenizer))
    return Stage(run, start, tokenizer)


def measure_cells(
    cells: Sequence[Cell], seeds: Sequence[int], training: Training, known: EarlierNumbers, further: int
) -> list[CellResult]:
    """Train what is not finished or known, and return the results, all cells of the first seed before the next."""
    learned = [cell for cell in cells if cell.metric not in COUNTED]
    wanted = {(id(cell), seed): (cell, number_key(cell, seed, training)) for seed in seeds for cell in learned}
    found = {one: known.result(cell, one[1], key) for one, (cell, key) in wanted.items() if key in known.cells}
    if found:
        log.info("%d of %d numbers are known", len(found), len(wanted))
    ranks = {key: stages_of(result) for (key, _), result in found.items()}
    ranks |= settled([cell for cell in learned if id(cell) not in ranks], training, seeds[0], further)
    counts = {(id(cell), seed): cell.stage for seed in seeds for cell in cells}
    counts |= repeated([(cell, one[1]) for one, (cell, _) in wanted.items() if one not in found], ranks, training)
    results = []
    for seed in seeds:
        probes = {on: Probes(training.sets[seed], on) for on in {cell.on for cell in cells}}
        for cell in cells:
            one = id(cell), seed
            measured = found.get(one) or _result(cell, counts[one], seed, training, probes[cell.on])
            results.append(replace(measured, key=wanted[one][1]) if one in wanted else measured)
    return results


def repeated(
    cells: Sequence[tuple[Cell, int]], ranks: Mapping[int, Sequence[Stage]], training: Training
) -> dict[tuple[int, int], Stage]:
    """Train each cell with its seed, and return the training that counts by the identity of the cell and the seed.

    It is the best one, or the next best if that diverges with the seed.
    """
    found: dict[tuple[int, int], Stage] = {}
    wanted = [(cell, seed, ranks[id(cell)]) for cell, seed in cells]
    while wanted:
        training.train((cell, stages[0], seed) for cell, seed, stages in wanted)
        found |= {(id(cell), seed): stages[0] for cell, seed, stages in wanted}
        lost = [(cell, seed, rest) for cell, seed, (stage, *rest) in wanted if training.diverged((stage, seed))]
        wanted = [(cell, seed, rest) for cell, seed, rest in lost if rest]
    return found


def settled(cells: Sequence[Cell], training: Training, seed: int, further: int) -> dict[int, list[Stage]]:
    """Return, by the identity of a cell, the trainings that it tries, the best one with a seed first.

    Where the best learning rate is the smallest or the largest that was tried, the next one beyond it is tried, too, at
    most `further` times.
    """
    tried = {id(cell): list(cell.tried) for cell in cells}
    while True:
        training.train((cell, stage, seed) for cell in cells for stage in tried[id(cell)])
        found = {key: ranked(stages, training, seed) for key, stages in tried.items()}
        beyond = {key: stage for key, (best, *_) in found.items() if (stage := beyond_rates(tried[key], best))}
        if not beyond or not further or training.late():
            break
        further -= 1
        for key, stage in beyond.items():
            tried[key].append(stage)
    if beyond:
        names = listing([f"{cell.row}, {column(cell.at)}" for cell in cells if id(cell) in beyond])
        log.warning("the best learning rate is the first or the last of those that were tried: %s", names)
    return found


def beyond_rates(tried: Sequence[Stage], best: Stage) -> Stage | None:
    """Return the training at the next rate beyond the best, if that is the first or the last of several rates.

    None if it is between others, or if the trainings differ in more than their rate: those are the paper's own choices.
    """
    rates = sorted(stage.run.optim.lr for stage in tried)
    alike = all(stage == at_rate(best, stage.run.optim.lr) for stage in tried)
    if len(rates) < 2 or not alike or rates[0] < best.run.optim.lr < rates[-1]:
        return None
    rate = rates[0] ** 2 / rates[1] if best.run.optim.lr == rates[0] else rates[-1] ** 2 / rates[-2]
    return at_rate(best, float(f"{rate:.3g}"))


def _result(cell: Cell, stage: Stage, seed: int, training: Training, probes: Probes) -> CellResult:
    if cell.metric in COUNTED:
        return CellResult(cell, seed, count_cost(cell.metric, stage))
    rate = stage.run.optim.lr if cell.others else None
    if (reason := training.problem((stage, seed))) is not None:
        return CellResult(cell, seed, None, reason, rate=rate)
    outcome = training.outcomes[stage, seed]
    place = Path(outcome.run).resolve().relative_to(training.folder.resolve())  # so that the folder can be moved
    base = CellResult(cell, seed, None, "", str(place), rate, outcome.seconds)
    try:
        return replace(base, score=probes.number(cell.metric, outcome, cell.best))
    except VitrailError as error:
        return replace(base, reason=str(error))
