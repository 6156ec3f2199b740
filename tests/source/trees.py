"""The syntax trees of the files of this project, each parsed once."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which callers do not change."""
    return _parsed(path.read_text(encoding="utf-8"))


@cache
def _parsed(text: str) -> ast.Module:
    gc.disable()  # a tree is no garbage
    try:
        return ast.parse(text)
    finally:
        gc.enable()
