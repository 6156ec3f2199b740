"""The files of `vitrail evaluate --out`: the numbers, the reliability diagram, and the outputs for every image."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import UsageError

if TYPE_CHECKING:
    from vitrail.evaluation.classify import Classification


def make_room(out: Path) -> None:
    """Create the folder for `write` before the evaluation starts. Raises UsageError if that is not possible."""
    with _explained(out):
        (out.parent if _is_file(out) else out).mkdir(parents=True, exist_ok=True)


def write(found: Classification, numbers: Any, out: Path) -> None:
    """Write outputs and numbers (JSON values) to the folder `out`, or only the outputs to a file named .npz.

    Raises UsageError if `out` cannot be written.
    """
    from vitrail.evaluation.calibration import calibration, write_bins
    from vitrail.evaluation.classify import save_classification
    from vitrail.evaluation.reliability import draw
    from vitrail.training.folder import plain

    with _explained(out):
        if _is_file(out):
            save_classification(out, found)
            return
        text = json.dumps(plain(numbers), indent=1, ensure_ascii=False)
        (out / "evaluation.json").write_text(text + "\n", encoding="utf-8")
        save_classification(out / "answers.npz", found)
        calibrated = calibration(found)
        write_bins(out / "calibration.csv", calibrated)
        draw(calibrated, out / "reliability.png")
        with open(out / "classes.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("class", "images", "right"))
            writer.writerows(zip(found.class_names, found.class_count, found.class_correct, strict=True))


def _is_file(out: Path) -> bool:
    return out.suffix.lower() == ".npz"


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror or error}") from None
