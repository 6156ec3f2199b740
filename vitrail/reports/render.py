"""Turn templates into pages. Every page is one file that loads nothing and runs no scripts.

Everything that a template prints is escaped, and characters that cannot be printed are replaced: names of classes
and files are never trusted. Only `Markup` is printed as HTML.
"""

from __future__ import annotations

import math
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vitrail.costs.estimate import amount
from vitrail.errors import UsageError
from vitrail.evaluation.metric import wilson
from vitrail.files import replacing_text
from vitrail.reports.figures import data_uri, picture
from vitrail.words import as_text, time_span


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
    found = Environment(
        loader=PackageLoader("vitrail.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (amount, data_uri, percent, picture, points, short, time_span)
    found.filters.update({function.__name__: function for function in filters})
    found.filters["shell_quote"] = shlex.quote
    found.globals["wilson"] = wilson
    return found


def render(template: str, **values: Any) -> str:
    """Fill in a template of this package and return it as HTML."""
    return environment().get_template(template).render(values)


def write_page(path: Path, page: str) -> Path:
    """Replace the file `path` atomically and return it. Raises UsageError if it cannot be written."""
    with replacing_text(path, UsageError) as file:
        file.write(page)
    return path
