"""`vitrail vtab`: fine-tune a network on the 19 tasks of VTAB-1k with the paper's setting, and compare with Table 9."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vitrail.device import Precision
from vitrail.durations import Percent, Steps
from vitrail.errors import DataError, UsageError
from vitrail.files import check_writable
from vitrail.ranges import Count, Positive, Range, Side, Threads, checked
from vitrail.recipes.asked import Asked
from vitrail.recipes.paper_finetune import VTAB
from vitrail.recipes.registry import recipe as named
from vitrail.terminal import page, table
from vitrail.verbs.sweep import executor
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.data.benchmarks.vtab_tasks import VtabTask
    from vitrail.transfer.vtab_runs import TaskScore, VtabTable

log = logging.getLogger("vitrail")


@one_line
@dataclass(frozen=True)
class Listing:
    """The tasks, with the folders or the sources of their data."""

    tasks: list[VtabTask]
    folders: dict[str, str]
    """Task -> its folder, for the tasks whose data were found."""
    searched: bool
    """Whether a folder was searched for data."""


@checked
def vtab(
    *,
    weights: str | Path | None = None,
    data: str | Path | None = None,
    tasks: list[str] | None = None,
    seeds: Annotated[int, Range(1, 1000)] = 1,
    image_size: Side | None = None,
    steps: Count | None = None,
    batch_size: Count | None = None,
    lr: Positive | None = None,
    config: tuple[str | Path, ...] = (),
    out: str | Path = "runs/vtab",
    device: str | None = None,
    precision: Precision = "auto",
    workers: Threads | None = None,
    ray: str | None = None,
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
        ray: Train on this Ray cluster: 'auto' or ray://HOST:10001. Without a value, a cluster is started on this
            machine.
        show_list: List the tasks and exit.
    """
    from vitrail.data.benchmarks.vtab_tasks import TASKS, task_named

    chosen = [task_named(name) for name in dict.fromkeys(tasks or TASKS)]
    if show_list or weights is None:
        return _listing(chosen, data)
    if data is None:
        raise UsageError(
            "no data are given: vitrail vtab --from RUN --data DIR (`vitrail vtab` lists the sources of the data)"
        )
    settings: dict[str, Any] = {"device": device, "precision": precision, "workers": workers}
    settings |= {"image_size": image_size, "batch_size": batch_size}
    paper = named(VTAB.recipe)
    chosen_settings = {name: value for name, value in settings.items() if value is not None}
    asked = Asked(config=config, lr=lr, weights=weights, settings=chosen_settings)
    run, _ = asked.applied_to(paper)
    if steps is not None:  # with a warmup in the same proportion
        warmup = Percent(100 * VTAB.warmup / VTAB.steps)
        run = replace(run, duration=Steps(steps), schedule=replace(run.schedule, warmup=warmup))
    check_writable(Path(out), UsageError, folder=True)
    from vitrail.transfer.trial import here
    from vitrail.transfer.vtab_runs import vtab as run_tasks

    execute = executor(None, [], ray) if ray is not None else here
    every = [run.seed + i for i in range(seeds)]
    return run_tasks(run, paper, chosen, str(data), every, Path(out), asked.origins, execute)


def _listing(tasks: Sequence[VtabTask], data: str | Path | None) -> Listing:
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
    if isinstance(result, Listing):
        return _shown_list(result)
    from vitrail.transfer.vtab_means import PUBLISHED, QUOTED, means

    others = {**PUBLISHED, **QUOTED}
    published = others.values()
    rows = [(*_cells(score), *(f"{row[score.task.name]:.1f}" for row in published)) for score in result.scores]
    title = "VTAB-1k, top-1 in %, compared with the paper's Table 9 and with S4L of its Figure 2"
    tasks = result.percent
    theirs = [means({task: row[task] for task in tasks}) for row in published]
    for group, (mean, count) in means(tasks).items():
        rows.append((f"{group} ({count})", f"{mean:.1f}", "", *(f"{each[group][0]:.1f}" for each in theirs)))
    shown = table(("task", Path(result.weights).name, "±", *others), rows, title, rules=(len(result.scores),))
    fewer = len(tasks) < len(next(iter(published)))
    return page(
        shown,
        [f"not the paper's setting: {line}" for line in result.departures],
        [f"{score.task.name}: {note}" for score in result.scores for note in score.notes],
        ["All means, also the published ones, are over the tasks above."] if fewer else [],
        [f"skipped: {task} ({reason})" for task, reason in result.absent.items()],
        f"table: {result.folder / 'vtab.json'}, means by group: {result.folder / 'vtab.png'}",
    )


def _shown_list(result: Listing) -> str:
    """Return two lines per task, because an address is too long for a column."""
    lines = []
    for task in result.tasks:
        where = result.folders.get(task.name) or f"{'not found; ' if result.searched else ''}{task.entry.source}"
        kind = f"{task.name:20}  {task.group:11}  {task.classes:3} classes  {task.test_images:6,} test images"
        lines += [kind, f"    {where}"]
    return "\n".join(lines)


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
