"""What verbs show on a terminal: progress, tables, and lists that are cut to a readable length."""

from __future__ import annotations

import logging
import re
import sys
import textwrap
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from vitrail.words import printable

log = logging.getLogger("vitrail")
LINES = 20
"""Maximum number of lines of one kind on a terminal; --json and --out contain all of them."""
INDENT, GAP = 2, 3
"""Number of spaces before a table, and between its columns."""
NUMBER = re.compile(r"[-+]?\d|$")
"""The beginning of a table's cell that holds a number, or nothing."""


class ProgressLine:
    """Progress on a terminal, on one line of stderr."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.shown = sys.stderr.isatty() and log.isEnabledFor(logging.INFO)
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` images are done, ten times a second at most."""
        now = time.monotonic()
        if self.shown and (now >= self._next or done == total):
            self._next = now + 0.1
            line = f"{self.what} {done:,} of {total:,}"
            print("\r" + " " * len(line) + "\r" if done == total else f"\r{line}", end="", file=sys.stderr, flush=True)


class Unwrapped(str):
    """A line that is never wrapped, such as a command to copy."""


@dataclass(frozen=True)
class TextTable:
    """Rows of text below the names of their columns; columns without any name have no header."""

    columns: list[str]
    rows: list[list[str]]
    title: str = ""
    rules: tuple[int, ...] = ()
    """Numbers of the rows before which there is a line."""

    def lines(self, width: int | None) -> Iterator[str]:
        """Yield the lines for a terminal of this width; for None, which is a pipe, cells with tabs between them.

        Columns of numbers are aligned to the right. Cells are wrapped at spaces only. If the longest words do not fit
        beside each other, each row takes a line for each column.
        """
        if self.title:
            yield from [*_wrapped(self.title, width), *([] if width is None else [""])]
        header = [self.columns] if any(self.columns) else []
        if width is None:
            yield from ("\t".join(" ".join(cell.split()) for cell in row) for row in [*header, *self.rows])
            return
        columns = list(zip(*header, *self.rows, strict=True))
        numeric = [all(map(NUMBER.match, column[len(header) :])) for column in columns]
        if (widths := _widths(columns, len(header), numeric, width - INDENT)) is None:
            yield from self._blocks(width)
            return
        rule = " " + "\u2500" * min(sum(widths) + GAP * (len(widths) - 1) + 2, width - 1)
        for number, row in enumerate([*header, *self.rows]):
            yield from _row(row, widths, numeric)
            if (number == 0 and header) or number + 1 - len(header) in self.rules:
                yield rule

    def _blocks(self, width: int) -> Iterator[str]:
        """Yield a line for each cell, and an empty line after each row."""
        longest = max(map(len, self.columns))
        for row in self.rows:
            for name, cell in zip(self.columns, row, strict=True):
                yield from _wrapped(f"{' ' * INDENT}{name:{longest}}{' ' * GAP}{cell}".rstrip(), width)
            yield ""


@dataclass(frozen=True)
class TerminalPage:
    """Tables and lines, one below the other."""

    parts: list[TextTable | str]

    def text(self, width: int | None) -> str:
        """Return the page for a terminal of this width; for None, which is a pipe, nothing is wrapped."""
        lines: list[str] = []
        for part in self.parts:
            if not isinstance(part, TextTable):
                lines += _wrapped(part, width)
                continue
            apart = [""] if width is not None else []
            lines += [*(apart if lines and lines[-1] else []), *part.lines(width), *apart]
        return "\n".join(lines).rstrip("\n")


def table(
    columns: Sequence[str], rows: Iterable[Iterable[object]], title: str = "", rules: tuple[int, ...] = ()
) -> TextTable:
    """Return a table of anything that can be written as text."""
    return TextTable(
        [printable(name) for name in columns],
        [[printable(str(cell)) for cell in row] for row in rows],
        printable(title),
        rules,
    )


def page(*parts: TextTable | str | Iterable[str]) -> TerminalPage:
    """Return tables, lines and lists of lines, one below the other, without empty lists and tables without rows."""
    shown: list[TextTable | str] = []
    for part in parts:
        if isinstance(part, TextTable):
            shown += [part] if part.rows else []
        else:
            shown += [part] if isinstance(part, str) else list(part)
    return TerminalPage([part if isinstance(part, TextTable) else type(part)(printable(part)) for part in shown])


def _widths(columns: Sequence[Sequence[str]], headers: int, numeric: Sequence[bool], width: int) -> list[int] | None:
    """Return the width of each column; None if the longest words do not fit into `width` characters."""
    widths, least = [], []
    for column, numbers in zip(columns, numeric, strict=True):
        widths.append(max(map(columns_wide, column)))
        words = [word for cell in (column[:headers] if numbers else column) for word in cell.split()]
        least.append(max([0, *map(columns_wide, words), *(map(columns_wide, column[headers:]) if numbers else ())]))
    room = width - GAP * (len(widths) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        widest = max(
            (number for number in range(len(widths)) if widths[number] > least[number]), key=widths.__getitem__
        )
        widths[widest] -= 1
    return widths


def _row(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> Iterator[str]:
    """Yield the lines of a row of a table."""
    cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for line in zip_longest(*cells, fillvalue=""):
        parts = [
            text + " " * (width - columns_wide(text)) if not numbers else text.rjust(width)
            for text, width, numbers in zip(line, widths, numeric, strict=True)
        ]
        yield (" " * INDENT + (" " * GAP).join(parts)).rstrip()


def columns_wide(text: str) -> int:
    """Return the number of columns that a text takes on a terminal: two for a Chinese character, none for an accent."""
    marks = sum(unicodedata.category(letter) in ("Mn", "Me", "Cf") for letter in text)
    return len(text) - marks + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)


def _wrapped(text: str, width: int | None) -> list[str]:
    """Return the lines of a text, wrapped at spaces. A word that is longer than a line stays whole."""
    if width is None or isinstance(text, Unwrapped):
        return text.split("\n")
    return [
        part
        for line in text.split("\n")
        for part in textwrap.wrap(line, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]
    ]


def first_lines(lines: list[str], total: int | None = None) -> list[str]:
    """Return the first lines, and the number of further ones if `total` (default: all lines) is larger."""
    more = (len(lines) if total is None else total) - LINES
    return lines[:LINES] + ([f"... and {more:,} more"] if more > 0 else [])


def unreadable_lines(unreadable: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line about each unreadable image, (image, reason)."""
    return [f"unreadable image, skipped: {image} ({reason})" for image, reason in unreadable]


def unreadable_json(unreadable: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Return unreadable images, (image, reason), as JSON values."""
    return [{"image": image, "reason": reason} for image, reason in unreadable]
