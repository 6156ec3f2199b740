"""One process of a run that `processes.group.launch` started: `python -m vitrail.training.processes.member ...`.

The first to fail writes why into NOTE; the others, which fail because it is gone, find it there and say nothing. Where
none fails the main process writes the result.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitrail import world
from vitrail.config import from_yaml
from vitrail.errors import VitrailError
from vitrail.training.loop import fit
from vitrail.training.processes.group import joined, leave, own_note
from vitrail.training.run import Run


def main(config: str, note: str, resume: str) -> int:
    """Train as the file `config` says, in the folder `resume` unless that is empty, and return the exit code."""
    try:
        run = from_yaml(Path(config), Run())
        with joined(run.timeout):
            result = fit(run, resume=resume or None)
            if world.is_main():
                _note(Path(note), {**asdict(result), "folder": str(result.folder)})
        return 0
    except (VitrailError, KeyboardInterrupt) as error:
        _note(Path(note), {"error": str(error) or "interrupted"})
        return error.exit_code if isinstance(error, VitrailError) else 130
    except BaseException as error:
        if _note(Path(note), {"error": f"process {os.environ['RANK']}: {type(error).__name__}: {error}"}):
            traceback.print_exc()
        return 1


def _note(path: Path, value: dict[str, Any]) -> bool:
    """Write the note, unless another process has; say whether it was this one."""
    own = own_note(path, int(os.environ["RANK"]))
    own.write_text(json.dumps(value))
    try:
        os.link(own, path)  # all of it, or nothing because another one is there
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
