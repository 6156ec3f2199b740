"""Ranges of values as part of their types: `Count` is `Annotated[int, Range(1, ...)]`.

The type of a field or a parameter states its range once. Flags, configuration files and Python check it with
`outside(type, value)`; `Settings` does so for dataclasses, `checked` for functions. Torch-free.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from inspect import Parameter, signature, unwrap
from numbers import Integral, Real
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from vitrail.errors import UsageError, did_you_mean
from vitrail.version import extras_named
from vitrail.words import shown

P = ParamSpec("P")
R = TypeVar("R")
LARGE = 10**9
"""Maximum of everything that is counted. Larger numbers are mistakes, and do not fit into 32 bits."""


@dataclass(frozen=True)
class Range:
    """The valid numbers of a setting, always finite."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    """Whether `least` itself is not valid."""
    below: bool = False
    """Whether `most` itself is not valid."""
    extra: float | None = None
    """Another valid number, such as 0 for "off"."""
    note: str = ""

    def holds(self, value: Any) -> bool:
        """Return whether a number, or the number of a duration, is valid. NaN never is."""
        number = getattr(value, "value", value)
        high_enough = self.least < number or (number == self.least and not self.above)
        low_enough = number < self.most or (number == self.most and not self.below)
        return (-math.inf < number < math.inf and high_enough and low_enough) or number == self.extra

    def words(self, value: Any = 0) -> str:
        """Return the valid numbers in words. An upper limit of `LARGE` or more is named only if `value` exceeds it."""
        least, most = _number(self.least), _number(self.most)
        ends = []
        if self.least > -math.inf:
            ends.append(f"{'greater than' if self.above else 'at least'} {least}")
        if self.most < LARGE or self.most < getattr(value, "value", value) < math.inf:
            ends.append(f"{'below' if self.below else 'at most'} {most}")
        if len(ends) == 2 and not (self.above or self.below):
            ends = [f"from {least} to {most}"]
        extra = [] if self.extra is None else [_number(self.extra)]
        words = ", or ".join([*extra, " and ".join(ends) or "a finite number"])
        return f"{words} ({self.note})" if self.note else words


@dataclass(frozen=True)
class FolderName:
    """The valid names of folders: what a terminal shows in one line, without separators of paths."""

    def holds(self, value: str) -> bool:
        """Return whether a text is valid."""
        return value.isprintable() and value.strip() not in ("", ".", "..") and not {"/", "\\"} & {*value}

    def words(self, value: str = "") -> str:
        """Return the valid texts in words."""
        return "a folder name without slashes, line breaks and control characters"


@dataclass(frozen=True)
class FoldNumber:
    """The valid texts for one part of a data set that is divided into equal parts: "2/5"."""

    def holds(self, value: str) -> bool:
        """Return whether a text is valid."""
        number, slash, count = value.partition("/")
        plain = all(part.isdecimal() and len(part) < 7 and part == str(int(part)) for part in (number, count))
        return bool(slash) and plain and 1 <= int(number) <= int(count) and int(count) > 1

    def words(self, value: str = "") -> str:
        """Return the valid texts in words."""
        return "K/N, fold K of N folds, with K from 1 to N and N at least 2, such as 2/5"


Limit = Range | FolderName | FoldNumber

Count = Annotated[int, Range(1, LARGE)]
Whole = Annotated[int, Range(0, LARGE)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Threads = Annotated[int, Range(0, 1024, note="0: no threads")]
LARGEST_SIDE = 4096
"""Maximum height and width of a network's input in pixels."""
Side = Annotated[int, Range(1, LARGEST_SIDE)]
InputSize = Side | tuple[Side, Side]
"""Size of a network's input in pixels: the side of a square, or height and width."""
Width = Annotated[int, Range(1, 2**16)]
"""Number of values of a token or of units of a layer. The largest published network has 12,288."""
Hidden = Annotated[int, Range(1, 2**20)]
"""Number of units of a hidden layer between layers of `Width`."""
Heads = Annotated[int, Range(1, 4096)]
Registers = Annotated[int, Range(0, 4096)]
Channels = Annotated[int, Range(1, 1024)]
DropPath = Annotated[float, Range(0.0, 0.999)]
"""Probability of skipping a residual branch, which the other branches make up for."""
DEEPEST = 1000
"""Maximum number of layers, because building a network takes time and memory for each."""
Depth = Annotated[int, Range(1, DEEPEST)]
"""Number of blocks of a network."""
Finite = Annotated[float, Range()]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Part = Annotated[float, Range(0, 1, above=True)]
"""A share above 0."""
Fraction = Annotated[float, Range(0, 1, above=True, below=True)]
"""A share above 0 and below 1."""
Decay = Annotated[float, Range(0, 1, below=True)]
"""Share of its value that a moving average keeps in each step, or a probability below 1."""
Nodes = Annotated[int, Range(1, 100_000)]
"""Number of machines of a cluster, or of cores of a machine."""
Devices = Annotated[int, Range(0, 100_000)]
"""Number of devices of a machine; 0 trains on its CPUs."""
Amount = Annotated[float, Range(0, 1e30)]
"""A number that an estimate multiplies: images, epochs, dollars."""
Seconds = Annotated[float, Range(0, LARGE, above=True)]
EpochCount = Annotated[float, Range(0, 1e12, above=True)]
Layers = int | Sequence[int] | None
"""A selection of a network's layers: the last n, or a list of numbers; None: all."""


