"""What verbs show on a terminal: progress, tables, and lists that are cut to a readable length."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vitrail.words import printable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

log = logging.getLogger("vitrail")
LINES = 20
"""Maximum number of lines of one kind on a terminal; --json and --out contain all of them."""
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
            print(f"\r{self.what} {done:,} of {total:,}", end="\n" if done == total else "", file=sys.stderr)


def table(columns: Sequence[str], rows: Iterable[Iterable[object]], title: str | None = None) -> Table:
    """Return a table for a terminal. Columns of numbers are aligned to the right and not wrapped."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    cells = [[printable(str(cell)) for cell in row] for row in rows]
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for number, name in enumerate(columns):
        numeric = all(NUMBER.match(row[number]) for row in cells)
        made.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in cells:
        made.add_row(*row)
    return made


def page(*parts: Table | str | Iterable[str]) -> Group:
    """Return tables, lines and lists of lines, one below the other. Empty lists and tables without rows are left out.

    Lines are text, not markup: a class may be called "end [/b]".
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown: list[Table | Text] = []
    for part in parts:
        if isinstance(part, Table):
            shown += [part] if part.row_count else []
        elif lines := [part] if isinstance(part, str) else list(part):
            shown.append(Text(printable("\n".join(lines))))
    return Group(*shown)


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
