"""`vitrail sweep`: which learning rate suits these images, and how good the network is with it, over seeds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vitrail.config import from_yaml, plain
from vitrail.errors import UsageError
from vitrail.recipes.paper_finetune import GRID, GRID_IMAGENET, ROW_OF, VTAB
from vitrail.recipes.registry import recipe as named
from vitrail.training.run import Run
from vitrail.verbs.flags.settings import Asked, from_recipe
from vitrail.verbs.train import files

if TYPE_CHECKING:
    from vitrail.costs.estimate import Cost
    from vitrail.transfer.grid import Planned
    from vitrail.transfer.sweep import Executor, Row, Swept

log = logging.getLogger("vitrail")
LR = "optim.lr"
IMAGENET = 500_000
"""Training images from which on a data set has ImageNet's learning rates; the limit is that of its steps."""


@dataclass(frozen=True)
class Preview:
    """The trials of a sweep, where `dry_run` asked not to train yet."""

    planned: Planned
    finished: int
    """Trials of the search that need not be trained any more."""
    checked: dict[str, str]
    """What was tried with the first trial, and what came of it."""
    cost: Cost
    """Of the first trial."""

    @property
    def trials(self) -> int:
        """That will be trained."""
        searched = len({trial.key for trial in self.planned.search})
        return (searched if searched > 1 else 0) - self.finished + len(self.planned.sweep.seeds)

    @property
    def days(self) -> float | None:
        """Of this machine, one trial after another, if all cost what the first one does."""
        return None if self.cost.device_days is None else self.trials * self.cost.device_days