class Settings:
    """Base of dataclasses that check the ranges of their fields. Errors name a field after `section`: "optim.lr"."""

    section: ClassVar[str] = ""
    gone: ClassVar[tuple[str, ...]] = ()
    """Settings of earlier versions that changed no result. Their configurations may name them."""

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section or cls.section

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name in ranged_types(kind):
            value = getattr(self, name)
            if value is getattr(kind, name, self):  # the default
                continue
            value = tuple(value) if isinstance(value, list) else value
            if _is_outside(kind, name, value):
                wrong = outside(ranged_types(kind)[name], value)
                raise UsageError(f"{kind.section + '.' * bool(kind.section)}{name} {wrong}")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Return a verb for Python, which raises UsageError for an argument outside of the range of its parameter's type.

    An unknown keyword and a missing argument are UsageErrors, too. It also takes `quiet`: with True only warnings and
    errors are printed, as with the flag --quiet.
    """
    parameters = signature(function)

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        quiet = keywords.pop("quiet", False)
        of_kind = {name: parameter.kind for name, parameter in parameters.parameters.items()}
        known = {name for name in _argument_types(function) if of_kind.get(name) is not Parameter.VAR_POSITIONAL}
        if unknown := sorted(keywords.keys() - known):
            own = f" Valid: {', '.join(name for name, kind in of_kind.items() if kind is not Parameter.VAR_KEYWORD)}"
            near = {name: did_you_mean(name, known) or own for name in unknown}
            raise UsageError(
                "; ".join(f"{function.__name__} has no argument {name!r}.{near[name]}" for name in unknown)
            )
        try:
            arguments = parameters.bind(*args, **keywords).arguments
        except TypeError as error:
            raise UsageError(f"{function.__name__}: {error}") from error
        refuse_empty(function, {**arguments, **keywords})
        for name, hint in ranged_types(function).items():
            if wrong := outside(hint, arguments.get(name)):
                raise UsageError(f"{name} {wrong}")
        with _only_warnings() if quiet else nullcontext(), extras_named():
            return function(*args, **keywords)

    return call


def refuse_empty(function: Callable[..., Any], arguments: Mapping[str, Any], named: Callable[[str], str] = str) -> None:
    """Raise UsageError for an empty path among the arguments, which would be the current folder.

    named: Parameter -> its name in the error.
    """
    paths = [name for name, hint in _argument_types(unwrap(function)).items() if "pathlib.Path" in str(hint)]
    for name in paths:
        value = arguments.get(name)
        # arrays cannot be compared with a text, and a list of labels holds names, not paths
        values = value if isinstance(value, list | tuple) and name != "labels" else [value]
        if any(isinstance(one, str) and not one for one in values):
            raise UsageError(f"{named(name)} is empty. Give the path of a file or a folder; '.' is the current folder")


@cache
def _argument_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters, and of the keywords of `**settings: Unpack[...]` in the place of these."""
    types = parameter_types(function)
    for name, parameter in signature(function).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            (unpacked,) = get_args(types.pop(name))
            types |= get_type_hints(unpacked)
    return types


def parameter_types(function: Any) -> dict[str, Any]:
    """Return the types of the parameters; that of the result may be one that only a type checker imports."""
    parameters = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    own = unwrap(function).__globals__
    return get_type_hints(SimpleNamespace(__annotations__=parameters), own, include_extras=True)


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Let the log of vitrail, which progress follows, hold only warnings and errors."""
    log = logging.getLogger("vitrail")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


@cache
def ranged_types(owner: Any) -> dict[str, Any]:
    """Return the type of each field of a class or parameter of a function that states a range."""
    hints = get_type_hints(owner, include_extras=True) if isinstance(owner, type) else parameter_types(owner)
    return {name: hint for name, hint in hints.items() if limits(hint)}


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the types that a union allows; of any other type, itself alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def without_range(hint: Any) -> Any:
    """Return a type without the range that it states for the whole of its values."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def limits(hint: Any) -> list[Limit]:
    """Return the ranges within a type, those of a union's or a tuple's parts included."""
    own = [limit for limit in getattr(hint, "__metadata__", ()) if isinstance(limit, Limit)]
    if get_origin(hint) is Literal:
        return own
    parts = get_args(hint)[:1] if own else get_args(hint)
    return list(dict.fromkeys([*own, *(limit for part in parts for limit in limits(part))]))


