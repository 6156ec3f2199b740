"""`vitrail vtab`: fine-tune a network on the 19 tasks of VTAB-1k with the paper's setting, and compare with Table 9."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.config import Percent, Steps
from vitrail.errors import DataError, UsageError
from vitrail.recipes.paper_finetune import VTAB
from vitrail.recipes.registry import recipe as named
from vitrail.training.run import Run
from vitrail.verbs.flags.settings import Asked
from vitrail.verbs.train import files

if TYPE_CHECKING:
    from vitrail.data.benchmarks.vtab import Task
    from vitrail.transfer.vtab import TaskScore, VtabTable

log = logging.getLogger("vitrail")


@dataclass(frozen=True)
class Listing:
    """The tasks, and where their data are or come from."""

    tasks: list[Task]
    folders: dict[str, str]
    """Task -> its folder, for the tasks whose data are there."""
    searched: bool
    """Whether a folder was given to search for data."""


def vtab(
    *,
    weights: str | Path | None = None,
    data: str | Path | None = None,
    tasks: list[str] | None = None,
    seeds: int = 1,
    image_size: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    config: tuple[str | Path, ...] = (),
    out: str | Path = "runs/vtab",
    device: str | None = None,
    precision: Literal["auto", "bf16", "float32"] = "auto",
    workers: int | None = None,
    show_list: bool = False,
) -> VtabTable | Listing:
    """Fine-tune a network on each of VTAB-1k's 19 tasks with one setting, and measure it on their test sets.

    The paper's setting is the recipe paper/finetune-vtab: SGD, learning rate 0.01, 2,500 steps of 512 images of 384
    pixels, a zero classifier, training on all 1,000 images. The table shows means of the three groups and of all tasks
    next to those of the paper's Table 9, and says if another setting was used. Finished tasks are not trained again.

    Without --from, or with --list, the tasks are listed with the source of their data.

    Args:
        weights: The network: a run, a model folder, a weight file of any known library, or a name on the hub.
        data: Folder with the data of the tasks, each as TensorFlow Datasets prepares it, with index lists, or in
            any other layout; or 'hub' for copies on the hub, from which 1,000 images are drawn.
        tasks: Tasks to run, such as cifar100 dtd (default: all whose data are present).
        seeds: Number of runs of each task, with seeds 0, 1, ....
        image_size: Side of the square input in pixels, in place of 384.
        steps: Number of training steps, in place of 2,500. The warmup stays a fifth of them.
        batch_size: Number of images per step, in place of 512.
        lr: Learning rate, in place of 0.01.
        config: A YAML file of other settings. May be repeated.
        out: Folder of the runs, of the table vtab.json and of the figure vtab.png.
        device: Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available).
        precision: Number format of the computation. 'auto' chooses bf16 if the device is fast at it.
        workers: Number of threads that decode images (default: from the machine).
        show_list: List the tasks and exit.
    """
    from vitrail.data.benchmarks.vtab import TASKS, task_named

    chosen = [task_named(name) for name in dict.fromkeys(tasks or TASKS)]
    if show_list or weights is None:
        return _listing(chosen, data)
    if data is None:
        raise UsageError(
            "Where are the data? vitrail vtab --from RUN --data DIR (`vitrail vtab` lists where to get them)"
        )
    if seeds < 1:
        raise UsageError(f"--seeds is {seeds}. It must be at least 1.")
    settings: dict[str, Any] = {"device": device, "precision": precision, "workers": workers}
    settings |= {"image_size": image_size, "batch_size": batch_size}
    paper = named(VTAB.recipe)
    asked = Asked(None, None, files(config), None, lr, weights, {k: v for k, v in settings.items() if v is not None})
    run = _of_length(asked.over(paper), steps)
    from vitrail.transfer.vtab import vtab as run_tasks

    return run_tasks(run, paper, chosen, str(data), [run.seed + i for i in range(seeds)], Path(out))


def _of_length(run: Run, steps: int | None) -> Run:
    """Return `run` with the duration `steps` and a warmup in the same proportion."""
    if steps is None:
        return run
    if steps < 1:
        raise UsageError(f"--steps is {steps}. It must be at least 1.")
    warmup = Percent(100 * VTAB.warmup / VTAB.steps)
    return replace(run, duration=Steps(steps), schedule=replace(run.schedule, warmup=warmup))


def _listing(tasks: Sequence[Task], data: str | Path | None) -> Listing:
    from vitrail.data.benchmarks.vtab_source import locate

    folders: dict[str, str] = {}
    for task in tasks if data is not None else ():
        try:
            if (place := locate(task, str(data))) is not None:
                folders[task.name] = place.path
        except DataError as error:
            log.warning("%s: %s", task.name, error)
    return Listing([*tasks], folders, data is not None)


def show(result: VtabTable | Listing) -> Any:
    """Return the result as text or a table for a terminal."""
    return _shown_list(result) if isinstance(result, Listing) else _shown(result)


def _shown_list(result: Listing) -> str:
    """Return two lines per task, because addresses are too long for a column."""
    lines = []
    for task in result.tasks:
        where = result.folders.get(task.name) or f"{'not there; ' if result.searched else ''}{task.entry.source}"
        kind = f"{task.name:20}  {task.group:11}  {task.classes:3} classes  {task.test_images:6,} test images"
        lines += [kind, f"    {where}"]
    return "\n".join(lines)


def _shown(result: VtabTable) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from vitrail.transfer.vtab_means import PUBLISHED, means

    table = Table(box=SIMPLE_HEAD, title="VTAB-1k, top-1 in %, compared with the paper's Table 9", title_justify="left")
    table.add_column("task")
    for column in (Path(result.weights).name, "±", *PUBLISHED):
        table.add_column(column, justify="right")
    for score in result.scores:
        table.add_row(*_cells(score), *(f"{row[score.task.name]:.1f}" for row in PUBLISHED.values()))
    table.add_section()
    tasks = result.percent
    theirs = [means({task: row[task] for task in tasks}) for row in PUBLISHED.values()]
    for group, (mean, count) in means(tasks).items():
        table.add_row(f"{group} ({count})", f"{mean:.1f}", "", *(f"{each[group][0]:.1f}" for each in theirs))
    lines = [f"not the paper's setting: {line}" for line in result.departures]
    lines += [f"{score.task.name}: {note}" for score in result.scores for note in score.notes]
    if len(tasks) < len(next(iter(PUBLISHED.values()))):
        lines.append("All means, also the published ones, are over the tasks above.")
    lines += [f"skipped: {task} ({reason})" for task, reason in result.absent.items()]
    lines.append(f"table: {result.folder / 'vtab.json'}, means by group: {result.folder / 'vtab.png'}")
    return Group(table, Text("\n".join(lines)))


def _cells(score: TaskScore) -> tuple[str, str, str]:
    mean = "failed" if score.mean is None else f"{100 * score.mean:.1f}"
    return score.task.name, mean, "" if score.std is None else f"{100 * score.std:.1f}"


def as_json(result: VtabTable | Listing) -> Any:
    """Return the result as JSON values."""
    if not isinstance(result, Listing):
        return result.as_json()
    return [
        {
            "task": task.name,
            "group": task.group,
            "classes": task.classes,
            "test_images": task.test_images,
            "regions": task.regions,
            "place": result.folders.get(task.name),
            "comes_from": task.entry.source,
        }
        for task in result.tasks
    ]
