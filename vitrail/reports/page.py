"""`write_report(run_folder)`: the result of a run on one page that needs nothing but itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitrail.config import to_yaml
from vitrail.errors import VitrailError
from vitrail.evaluation.calibration import calibration
from vitrail.evaluation.classify import Classification
from vitrail.reports import tables
from vitrail.reports.attention import DistanceFigure, distance_figure, position_figure
from vitrail.reports.cost import cost_of
from vitrail.reports.curves import SHARES, training_curves
from vitrail.reports.figures import confusion, reliability
from vitrail.reports.gallery import exhibits, most_uncertain, worst_mistakes
from vitrail.reports.render import render, short, write_page
from vitrail.reports.run_record import RunRecord, read_run, validation_images
from vitrail.weights.load import load

MOST_DRAWN = 1000
"""Maximum number of classes in a confusion matrix: with more, a cell is smaller than a pixel."""


def write_report(run_folder: Path | str, out: Path | None = None) -> Path:
    """Write the report of a run from its folder and the data that it names; return the path of the page.

    The page is `out` or report.html in the folder. Notes on the page list what is missing. Raises DataError if the
    folder is not a run folder, UsageError if the page cannot be written.
    """
    folder = Path(run_folder)
    record = read_run(folder)
    model = _best_model(record)
    source = _validation_images(record, model)
    evaluation = record.evaluation
    page = render(
        "report.html",
        title=folder.resolve().name,
        record=record,
        network=tables.network_in_words(record),
        parameters=None if model is None else sum(parameter.numel() for parameter in model.parameters()),
        shares=SHARES,
        curves=training_curves(record),
        classes=None if evaluation is None else _classes(evaluation),
        calibration=None if evaluation is None else calibration(evaluation),
        reliability=reliability,
        galleries=_galleries(record, model, source),
        distances=_distances(record, model, source),
        positions=position_figure(model),
        examples=_self_supervised_examples(record),
        cost=cost_of(record, None if model is None else model.config),
        settings=None if record.run is None else to_yaml(record.run),
        problems=tables.data_problems(record),
        particulars=tables.particulars(record),
        notes=record.notes,
    )
    return write_page(out or folder / "report.html", page)


def _best_model(record: RunRecord) -> Any:
    if record.run is not None and record.run.objective.kind == "tokenizer":
        return None
    try:
        return load(record.folder)
    except VitrailError as error:
        record.notes.append(f"the model cannot be loaded: {error}")
        return None


def _validation_images(record: RunRecord, model: Any) -> Any:
    """Return the validation images; None without a model to show them to, or with a note if they are gone."""
    if model is None:
        return None
    try:
        return validation_images(record)
    except (VitrailError, OSError) as error:
        pictures = "" if record.evaluation is None else "pictures of mistakes and "
        record.notes.append(f"{pictures}attention distance: {error}")
        return None


def _classes(evaluation: Classification) -> dict[str, Any]:
    """Return confusion matrix, most frequent confusions, and the table of classes."""
    names = [short(name, 40) for name in evaluation.class_names]
    return {
        "matrix": confusion(evaluation.confusion, names) if len(names) <= MOST_DRAWN else None,
        "confusions": tables.most_confused(evaluation),
        "rows": tables.weakest_classes(evaluation),
    }


def _galleries(record: RunRecord, model: Any, source: Any) -> dict[str, Any]:
    """Return the exhibits of both galleries; a note if the images cannot be read."""
    evaluation = record.evaluation
    if evaluation is None or source is None:
        return {}
    try:
        return {
            "mistakes": exhibits(worst_mistakes(evaluation), evaluation, source, model),
            "uncertain": exhibits(most_uncertain(evaluation), evaluation, source, model),
        }
    except (VitrailError, OSError) as error:
        record.notes.append(f"pictures of mistakes: {error}")
        return {}


def _distances(record: RunRecord, model: Any, source: Any) -> DistanceFigure | None:
    """Return attention distance by layer; a note if the images cannot be read."""
    try:
        return None if source is None else distance_figure(model, source)
    except (VitrailError, OSError) as error:
        record.notes.append(f"attention distance: {error}")
        return None


def _self_supervised_examples(record: RunRecord) -> bytes | None:
    """Return the picture of inputs, masks, predictions and targets (seen.png); a note if it is missing."""
    if not record.self_supervised:
        return None
    try:
        return (record.folder / "seen.png").read_bytes()
    except OSError:
        record.notes.append("seen.png is missing: the run had no validation images, or was not evaluated")
        return None
