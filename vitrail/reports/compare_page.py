"""`write_comparison(runs, out)`: several runs beside each other, on one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.reports import compare_sections as sections
from vitrail.reports.compare import Comparison, compare
from vitrail.reports.cost_section import costs
from vitrail.reports.document import document, write_page
from vitrail.reports.text import safe


def write_comparison(run_folders: Sequence[Path | str], out: Path | str) -> Comparison:
    """Write a page that compares runs to the file `out`; return what it shows.

    The first run is the one that the others are compared with. What is missing is left out with a note. Raises
    DataError if a folder is no run folder, UsageError for one given twice and where `out` cannot be written.
    """
    found = compare([Path(folder) for folder in run_folders])
    notes = list(found.notes)
    body = [
        sections.verdict(found),
        sections.accuracy(found),
        sections.settings(found),
        sections.progress(found),
        sections.classes(found),
        sections.disagreements(found, notes),
        costs([f"<b>{safe(label, 60)}</b>" for label in found.labels], found.costs),
        sections.repeat(found),
    ]
    write_page(Path(out), document(f"{', '.join(found.labels[:-1])} and {found.labels[-1]}", "".join(body), notes))
    return found
