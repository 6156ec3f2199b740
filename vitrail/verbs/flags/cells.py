"""The flag that every verb with CSV files has. Torch-free at import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cells:
    """How names stand in CSV files. Each text below is the help of the flag with this name."""

    raw: bool = False
    """Write names into CSV files as they are. By default, names that a spreadsheet would run as a formula (=, +, -, @)
    begin with an apostrophe."""
