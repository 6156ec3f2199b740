"""The results of `vitrail evaluate` for a network that predicts numbers: a table, JSON and a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.data.spreadsheet import SafeWriter
from vitrail.files import replacing_text
from vitrail.terminal import page, table, unreadable_lines

if TYPE_CHECKING:
    from vitrail.evaluation.number_scores import NumberScores

COLUMNS = ("target", "R2", "MAE", "RMSE", "MAE of the mean", "RMSE of the mean")


def show(subject: str, found: NumberScores, notes: list[str]) -> Any:
    """Return the results as a table for a terminal; `subject` says of what on which images."""
    rows = [(name, *(f"{value:.4g}" for value in values)) for name, *values in _rows(found)]
    return page(
        f"{subject}: R2 {found.r2:.4f}, MAE {found.mae:.4g}, RMSE {found.rmse:.4g}, {found.count:,} images",
        notes,
        table(COLUMNS, rows, "targets; the last two are errors of always predicting the mean of the training images"),
        unreadable_lines(found.bad),
    )


def _rows(found: NumberScores) -> list[tuple[Any, ...]]:
    """Return the values of each target, in the order of `COLUMNS`."""
    columns = (found.target_r2, found.target_mae, found.target_rmse, found.mean_mae, found.mean_rmse)
    return list(zip(found.class_names, *(column.tolist() for column in columns), strict=True))


def as_json(found: NumberScores) -> dict[str, Any]:
    """Return the results as JSON values."""
    names = [name.replace(" ", "_").lower() for name in COLUMNS[1:]]
    return {
        **found.metrics(),
        "targets": [{"name": name, **dict(zip(names, values, strict=True))} for name, *values in _rows(found)],
        "bad": [{"id": id_, "reason": reason} for id_, reason in found.bad],
    }


def write(found: NumberScores, out: Path, *, raw: bool = False) -> None:
    """Write targets.csv into a folder; `raw` is SafeWriter's."""
    with replacing_text(out / "targets.csv") as file:
        writer = SafeWriter(file, raw=raw)
        writer.writerow(COLUMNS)
        writer.writerows((name, *(f"{value:.7g}" for value in values)) for name, *values in _rows(found))
