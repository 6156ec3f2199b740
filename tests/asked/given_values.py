"""A valid value for every setting, another one than the setting has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from vitrail.config import extension_bases, sections_of, union_members
from vitrail.data.settings import Preparation
from vitrail.durations import Duration, Epochs
from vitrail.ranges import limits
from vitrail.training.run import Run

CHOSEN: dict[str, Any] = {
    "model": "S/32",
    "data.validation": "none",
    "data.fold": "2/5",
    "data.labels_per_image": "one",
    "vit.stem": "hmlp",
    "vit.positions": "sincos",
    "device": "cpu",
    "timeout": 77.0,
    "weights": "another-run",
    "image_size": 64,
    "preprocess.image_size": (64, 64),
}
"""Settings whose type says too little about what is valid."""
NOT_TRIED = ("data.path", "preprocess.bands")
"""The subject of the command, and measured statistics, which are one value of several parts."""
NUMBERS = (2, 3, 0.5, 0.25, 7, 1, 0.999)


def settings_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name, the type and the value of every setting of a run that a value can be tried for."""
    kind: Any = type(section)
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(section):
        name, value, hint = prefix + field.name, getattr(section, field.name), hints[field.name]
        inner = value if is_dataclass(value) and not isinstance(value, Duration) else None
        if inner is None and sections_of(hint) == [Preparation]:
            inner = Preparation()
        if name in NOT_TRIED or name == "objective.kind":
            continue
        if inner is not None:
            yield from settings_of(inner, f"{name}.")
        elif [part for part in union_members(hint) if part is not NoneType] != list(
            extension_bases(hint)
        ):  # not a class of the user's own
            yield name, hint, value


def other_value(name: str, hint: Any, value: Any) -> Any:
    """Return a value that the type allows, as YAML and Python write it; not `value`, nor None."""
    if name in CHOSEN and CHOSEN[name] != value:
        return CHOSEN[name]
    for part in union_members(hint):
        found = _of_part(part, value)
        if found is not None:
            return found
    raise AssertionError(f"no value is known for {name}: {hint}")


def _of_part(hint: Any, value: Any, ranges: Any = None) -> Any:
    if get_origin(hint) is Annotated:
        return _of_part(get_args(hint)[0], value, hint)
    if get_origin(hint) is Literal:
        return next((word for word in get_args(hint) if word != value), None)
    if hint is bool:
        return not value
    if hint in (int, float):
        fitting = [hint(number) for number in NUMBERS if hint(number) == number]
        allowed = [number for number in fitting if all(limit.holds(number) for limit in limits(ranges))]
        return next((number for number in allowed if number != value), None)
    if hint is str:
        known = [limit for limit in limits(ranges) if not limit.holds("given")]
        return None if known else "given"
    if get_origin(hint) is tuple:
        args = [part for part in get_args(hint) if part is not Ellipsis]
        parts = value if isinstance(value, tuple) and len(value) == len(args) else [None] * len(args)
        found = tuple(_of_part(part, old) for part, old in zip(args, parts, strict=True))
        return tuple(sorted(found)) if all(isinstance(part, int | float) for part in found) else found
    if isinstance(hint, type) and issubclass(hint, Duration):
        return Epochs(7)
    return None


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return {"optim": {"lr": 1}} for "optim.lr"."""
    return reduce(lambda inner, part: {part: inner}, reversed(name.split(".")), value)


def every_setting(run: Run) -> list[tuple[str, Any]]:
    """Return every setting of a run with another value than its own."""
    return [(name, other_value(name, hint, value)) for name, hint, value in settings_of(run)]
