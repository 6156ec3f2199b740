"""Strict YAML and keyword arguments, merged into frozen dataclasses. Torch-free.

`from_yaml(path, base)` returns `base` with the file's values in place of its own; `merge(base, values)` does
the same for nested Python values; `to_yaml(value)` writes every value out, so that
`from_yaml(to_yaml(run), Run()) == run`. Nothing is guessed: unknown keys, wrong types, duplicate keys and
names outside a Literal are collected, and told in one UsageError with file, line and the nearest valid name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from vitrail.config import Duration, parse_duration
from vitrail.errors import UsageError, did_you_mean

T = TypeVar("T")

_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
_NULLS = ("null", "~", "")  # not "none", which is a kind of positions and of averaging


class _Plain(str):
    """A YAML scalar without quotes: its type is the one the field wants."""


class _Section(dict[str, Any]):
    """A YAML mapping that remembers on which line each key stands."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


@dataclass(frozen=True)
class _Place:
    """Where a value comes from, and the list to which what is wrong with it is added."""

    problems: list[str]
    file: str = ""
    line: int | None = None
    key: str = ""

    def child(self, key: str, line: int | None) -> _Place:
        return _Place(self.problems, self.file, line or self.line, f"{self.key}.{key}" if self.key else key)

    def wrong(self, what: str) -> None:
        at = ":".join(str(part) for part in (self.file, self.line) if part)
        self.problems.append(": ".join(part for part in (at, self.key, what) if part))


