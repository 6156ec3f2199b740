"""The files of `vitrail evaluate --out`: the numbers, the reliability diagram, and the outputs for every image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.data.spreadsheet import SafeWriter
from vitrail.disk import writing
from vitrail.errors import UsageError
from vitrail.files import check_writable, replacing_text, result_json
from vitrail.verbs.network import label_results, number_results
from vitrail.version import need

if TYPE_CHECKING:
    from vitrail.evaluation.classify import Classification
    from vitrail.evaluation.number_scores import NumberScores
    from vitrail.evaluation.label_scores import LabelScores


def check(out: Path) -> None:
    """Raise UsageError if `write` cannot write to `out` or lacks a package, before the evaluation starts."""
    if not _is_file(out):
        need("matplotlib")
    check_writable(out, UsageError, folder=not _is_file(out))


def write(found: Classification | LabelScores | NumberScores, numbers: Any, out: Path, *, raw: bool = False) -> None:
    """Write outputs and numbers (JSON values) to the folder `out`, or only the outputs to a file named .npz.

    `raw` is SafeWriter's. Raises UsageError if `out` cannot be written.
    """
    from vitrail.evaluation.calibration import calibration, draw, write_bins
    from vitrail.evaluation.classify import Classification
    from vitrail.evaluation.number_scores import NumberScores
    from vitrail.evaluation.tasks.store import save_results

    with writing(out, UsageError):
        if _is_file(out):
            save_results(out, found)
            return
        text = result_json(numbers, indent=1)
        with replacing_text(out / "evaluation.json") as file:
            file.write(text + "\n")
        save_results(out / "answers.npz", found)
        if isinstance(found, NumberScores):
            number_results.write(found, out, raw=raw)
            return
        if not isinstance(found, Classification):
            label_results.write(found, out, raw=raw)
            return
        calibrated = calibration(found)
        write_bins(out / "calibration.csv", calibrated)
        draw(calibrated, out / "reliability.png")
        with replacing_text(out / "classes.csv") as file:
            writer = SafeWriter(file, raw=raw)
            writer.writerow(("class", "images", "right", "f1"))
            scores = ["" if f1 != f1 else f"{f1:.6f}" for f1 in found.class_f1.tolist()]
            writer.writerows(zip(found.class_names, found.class_count, found.class_correct, scores, strict=True))


def _is_file(out: Path) -> bool:
    return out.suffix.lower() == ".npz"