def height_width(size: InputSize) -> tuple[int, int]:
    """Return the height and the width of an input. Raises UsageError unless there are one or two numbers."""
    if isinstance(size, Integral):
        return int(size), int(size)
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise UsageError(f"image_size is {shown(size)}; it must be a whole number, or height and width: (32, 64)")
    return int(size[0]), int(size[1])


def shortest_size(size: InputSize) -> InputSize:
    """Return the size of a square as one number, so that (64, 64) and 64 are one setting."""
    height, width = height_width(size)
    return height if height == width else (height, width)


def size_text(size: InputSize) -> str:
    """Return the size of an input in words: "64", "32 x 64"."""
    return " x ".join(size_words(size))


def size_words(size: InputSize) -> list[str]:
    """Return the words that give a size on a command line: ["64"], ["32", "64"]."""
    return [str(side) for side in dict.fromkeys(height_width(size))]


def selected(chosen: Layers, count: int, what: str) -> list[int]:
    """Return the numbers, from 0 to count - 1, that a selection names, in its order.

    A number n stands for the last n, None for all; negative numbers in a list count from the end. Raises UsageError,
    with `what` as the name of one thing ("layer").
    """
    if chosen is None:
        return list(range(count))
    if isinstance(chosen, int) and 0 < chosen <= count:
        return list(range(count - chosen, count))
    if isinstance(chosen, int | str) or not len(chosen):
        raise UsageError(
            f"{what}s is {shown(chosen)}; valid: 1 to {count}, for the last {what}s, or a list of numbers from "
            f"{-count} to {count - 1}"
        )
    for index in chosen:
        if not isinstance(index, Integral) or not -count <= index < count:
            raise UsageError(f"there is no {what} {index}: this model has {count}, numbered 0 to {count - 1}")
    return [int(index) % count for index in chosen]


@lru_cache(maxsize=4096, typed=True)
def _is_outside(kind: Any, name: str, value: Any) -> bool:
    """Return whether `value` is invalid for a field of a class. The recipes have thousands of settings, and few values.

    Equal values, such as 0.0 and -0.0, share an answer, so it has no words with the value in them.
    """
    return bool(outside(ranged_types(kind)[name], value))


def outside(hint: Any, value: Any) -> str:
    """Return what is wrong with `value`, "is 0; it must be at least 1", if it lies outside of the ranges in its type.

    "" if it is valid, or belongs to none of the types that have ranges.
    """
    valid = _outside(hint, value)
    return f"is {_text(value)}; it must be {valid}" if valid else ""


def _outside(hint: Any, value: Any) -> str:
    """Return the valid values in words; "" if `value` is one of them."""
    wrong = []
    for part in union_members(hint):
        if not _kind(without_range(part), value):
            continue
        if not (reason := _outside_one(part, value)):
            return ""
        wrong.append(reason)
    return ", or ".join(dict.fromkeys(wrong))


def _outside_one(hint: Any, value: Any) -> str:
    """`_outside` for a type that is not a union."""
    if get_origin(hint) is Annotated:
        if isinstance(value, Real) and not isinstance(value, Integral) and get_args(hint)[0] is int:
            return f"a whole number, {limits(hint)[0].words()}"
        own = (limit for limit in hint.__metadata__ if isinstance(limit, Limit))
        return next((limit.words(value) for limit in own if not limit.holds(value)), "")
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        parts = get_args(hint)
        each: Iterator[Any] = iter(parts[:1] * len(value) if parts[1:] == (...,) else parts)
        return next(filter(None, (_outside(part, item) for part, item in zip(each, value, strict=False))), "")
    return ""


def _kind(hint: Any, value: Any) -> bool:
    """Return whether a value (None, a number, text, another) is of the kind of a type that is not a union."""
    if hint in (int, float):
        return isinstance(value, Real) and not isinstance(value, bool)
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    base = get_origin(hint) or hint
    return isinstance(value, list | tuple) if base is tuple else isinstance(base, type) and isinstance(value, base)


def _text(value: Any) -> str:
    if isinstance(value, int) and abs(value) > LARGE**4:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write numbers of thousands of digits
    return str(value) if hasattr(value, "value") else shown(value)


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}"
