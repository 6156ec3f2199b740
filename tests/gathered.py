"""One test of many small cases: each case as a test of its own costs more than what it looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")


def failures(cases: Iterable[Case], check: Callable[[Case], object]) -> list[str]:
    """Return each case for which `check` fails, with its reason."""
    found = []
    for case in cases:
        try:
            check(case)
        except Exception as error:
            found.append(f"{case}: {type(error).__name__}: {error}")
    return found
