"""`vitrail report`: write the page of one run again, or a page that compares several runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import UsageError
from vitrail.files import check_writable
from vitrail.ranges import checked
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.reports.compare import Comparison

COMPARED = "comparison.html"


@one_line
@dataclass(frozen=True)
class WrittenReport:
    """The path of the page, and the comparison; None for one run."""

    path: Path
    comparison: Comparison | None = None


@checked
def report(run: str | Path, *runs: str | Path, out: str | Path | None = None) -> WrittenReport:
    """Write the report of one run again, or one page that compares several runs.

    The comparison shows settings that differ, curves over each other, accuracy with McNemar's test on the images that
    all runs have evaluated, classes that gain and lose, images that only one run gets right, and cost. All runs are
    compared with the first one. Nothing is trained or evaluated.

    If all runs are folds of one cross-validation (--data.fold), the page shows mean and standard deviation over folds
    in place of tests. The predictions for all images, each by the network that has not seen the image, are written to a
    CSV beside the page.

    Args:
        run: A run folder.
        runs: Further run folders to compare with it.
        out: The file to write; an existing one is replaced (default: report.html in the run folder, or
            comparison.html in this folder).
    """
    target = None if out is None else Path(out)
    if target is not None and target.is_dir():
        raise UsageError(f"--out {out} is a folder. Give the file to write, such as {target / COMPARED}.")
    if target is not None:
        check_writable(target, UsageError)
    folders = [Path(folder) for folder in (run, *runs)]
    if len(folders) == 1:
        from vitrail.reports.page import write_report

        return WrittenReport(write_report(folders[0], target))
    from vitrail.reports.compare import write_comparison

    target = target or Path(COMPARED)
    return WrittenReport(target, write_comparison(folders, target))


def show(result: WrittenReport) -> str:
    """Return the path of the page and the comparison as text for a terminal."""
    lines = [f"report: {result.path}"]
    found = result.comparison
    if found is None:
        return lines[0]
    for label, record in zip(found.labels, found.runs, strict=True):
        lines.append(f"{label}: {'not evaluated' if record.results is None else record.results.in_words()}")
    for one in found.against:
        low, high = one.pair.interval
        lines.append(
            f"{found.labels[one.number]} against {found.labels[0]}: {100 * one.pair.difference:+.2f} points "
            f"(95 % confidence: {100 * low:+.2f} to {100 * high:+.2f}) on {one.pair.count:,} images, "
            f"McNemar p = {one.p:.3g}"
        )
    if found.folds:
        numbers = ", ".join(map(str, found.folds.numbers))
        lines.append(f"{found.folds.done} of {found.folds.count} folds, mean and standard deviation: {numbers}")
        lines.append(f"predictions of {found.folds.images:,} images: {_predictions(result)}")
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _predictions(result: WrittenReport) -> str:
    from vitrail.reports.compare import predictions_file

    return str(predictions_file(result.path))


def as_json(result: WrittenReport) -> Any:
    """Return the result as JSON values."""
    value: dict[str, Any] = {"path": str(result.path)}
    found = result.comparison
    if found is None:
        return value
    value["runs"] = []
    for label, record, cost in zip(found.labels, found.runs, found.costs, strict=True):
        accuracy = None if record.results is None else dict(record.results.metrics())
        if accuracy is not None and record.evaluation is not None:
            accuracy["right"] = int(record.evaluation.correct.sum())
        spent = {"flops": cost.flops, "seconds": cost.seconds, "joules": cost.joules, "steps": cost.steps}
        value["runs"].append({"run": label, "folder": str(record.folder), "validation": accuracy, "cost": spent})
    value["settings"] = {name: dict(zip(found.labels, values, strict=True)) for name, values in found.settings.items()}
    value["against_first"] = [
        {
            "run": found.labels[one.number],
            "images": one.pair.count,
            "only_first_right": one.pair.only_first,
            "only_this_right": one.pair.only_second,
            "difference": one.pair.difference,
            "interval": list(one.pair.interval),
            "p": one.p,
        }
        for one in found.against
    ]
    value["notes"] = found.notes
    if found.folds:
        numbers = {one.title: {"mean": one.mean, "deviation": one.deviation} for one in found.folds.numbers}
        value["folds"] = {
            "count": found.folds.count,
            "done": found.folds.done,
            "images": found.folds.images,
            "numbers": numbers,
            "predictions": _predictions(result),
        }
    return value
