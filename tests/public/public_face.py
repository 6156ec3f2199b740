"""The public face as text: each name of `vitrail` with its parameters, their defaults and what it returns.

`python tests/public/public_face.py` prints it. The expected text is in `public_face.txt`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any

import vitrail
from vitrail.durations import Duration

Plain = bool | int | float | str | tuple | None | Enum | Duration


def face() -> list[str]:
    """One row for each public name, public method of a network, and class of a result."""
    rows = [row for name in vitrail.__all__ for row in _rows(name, getattr(vitrail, name))]
    return sorted(set(rows))


def _rows(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield name
    elif isinstance(value, ModuleType):
        own = {key: part for key, part in vars(value).items() if getattr(part, "__module__", "") == value.__name__}
        for key, part in own.items():
            if inspect.isfunction(part) and not key.startswith("_"):
                yield f"{name}.{key}{_signature(part)}"
    elif isinstance(value, type) and issubclass(value, Exception):
        yield f"{name}({value.__bases__[0].__name__})"
    else:
        yield name + _signature(value)
        if isinstance(value, type) and not dataclasses.is_dataclass(value):
            methods = {key: part for key, part in vars(value).items() if inspect.isfunction(part) and key[0] != "_"}
            yield from (f"{name}.{key}{_signature(part)}" for key, part in methods.items())
        yield from _results(value)


def _results(value: Any) -> Iterator[str]:
    """The fields of the classes that a function returns, where its module has them at hand."""
    returned = str(getattr(value, "__annotations__", {}).get("return", ""))
    for word in re.findall(r"\w+", returned):
        found = getattr(sys.modules[value.__module__], word, None)
        if isinstance(found, type) and dataclasses.is_dataclass(found) and getattr(vitrail, word, None) is not found:
            yield f"{word}: " + ", ".join(field.name for field in dataclasses.fields(found))


def _signature(value: Callable[..., Any]) -> str:
    """Parameters without their types, and the type that is returned."""
    signature = inspect.signature(value)
    parameters = [
        parameter.replace(annotation=parameter.empty, default=_default(parameter.default))
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    returned = signature.return_annotation
    hidden = isinstance(value, type) or returned is signature.empty
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return text if hidden else f"{text} -> {returned}"


class _Other:
    """Stands for a default that is built by a function, such as other settings."""

    def __repr__(self) -> str:
        return "..."


def _default(default: Any) -> Any:
    return default if default is inspect.Parameter.empty or isinstance(default, Plain) else _Other()


if __name__ == "__main__":
    for row in face():
        print(textwrap.fill(row, 120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))
