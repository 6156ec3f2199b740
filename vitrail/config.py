"""Settings: durations with a unit, and strict merging of YAML and keyword arguments into frozen dataclasses.

`from_yaml(path, base)` returns the dataclass `base` with the values of a YAML file in place of its own;
`merge(base, values)` does the same with nested Python values; `to_yaml(value)` writes every value, so that
`from_yaml(to_yaml(run), Run()) == run`. An unknown name, a wrong type, a repeated name and a word outside of a Literal
are errors. One UsageError lists all of them with file, line and the nearest valid name. Torch-free, so that `--help`
and a wrong flag answer at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from vitrail.errors import UsageError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Duration:
    """A length of training in one of four units. `steps` converts it to optimiser steps.

    Written "500 steps", "30 epochs", "1e6 examples" or "5 %" (of the whole run). Raises UsageError if the value is
    negative or not finite.
    """

    value: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value >= 0):
            raise UsageError(f"the duration {self.value!r} is not valid: it must be a finite number of at least 0")

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """Return the number of optimiser steps, rounded up; a percentage is relative to `total`."""
        raise NotImplementedError

    def __str__(self) -> str:
        # exact, so that a written duration reads back as itself: {:g} would round 1,234,567 examples
        whole = float(self.value).is_integer() and self.value < 1e15
        return f"{int(self.value) if whole else repr(float(self.value))} {UNIT_NAMES[type(self)]}"


def _up(steps: float) -> int:
    return math.ceil(round(steps, 6))  # 0.1 epochs of 30 steps are 3.0000000000000004 steps and must become 3


@dataclass(frozen=True)
class Steps(Duration):
    """Optimiser steps."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`."""
        return _up(self.value)


@dataclass(frozen=True)
class Epochs(Duration):
    """Passes over the training split."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`."""
        return _up(self.value * per_epoch)


@dataclass(frozen=True)
class Examples(Duration):
    """Training images."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`."""
        return _up(self.value / batch_size)


@dataclass(frozen=True)
class Percent(Duration):
    """Percent of the whole run."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`; raises UsageError if the length of the whole run is not known."""
        if total is None:
            raise UsageError("the length of a run cannot be a percentage: use steps, epochs or examples")
        return _up(self.value * total / 100)


UNIT_NAMES: dict[type[Duration], str] = {Steps: "steps", Epochs: "epochs", Examples: "examples", Percent: "%"}
_UNITS: dict[str, type[Duration]] = {
    "": Steps,
    **dict.fromkeys(("step", "steps"), Steps),
    **dict.fromkeys(("ep", "epoch", "epochs"), Epochs),
    **dict.fromkeys(("ex", "example", "examples", "images"), Examples),
    **dict.fromkeys(("%", "percent"), Percent),
}
_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_DURATION = re.compile(rf"\s*(?P<number>{_NUMBER})\s*(?P<unit>[a-z%]*)\s*")


def parse_duration(text: str | int | float | Duration) -> Duration:
    """Return the duration that "30 epochs", "500", "1e6 examples" or "5%" means; a number alone counts steps.

    Raises UsageError for anything else.
    """
    if isinstance(text, Duration):
        return text
    match = _DURATION.fullmatch(str(text))
    if not match or match["unit"] not in _UNITS:
        raise UsageError(f"{text!r} is not a duration: write '500 steps', '30 epochs', '1e6 examples' or '5 %'")
    return _UNITS[match["unit"]](float(match["number"]))


