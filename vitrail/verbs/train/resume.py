"""`--resume`: the recorded run that a command continues."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import CheckpointError, UsageError
from vitrail.files import names_near
from vitrail.objective.settings import Segmentation, SeveralAnswers, Supervised
from vitrail.recipes.asked import Asked
from vitrail.recipes.decide import undecided
from vitrail.recipes.finetune_by_data import WEIGHTS
from vitrail.recipes.registry import recipe
from vitrail.training.run import Run

if TYPE_CHECKING:
    from vitrail.recipes.known import Known

LATEST = "latest"
"""The value of `--resume` without a folder."""
AUTO = "auto"
"""The value of `--resume` for scripts that are started again: resume a run if there is one, else start one."""


def resumed(asked: Asked, where: str | Path, known: Known, *, tunes: bool = False) -> tuple[Run, Path] | None:
    """Return the recorded run to resume, changed by files and flags, and its folder.

    `where` is a run folder; or "latest", the newest run in --out, of --name if it is given; or "auto", the newest run
    in --out of the name that the command gives to its run, and None if no such run has saved a checkpoint. A recipe may
    be named only with "auto", because the same command also starts the run. `known` and `tunes` are those of `decide`.
    Raises CheckpointError if there is no checkpoint, or if all checkpoints are damaged, and UsageError if the newest
    run is another one than the command asks for.
    """
    if asked.recipe is not None and where != AUTO:
        raise UsageError(
            "a resumed run continues with its own settings: remove --recipe, or start a new run without --resume"
        )
    newest = where in (LATEST, AUTO)
    found, wish = _newest(asked, known, tunes=tunes, auto=where == AUTO) if newest else (Path(where), None)
    if found is None:
        return None
    folder, written = found, found / "config.yaml"
    if not folder.exists():
        raise CheckpointError(f"there is no run folder {folder}.{names_near(folder)} Give a run to resume.")
    if not written.is_file():
        raise CheckpointError(f"{folder} is not a run folder: {written} does not exist")
    from vitrail.training.folder import RunFolder
    from vitrail.training.python_objects import PythonObjects
    from vitrail.training.recorded import recorded_run

    PythonObjects().check_resume(RunFolder.open(folder))
    before = recorded_run(folder)
    assert before is not None  # it has a config.yaml
    run, _ = asked.applied_to(before, recorded=True)
    if newest:
        _refuse_another(before, wish or run, folder, tunes=tunes)
    fixed = ("name",) if newest else ("name", "out")
    for name in fixed:
        if getattr(run, name) != getattr(before, name):
            raise UsageError(
                f"{asked.places[name].words} is {getattr(run, name)}, but the run to resume is {folder} and stays "
                "there. Remove it, or start a new run without --resume"
            )
    return run, folder


def _newest(asked: Asked, known: Known, *, tunes: bool, auto: bool) -> tuple[Path | None, Run | None]:
    """Return the newest run that `asked` can mean, and with `auto` the run that it asks for; None if there is none.

    Other flags than --out and --name are not read without `auto`, because they may need the settings of a recorded run.
    """
    base = Run() if asked.recipe is None else recipe(asked.recipe)
    alone = {name: value for name, value in asked.settings.items() if name in ("out", "name")}
    given, wish = replace(asked, settings=alone).applied_to(base)[0], None
    out, name = Path(given.out), given.name if "name" in asked.places else None
    if auto:
        if not any(out.glob("*/checkpoints")):
            return None, None
        wish = undecided(asked, known, tunes=tunes)
        name = wish.name
    found = newest_run(out, name, passing=auto)
    if found is None and not auto:
        raise CheckpointError(
            f"no run in {out.resolve()} has a valid checkpoint to resume from: name the run with --resume RUN, "
            "or the folder of the runs with --out DIR"
        )
    return found, wish


def _refuse_another(before: Run, wish: Run, folder: Path, *, tunes: bool) -> None:
    """Raise UsageError if the newest run, recorded as `before`, learns other things than `wish`, or from other weights.

    A command cannot mean such a run: to continue it would end it where its own command had not, and replace its models.
    """
    from vitrail.training.recorded import are_other_weights

    weights = wish.weights or (WEIGHTS if tunes else None)
    by_data = isinstance(before.objective, Segmentation | SeveralAnswers) and wish.objective.kind == Supervised.kind
    same = by_data or before.objective.kind == wish.objective.kind
    if same and not are_other_weights(weights, before.weights):
        return
    theirs = f"{before.objective.kind} from {before.weights or 'random weights'}"
    raise UsageError(
        f"the newest run is {folder}, which learns {theirs}, and this command asks for {wish.objective.kind} from "
        f"{weights or 'random weights'}. To continue that run: vitrail train --resume {shlex.quote(str(folder))}. For "
        "a run of its own, give this command a --name or an --out that no other one has"
    )


def newest_run(out: Path, name: str | None = None, *, passing: bool = True) -> Path | None:
    """Return the run folder in `out` with the newest valid checkpoint, of the runs `name`-<n> if there is a name.

    None if there is no checkpoint. passing: Whether a newer run that has none is passed over. Raises CheckpointError if
    it is not, and if all checkpoints of a run are damaged.
    """
    from vitrail.training.checkpoints.checkpoint import latest_valid

    found = {path.parent: os.path.getmtime(path) for path in out.glob("*/config.yaml")}
    found |= {path.parent: os.path.getmtime(path) for path in out.glob("*/checkpoints")}
    own = [run for run in found if name is None or re.fullmatch(re.escape(name) + r"-\d+", run.name)]
    without = None
    for folder in sorted(own, key=lambda run: (found[run], run), reverse=True):
        if latest_valid(folder / "checkpoints") is None:
            without = without or folder
        elif passing or without is None:
            return folder
        else:
            raise CheckpointError(
                f"the newest run, {without}, has no checkpoint to resume from: start it again, or resume the run "
                f"before it with --resume {shlex.quote(str(folder))}"
            )
    return None
