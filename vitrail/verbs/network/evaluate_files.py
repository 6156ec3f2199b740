"""The files of `vitrail evaluate --out`: the numbers, the reliability diagram, and the outputs for every image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.disk import writing
from vitrail.errors import UsageError
from vitrail.files import check_writable, replacing_text, result_json
from vitrail.version import need

if TYPE_CHECKING:
    from vitrail.evaluation.results import Results


def check(out: Path) -> None:
    """Raise UsageError if `write` cannot write to `out` or lacks a package, before the evaluation starts."""
    if not _is_file(out):
        need("matplotlib")
    check_writable(out, UsageError, folder=not _is_file(out))


def write(found: Results, numbers: Any, out: Path, *, raw: bool = False) -> None:
    """Write outputs and numbers (JSON values) to the folder `out`, or only the outputs to a file named .npz.

    `raw` is SafeWriter's. Raises UsageError if `out` cannot be written.
    """
    from vitrail.tasks.catalog import TASKS, save_results

    with writing(out, UsageError):
        if _is_file(out):
            save_results(out, found)
            return
        text = result_json(numbers, indent=1)
        with replacing_text(out / "evaluation.json") as file:
            file.write(text + "\n")
        save_results(out / "answers.npz", found)
        TASKS[found.task].write(found, out, raw=raw)


def _is_file(out: Path) -> bool:
    return out.suffix.lower() == ".npz"