def to_yaml(value: Any) -> str:
    """Return a dataclass as YAML: every field, in order, the same bytes for equal values."""
    return yaml.dump(plain(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)


def plain(value: Any) -> Any:
    """Return a dataclass as nested dicts of plain values: durations and paths as text, tuples unchanged."""
    if isinstance(value, Duration):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(plain(item) for item in value)
    return str(value) if isinstance(value, Path) else value


class _Dumper(yaml.SafeDumper):
    """Write tuples on one line, and equal objects twice in place of YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_inline(self, values: tuple[Any, ...]) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)

    def represent_text(self, text: str) -> yaml.Node:
        # within single quotes the emitter folds line breaks, and loses the rarer ones
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(tuple, _Dumper.represent_inline)
_Dumper.add_representer(str, _Dumper.represent_text)


def from_yaml(source: str | Path, base: T) -> T:
    """Return the dataclass `base` with the values of a YAML file (a Path) or of a YAML text (a str).

    Raises UsageError that lists everything wrong with it.
    """
    merging = _Merge(str(source) if isinstance(source, Path) else "<yaml>")
    try:
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = {} if node is None else merging.read(node)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the configuration {source}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{merging.source}:{mark.line + 1}" if mark else merging.source
        raise UsageError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise UsageError(f"{merging.source}: nested too deeply") from None
    return merging.merged(base, values)


def merge(base: T, values: Mapping[str, Any], where: str = "") -> T:
    """Return the dataclass `base` with `values`, nested by field name, in place of its own.

    A section may be a mapping or a dataclass, a duration may be text. Raises UsageError that lists everything wrong;
    `where` names the source of the values in each of its lines.
    """
    return _Merge(where).merged(base, values)


class _Unquoted(str):
    """A YAML scalar without quotes. The type of its field decides how it is read."""


class _Merge:
    """One set of values that is merged into a dataclass: where they come from, and all that is wrong with them.

    A setting is named by its path, such as "optim.lr".
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[str, int] = {}
        self.problems: list[str] = []
        self.nodes: set[int] = set()
        """Identities of the YAML nodes that were read."""

    def merged(self, base: T, values: Any) -> T:
        """Return `base` with `values` in place of its own. Raises UsageError with all problems."""
        result = self.section(base, values, "")
        if self.problems:
            count = len(self.problems)
            title = "" if count == 1 else f"{count} problems in the configuration:\n  "
            raise UsageError(title + "\n  ".join(self.problems))
        return result

    def wrong(self, path: str, what: str) -> None:
        """Note a problem, with the line of the setting or else of the section around it."""
        around = path
        while around and around not in self.lines:
            around = around.rpartition(".")[0]
        place = ":".join(str(part) for part in (self.source, self.lines.get(around)) if part)
        self.problems.append(": ".join(part for part in (place, path, what) if part))

    def read(self, node: yaml.Node, path: str = "") -> Any:
        """Return a YAML node as nested dicts, lists and text, and note the line of each setting."""
        if id(node) in self.nodes:  # an alias may contain itself, or multiply into gigabytes
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not read", problem_mark=node.start_mark)
        self.nodes.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            return _Unquoted(node.value) if node.style is None else node.value
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, path) for item in node.value]
        values: dict[str, Any] = {}
        for key, value in node.value:
            name, inner = str(key.value), _join(path, str(key.value))
            first, self.lines[inner] = self.lines.get(inner), key.start_mark.line + 1
            if name in values:
                self.wrong(inner, f"given twice, first on line {first}")
            values[name] = self.read(value, inner)
        return values

    def section(self, base: T, values: Any, path: str) -> T:
        """Return the dataclass `base` with `values` in place of its own."""
        if isinstance(values, type(base)):
            return values
        settings = _settings(type(base))
        if not isinstance(values, Mapping):
            self.wrong(path, f"expected settings by name ({', '.join(settings)}), got {_show(values)}")
            return base
        changes = {}
        for name, value in values.items():
            inner = _join(path, str(name))
            if name in settings:
                changes[name] = self.setting(settings[name], value, getattr(base, name), inner)
            else:
                self.wrong(inner, f"unknown setting.{_suggest(str(name), settings)}")
        if self.problems:  # a section may refuse its values only because one of them is missing
            return base
        try:
            return replace(base, **changes)  # type: ignore[type-var]
        except UsageError as error:
            self.wrong(path, str(error))
            return base

    def setting(self, hint: Any, value: Any, base: Any, path: str) -> Any:
        """Return `value` as the type `hint` of its field wants it; `base` if it does not fit."""
        sections = sections_of(hint)
        if sections and not (NoneType in arms(hint) and _is_null(value)):
            section = sections[0] if len(sections) == 1 else self.kind(sections, value, base, path)
            if section is None:
                return base
            return self.section(base if isinstance(base, section) else section(), value, path)
        try:
            return _fitted(value, hint)
        except ValueError:
            near = did_you_mean(str(value), map(str, _words(hint))) if isinstance(value, str) else ""
            self.wrong(path, f"expected {_describe(hint)}, got {_show(value)}.{near}")
            return base

    def kind(self, sections: list[Any], value: Any, base: Any, path: str) -> Any:
        """Return the one of several sections that the `kind` of `value`, or else of `base`, names."""
        kind = value.get("kind", base.kind) if isinstance(value, Mapping) else getattr(value, "kind", base.kind)
        kinds = {section.kind: section for section in sections}  # the class attribute is the field's default
        if str(kind) not in kinds:
            near = did_you_mean(str(kind), kinds)
            self.wrong(_join(path, "kind"), f"expected one of {', '.join(kinds)}, got {_show(kind)}.{near}")
        return kinds.get(str(kind))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
