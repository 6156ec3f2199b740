"""`python -m vitrail.transfer.worker FOLDER`: the process that trains one trial of a sweep (`processes`)."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from vitrail.errors import VitrailError
from vitrail.transfer.trial import run_trial


def main(argv: Sequence[str] | None = None) -> int:
    """Train the trial and return the exit code: 0 if there is an outcome, a failure too; 143 if it was ended."""
    parser = argparse.ArgumentParser(prog="python -m vitrail.transfer.worker")
    parser.add_argument("folder", type=Path, help="of the trial")
    parser.add_argument("--device", help="in place of the run's own")
    parser.add_argument("--cores", type=int, help="what this process may use")
    asked = parser.parse_args(argv)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    try:
        run_trial(asked.folder, device=asked.device, cores=asked.cores)
    except VitrailError as error:
        print(f"vitrail: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def end_with_parent() -> None:
    """Wait until the pipe on stdin closes, as it does when the sweep's process is gone; then save and end.

    It reads the descriptor itself: a thread inside sys.stdin would hold its lock when the interpreter ends.
    """
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
