"""`vitrail study`: reproduce a table or a figure of the papers, on a laptop or at the paper's scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vitrail.durations import Minutes, parse_minutes
from vitrail.errors import UsageError
from vitrail.files import check_writable
from vitrail.ranges import Count, Positive, Range, Seed, checked
from vitrail.studies.catalog import NAMES, REPORT, StudyName, StudySummary, study_named
from vitrail.terminal import TerminalPage, page, table
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.studies.costs import Planned
    from vitrail.studies.table import Tables


WIDTH = 78
"""Number of characters that a table may be wide."""


@one_line
@dataclass(frozen=True)
class Studied:
    """The results of a study, and the files they were written to."""

    tables: Tables
    files: list[Path]
    about: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """1 if a number is missing."""
        return int(bool(self.tables.missing))


@checked
def study(
    name: StudyName | None = None,
    *,
    data: str | Path | None = None,
    transfer: tuple[str | Path, ...] = (),
    scale: Literal["laptop", "paper"] = "laptop",
    rows: tuple[str, ...] = (),
    seeds: Annotated[int, Range(1, 1000)] = 2,
    seed: Seed = 0,
    known: tuple[str | Path, ...] = (),
    minutes: Minutes | str | None = None,
    longer: Positive = 1.0,
    parallel: Annotated[int, Range(0, 1024, note="0: train in this process")] | None = None,
    devices: list[str] | None = None,
    ray: str | None = None,
    limit_images: Count | None = None,
    limit_steps: Count | None = None,
    dry_run: bool = False,
    out: str | Path = "runs/studies",
) -> dict[StudyName, StudySummary] | Planned | Studied | Path:
    """Train the networks of a table or a figure of the papers, measure them, and say which claims hold.

    At laptop scale a fifth of the classes is left out of pre-training; each network is measured on them by the
    paper's few-shot accuracy, with five images of each class, or by a linear classifier, or is fine-tuned. A t-test
    over the seeds decides whether a claim holds, corrected for the number of claims, or says how many seeds would
    decide. Finished networks are never trained again: the same command continues after any end.

    Without a name, the studies are listed: what they show, about how long they take on two cores, the compute of the
    published grid, and whether the paper's data are public. The name 'report' draws the figures of all finished studies
    in --out again from their numbers and joins them into one page.

    Args:
        name: Name of the study, or 'report'.
        data: The images, such that `vitrail train DIR` opens them without settings, of at least four classes; at the
            paper's scale a folder of data sets, each in a folder of its name, such as imagenet and cifar100.
        transfer: More data sets to transfer to, at laptop scale.
        scale: The grid. laptop: small networks for about an hour on two cores; paper: the published one, which
            --dry-run lists with its cost.
        rows: Only these rows of the table.
        seeds: Number of networks of each kind. Their seeds count up from --seed.
        seed: First seed. Each seed also draws the classes that are left out of pre-training.
        known: The .json files of earlier studies. Their numbers count where settings, images and seed are the same, so
            that seeds can be added without the folder of the networks.
        minutes: Train for at most about this time, in minutes or with a unit (90s, 1.5h). The same command continues.
        longer: Factor of the length of each training. Twice or three times as long tells smaller differences.
        parallel: Number of networks trained at the same time, each in a process with its share of the cores; 0 trains
            in this process (default: one for each device; without devices one on a GPU, and on a CPU one for each core
            if memory allows).
        devices: Devices to train on, such as cuda:0 cuda:1, with one network at a time on each.
        ray: Train on this Ray cluster: 'auto' or ray://HOST:10001. Without a value, a cluster is started on this
            machine.
        limit_images: Train on this number of images of each data set, and use no larger batch, to try the command.
        limit_steps: Train each network for this number of steps only, to try the command.
        dry_run: List the trainings with their cost, and exit.
        out: Folder of the networks, the tables, the figures and the page. Studies in one folder share their networks.
    """
    if name is None:
        return dict(NAMES)
    folder = Path(out)
    if name == REPORT:
        from vitrail.studies.page import write_gallery
        from vitrail.studies.results import redraw

        redraw(folder)
        return write_gallery(folder)
    chosen = study_named(name)
    from vitrail.studies.run import StudyRequest, planned, run_study

    asked = StudyRequest(
        None if data is None else str(data), scale, [str(path) for path in transfer], range(seed, seed + seeds),
        None if minutes is None else parse_minutes(minutes), longer, rows, [str(path) for path in known],
        limit_images, limit_steps,
    )  # fmt: skip
    if dry_run:
        return planned(chosen, asked)
    if data is None:
        what = "no images are given" if scale == "laptop" else "no folder of data sets is given"
        raise UsageError(f"{what}: vitrail study {name} --data DIR, or --dry-run to see what it would train")
    check_writable(folder, UsageError, folder=True)
    from vitrail.studies.page import write_gallery
    from vitrail.studies.results import write
    from vitrail.verbs.sweep import executor

    found, about = run_study(chosen, asked, folder, executor(parallel, devices or [], ray))
    files = write(found, about, folder)
    return Studied(found, [*files, write_gallery(folder)], about)


def show(result: dict[StudyName, StudySummary] | Planned | Studied | Path) -> Any:
    """Return the result as text or a table for a terminal."""
    if isinstance(result, dict):
        return _listing(result)
    if isinstance(result, Path):
        return f"page: {result}"
    if not isinstance(result, Studied):
        return "\n".join(result.lines())
    missing = [f"{one.cell.row}, {one.cell.at}, seed {one.seed}: {one.reason}" for one in result.tables.missing]
    shown: list[Any] = []
    for one in result.tables.tables:
        lines = one.lines()
        if sum(max(map(len, column)) + 2 for column in zip(*lines, strict=True)) > WIDTH:
            lines = [list(line) for line in zip(*lines, strict=True)]  # a wide table stands on its side
        shown += [[one.name], table(lines[0], lines[1:])]
    return page(
        *shown,
        missing,
        [str(answer) for answer in result.tables.answers()],
        [f"tables and figure: {result.files[0].with_suffix('')}.*", f"page: {result.files[-1]}"],
    )


def _listing(studies: Mapping[StudyName, StudySummary]) -> TerminalPage:
    rows = [(name, one.minutes, f"{one.exaflops:,}", one.public, one.shows) for name, one in studies.items()]
    notes = "minutes: here, on two cores with --parallel 2; exaFLOPs: of the published grid; public: the paper's data"
    return page(table(("study", "minutes", "exaFLOPs", "public", "shows"), rows), notes)


def as_json(result: dict[StudyName, StudySummary] | Planned | Studied | Path) -> Any:
    """Return the result as JSON values."""
    if isinstance(result, dict):
        return {name: one._asdict() for name, one in result.items()}
    if isinstance(result, Path):
        return {"page": str(result)}
    if not isinstance(result, Studied):
        return result.as_json()
    from vitrail.studies.results import as_json as values

    return values(result.tables, result.about)
