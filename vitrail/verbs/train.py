"""`vitrail train` and `vitrail demo`: from images to a trained network and a report."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import to_yaml
from vitrail.errors import VitrailError
from vitrail.training.run import Run
from vitrail.verbs.flags.settings import Asked, OpenedData, plan, resumed

if TYPE_CHECKING:
    from vitrail.costs.estimate import Cost
    from vitrail.training.checkpoints.state import Result

log = logging.getLogger("vitrail")


@dataclass(frozen=True)
class Preview:
    """What would be trained, where `print_config` or `dry_run` asked not to train yet."""

    run: Run
    checked: dict[str, str] = field(default_factory=dict)
    """`dry_run` only: what was tried, and what came of it."""
    cost: Cost | None = None
    """`dry_run` only: what the run would cost on this machine."""


def train(
    path: str | Path | None = None,
    *,
    recipe: str | None = None,
    config: tuple[str | Path, ...] = (),
    epochs: float | None = None,
    lr: float | None = None,
    resume: str | Path | None = None,
    nproc: int | None = None,
    print_config: bool = False,
    dry_run: bool = False,
    **settings: Any,
) -> Result | Preview:
    """Train a Vision Transformer on a folder of images.

    Without --recipe and --config, a recipe is chosen by the number and the size of the images. Values of --config
    replace those of the recipe, and flags replace both. Defaults shown below are those of the recipe and the files on
    the same command line. The run folder OUT/NAME-N/ holds everything about the run; open its report.html.

    Args:
        path: A folder with one folder per class (with or without split folders), a CSV or Parquet file, tar shards,
            an .npz file, a data set of the hub, or 'digits'.
        recipe: Recipe to start from (`vitrail recipes` lists them).
        config: A YAML file of settings, such as the config.yaml of a run. May be repeated.
        epochs: Length of the training in epochs: short for --duration 'N epochs'.
        lr: Peak learning rate: short for --optim.lr.
        resume: Resume this run from its newest valid checkpoint. Without a value or with 'latest', the newest run
            in --out is resumed; with 'auto', a new run starts if there is none to resume.
        nproc: Number of training processes on this machine, one per device. The total batch size does not change.
            For several hosts, use torchrun ... -m vitrail train.
        print_config: Print every resolved setting as YAML and exit.
        dry_run: Check data, model, memory and one batch, estimate the cost, and exit.
        settings: Any field of `Run`; a section is a dict, such as `optim={"momentum": 0.8}`.
    """
    weights = settings.pop("weights", None)
    asked = Asked(path, recipe, files(config), epochs, lr, weights, settings)
    folder = None
    if resume is not None and (found := resumed(asked, resume)):
        run, folder = found
        log.info("going on with %s", folder)
    else:
        run, why = plan(asked)
        log.info("%s", why)
    if print_config or dry_run:
        return preview(run, asked.data, dry_run)
    from vitrail.training.loop import fit
    from vitrail.training.processes.group import joined, launch

    if nproc is not None:
        return reported(launch(run, folder, nproc))
    with joined(run.timeout):
        return reported(fit(run, resume=folder, splits=asked.data.of(run)))


def demo(*, out: str | Path = "runs", seed: int = 0) -> Result:
    """Train a small Vision Transformer on the embedded handwritten digits, in about a minute.

    The result is the accuracy on digits that the network has never seen, and the path of report.html.

    Args:
        out: Folder in which the run folder is created.
        seed: Seed of the run.
    """
    return train(recipe="digits", name="demo", out=out, seed=seed)  # type: ignore[return-value]


def start(
    run: Run,
    data: OpenedData,
    folder: Path | None = None,
    *,
    nproc: int | None = None,
    print_config: bool = False,
    dry_run: bool = False,
) -> Result | Preview:
    """Do with `run` what the end of `train` does: preview it, or train it and write the report."""
    if print_config or dry_run:
        return preview(run, data, dry_run)
    from vitrail.training.loop import fit
    from vitrail.training.processes.group import joined, launch

    if nproc is not None:
        return reported(launch(run, folder, nproc))
    with joined(run.timeout):
        return reported(fit(run, resume=folder, splits=data.of(run)))


def preview(run: Run, data: OpenedData, dry_run: bool) -> Preview:
    """Return what `run` would train; with `dry_run`, try it and estimate its cost."""
    if not dry_run:
        return Preview(run)
    from vitrail.verbs.dry_run import check

    return Preview(run, *check(run, data.of(run)))


def reported(result: Result) -> Result:
    """Return the result, once its report is written. All processes of a run call it; the main process writes."""
    from vitrail import world
    from vitrail.reports.page import write_report

    with world.main_alone("writing the report"):
        if world.is_main():
            try:
                write_report(result.folder)
            except (VitrailError, OSError) as error:  # a page that cannot be written must not cost a trained network
                log.warning("no report: %s", error)
    return result


def files(config: tuple[str | Path, ...] | str | Path) -> tuple[str, ...]:
    """Return configuration files as a tuple, where one was given by itself, too."""
    return (str(config),) if isinstance(config, str | Path) else tuple(map(str, config))


def show(result: Result | Preview) -> str:
    """Return the result as text for a terminal."""
    if isinstance(result, Preview):
        lines = [f"{name}: {what}" for name, what in result.checked.items()]
        return "\n".join(lines) if lines else to_yaml(result.run).rstrip()
    lines = [result.message]
    if result.test and "top1" in result.test:
        unseen = f"{result.test['count']:,.0f} test images, which had no part in training or in choosing the model"
        lines.append(f"top-1 {result.test['top1']:.2%} on {unseen}")
    report = result.folder / "report.html"
    return "\n".join([*lines, f"report: {report}"] if report.is_file() else lines)


def as_json(result: Result | Preview) -> Any:
    """Return the result as JSON values."""
    from vitrail.config import plain

    if isinstance(result, Preview):
        cost = None if result.cost is None else result.cost.as_json()
        return {"run": plain(result.run), "checked": result.checked, "cost": cost}
    return {**plain(result), "report": str(result.folder / "report.html")}
