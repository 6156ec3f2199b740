"""One process of a run that `processes.group.launch` has started: `python -m vitrail.training.processes.child ...`.

The first process that fails writes the reason into the file NOTE. The other processes then fail as well, find the note,
and stay silent. If none fails, the main process writes the result into NOTE.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitrail import world
from vitrail.config import from_yaml
from vitrail.device import keep_freed_memory
from vitrail.errors import VitrailError
from vitrail.files import write_once
from vitrail.training.checkpoints.state import Result
from vitrail.training.loop import training
from vitrail.training.processes.group import joined, leave, own_note
from vitrail.training.processes.parent import end_with_parent
from vitrail.training.python_objects import PythonObjects
from vitrail.training.run import Run


def main(config: str, note: str, resume: str, asked: str, *, report: Callable[[Result], Result] | None = None) -> int:
    """Train the run in the file `config` and return the exit code; `resume` is a run folder, or "" for a new run.

    asked: See `fit`, in JSON. report: Writes report.html, and returns the result.
    """
    try:
        if resume:  # the command that started this process has read it, and refused modules that nobody has named
            from_yaml(Path(resume) / "config.yaml", Run(), imports=True)
        run = from_yaml(Path(config), Run(), imports=True)
        keep_freed_memory()
        objects, reported = PythonObjects(asked=json.loads(asked)), report is not None
        with joined(run.timeout):
            with training(run, objects, resume=resume or None, reported=reported) as result:
                result = result if report is None else report(result)
            if world.is_main():
                _write_note(Path(note), {**asdict(result), "folder": str(result.folder)})
        return 0
    except (VitrailError, KeyboardInterrupt) as error:
        _write_note(Path(note), {"error": str(error) or "interrupted"})
        return error.exit_code if isinstance(error, VitrailError) else 130
    except BaseException as error:
        if _write_note(Path(note), {"error": f"process {os.environ['RANK']}: {type(error).__name__}: {error}"}):
            traceback.print_exc()
        return 1


def _write_note(path: Path, value: dict[str, Any]) -> bool:
    """Write the note unless another process has written it; return whether this process wrote it."""
    own_note(path, int(os.environ["RANK"])).write_text(json.dumps(value))
    return write_once(path, json.dumps(value))


if __name__ == "__main__":
    end_with_parent()
    leave(main(*sys.argv[1:]))