def to_yaml(value: Any) -> str:
    """Return a dataclass as YAML: every field, in order, the same bytes for equal values."""
    return yaml.dump(plain(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)


def plain(value: Any) -> Any:
    """Return a dataclass as nested dicts of plain values: durations as text, tuples kept, paths as text."""
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
    """Tuples on one line, and no anchors for values that happen to be the same object."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_inline(self, values: tuple[Any, ...]) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)

    def represent_text(self, text: str) -> yaml.Node:
        # between single quotes the emitter folds line breaks, and loses the rarer ones
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(tuple, _Dumper.represent_inline)
_Dumper.add_representer(str, _Dumper.represent_text)


def from_yaml(source: str | Path, base: T) -> T:
    """Return the dataclass `base` with the values of a YAML file (a Path) or of a YAML text (a str).

    Raises UsageError that lists everything wrong with it.
    """
    place = _Place([], file=str(source) if isinstance(source, Path) else "<yaml>")
    try:
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = _Section() if node is None else _read(node, place, set())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the configuration {source}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place.file}:{mark.line + 1}" if mark else place.file
        raise UsageError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise UsageError(f"{place.file}: nested too deeply") from None
    return _merged(base, values, place)


def merge(base: T, values: Mapping[str, Any], where: str = "") -> T:
    """Return the dataclass `base` with `values`, nested by field name, in place of its own.

    Sections may be given as mappings or as dataclasses, durations also as text. Raises UsageError that lists
    everything wrong; `where` says in its lines what the values are from.
    """
    return _merged(base, values, _Place([], file=where))


def _merged(base: T, values: Any, place: _Place) -> T:
    result = _merge(base, values, place)
    if place.problems:
        count = len(place.problems)
        title = "" if count == 1 else f"{count} problems in the configuration:\n  "
        raise UsageError(title + "\n  ".join(place.problems))
    return result


def _read(node: yaml.Node, place: _Place, seen: set[int]) -> Any:
    """YAML nodes as nested values that keep line numbers and do not guess types."""
    if id(node) in seen:  # an alias may contain itself, or multiply into gigabytes
        raise yaml.MarkedYAMLError(problem="anchors and aliases are not read", problem_mark=node.start_mark)
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        return _Plain(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_read(item, place, seen) for item in node.value]
    section = _Section()
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in section:
            place.child(key, line).wrong(f"given twice, first on line {section.lines[key]}")
        section[key] = _read(value_node, place, seen)
        section.lines[key] = line
    return section


def _merge(base: T, values: Any, place: _Place) -> T:
    if isinstance(values, type(base)):
        return values
    if not isinstance(values, Mapping):
        place.wrong(f"expected settings by name ({', '.join(_keys(type(base)))}), got {_show(values)}")
        return base
    hints, changes = _hints(type(base)), {}
    lines = values.lines if isinstance(values, _Section) else {}
    for key, value in values.items():
        here = place.child(str(key), lines.get(key))
        if key in hints:
            changes[key] = _convert(value, hints[key], getattr(base, key), here)
        else:
            here.wrong(f"unknown setting.{_suggest(str(key), type(base))}")
    if place.problems:  # the parts may contradict each other only because one of them was left out
        return base
    try:
        return replace(base, **changes)  # type: ignore[type-var]
    except UsageError as error:
        place.wrong(str(error))
        return base


def _convert(value: Any, hint: Any, base: Any, place: _Place) -> Any:
    sections = sections_of(hint)
    if sections and not (NoneType in _arms(hint) and _is_null(value)):
        if len(sections) > 1:
            return _merge_kind(value, sections, base, place)
        return _merge(base if isinstance(base, sections[0]) else sections[0](), value, place)
    try:
        return _parse(value, hint)
    except ValueError:
        near = did_you_mean(str(value), map(str, _options(hint))) if isinstance(value, str) else ""
        place.wrong(f"expected {_describe(hint)}, got {_show(value)}.{near}")
        return base


def _merge_kind(value: Any, sections: list[Any], base: Any, place: _Place) -> Any:
    """Settings whose `kind` says which of several sections they are of; without one, that of `base`."""
    kind = value.get("kind", base.kind) if isinstance(value, Mapping) else getattr(value, "kind", base.kind)
    kinds = {section.kind: section for section in sections}  # the class holds the field's default
    if str(kind) not in kinds:
        here = place.child("kind", value.lines.get("kind") if isinstance(value, _Section) else None)
        here.wrong(f"expected one of {', '.join(kinds)}, got {_show(kind)}.{did_you_mean(str(kind), kinds)}")
        return base
    section = kinds[str(kind)]
    return _merge(base if isinstance(base, section) else section(), value, place)


def _parse(value: Any, hint: Any) -> Any:
    """Return `value` as the annotation `hint` wants it; ValueError where it does not fit."""
    for arm in sorted(_arms(hint), key=lambda arm: arm is not NoneType):  # "null" is null before it is text
        try:
            return _parse_arm(value, arm)
        except ValueError:
            continue
    raise ValueError


def _parse_arm(value: Any, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        for option in get_args(hint):
            if value == option and isinstance(value, type(option)):
                return option
    elif get_origin(hint) is tuple:
        return _parse_tuple(value, get_args(hint))
    elif hint is NoneType and _is_null(value):
        return None
    elif issubclass(hint, Duration):
        if isinstance(value, Duration | str | int | float) and not isinstance(value, bool):
            try:
                return parse_duration(value)
            except UsageError:
                raise ValueError from None
    elif hint is bool and isinstance(value, _Plain) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    elif hint in (int, float) and isinstance(value, _Plain):
        return hint(value.replace(".inf", "inf").replace(".nan", "nan"))
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif hint is str and isinstance(value, str | Path):
        return str(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError


def _parse_tuple(value: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError
    items = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
    return tuple(_parse(item, arm) for item, arm in zip(value, items, strict=True))


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, _Plain) and value.lower() in _NULLS)


def _arms(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def sections_of(hint: Any) -> list[Any]:
    """Return the dataclasses of settings among the types of a hint; several are told apart by their `kind`."""
    arms = [arm for arm in _arms(hint) if isinstance(arm, type) and is_dataclass(arm)]
    return [arm for arm in arms if not issubclass(arm, Duration)]


def _options(hint: Any) -> list[Any]:
    return [option for arm in _arms(hint) if get_origin(arm) is Literal for option in get_args(arm)]


def _hints(section: type) -> dict[str, Any]:
    return {key: hint for key, hint in get_type_hints(section).items() if key in _keys(section)}


def _keys(section: type) -> list[str]:
    return [field.name for field in fields(section)]


def _suggest(key: str, section: type) -> str:
    """The nearest setting: of this section, or one of the same name further in ("lr" is "optim.lr")."""
    near = did_you_mean(key, _keys(section))
    if near:
        return near
    for name, hint in _hints(section).items():
        if any(key in _keys(inner) for inner in sections_of(hint)):
            return f" Did you mean '{name}.{key}'?"
    return f" Valid: {', '.join(_keys(section))}"


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}


def _describe(hint: Any) -> str:
    """What would be valid, in words."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        items = [_describe(arm) for arm in get_args(hint) if arm is not Ellipsis]
        return f"[{', '.join(items)}{', ...' if get_args(hint)[-1] is Ellipsis else ''}]"
    if len(_arms(hint)) > 1:
        return " or ".join(_describe(arm) for arm in _arms(hint))
    if issubclass(hint, Duration):
        return "a duration such as '500 steps', '30 epochs', '1e6 examples' or '5 %'"
    return _NAMES.get(hint, hint.__name__)


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return "settings by name"
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return repr(str(value)) if isinstance(value, str) else repr(value)
