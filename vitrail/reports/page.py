"""`write_report(run_folder)`: the result of a run on one page that needs nothing but itself.

Every page is one file that loads nothing and runs no scripts. Everything that a template prints is escaped, and
characters that cannot be printed are replaced: names of classes and files are never trusted. Only `Markup` is printed
as HTML.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vitrail.config import to_yaml
from vitrail.costs.estimate import amount
from vitrail.errors import UsageError
from vitrail.evaluation.answers import AnswerResults
from vitrail.evaluation.calibration import before_scaling, calibration
from vitrail.evaluation.classify import Classification
from vitrail.evaluation.label_scores import LabelScores, label_calibration, labels_before_scaling
from vitrail.evaluation.metric import wilson
from vitrail.evaluation.number_scores import NumberScores
from vitrail.evaluation.pixel_scores import TRUE, PixelResults
from vitrail.evaluation.results import Results
from vitrail.files import read_bytes, replacing_text
from vitrail.reports import run_record, tables
from vitrail.reports.attention import distance_figure, position_figure
from vitrail.reports.cost import cost_of
from vitrail.reports.curves import SHARES, training_curves
from vitrail.reports.figures import confusion, cooccurrence, data_uri, picture, reliability, risk_coverage, scatter
from vitrail.reports.gallery import SHOWN, exhibits, masks_picture
from vitrail.reports.run_record import read_run, validation_images
from vitrail.reports.suggestions import suggestions
from vitrail.weights.load import load
from vitrail.words import as_text, time_span

MOST_SCATTERS = 6
"""Maximum number of targets whose predictions are drawn."""
MOST_DRAWN = 1000
"""Maximum number of classes in a confusion matrix: with more, a cell is smaller than a pixel."""


def write_report(run_folder: Path | str, out: Path | None = None) -> Path:
    """Write the report of a run from its folder and the data that it names; return the path of the page.

    The page is `out` or report.html in the folder. Notes on the page list what is missing. Raises DataError if the
    folder is not a run folder, UsageError if the page cannot be written.
    """
    folder = Path(run_folder)
    record = read_run(folder)
    results, attempt = record.results, partial(run_record.attempt, record.notes)
    model = source = distances = examples = None
    galleries: dict[str, Any] = {}
    if record.run is None or record.run.objective.kind != "tokenizer":
        model = attempt("the model cannot be loaded", lambda: load(folder))
    if model is not None:
        pictures = "" if results is None else "pictures of mistakes and "
        source = attempt(f"{pictures}attention distance", lambda: validation_images(record))
    if source is not None:
        distances = attempt("attention distance", lambda: distance_figure(model, source))
        if results is not None:
            galleries = attempt("pictures of mistakes", lambda: _galleries(results, model, source)) or {}
    if record.self_supervised:
        what = "no examples, because the run had no validation images or was not evaluated"
        examples = attempt(what, lambda: read_bytes(folder / "seen.png"))
    page = render(
        "report.html",
        title=folder.resolve().name,
        record=record.shareable(),
        network=record.local(tables.network_in_words(record)),
        parameters=None if model is None else sum(parameter.numel() for parameter in model.parameters()),
        suggestions=[
            replace(one, reason=record.runnable(one.reason), command=one.command and record.runnable(one.command))
            for one in suggestions(record, None if model is None else min(model.config.image_size))
        ],
        shares=SHARES,
        curves=training_curves(record),
        shown=None if results is None else SHOWN_OF[results.task](results),
        temperature=1.0 if model is None else model.card.temperature,
        galleries=galleries,
        distances=distances,
        positions=position_figure(model),
        examples=examples,
        cost=cost_of(record, None if model is None else model.config),
        settings=None if record.run is None else record.local(to_yaml(record.run)),
        problems=record.local(tables.data_problems(record)),
        particulars=record.local(tables.particulars(record)),
        notes=record.local(record.notes),
    )
    return write_page(out or folder / "report.html", page)


def _classes(found: Classification) -> dict[str, Any]:
    """Return confusions, the table of classes, calibration, and what a smallest confidence means."""
    names = [short(name, 40) for name in found.class_names]
    return {
        "matrix": confusion(found.confusion, names) if len(names) <= MOST_DRAWN else None,
        "confusions": tables.most_confused(found),
        "rows": tables.weakest_classes(found),
        "calibration": calibration(found),
        "before": None if found.uncalibrated is None else before_scaling(found),
        "rejections": tables.rejections(found),
        "risk_coverage": risk_coverage(found),
    }


def _labels(found: LabelScores) -> dict[str, Any]:
    """Return co-occurrence, wrong labels and the table of labels, and their calibration."""
    names, calibrated = [short(name, 40) for name in found.class_names], label_calibration(found)
    drawn = len(names) <= MOST_DRAWN
    return {
        "matrix": cooccurrence(found.cooccurrence, found.predicted_together, names) if drawn else None,
        "wrong": tables.wrong_beside(found),
        "rows": tables.weakest_labels(found, calibrated),
        "calibrated": calibrated,
        "before": labels_before_scaling(found),
    }


def _numbers(found: NumberScores) -> dict[str, Any]:
    """Return the table of targets, and predicted against true values of the first targets."""
    drawn = range(min(len(found.class_names), MOST_SCATTERS))
    return {"rows": tables.targets(found), "figures": [scatter(found, number) for number in drawn]}


def _answers(found: AnswerResults) -> dict[str, Any]:
    """Return what is shown of each answer."""
    return {name: SHOWN_OF[part.task](part) for name, part in found.parts.items()}


def _pixels(found: PixelResults) -> dict[str, Any]:
    """Return name, share of the pixels and IoU of each class."""
    pixels = found.pixels[:, TRUE].sum(axis=0)
    return {"rows": list(zip(found.class_names, (pixels / pixels.sum()).tolist(), found.iou.tolist(), strict=True))}


SHOWN_OF: dict[str, Callable[[Any], dict[str, Any]]] = {
    "classes": _classes,
    "labels": _labels,
    "numbers": _numbers,
    "answers": _answers,
    "segmentation": _pixels,
}
"""Task -> what is drawn and listed of its results, which templates/tasks/TASK.html says."""


def _galleries(results: Results, model: Any, source: Any) -> dict[str, Any]:
    """Return the exhibits of the galleries."""
    rows = {"mistakes": results.worst(SHOWN), "uncertain": results.uncertain(SHOWN)}
    found: dict[str, Any] = {name: exhibits(chosen, results, source, model) for name, chosen in rows.items()}
    return found | ({"masks": masks_picture(results, model, source)} if isinstance(results, PixelResults) else {})


def without_controls(value: Any) -> Any:
    """Replace characters that cannot be printed, such as those that reverse the direction of text; see `as_text`."""
    if isinstance(value, Markup):
        return value
    return "".join(char if char.isprintable() else "�" for char in as_text(value))


def short(value: Any, longest: int = 120) -> str:
    """Return a value as printable text of at most `longest` characters; HTML stays as it is."""
    text: str = without_controls(value)
    return text if isinstance(text, Markup) or len(text) <= longest else text[: longest - 1] + "…"


def percent(share: float, digits: int = 1) -> Markup:
    """Write a share as a percentage that stays on one line: 0.1234 -> "12.3 %"; NaN -> "–"."""
    return Markup("–" if math.isnan(share) else f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%")


def points(share: float) -> str:
    """Write a difference of two shares in percentage points: 0.012 -> "+1.2"."""
    rounded = round(100 * share, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


@cache
def environment() -> Environment:
    """Return the templates of this package with the filters that they use."""
    templates = Environment(
        loader=PackageLoader("vitrail.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (amount, data_uri, percent, picture, points, short, time_span)
    templates.filters.update({function.__name__: function for function in filters})
    templates.filters["shell_quote"] = shlex.quote
    templates.globals.update(wilson=wilson, calibration=calibration, reliability=reliability)
    return templates


def render(template: str, **values: Any) -> str:
    """Fill in a template of this package and return it as HTML."""
    return environment().get_template(template).render(values)


def write_page(path: Path, page: str) -> Path:
    """Replace the file `path` atomically and return it. Raises UsageError if it cannot be written."""
    with replacing_text(path, UsageError) as file:
        file.write(page)
    return path
