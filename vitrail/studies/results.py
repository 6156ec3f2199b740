"""The files of a study: its tables (JSON, CSV, Markdown) and its figure (PNG, PDF)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.spreadsheet import SafeWriter
from vitrail.errors import UsageError
from vitrail.files import replacing_text
from vitrail.studies.catalog import NAMES, study_named
from vitrail.studies.figure import draw_study, draw_tiles
from vitrail.studies.study import LaptopData
from vitrail.studies.table import CellResult, Tables, column, published_tables
from vitrail.transfer.trial import write_json


def write(found: Tables, about: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write all files of a study into `folder`, and return them. `about` describes data, seeds and machine.

    Raises UsageError if one cannot be written.
    """
    name = found.study.name
    files = [folder / f"{name}.{suffix}" for suffix in ("json", "csv", "md", "png", "pdf")]
    write_json(files[0], as_json(found, about))
    with replacing_text(files[1], UsageError) as stream:
        SafeWriter(stream).writerows([table.name, *line] for table in found.tables for line in table.lines())
    with replacing_text(files[2], UsageError) as stream:
        stream.write(markdown(found, about.get("changes", ())))
    for path in files[3:]:
        (draw_tiles if found.study.tiles else draw_study)(found, path)
    return files


def read(path: Path) -> Tables:
    """Return the numbers of the .json file of a study, in the cells of today's grid.

    Raises OSError, ValueError or TypeError if this is no such file, KeyError if the grid has no such cell any more.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    study = study_named(found["study"])
    grid = study.cells(found["scale"], LaptopData(found["images"], found["sets"]))
    cells = {(cell.table, cell.row, cell.at): cell for cell in grid}
    results = [
        CellResult(cells[one["table"], one["row"], one["at"]], one["seed"], one["score"], one["reason"], one["run"])
        for one in found["cells"]
    ]
    return Tables(study, results, found["scale"], not found.get("rows"))


def redraw(folder: Path) -> None:
    """Draw the figures of the finished studies in `folder` anew from their numbers; Figure 10 would need the networks.

    Raises UsageError if a figure cannot be written.
    """
    for name in NAMES:
        try:
            found = read(folder / f"{name}.json")
        except (OSError, ValueError, TypeError, KeyError):
            continue  # the page leaves it out, or shows the figure as it is
        if not found.study.tiles:
            draw_study(found, folder / f"{name}.png")
            if (document := folder / f"{name}.pdf").exists():
                draw_study(found, document)


def as_json(found: Tables, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a study's results as JSON values."""
    study = found.study
    return {
        "study": study.name,
        "where": study.where,
        "title": study.title,
        **about,
        "tables": {
            table.name: [
                {"row": row, "at": at, "mean": mean, "deviation": None if math.isnan(deviation) else deviation}
                for (row, at), (mean, deviation) in table.means.items()
            ]
            for table in found.tables
        },
        "claims": [
            {"claim": answer.claim.text, "verdict": answer.verdict, "difference": answer.difference,
             "error": answer.error, "p": answer.p, "matters": answer.claim.matters, "advice": answer.advice}
            for answer in found.answers()
        ],
        "published": [
            {"table": table, "row": row, "at": at, "value": value, "quoted": row in study.quoted}
            for (table, row, at), value in study.published.items()
        ],
        "cells": [result.as_json() for result in found.results],
    }  # fmt: skip


def markdown(found: Tables, changes: Sequence[str] = ()) -> str:
    """Return tables, claims, what is missing and the published numbers as Markdown.

    `changes` are those of the whole grid (`vitrail.studies.run.StudyRequest.changes`).
    """
    study = found.study
    lines = [f"# {study.where}: {study.title}", *(["", f"Changed: {'; '.join(changes)}."] if changes else [])]
    for table in found.tables:
        lines += ["", f"{table.name} (columns: {study.axis})", "", *_grid(table.lines())]
    lines += ["", *(f"- {answer}" for answer in found.answers())]
    lines += ["", *(f"- {cell.cell.row}, {column(cell.cell.at)}, {cell.cell.table}, seed {cell.seed}: {cell.reason}"
                    for cell in found.missing)]  # fmt: skip
    for name, rows in published_tables(study.published, study.quoted).items():
        lines += ["", f"Published: {name}", "", *_grid(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _grid(lines: Sequence[Sequence[str]]) -> list[str]:
    header, *rows = lines
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
