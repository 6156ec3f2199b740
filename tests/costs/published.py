"""The paper's published tables, where they are on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TABLES = Path(__file__).resolve().parents[3] / "shared" / "paper" / "tables.json"


def tables() -> dict[str, Any]:
    """Return the published tables, or skip the test."""
    if not TABLES.exists():
        pytest.skip(f"the published tables are not at {TABLES}")
    return json.loads(TABLES.read_text())
