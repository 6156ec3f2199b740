"""Seconds, bytes, lists and paths in words, written the same way everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def listing(names: Sequence[str], most: int = 12, *, quoted: bool = True) -> str:
    """Return the first `most` names and the number of the others: "'cat', 'dog' and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) if quoted else name for name in names[:most]) + more


def distinct_labels(paths: Sequence[str | Path]) -> list[str]:
    """Return the shortest ends of the paths that are all different; whole paths if some are equal."""
    parts = [Path(path).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def time_span(seconds: float) -> str:
    """Return a time span in words: "42 s", "3 min 5 s", "2 h 3 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def binary_size(count: float) -> str:
    """Return a number of bytes in binary units: "3.2 GiB", "180 MiB"."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
