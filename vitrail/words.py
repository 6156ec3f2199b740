"""Seconds, bytes, lists and paths in words, written the same way everywhere."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

Class = TypeVar("Class")


def listing(names: Sequence[str], most: int = 12, *, quoted: bool = True) -> str:
    """Return the first `most` names and the number of the others: "'cat', 'dog' and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) if quoted else name for name in names[:most]) + more


def with_slashes(path: str) -> str:
    """Return a path of this system with "/": the names of images are the same on Windows."""
    return path.replace(os.sep, "/")


def counted(count: int, what: str) -> str:
    """Return a number of things: "1 part", "2,000 parts"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


_FOLDERS = re.compile(r"(?<![\w.:/\\])(?:~\w*|[A-Za-z]:)?[/\\](?:[^\s,;:'\"()/\\]+[/\\])+(?=[^\s,;:'\"()/\\])")
"""The folders of an absolute path within a text."""


def without_folders(value: Any, below: str = "", instead: str = "") -> Any:
    """Return JSON values in which every absolute path is only its last part: what is published tells nothing of disks.

    Paths in the folder `below` are relative to it. Within a text, `instead` takes the place of the folders of others.
    """
    if isinstance(value, Mapping):
        return {name: without_folders(item, below, instead) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item, below, instead) for item in value]
    if not isinstance(value, str):
        return value
    if value == os.path.expanduser("~"):  # its last part is the user's name
        return "~"
    if below.strip("/"):
        value = value.replace(f"{below.rstrip('/')}/", "")
    if PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute() or value.startswith("~"):
        return PureWindowsPath(value).name if "\n" not in value else _FOLDERS.sub(instead, value)
    return _FOLDERS.sub(instead, value)


def distinct_labels(paths: Sequence[str | Path]) -> list[str]:
    """Return the shortest ends of the paths that are all different; whole paths if some are equal."""
    parts = [Path(path).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def time_span(seconds: float) -> str:
    """Return a time span in words: "0.42 s", "42 s", "3 min 5 s", "2 h 3 min", "4.1 days"."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{seconds / 86_400:.1f} days"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def binary_size(count: float) -> str:
    """Return a number of bytes in binary units: "3.2 GiB", "180 MiB"."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that move the cursor or change what a terminal shows; the line break and the tab are not among them."""


def duration(days: float) -> str:
    """Return days in words, in the largest unit that gives at least 1: days, hours, minutes or seconds."""
    for unit, size in (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0)):
        if days * size >= 1:
            return f"{four_digits(days * size)} {unit}"
    return f"{four_digits(days * 86_400)} seconds"


def four_digits(value: float) -> str:
    """Return a number with four significant digits; from 1,000 on, with all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def printable(text: str) -> str:
    """Return a text for a terminal: control characters, which names in files may contain, become escapes like \\x1b."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), as_text(text))


_ESCAPE = re.compile(r"\\x([89a-f][0-9a-f])")
_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # surrogates that stand for no byte of a name


def as_text(value: str | Path) -> str:
    r"""Return a name that can be written as UTF-8: a byte of a file's name that is none becomes an escape, \xe9.

    Bytes that are UTF-8 are read as such, whatever the locale. Every text that is written has names in this form;
    `from_text` gives them back.
    """
    text = _NO_BYTE.sub(lambda match: f"\\u{ord(match[0]):04x}", str(value))
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def from_text(text: str) -> str:
    r"""Return the name that `as_text` was given: an escape such as \xe9 becomes the byte that it stands for."""
    return _ESCAPE.sub(lambda match: chr(0xDC00 + int(match[1], 16)), text)


def is_class_name(text: str) -> bool:
    """Return whether a text can be the name of a class: it can be written as UTF-8 and holds no NUL.

    Bytes of a folder's name that are not UTF-8, which Python reads as surrogates, are valid.
    """
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def one_line(kind: type[Class]) -> type[Class]:
    """Give a class with attributes a `repr` of one line: its values, and the lengths of long ones, without empty ones.

    This is a decorator for the results of verbs, which a notebook shows and which may hold thousands of rows.
    """
    kind.__repr__ = _one_line  # type: ignore[method-assign, assignment]
    return kind


def _one_line(result: object) -> str:
    return brief(result, vars(result))


def brief(result: object, values: Mapping[str, Any]) -> str:
    """Return a `repr` of one line with these values of a result, as `one_line` writes them."""
    parts = [f"{name}={_in_brief(value)}" for name, value in values.items() if not _is_empty(value)]
    return f"{type(result).__name__}({', '.join(parts)})"


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


def _in_brief(value: Any) -> str:
    if isinstance(value, str | int | float | Path):
        return shown(str(value) if isinstance(value, Path) else value)
    if hasattr(value, "__len__"):
        return f"<{len(value):,} {'entries' if isinstance(value, dict) else 'rows'}>"
    return f"<{type(value).__name__}>"


def shown(value: Any) -> str:
    """Return a value for an error message, as `repr` does but short: it may come from a file and be of any size."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
