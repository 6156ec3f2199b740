"""`--resume`: the recorded run that a command continues."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from vitrail.config import from_yaml
from vitrail.errors import CheckpointError, UsageError
from vitrail.files import names_near
from vitrail.recipes.asked import Asked
from vitrail.recipes.registry import recipe
from vitrail.training.run import Run

LATEST = "latest"
"""The value of `--resume` without a folder."""
AUTO = "auto"
"""The value of `--resume` for scripts that are started again: resume a run if there is one, else start one."""


def resumed(asked: Asked, where: str | Path) -> tuple[Run, Path] | None:
    """Return the recorded run to resume, changed by files and flags, and its folder.

    `where` is a run folder; or "latest", the run in --out with the newest valid checkpoint; or "auto", which is the
    same but returns None if no run has saved a checkpoint. A recipe may be named only with "auto", because the same
    command also starts the run. Raises CheckpointError if there is no checkpoint, or if all checkpoints are damaged.
    """
    if asked.recipe is not None and where != AUTO:
        raise UsageError(
            "a resumed run continues with its own settings: remove --recipe, or start a new run without --resume"
        )
    if where in (LATEST, AUTO):
        out = _out(asked)
        found = newest_run(out)
        if found is None and where == AUTO:
            return None
        if found is None:
            raise CheckpointError(
                f"no run in {out.resolve()} has a valid checkpoint to resume from: name the run with --resume RUN, "
                "or the folder of the runs with --out DIR"
            )
        folder = found
    else:
        folder = Path(where)
    written = folder / "config.yaml"
    if not folder.exists():
        raise CheckpointError(f"there is no run folder {folder}.{names_near(folder)} Give a run to resume.")
    if not written.is_file():
        raise CheckpointError(f"{folder} is not a run folder: {written} does not exist")
    from vitrail.training.folder import RunFolder
    from vitrail.training.python_objects import PythonObjects

    PythonObjects().check_resume(RunFolder.open(folder))
    before = from_yaml(written, Run())
    run, _ = asked.applied_to(before, recorded=True)
    fixed = ("name",) if where in (LATEST, AUTO) else ("name", "out")
    for name in fixed:
        if getattr(run, name) != getattr(before, name):
            raise UsageError(
                f"{asked.places[name].words} is {getattr(run, name)}, but the run to resume is {folder} and stays "
                "there. Remove it, or start a new run without --resume"
            )
    return run, folder


def _out(asked: Asked) -> Path:
    """Return the folder of the runs. Other flags are not read, because they may need the settings of a recorded run."""
    base = Run() if asked.recipe is None else recipe(asked.recipe)
    alone = {name: value for name, value in asked.settings.items() if name == "out"}
    return Path(replace(asked, settings=alone).applied_to(base)[0].out)


def newest_run(out: Path) -> Path | None:
    """Return the run folder in `out` with the newest valid checkpoint; None if there is no checkpoint.

    Raises CheckpointError if all checkpoints of a run are damaged.
    """
    from vitrail.training.checkpoints.checkpoint import latest_valid

    found = [(os.path.getmtime(path), path.parent) for path in out.glob("*/checkpoints")]
    for _, folder in sorted(found, reverse=True):
        if latest_valid(folder / "checkpoints") is not None:
            return folder
    return None
