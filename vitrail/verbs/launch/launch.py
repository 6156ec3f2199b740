"""The shared part of `vitrail launch`: check a training command, and return a script for a cluster.

    vitrail launch slurm --nodes 4 --gpus-per-node 8 -- train s3://bucket/packed --recipe ... > train.sbatch

The command after `--` is parsed like a command line, so that mistakes are reported now and not when the job starts.
Both scripts start and resume a run with the same command: a folder that belongs to the job, and `--resume auto`.
Torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.errors import UsageError, did_you_mean
from vitrail.recipes.registry import recipe as named
from vitrail.training.run import Run, check_batch
from vitrail.verbs.flags.parse import GLOBAL, parse
from vitrail.verbs.flags.settings import RECIPE_OF, RunArguments, require_images, with_weights
from vitrail.verbs.train.train import finetune, train
from vitrail.words import one_line

LAUNCHED: dict[str, Callable[..., Any]] = {"train": train, "finetune": finetune}
OURS = {
    "out": "it is a flag of the launcher: vitrail launch ... --out DIR -- train ...",
    "resume": "the script resumes by itself",
    "nproc": "the script starts the processes; set their number with --nodes and --gpus-per-node",
    "print_config": "use it without the launcher",
    "dry_run": "use it without the launcher",
}
"""Flags that a launched command cannot have, and the reason."""
WORD = re.compile(r"[\w.,:@%+-]+")


@one_line
@dataclass(frozen=True)
class Script:
    """A script, and what it launches."""

    text: str
    run: Run
    """The run, as far as it is known without the data."""
    processes: int


def checked_run(command: Sequence[str], nodes: int, tasks: int) -> tuple[Run, list[str]]:
    """Return the run that `command` describes, and its words. Raises UsageError; data are not opened."""
    _require_utf8(" ".join(command))
    words = list(command[1:] if command[:1] == ("vitrail",) else command)
    if not words:
        raise UsageError("no command is given: vitrail launch slurm --nodes 2 -- train photos/ --recipe scratch-small")
    verb, *rest = words
    if verb not in LAUNCHED:
        raise UsageError(f"cannot launch {verb!r}, only: {', '.join(LAUNCHED)}.{did_you_mean(verb, LAUNCHED)}")
    _, given = parse(LAUNCHED[verb], rest, f"vitrail {verb}")
    for name, why in OURS.items():
        if name in given:
            raise UsageError(f"Remove --{name.replace('_', '-')} from the launched command: {why}")
    own = {name: given.pop(name, None) for name in ("path", "recipe", "epochs", "lr", "weights")}
    config = given.pop("config", ())
    arguments = RunArguments(**own, config=config, settings={name: given[name] for name in given if name not in GLOBAL})
    if verb == "finetune":
        arguments = with_weights(arguments)
    else:
        require_images(arguments)
    base = arguments.recipe or RECIPE_OF.get(verb)
    run = arguments.applied_to(Run() if base is None else named(base))
    processes = nodes * tasks
    if run.batch_size is not None:
        check_batch(run.batch_size, processes, f"{nodes} x {tasks}")
    return run, words


def script(text: str, run: Run, processes: int) -> Script:
    """Return a script. Raises UsageError if it contains a file name that is not UTF-8."""
    _require_utf8(text)
    return Script(text, run, processes)


def _require_utf8(text: str) -> None:
    """Raise UsageError if `text` contains a file name that is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        name = os.fsencode(error.object[error.start : error.end])
        raise UsageError(f"{name!r} in a name is not UTF-8, so a script cannot contain it. Rename the file.") from error


def show(result: Script) -> str:
    """Return the script."""
    return result.text.rstrip("\n")


def as_json(result: Script) -> Any:
    """Return the script, the number of processes it starts, and the run."""
    from vitrail.config import plain

    return {"script": result.text, "processes": result.processes, "run": plain(result.run)}
