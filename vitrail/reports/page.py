"""`write_report(run_folder)`: what a run came to, on one page that needs nothing but itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitrail.errors import VitrailError
from vitrail.reports import sections
from vitrail.reports.contents import Contents, read_contents, validation_images
from vitrail.reports.cost_section import cost
from vitrail.reports.document import document, write_page
from vitrail.reports.gallery import exhibits, most_uncertain, worst_mistakes
from vitrail.reports.insides import attended, positioned
from vitrail.reports.seen import seen
from vitrail.weights.load import load

LIT = (
    "The right-hand picture is yellow where, by attention rollout, most of the answer came from, and blue where least "
    "did: attention averaged over heads and multiplied through the layers. It shows what was looked at, not why."
)


def write_report(run_folder: Path | str, out: Path | None = None) -> Path:
    """Write the report of a run, from what its folder holds and the data it names; return its path.

    It goes to `out`, or to report.html in the folder. What is missing is left out with a note. Raises DataError if the
    folder is no run folder, UsageError where the page cannot be written.
    """
    folder = Path(run_folder)
    contents = read_contents(folder)
    model = _model(contents)
    parameters = None if model is None else sum(parameter.numel() for parameter in model.parameters())
    source = _images(contents, model)
    body = [
        sections.verdict(contents),
        sections.numbers(contents, parameters),
        sections.progress(contents),
        sections.classes(contents.answers) if contents.answers else "",
        sections.calibrated(contents.answers) if contents.answers else "",
        *_galleries(contents, model, source),
        _distances(contents, model, source),
        positioned(model),
        seen(contents),
        sections.batch(contents),
        cost(contents, None if model is None else model.config),
        sections.repeat(contents),
        sections.particulars(contents),
    ]
    page = document(folder.resolve().name, "".join(body), contents.notes)
    return write_page(out or folder / "report.html", page)


def _model(contents: Contents) -> Any:
    if contents.run is not None and contents.run.objective.kind == "tokenizer":
        return None
    try:
        return load(contents.folder)
    except VitrailError as error:
        contents.notes.append(f"no model: {error}")
        return None


def _images(contents: Contents, model: Any) -> Any:
    """The validation images; None, with a note, where they are not there, and where nothing would be shown of them."""
    if model is None:
        return None
    try:
        return validation_images(contents)
    except (VitrailError, OSError) as error:
        lost = ["pictures of mistakes", "attention distance"][contents.answers is None :]
        contents.notes.append(f"no {', no '.join(lost)}: {error}")
        return None


def _galleries(contents: Contents, model: Any, source: Any) -> list[str]:
    """Two sections of images; a note where one cannot be had."""
    answers = contents.answers
    if answers is None or source is None:
        return []
    mistakes, uncertain = worst_mistakes(answers), most_uncertain(answers)
    try:
        return [
            sections.gallery(
                "Worst mistakes",
                f"Wrong, and least expected to be: the largest loss first. {LIT}",
                exhibits(mistakes, answers, source, model),
                answers,
            ),
            sections.gallery(
                "Most uncertain",
                "The two best classes are closest to each other; right or wrong by little.",
                exhibits(uncertain, answers, source, model),
                answers,
            ),
        ]
    except (VitrailError, OSError) as error:
        contents.notes.append(f"no pictures of mistakes: {error}")
        return []


def _distances(contents: Contents, model: Any, source: Any) -> str:
    """Attention distance by layer; a note where the images cannot be read."""
    if source is None:
        return ""
    try:
        return attended(model, source)
    except (VitrailError, OSError) as error:
        contents.notes.append(f"no attention distance: {error}")
        return ""
