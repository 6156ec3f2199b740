"""Read what a run has written about itself: only values of the types that a run writes, and a count of the others.

metrics.jsonl and run.json are logs: nothing in them, and nothing in their place, may stop a run or a report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from vitrail.files import parse_json
from vitrail.words import counted

LONGEST_LINE = 16 << 20
"""Maximum number of bytes of a line. The longest lines name all images of a batch."""
LARGEST = 2**53
"""Numbers beyond it have no exact float; no run counts so far."""
TEXTS = ("kind", "image", "reason")
"""Entries of a line that are text. `images` is a list of text; all others are numbers or null, and `error` is a number
in a line of a step and text where something failed."""


@dataclass
class Dropped:
    """Lines that could not be read: their number, and why the first was dropped."""

    count: int = 0
    first: str = ""

    def add(self, number: int, reason: str) -> None:
        """Count one line."""
        self.first = self.first or f"line {number}: {reason}"
        self.count += 1

    def __str__(self) -> str:
        return f"{counted(self.count, 'line')} could not be read and will be left out ({self.first})"


def log_lines(file: IO[bytes], dropped: Dropped) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the text and the values of each line of a metrics.jsonl that fits, and count the others in `dropped`.

    A last line without an end, which a killed run leaves, is not counted. Memory does not grow with the file.
    """
    number = 0
    while text := file.readline(LONGEST_LINE):
        number += 1
        ended = text.endswith(b"\n")
        if not ended and len(text) == LONGEST_LINE:
            dropped.add(number, f"it is longer than {LONGEST_LINE:,} bytes")
            while text and not text.endswith(b"\n"):
                text = file.readline(LONGEST_LINE)
            continue
        if not text.strip():
            continue
        try:
            line = check_line(parse_json(text.decode("utf-8-sig")))
        except UnicodeDecodeError as error:
            reason = f"it is not UTF-8 text: {error.reason} at byte {error.start}"
        except ValueError as error:
            reason = str(error)
        else:
            yield text.strip(), line
            continue
        if ended:
            dropped.add(number, reason)


def check_line(line: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl if its values have the types that a run writes. Raises ValueError."""
    if not isinstance(line, dict):
        raise ValueError("it is not a JSON object")
    for name, value in line.items():
        if name in TEXTS or (name == "error" and line.get("kind") != "train"):
            fits, wanted = isinstance(value, str), "text"
        elif name == "images":
            fits, wanted = isinstance(value, list) and all(isinstance(item, str) for item in value), "a list of names"
        elif name == "step":
            fits, wanted = _is_number(value) and isinstance(value, int) and value >= 0, "an integer of at least 0"
        else:
            fits, wanted = value is None or _is_number(value), "a number"
        if not fits:
            raise ValueError(f"{name[:40]!r} is {str(value)[:40]!r}; it should be {wanted}")
    missing = {"kind", "step", *(("reason",) if "image" in line else ())} - line.keys()
    if missing:
        raise ValueError(f"it has no {sorted(missing)[0]!r}")
    return line


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value)


MAPPING, COUNTS, NUMBERS = {"": object}, {"": int}, {"": float}
FACTS: dict[str, Any] = {
    "directory": str,
    "command": str,
    "name": str,
    "commit": str,
    "started": str,
    "ended": str,
    "seed": int,
    "machine": MAPPING,
    "versions": {"": str},
    "data": {"path": str, "fingerprint": str, "classes": int, "images": COUNTS, "notes": [str]},
    "decisions": {"": str},
    "given": {"": str},
    "base": MAPPING,
    "tuned": {"what": str, "parameters": int, "of": int},
    "resumed": [{"": object, "at": str, "step": int}],
    "out_of_memory": [{"": object, "step": int, "accumulate": int}],
    "result": {
        "": object,
        "steps": int,
        "epochs": float,
        "seconds": float,
        "ended": str,
        "best": NUMBERS,
        "before": NUMBERS,
        "test": NUMBERS,
        "skipped": int,
        "floors": {"": NUMBERS},
        "no_floor": str,
        "lost": [str],
    },
}
"""The types of run.json. "" stands for every other entry, which is otherwise left as it is."""


def fitting(facts: Mapping[str, Any], shape: Mapping[str, Any] = FACTS) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of a run.json that have the types a run writes, and the names of the others.

    `shape` states the types of another file as `FACTS` does.
    """
    wrong: list[str] = []
    return _fitting(facts, {"": object, **shape}, "", wrong), wrong


def _fitting(value: Any, shape: Any, place: str, wrong: list[str]) -> Any:
    """Return `value` without what does not fit `shape`; None if nothing does. `wrong` gets the place of each."""
    if isinstance(shape, dict) and isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for name, item in value.items():
            wanted = shape.get(name, shape.get("", object))
            if item is None and (wanted is object or (name in shape and isinstance(wanted, type))):
                found[name] = None  # a single value may be unknown
            elif (kept := _fitting(item, wanted, f"{place}.{name}".lstrip("."), wrong)) is not None:
                found[name] = kept
        return found
    if isinstance(shape, list) and isinstance(value, list):
        items = [_fitting(item, shape[0], f"{place}.{number}", wrong) for number, item in enumerate(value)]
        return [item for item in items if item is not None]
    if shape is object or value is None:
        return value
    if isinstance(shape, type) and _is_of(value, shape):
        return value
    wrong.append(place[:80])
    return None


def _is_of(value: Any, kind: type) -> bool:
    return isinstance(value, str) if kind is str else _is_number(value) and (kind is float or isinstance(value, int))
