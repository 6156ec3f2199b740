"""`write_report(run_folder)`: what a run came to, on one page that needs nothing but itself."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from vitrail.errors import VitrailError
from vitrail.report import sections
from vitrail.report.contents import Contents, read_contents, validation_images
from vitrail.report.gallery import exhibits, most_uncertain, worst_mistakes
from vitrail.report.text import safe
from vitrail.weights.load import load

# The page has no scripts and loads nothing; this makes the browser enforce it, whatever a class is called.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

LIT = (
    "The right-hand picture is yellow where, by attention rollout, most of the answer came from, and blue where least "
    "did: attention averaged over heads and multiplied through the layers. It shows what was looked at, not why."
)


def write_report(run_folder: Path | str) -> Path:
    """Write report.html into a run folder, from what the folder holds and the data it names; return its path.

    What is missing is left out with a note. Raises DataError if the folder is no run folder.
    """
    folder = Path(run_folder)
    contents = read_contents(folder)
    model = _model(contents)
    parameters = None if model is None else sum(parameter.numel() for parameter in model.parameters())
    body = [
        sections.verdict(contents),
        sections.numbers(contents, parameters),
        sections.progress(contents),
        sections.classes(contents.answers) if contents.answers else "",
        sections.calibrated(contents.answers) if contents.answers else "",
        *_galleries(contents, model),
        sections.batch(contents),
        sections.repeat(contents),
        sections.particulars(contents),
    ]
    notes = "".join(f'<p class="note">{safe(note, 1000)}</p>' for note in contents.notes)
    page = _page(folder.resolve().name, "".join(body), notes)
    path = folder / "report.html"
    partial = folder / f".report.html.{os.getpid()}"
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _model(contents: Contents) -> Any:
    try:
        return load(contents.folder)
    except VitrailError as error:
        contents.notes.append(f"no model: {error}")
        return None


def _galleries(contents: Contents, model: Any) -> list[str]:
    """Two sections of images; a note where the images or the model are not there."""
    answers = contents.answers
    if answers is None or model is None:
        return []
    mistakes, uncertain = worst_mistakes(answers), most_uncertain(answers)
    try:
        source = validation_images(contents)
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


def _page(title: str, body: str, notes: str) -> str:
    style = files("vitrail.report").joinpath("style.css").read_text(encoding="utf-8")
    missing = f"<h2>Not in this report</h2>{notes}" if notes else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)}: vitrail report</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body><main>\n<header><h1>{safe(title)}</h1></header>\n{body}\n{missing}\n"
        "<footer>Written by vitrail. This page is one file: it loads nothing and runs no scripts.</footer>\n"
        "</main></body>\n</html>\n"
    )
