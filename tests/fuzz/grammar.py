"""The flags of every verb with their types and ranges, from the functions and dataclasses that the parser reads."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from vitrail.cli import VERBS
from vitrail.config import sections_of, union_members
from vitrail.data.settings import Data
from vitrail.durations import Duration, Epochs, Examples, Percent, Steps
from vitrail.ranges import FolderName, FoldNumber, Limit, Range, limits
from vitrail.training.run import Run
from vitrail.verbs.flags.declared import READING, global_flags


@dataclass(frozen=True)
class Flag:
    """A flag or a subject of a verb."""

    verb: str
    name: str
    """As Python writes it: "optim.lr"."""
    hint: Any
    """Its type with the ranges."""
    kind: Any = inspect.Parameter.KEYWORD_ONLY
    owner: Any = None
    """The dataclass of a setting; None for a parameter of the verb."""

    @property
    def word(self) -> str:
        """What sets it on the command line."""
        return "--" + self.name.replace("_", "-")

    def __str__(self) -> str:
        return f"{self.verb} {self.name}"


@cache
def function_of(verb: str) -> Any:
    """Return the function of a verb."""
    return VERBS[verb].load()[1]


@cache
def flags_of(verb: str) -> tuple[Flag, ...]:
    """Return every flag and subject of a verb."""
    return tuple([*_parameters(verb, function_of(verb)), *_parameters(verb, global_flags)])


def _parameters(verb: str, function: Any) -> Iterator[Flag]:
    function = inspect.unwrap(function)
    parameters = inspect.signature(function).parameters
    notes = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    hints = get_type_hints(SimpleNamespace(__annotations__=notes), function.__globals__, include_extras=True)
    for name, parameter in parameters.items():
        if name == READING:
            yield from _settings(verb, Data, f"{Data.section}.")
        elif parameter.kind is parameter.VAR_KEYWORD:
            yield from (flag for flag in _settings(verb, Run) if flag.name not in parameters)
        else:
            yield Flag(verb, name, hints[name], parameter.kind)


def _settings(verb: str, section: Any, prefix: str = "") -> Iterator[Flag]:
    hints = get_type_hints(section, include_extras=True)
    for field in fields(section):
        inner = sections_of(hints[field.name])
        for kind in inner:
            yield from _settings(verb, kind, f"{prefix}{field.name}.")
        if not inner and f"{prefix}{field.name}" != "data.path":  # the subject
            yield Flag(verb, prefix + field.name, hints[field.name], owner=section)


def ranged(hint: Any) -> Iterator[tuple[Any, Limit]]:
    """Yield the base type and the range of each part of a type that has one."""
    if get_origin(hint) is Annotated:
        yield from ((get_args(hint)[0], limit) for limit in get_args(hint)[1:] if isinstance(limit, Limit))
    elif limits(hint):
        for part in get_args(hint):
            yield from ranged(part)


def at_the_ends(hint: Any) -> list[Any]:
    """Return the valid values at the ends of the ranges in a type."""
    found: list[Any] = []
    for part in union_members(hint):
        if get_origin(part) is tuple:
            each = [at_the_ends(part) for part in get_args(part) if part is not ...]
            found += zip(*each, strict=True)
        elif get_origin(part) is Annotated:
            found += [value for limit in limits(part) for value in _ends(get_args(part)[0], limit)]
    return found


def _ends(base: Any, limit: Limit) -> list[Any]:
    if isinstance(limit, FolderName):
        return ["a", "ein Ordner", "x" * 200, "." * 3]
    if isinstance(limit, FoldNumber):
        return ["1/2", "2/5", "999999/999999"]
    low, high = limit.least, limit.most
    if limit.above:
        low = low + 1 if base is int else math.nextafter(low, math.inf)
    if limit.below:
        high = high - 1 if base is int else math.nextafter(high, -math.inf)
    numbers = [end for end in (low, high, limit.extra) if end is not None and math.isfinite(end)]
    if base is Duration:
        return [unit(number) for unit in (Steps, Epochs, Examples, Percent) for number in numbers]
    return [base(number) for number in numbers]


def beyond(base: Any, limit: Limit) -> st.SearchStrategy[Any]:
    """Draw values outside of a range."""
    if isinstance(limit, FolderName):
        return st.sampled_from(["", " ", ".", "..", "a/b", "a\\b", "a\nb", "\x1b[31mred", "a\x00b", "\u202e"])
    if isinstance(limit, FoldNumber):
        return st.sampled_from(["", "/", "2", "0/5", "6/5", "1/1", "02/5", "2/ 5", "-1/5", "1/5/5", "1/1000000", "a/b"])
    low, high, extra = limit.least, limit.most, limit.extra
    if base is int:
        parts = [st.integers(max_value=int(low) - 1)] if math.isfinite(low) else []
        parts += [st.integers(min_value=int(high) + 1)] if math.isfinite(high) else []
        return st.one_of([*parts, st.just(10**22)]).filter(lambda value: value != extra)
    positive = {"min_value": 0} if base is Duration else {}
    parts = [st.just(end) for end in beyond_itself(limit)]
    if math.isfinite(low) and (base is not Duration or low > 0):
        parts += [st.floats(max_value=low, exclude_max=True, allow_infinity=base is float, **positive)]
    if math.isfinite(high):
        parts += [st.floats(min_value=high, exclude_min=True, allow_infinity=base is float)]
    if base is float:
        parts += [st.sampled_from([math.nan, math.inf, -math.inf])]
    numbers = st.one_of(parts).filter(lambda value: value != extra)
    return numbers.map(Steps) | numbers.map(Epochs) if base is Duration else numbers.map(float)


def invalid(hint: Any) -> st.SearchStrategy[Any]:
    """Draw values of a type, one number of which at least lies outside of its range."""
    parts = list(ranged(hint))
    if any(get_origin(part) is tuple for part in union_members(hint)):
        return _invalid_tuple(next(part for part in union_members(hint) if get_origin(part) is tuple))

    def inside(value: Any) -> bool:
        return any(_within(base, limit, value) for base, limit in parts)

    return st.one_of([beyond(base, limit) for base, limit in parts]).filter(lambda value: not inside(value))


def _invalid_tuple(hint: Any) -> st.SearchStrategy[Any]:
    each = get_args(hint)
    if each[1:] == (...,):
        return st.tuples(invalid(each[0]))
    fine = [st.just(at_the_ends(part)[0]) for part in each]
    return st.one_of([st.tuples(*fine[:i], invalid(part), *fine[i + 1 :]) for i, part in enumerate(each)])


def _within(base: Any, limit: Limit, value: Any) -> bool:
    if not isinstance(limit, Range) or isinstance(value, Duration) or not math.isfinite(value):
        return False  # no other type is beside them
    whole = base is not int or float(value).is_integer()
    return whole and limit.least <= value <= limit.most and value not in beyond_itself(limit)


def beyond_itself(limit: Range) -> list[float]:
    """Return the ends that are not valid themselves."""
    return [limit.least] * limit.above + [limit.most] * limit.below


def words(value: Any) -> list[str]:
    """Return a value as words of the command line."""
    return [str(item) for item in value] if isinstance(value, tuple) else [str(value)]
