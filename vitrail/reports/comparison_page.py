"""`write_comparison(run_folders, out)`: several runs on one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitrail.evaluation.calibration import calibration
from vitrail.reports.compare import Comparison, compare
from vitrail.reports.curves import comparison_curves
from vitrail.reports.differences import class_shifts, disagreements
from vitrail.reports.figures import SERIES
from vitrail.reports.render import render, write_page
from vitrail.reports.run_record import attempt, validation_images
from vitrail.reports.tables import MOST_CLASSES
from vitrail.words import without_folders


def write_comparison(run_folders: Sequence[Path | str], out: Path | str) -> Comparison:
    """Write a page that compares runs to the file `out`; return the comparison. The first run is the baseline.

    If the runs are the folds of a cross-validation, the predictions for all images are written to `predictions_file`.

    Notes on the page list what is missing. Raises DataError if a folder is not a run folder, UsageError if a folder is
    given twice or `out` cannot be written.
    """
    found = compare([Path(folder) for folder in run_folders])
    notes, galleries = list(found.notes), None
    if found.against:
        galleries = attempt(notes, "pictures", lambda: disagreements(found, validation_images(found.runs[0])))
    settings = {
        name: [run.local(v) for run, v in zip(found.runs, values, strict=True)]
        for name, values in found.settings.items()
    }
    page = render(
        "comparison.html",
        title=f"{', '.join(found.labels[:-1])} and {found.labels[-1]}",
        found=replace(found, runs=[run.published() for run in found.runs], settings=settings),
        curves=comparison_curves(found.runs, found.labels),
        colours=len(SERIES),
        calibration=calibration,
        shifts=class_shifts(found),
        most_classes=MOST_CLASSES,
        galleries=galleries or [],
        notes=without_folders(notes),
    )
    write_page(Path(out), page)
    if found.folds:
        found.folds.write(predictions_file(Path(out)))
    return found


def predictions_file(page: Path) -> Path:
    """Return the CSV beside a page, for the predictions of the folds of a cross-validation."""
    return page.with_name(f"{page.stem}-predictions.csv")