def sweep(
    path: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    recipe: str | None = None,
    config: tuple[str | Path, ...] = (),
    lr: tuple[float, ...] = (),
    vary: tuple[str, ...] = (),
    seeds: int = 3,
    dev: float | None = None,
    epochs: float | None = None,
    out: str | Path = "runs/sweep",
    parallel: int | None = None,
    devices: list[str] | None = None,
    ray: str | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> Swept | Preview:
    """Find the learning rate on part of the training images, then retrain on all of them with several seeds.

    The procedure is the paper's (appendix B.1.1). Each learning rate of the grid is trained without a small part of the
    training images and judged by its top-1 accuracy on that part. The best one is trained on all training images, once
    for each seed, and measured on the test images, which nothing has used before. Finished trials are never repeated:
    the same command continues an interrupted sweep.

    Args:
        path: The images, in any form that `vitrail train` takes.
        weights: Weights to start from: a run, a model folder, a weight file of any known library, or a name on the
            hub.
        recipe: Recipe to start from, such as paper/finetune-cifar100 (default: finetune, with a length that depends
            on the number of images).
        config: A YAML file of settings, such as the config.yaml of a run. May be repeated.
        lr: Learning rates to try (default: those of the paper for the recipe, or for this number of images).
        vary: Another setting and its values to try, such as 'optim.momentum=0.8,0.9'. May be repeated to try all
            combinations.
        seeds: Number of final runs. Their seeds count up from --seed.
        dev: Share of the training images to choose by (default: the recipe's, or the validation split, or 1, 2, 10
            or 20 % depending on the number of images, as in the paper).
        epochs: Length of the training in epochs: short for --duration 'N epochs'.
        out: Folder of the trials and of the table sweep.json. Sweeps in the same folder share their trials.
        parallel: Number of trials at the same time, each a process with its share of the cores; 0 trains in this
            process (default: one for each device, or 1).
        devices: Devices to train on, such as cuda:0 cuda:1, with one trial at a time on each.
        ray: Train on this Ray cluster: 'auto' or ray://HOST:10001. Without a value, a cluster is started on this
            machine.
        dry_run: List the trials, check data, model, memory and one batch of the first one, estimate the cost, and
            exit.
        settings: Any other field of `Run`; a section is a dict, such as `optim={"momentum": 0.8}`.
    """
    asked = Asked(path, recipe, files(config), epochs, None, weights, settings)
    execute = _executor(parallel, devices or [], ray)
    planned = _planned(asked, lr, vary, seeds, dev, Path(out))
    if dry_run:
        return _preview(planned)
    from vitrail.transfer.sweep import sweep as sweep_over

    return sweep_over(planned, execute)


def _executor(parallel: int | None, devices: Sequence[str], ray: str | None) -> Executor:
    """Where the trials are trained. Raises UsageError where the flags contradict each other."""
    if parallel is not None and parallel < 0:
        raise UsageError(f"parallel is {parallel}; it must be 0 (in this process) or more")
    if ray is not None:
        if devices or parallel == 0:
            raise UsageError("a Ray cluster decides where trials run: leave --devices out, and --parallel above 0")
        from vitrail.transfer.on_ray import OnRay

        return OnRay(ray, parallel)
    if parallel == 0:
        if len(devices) > 0:
            raise UsageError("--parallel 0 trains in this process: say on what with --device")
        from vitrail.transfer.trial import here

        return here
    from vitrail.training.resolve import choose_device
    from vitrail.transfer.processes import Processes

    for device in devices:
        choose_device(device)  # one that is not there is told now
    count = parallel or max(len(devices), 1)
    return Processes([devices[i % len(devices)] if devices else None for i in range(count)])


def _planned(
    asked: Asked, lr: Sequence[float], vary: Sequence[str], seeds: int, dev: float | None, out: Path
) -> Planned:
    """The sweep asked for, and its data. Raises UsageError and DataError."""
    from vitrail.transfer.dev import arrange
    from vitrail.transfer.finetune import finetune_run
    from vitrail.transfer.grid import Planned, Sweep

    if asked.path is None and not asked.config:
        raise UsageError("sweep on which images? vitrail sweep DIR --from RUN")
    row = ROW_OF.get(asked.recipe or "")
    run = asked.over(named(asked.recipe or "finetune"))
    if run.weights is None and asked.recipe is None:
        raise UsageError("fine-tune which network? vitrail sweep DIR --from RUN (or, from scratch: --recipe NAME)")
    if dev is None:
        dev = _held_out(asked) or (row.holdout if row is not None and row is not VTAB else None)
    arranged = arrange(run.data, dev, run.seed)
    if asked.recipe is not None:
        run, why = from_recipe(asked)
        log.info("%s", why)
    else:
        assert run.weights is not None
        run = asked.over(finetune_run(named("finetune"), run.weights, arranged.images))
        log.info("recipe finetune for %s images: %s", f"{arranged.images:,}", run.duration)
    grid: dict[str, Sequence[Any]] = {}
    for text in vary:
        name, values = values_of(text, run)
        grid[name] = values
    if lr and LR in grid:
        raise UsageError(f"--lr and --vary {LR} both say which learning rates to try: give one of them")
    if lr or not grid:
        rates = lr or _published(asked.recipe, arranged.images)
        grid = {LR: tuple(rates), **grid}
    return Planned(Sweep(run, grid, [run.seed + i for i in range(seeds)], dev), out, arranged)


def _held_out(asked: Asked) -> float | None:
    """The share that was asked for with --data.holdout: here, it is what --dev is short for."""
    data = asked.settings.get("data")
    return data.get("holdout") if isinstance(data, Mapping) else None


def _published(recipe: str | None, images: int) -> tuple[float, ...]:
    """The paper's learning rates (Table 4)."""
    if recipe in (None, "finetune"):
        return GRID if images < IMAGENET else GRID_IMAGENET
    if recipe not in ROW_OF:
        raise UsageError(
            f"no learning rates to try are published for recipe {recipe}: say which, --lr 0.001 0.003 0.01"
        )
    return ROW_OF[recipe].grid


def values_of(text: str, base: Run) -> tuple[str, tuple[Any, ...]]:
    """Read "optim.momentum=0.8,0.9" as a field of `Run` and its values. Raises UsageError."""
    name, equals, listed = (part.strip() for part in text.partition("="))
    try:
        node = yaml.compose(f"[{listed}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if not equals or not name or not isinstance(node, yaml.SequenceNode) or not node.value:
        raise UsageError(f"{text!r} names no values to try: write --vary optim.momentum=0.8,0.9")
    values = []
    for item in node.value:
        written = f"[{listed}]"[item.start_mark.index : item.end_mark.index]
        value: Any = from_yaml("".join(f"{{{part}: " for part in name.split(".")) + written + "}" * _depth(name), base)
        for part in name.split("."):
            value = getattr(value, part)
        values.append(value)
    return name, tuple(values)


def _depth(name: str) -> int:
    return name.count(".") + 1


def _preview(planned: Planned) -> Preview:
    from vitrail.transfer.trial import finished
    from vitrail.verbs.dry_run import check

    search = planned.search
    done = sum(finished(trial.folder) is not None for trial in {trial.key: trial for trial in search}.values())
    return Preview(planned, done if len(search) > 1 else 0, *check(replace(search[0].run, out=str(planned.folder))))


def show(result: Swept | Preview) -> Any:
    """Return the table, or the trials to come, for a terminal."""
    return _shown_preview(result) if isinstance(result, Preview) else _shown(result)


def _shown(result: Swept) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for column in ("trial", "dev top-1", "loss", "test top-1", "seconds", ""):
        words = column in ("trial", "")
        table.add_column(column, justify="left" if words else "right", no_wrap=column != "trial")
    rows = [*result.search, *result.final]
    for row in rows:
        chosen = not row.trial.final and dict(row.trial.values) == result.chosen
        table.add_row(*_cells(row), "chosen" if chosen else row.outcome.status)
    last = next(row for row in result.final if row.outcome.status == "done")
    lines = [f"{row.trial}: {row.outcome.reason}" for row in rows if row.outcome.reason]
    lines += [f"chosen by {result.arranged.how} ({result.arranged.dev:,} images)"] if result.search else []
    lines += [_measured(result), f"model: {last.outcome.run}", f"table: {result.folder / 'sweep.json'}"]
    return Group(table, Text("\n".join(lines)))


def _cells(row: Row) -> tuple[str, ...]:
    outcome = row.outcome
    dev = ("", "") if outcome.dev is None else (f"{outcome.dev['top1']:.2%}", f"{outcome.dev['nll']:.4f}")
    test = "" if outcome.test is None else f"{outcome.test['top1']:.2%}"
    return str(row.trial), *dev, test, f"{outcome.seconds:,.0f}"


def _measured(result: Swept) -> str:
    if result.top1 is None:
        return "no test images: what the final runs reach is not measured"
    mean, std, count = result.top1.mean, result.top1.std, result.top1.count
    spread = "" if std is None else f" ± {100 * std:.2f} (sample standard deviation)"
    lost = len(result.final) - count
    failed = f", without {lost} that failed" if lost else ""
    return f"test top-1 {100 * mean:.2f} %{spread} over {count} seed{'s' * (count > 1)}{failed}"


def _shown_preview(result: Preview) -> str:
    from vitrail.costs.estimate import duration

    planned = result.planned
    arranged = planned.arranged
    lines = [str(trial) for trial in planned.search] if len(planned.search) > 1 else []
    lines += [f"the best of them, seed {seed}, on everything" for seed in planned.sweep.seeds]
    lines = [f"{number:>3}  {line}" for number, line in enumerate(lines, 1)]
    lines += ["", f"choosing by: {arranged.how} ({arranged.dev:,} images)", f"test images: {arranged.test:,}"]
    lines += ["", "the first of them:", *(f"{name}: {what}" for name, what in result.checked.items()), ""]
    finished = f", {result.finished} being finished" if result.finished else ""
    if result.days is not None:
        lines.append(
            f"all: {result.trials} trials to train{finished}: about {duration(result.days)} of one such device"
        )
    return "\n".join(lines)


def as_json(result: Swept | Preview) -> Any:
    """Return the result as JSON values."""
    if not isinstance(result, Preview):
        return result.as_json()
    return {
        "search": [{"values": plain(dict(trial.values)), "key": trial.key} for trial in result.planned.search],
        "seeds": list(result.planned.sweep.seeds),
        "dev": {"how": result.planned.arranged.how, "images": result.planned.arranged.dev},
        "test": {"images": result.planned.arranged.test},
        "finished": result.finished,
        "trials": result.trials,
        "checked": result.checked,
        "cost": result.cost.as_json(),
        "device_days": result.days,
    }
