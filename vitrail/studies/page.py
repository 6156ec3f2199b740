"""All finished studies of a folder as one page: the tables and figures of the papers, published and ours."""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from vitrail.errors import UsageError
from vitrail.files import read_bytes, read_json_object, replacing_text
from vitrail.studies.catalog import NAMES
from vitrail.studies.table import axes, column, number, published_tables, text_table

log = logging.getLogger("vitrail")
PAGE = "index.html"


def write_gallery(folder: Path) -> Path:
    """Write index.html about all studies whose results are in `folder`, and return it.

    Raises UsageError if there are none, or if the page cannot be written.
    """
    found = [study for name in NAMES if (study := _read(folder / f"{name}.json")) is not None]
    if not found:
        raise UsageError(f"{folder} has no finished study. Run one: vitrail study figure4 --data DIR --out {folder}")
    environment = Environment(
        loader=PackageLoader("vitrail.studies"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("gallery.html").render(studies=found)
    with replacing_text(folder / PAGE, UsageError, errors="backslashreplace") as stream:
        stream.write(page)
    return folder / PAGE


def _read(path: Path) -> dict[str, Any] | None:
    """Return what the page shows of a study; None, with a warning, if its files cannot be read."""
    if not path.exists():
        return None
    try:
        found = read_json_object(path, UsageError)
        picture = read_bytes(path.with_suffix(".png"))
        return {
            "name": str(found["study"]),
            "where": str(found["where"]),
            "title": str(found["title"]),
            "about": _about(found),
            "picture": "data:image/png;base64," + base64.b64encode(picture).decode("ascii"),
            "tables": {name: _lines(rows) for name, rows in found["tables"].items()},
            "published": _published(found["published"]),
            "claims": [
                {"verdict": str(one["verdict"]), "claim": str(one["claim"]), "difference": _difference(one)}
                for one in found["claims"]
            ],
            "missing": [
                {name: str(cell[name]) for name in ("row", "at", "table", "seed", "reason")}
                for cell in found["cells"]
                if cell["score"] is None
            ],
            "runs": _runs(found["cells"], path.parent),
        }
    except (UsageError, OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        reason = f" ({error})" if isinstance(error, UsageError | OSError) else ""
        log.warning("%s is left out of the page: it does not hold the results of a study%s", path, reason)
        return None


def _difference(claim: Mapping[str, Any]) -> str:
    """Return " (+1.20 ± 0.30, p 0.01)"; empty for a claim that is not decided."""
    if claim["difference"] is None:
        return ""
    error = "" if claim.get("error") is None else f" ± {claim['error']:.2f}, p {claim['p']:.2g}"
    return f" ({claim['difference']:+.2f}{error}{claim.get('advice', '')})"


def _about(found: Mapping[str, Any]) -> str:
    seeds = len(found["seeds"])
    about = [f"{found['scale']} scale", found["data"], f"{seeds} seed{'s' * (seeds > 1)}", *found.get("changes", ())]
    return ", ".join(about)


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a table of the file as text, a header and then a line for each row."""
    shown = {
        (row["row"], row["at"]): number(row["mean"], math.nan if row["deviation"] is None else row["deviation"])
        for row in rows
    }
    return text_table(shown, *axes(shown))


def _published(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[list[str]]]:
    """Return the published tables of the file as text."""
    quoted = [row["row"] for row in rows if row["quoted"]]
    return published_tables({(row["table"], row["row"], row["at"]): row["value"] for row in rows}, quoted)


def _runs(cells: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, str]:
    """Return a label -> the run folder, as seen from `folder`, for each network that is still there."""
    found = {}
    for cell in cells:
        if cell["run"] and (folder / cell["run"]).is_dir():
            found[f"{cell['row']}, {column(cell['at'])}, seed {cell['seed']}"] = cell["run"]
    return found
