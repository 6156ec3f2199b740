"""Modules of a user, which can be imported while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from own import EXAMPLES, importable


@pytest.fixture
def examples() -> Iterator[None]:
    """The examples that we ship."""
    with importable(EXAMPLES):
        yield


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """An empty folder for modules."""
    folder = tmp_path / "mine"
    folder.mkdir()
    with importable(folder):
        yield folder
