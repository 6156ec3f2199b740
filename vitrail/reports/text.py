"""Values as text for people, and as text for HTML. Names of classes and files are never trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

LONGEST = 120
"""Characters shown of a name."""


def safe(value: Any, longest: int = LONGEST) -> str:
    """Return a value as HTML text or attribute: escaped, of printable characters, no longer than `longest`."""
    text = "".join(char if char.isprintable() else "�" for char in str(value))
    return escape(text if len(text) <= longest else text[: longest - 1] + "…")


def percent(share: float, digits: int = 1) -> str:
    """0.1234 -> "12.3 %" (they stay on one line); NaN -> "–"."""
    return "–" if math.isnan(share) else f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def wilson(right: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (Wilson's score interval; right for small counts, too)."""
    if not count:
        return 0.0, 1.0
    share = right / count
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Sequence[int] = ()) -> str:
    """Return an HTML table; cells are HTML already, `numeric` are the columns that are right-aligned."""
    kind = [' class="n"' if column in numeric else "" for column in range(len(head))]
    top = "".join(f'<th scope="col"{k}>{cell}</th>' for k, cell in zip(kind, head, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{k or FREE}>{cell}</td>" for k, cell in zip(kind, row, strict=True)) + "</tr>"
        for row in rows
    ]
    body = "".join(lines)
    return (
        f'<div class="scroll"><table><caption>{caption}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


FREE = ' class="free"'


def facts(rows: Iterable[tuple[str, Any]]) -> str:
    """Return a two-column table of names and values, which are escaped here."""
    lines = "".join(
        f'<tr><th scope="row">{safe(name)}</th><td class="free">{safe(value, 1000)}</td></tr>' for name, value in rows
    )
    return f'<div class="scroll"><table>{lines}</table></div>'