_NULLS = ("null", "~", "")  # not "none", which is a kind of positions and of averaging


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, _Unquoted) and value.lower() in _NULLS)


def _fitted(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint` wants it. Raises ValueError if it does not fit."""
    for arm in sorted(arms(hint), key=lambda arm: arm is not NoneType):  # null is None before it is text
        try:
            return _fitted_to_one(value, arm)
        except ValueError:
            continue
    raise ValueError


def _fitted_to_one(value: Any, hint: Any) -> Any:
    """`_fitted` for a type that is not a union."""
    if get_origin(hint) is Literal:
        for word in get_args(hint):
            if value == word and isinstance(value, type(word)):
                return word
    elif get_origin(hint) is tuple:
        if isinstance(value, list | tuple):
            args = get_args(hint)
            items = [args[0]] * len(value) if args[-1] is Ellipsis else args
            return tuple(_fitted(item, arm) for item, arm in zip(value, items, strict=True))
    elif hint is NoneType and _is_null(value):
        return None
    elif issubclass(hint, Duration):
        if isinstance(value, Duration | str | int | float) and not isinstance(value, bool):
            try:
                return parse_duration(value)
            except UsageError:
                raise ValueError from None
    elif hint is bool and isinstance(value, _Unquoted) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    elif hint in (int, float) and isinstance(value, _Unquoted):
        return hint(value.replace(".inf", "inf").replace(".nan", "nan"))
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif hint is str and isinstance(value, str | Path):
        return str(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError


def arms(hint: Any) -> tuple[Any, ...]:
    """Return the types that a union allows; of any other type, itself alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def sections_of(hint: Any) -> list[Any]:
    """Return the dataclasses of settings that a type allows. A setting's `kind` chooses among several."""
    return [arm for arm in arms(hint) if is_dataclass(arm) and not issubclass(arm, Duration)]  # type: ignore[arg-type]


def _settings(section: type) -> dict[str, Any]:
    """Return the type of each setting of a section."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section)}


def _words(hint: Any) -> list[Any]:
    return [word for arm in arms(hint) if get_origin(arm) is Literal for word in get_args(arm)]


def _suggest(name: str, settings: Mapping[str, Any]) -> str:
    """Return the nearest setting: one of this section, or one of this very name in a section within it."""
    if near := did_you_mean(name, settings):
        return near
    for section, hint in settings.items():
        if any(name in _settings(inner) for inner in sections_of(hint)):
            return f" Did you mean '{section}.{name}'?"
    return f" Valid: {', '.join(settings)}"


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}


def _describe(hint: Any) -> str:
    """Return the values that a type allows in words."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        items = [_describe(arm) for arm in get_args(hint) if arm is not Ellipsis]
        return f"[{', '.join(items)}{', ...' if get_args(hint)[-1] is Ellipsis else ''}]"
    if len(arms(hint)) > 1:
        return " or ".join(_describe(arm) for arm in arms(hint))
    if issubclass(hint, Duration):
        return "a duration such as '500 steps', '30 epochs', '1e6 examples' or '5 %'"
    return _NAMES.get(hint, hint.__name__)


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return "settings by name"
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return repr(str(value)) if isinstance(value, str) else repr(value)
