"""The frame of every page we write: one file that loads nothing and runs nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from vitrail.errors import UsageError
from vitrail.reports.text import safe

# The page has no scripts and loads nothing; this makes the browser enforce it, whatever a class is called.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def document(title: str, body: str, notes: Sequence[str]) -> str:
    """Return a whole page; `body` is HTML, `title` and `notes`, which say what is not there, are text."""
    style = files("vitrail.reports").joinpath("style.css").read_text(encoding="utf-8")
    listed = "".join(f'<p class="note">{safe(note, 1000)}</p>' for note in notes)
    missing = f"<h2>Not in this report</h2>{listed}" if listed else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)}: vitrail report</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body><main>\n<header><h1>{safe(title)}</h1></header>\n{body}\n{missing}\n"
        "<footer>Written by vitrail. This page is one file: it loads nothing and runs no scripts.</footer>\n"
        "</main></body>\n</html>\n"
    )


def write_page(path: Path, page: str) -> Path:
    """Replace the file at `path`, atomically, and return it. Raises UsageError where that cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    return path
