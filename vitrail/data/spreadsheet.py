"""CSV that a spreadsheet shows as text: no cell of it is run as a formula.

Spreadsheets run a cell that begins with =, +, - or @, or with a tab or a carriage return before these. The names of
files and classes come from elsewhere, so such text gets an apostrophe in front, which spreadsheets do not show. Text
that begins with an apostrophe gets another, so that `unescape_formula` gives every name back exactly.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import Any, TextIO

from vitrail.words import as_text

PREDICTIONS = ("path", "class", "probability")
"""First columns of the CSV of `vitrail predict`, by which it is known as a table of images and labels."""
LABEL_PREDICTIONS = ("path", "labels", "probabilities")
"""Columns of that CSV if a network predicts several labels for an image."""
RISKY = ("=", "+", "-", "@", "\t", "\r", "'")
"""Beginnings of text that get an apostrophe in front."""


def escape_formula(cell: Any) -> Any:
    """Return a cell as it is written: text that a spreadsheet would run begins with an apostrophe."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(RISKY) and not _is_number(cell) else cell


def unescape_formula(cell: str) -> str:
    """Return the text that `escape_formula` was given; other text as it is."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(RISKY) else cell


def _escaped(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and unescape_formula(cell) != cell else cell


def _unchanged(cell: Any) -> Any:
    return cell


def _is_number(text: str) -> bool:
    """Return whether text is a plain number such as -0.5, which nothing can run."""
    return text[:1] in "+-" and text[1:].replace(".", "", 1).isdecimal() and text.isascii()


class _Rows:
    """A file that gets rows of a csv.writer, each with the line end `end`; names that are not UTF-8 become escapes."""

    def __init__(self, file: TextIO, end: str) -> None:
        self._file, self._end = file, end

    def write(self, row: str) -> None:
        """Write one row, which ends in a carriage return and a line feed."""
        self._file.write(as_text(row.removesuffix("\r\n") + self._end))


class SafeWriter:
    """A writer of CSV rows, as a spreadsheet may open them, or as they are if `raw`.

    With `read_back`, `unescape_formula` gives every name back exactly. Even a `raw` file then doubles the apostrophe at
    the beginning of a name that `unescape_formula` would change.
    """

    def __init__(self, file: TextIO, *, raw: bool = False, read_back: bool = False, end: str = "\n") -> None:
        # csv quotes a carriage return or line feed within a cell only if both are in its line end
        self._writer = csv.writer(_Rows(file, end), lineterminator="\r\n")
        self._cell = escape_formula if not raw else _escaped if read_back else _unchanged

    def writerow(self, row: Iterable[Any]) -> None:
        """Write one row."""
        self._writer.writerow(map(self._cell, row))

    def writerows(self, rows: Iterable[Iterable[Any]]) -> None:
        """Write rows, one by one."""
        for row in rows:
            self.writerow(row)
