"""Settings: strict merging of YAML and keyword arguments into frozen dataclasses.

`from_yaml(path, base)` returns the dataclass `base` with the values of a YAML file in place of its own;
`merge(base, values)` does the same with nested Python values; `to_yaml(value)` writes every value, so that
`from_yaml(to_yaml(run), Run()) == run`. An unknown name, a wrong type, a repeated name and a word outside of a Literal
are errors. One UsageError lists all of them with file, line and the nearest valid name. A section that is `Extensible`
may name a class of the user's own: `optim: {class: "my.optimisers:Lion", lr: 1e-4}` (`vitrail.import_path`).
Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from vitrail.durations import Duration, in_minutes, parse_duration, parse_minutes
from vitrail.errors import UsageError, did_you_mean
from vitrail.files import text_of
from vitrail.import_path import Extensible, import_path, inheriting, is_own, own_class
from vitrail.ranges import outside, without_range
from vitrail.ranges import union_members as union_members
from vitrail.words import shown

T = TypeVar("T")
CLASS = "class"
"""The entry of an `Extensible` section that names a class of the user's own."""


def to_yaml(value: Any) -> str:
    """Return a dataclass as YAML: every field, in order, the same bytes for equal values."""
    return yaml.dump(plain(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)


def plain(value: Any) -> Any:
    """Return a dataclass as nested dicts of plain values: durations and paths as text, tuples unchanged."""
    if isinstance(value, Duration):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {CLASS: import_path(type(value))} if is_own(type(value)) else {}
        return {**own, **{field.name: plain(getattr(value, field.name)) for field in fields(value)}}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(plain(item) for item in value)
    return str(value) if isinstance(value, Path) else value


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every setting in nested mappings: ("optim.lr", 0.001)."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


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


def from_yaml(source: str | Path, base: T, *, imports: bool = False) -> T:
    """Return the dataclass `base` with the values of a YAML file (a Path, or a str with ".yaml" or ".yml") or text.

    imports: Import the modules of the classes that it names. This runs code, so it is only for text that you wrote
    yourself. Raises UsageError that lists everything wrong with it.
    """
    if isinstance(source, str) and source.endswith((".yaml", ".yml")) and "\n" not in source:
        source = Path(source)
    merging = _Merge(str(source) if isinstance(source, Path) else "<yaml>", imports)
    return merging.merged(base, _values(source, merging))


def lines_of(file: Path) -> dict[str, int]:
    """Return the line of each setting in a YAML file, by its dotted name. Raises UsageError if it is not YAML."""
    merging = _Merge(str(file))
    _values(file, merging)
    return merging.lines


def _values(source: str | Path, merging: _Merge) -> Any:
    """Return the values of a YAML file or text, with their lines in `merging`. Raises UsageError if it is not YAML."""
    try:
        text = text_of(source) if isinstance(source, Path) else source
        node = _composed(text)
        return {} if node is None else merging.read(node)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the configuration {source}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{merging.source}:{mark.line + 1}" if mark else merging.source
        raise UsageError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise UsageError(f"{merging.source}: nested too deeply") from None


def _composed(text: str) -> yaml.Node | None:
    """Return the nodes of a text, read by libyaml where PyYAML has it. The reader in Python explains what is wrong."""
    if fast := getattr(yaml, "CSafeLoader", None):
        with suppress(yaml.YAMLError, UnicodeError):
            return yaml.compose(text, Loader=fast)  # type: ignore[no-any-return]
    return yaml.compose(text, Loader=yaml.SafeLoader)


def merge(base: T, values: Mapping[str, Any], where: str = "", *, imports: bool = False) -> T:
    """Return the dataclass `base` with `values`, nested by field name, in place of its own.

    A section may be a mapping or a dataclass, a duration may be text. `where` names the source of the values in each
    line of an error. imports: See `from_yaml`. Raises UsageError that lists everything wrong.
    """
    return _Merge(where, imports).merged(base, values)


def from_words(hint: Any, words: str | Sequence[str], name: str, *, subject: bool = False) -> Any:
    """Return the value that words of a command line give to a setting or an argument of a type.

    A text is one value, a sequence is a list of values. They are read as YAML without quotes is. "none" is null, too,
    unless the type has such a word. Paths and classes of the user's own stay text, and so does a `subject`, whatever it
    looks like. Raises UsageError that begins with `name`.
    """
    nulls = set() if subject else {"null", "None", "none"} - {*map(str, _words(hint))}

    def read(word: str) -> Any:
        if NoneType in union_members(hint) and word in nulls:
            return None
        return word if subject or word in _NULLS else _Unquoted(word)

    merging = _Merge("")
    value = read(words) if isinstance(words, str) else [read(word) for word in words]
    found = merging.setting(_in_words(hint), value, None, name)
    if merging.problems:
        raise UsageError(merging.problems[0])
    return found


def _in_words(hint: Any) -> Any:
    """Return a type as a command line has it: text for paths and classes, which comes last, because it fits all."""
    texts = [part for part in union_members(hint) if part in (str, Path, *extension_bases(hint))]
    lists = {part: tuple[get_args(part)[0], ...] for part in union_members(hint) if get_origin(part) is list}  # type: ignore[misc]
    others = [lists.get(part, part) for part in union_members(hint) if part not in texts]
    return Union[tuple([*others, *([str] if texts else [])])]  # noqa: UP007


class _Unquoted(str):
    """A YAML scalar without quotes. The type of its field decides how it is read."""


class _Merge:
    """One set of values that is merged into a dataclass: where they come from, and all that is wrong with them.

    A setting is named by its path, such as "optim.lr".
    """

    def __init__(self, source: str, imports: bool = False) -> None:
        self.source, self.imports = source, imports
        self.lines: dict[str, int] = {}
        self.problems: list[str] = []
        self.nodes: set[int] = set()  # identities of the YAML nodes that were read

    def merged(self, base: T, values: Any) -> T:
        """Return `base` with `values` in place of its own. Raises UsageError with all problems."""
        result = self.section(base, values, "")
        if self.problems:
            title = f"{len(self.problems)} problems in the configuration:\n  " if len(self.problems) > 1 else ""
            raise UsageError(title + "\n  ".join(self.problems))
        return result

    def wrong(self, path: str, what: str, link: str = ": ") -> None:
        """Note a problem, with the line of the setting or else of the section around it."""
        around = path
        while around and around not in self.lines:
            around = around.rpartition(".")[0]
        place = ":".join(str(part) for part in (self.source, self.lines.get(around)) if part)
        named = link.join(part for part in (path, what) if part)
        self.problems.append(": ".join(part for part in (place, named) if part))

    def read(self, node: yaml.Node, path: str = "") -> Any:
        """Return a YAML node as nested dicts, lists and text, and note the line of each setting."""
        if id(node) in self.nodes:  # an alias may contain itself, or multiply into gigabytes
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not read", problem_mark=node.start_mark)
        self.nodes.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            return node.value if node.style else _Unquoted(node.value)
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
        kind: Any = type(base)
        settings = field_types(kind)
        if not isinstance(values, Mapping):
            self.wrong(path, f"expected settings by name ({', '.join(settings)}), got {_show(values)}")
            return base
        changes = {}
        for name, value in values.items():
            inner = _join(path, str(name))
            if name in getattr(kind, "gone", ()):
                continue
            if name in settings:
                changes[name] = self.setting(settings[name], value, getattr(base, name), inner)
            else:
                self.wrong(inner, f"unknown setting.{_suggest(str(name), settings)}")
        if self.problems:  # a section may refuse its values only because one of them is missing
            return base
        try:
            changed = replace(base, **changes)  # type: ignore[type-var]
            if self.imports and isinstance(changed, Extensible):
                changed.import_code(changes)
            return changed
        except (UsageError, ValueError) as error:  # a class of the user's own may raise ValueError
            self.wrong(path, str(error))
            return base

    def setting(self, hint: Any, value: Any, base: Any, path: str) -> Any:
        """Return `value` as the type `hint` of its field wants it, within its ranges; `base` if it does not fit.

        It becomes an object of a class of the user's own, a section of the built-in settings, or a plain value.
        """
        sections, bases = sections_of(hint), extension_bases(hint)
        if bases:
            if isinstance(value, bases):
                return value
            value = _by_name(value, sections)
            if isinstance(value, Mapping) and CLASS in value:
                return self.own(bases, value, base, path)
            if isinstance(value, Mapping) and is_own(type(base)) and "kind" not in value:
                return self.section(base, value, path)
        if sections and not (NoneType in union_members(hint) and _is_null(value)):
            section = sections[0] if len(sections) == 1 else self.kind(sections, value, base, path)
            if section is None:
                return base
            kept = type(base) is section or (len(sections) == 1 and isinstance(base, section))
            return self.section(base if kept else section(), value, path)
        value = self.time(value, path) if in_minutes(hint) else value
        try:
            found = _fitted(value, hint)
        except ValueError:
            near = did_you_mean(str(value), map(str, _words(hint))) if isinstance(value, str) else ""
            self.wrong(path, f"expected {_describe(hint)}, got {_show(value)}.{near}")
            return base
        if wrong := outside(hint, found):
            self.wrong(path, wrong, " ")
        return found

    def time(self, value: Any, path: str) -> Any:
        """Return a text with a time as minutes; any other value as it is, and None for a text that is no time."""
        try:
            text = _number_of(value) if isinstance(value, _Unquoted) else value
            return parse_minutes(text) if isinstance(text, str) and not _is_null(value) else value
        except UsageError as error:
            self.wrong(path, str(error))
        return None

    def own(self, bases: tuple[Any, ...], value: Mapping[str, Any], base: Any, path: str) -> Any:
        """Return a section whose class is the user's own, with the values of `value`; `base` if that is not possible.

        What the class inherits from the class of `base`, and does not declare itself, keeps the value in `base`. If the
        name is null, the class is the built-in one.
        """
        try:
            if _is_null(value[CLASS]):
                kind = next((each for each in type(base).__mro__ if is_dataclass(each) and not is_own(each)), bases[0])
            else:
                kind = own_class(str(value[CLASS]), bases, imports=self.imports)
            _check_types(kind)
        except UsageError as error:
            self.wrong(_join(path, CLASS), str(error))
            return base
        rest = {name: inner for name, inner in value.items() if name != CLASS}
        return self.section(base if type(base) is kind else inheriting(kind, base), rest, path)

    def kind(self, sections: list[Any], value: Any, base: Any, path: str) -> Any:
        """Return the one of several sections that the `kind` of `value`, or else of `base`, names."""
        kind = value.get("kind", base.kind) if isinstance(value, Mapping) else getattr(value, "kind", base.kind)
        kinds = {section.kind: section for section in sections}  # the class attribute is the field's default
        if str(kind) not in kinds:
            near = did_you_mean(str(kind), kinds)
            self.wrong(_join(path, "kind"), f"expected one of {', '.join(kinds)}, got {_show(kind)}.{near}")
        return kinds.get(str(kind))


def _by_name(value: Any, sections: list[Any]) -> Any:
    """Return the value of an `Extensible` section as settings by name, if it names a class or a built-in kind."""
    named = value.get(CLASS) if isinstance(value, Mapping) else value
    if not isinstance(named, str):
        return value
    rest = dict(value) if isinstance(value, Mapping) else {}
    if len(sections) > 1 and not {":", "."} & {*named}:
        rest.pop(CLASS, None)
        return {**rest, "kind": named}
    return {**rest, CLASS: named} if rest or {":", "."} & {*named} else value


def _check_types(kind: Any) -> None:
    """Raise UsageError unless the types of all settings are ones that flags and files can express."""
    try:
        settings = field_types(kind)
    except (NameError, TypeError) as error:
        raise UsageError(f"the types of {import_path(kind)} cannot be read: {error}") from error
    for name, hint in settings.items():
        if not _is_readable(hint) or (extension_bases(hint) and NoneType in union_members(hint)):
            raise UsageError(
                f"{import_path(kind)} has a setting {name!r} of type {getattr(hint, '__name__', hint)}. Valid: bool, "
                "int, float, str, None, Literal, Duration, tuples and unions of them, and dataclasses of settings"
            )


def _is_readable(hint: Any) -> bool:
    hint = without_range(hint)
    if get_origin(hint) is tuple or len(union_members(hint)) > 1:
        return all(part is Ellipsis or _is_readable(part) for part in get_args(hint))
    return (
        get_origin(hint) is Literal
        or is_dataclass(hint)
        or hint in (bool, int, float, str, NoneType)
        or extension_bases(hint) != ()
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
_NULLS = ("null", "~", "")  # not "none", which is a kind of positions and of averaging


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, _Unquoted) and value.lower() in _NULLS)


def _fitted(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint` wants it. Raises ValueError if it does not fit."""
    for part in sorted(union_members(hint), key=lambda part: part is not NoneType):  # null is None before it is text
        try:
            return _fitted_to_one(value, part)
        except (ValueError, OverflowError):  # a whole number may be too large for a float
            continue
    raise ValueError


def _fitted_to_one(value: Any, hint: Any) -> Any:
    """`_fitted` for a type that is not a union."""
    hint = without_range(hint)
    if get_origin(hint) is Literal:
        for word in get_args(hint):
            if value == word and isinstance(value, type(word)):
                return word
    elif get_origin(hint) is tuple:
        if hint == tuple[str, ...] and isinstance(value, str | Path | NoneType):  # one text is a list of one
            value = () if _is_null(value) else (value,)
        if isinstance(value, list | tuple):
            items = [get_args(hint)[0]] * len(value) if get_args(hint)[-1] is Ellipsis else get_args(hint)
            return tuple(_fitted(item, part) for item, part in zip(value, items, strict=True))
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
        return hint(_number_of(value))
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif hint is str and isinstance(value, str | Path):
        return str(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError


def _number_of(value: str) -> str:
    """Return a YAML scalar as Python writes numbers: "-inf" for "-.inf"."""
    return value.replace(".inf", "inf").replace(".nan", "nan")


def sections_of(hint: Any) -> list[Any]:
    """Return the dataclasses of settings that a type allows. A setting's `kind` chooses among several."""
    return [part for part in union_members(hint) if is_dataclass(part) and not issubclass(part, Duration)]  # type: ignore[arg-type]


def extension_bases(hint: Any) -> tuple[Any, ...]:
    """Return the classes of which a subclass of the user's own may take the place of this type's sections."""
    return tuple(part for part in union_members(hint) if isinstance(part, type) and issubclass(part, Extensible))


@cache
def field_types(section: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, with its ranges. To find them takes milliseconds."""
    hints = get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in fields(section)}


def _words(hint: Any) -> list[Any]:
    """Return the words that a type lists."""
    return [word for part in union_members(hint) if get_origin(part) is Literal for word in get_args(part)]


def _suggest(name: str, settings: Mapping[str, Any]) -> str:
    """Return the nearest setting: one of this section, or one of this very name in a section within it."""
    if near := did_you_mean(name, settings):
        return near
    for section, hint in settings.items():
        if any(name in field_types(inner) for inner in sections_of(hint)):
            return f" Did you mean '{section}.{name}'?"
    return f" Valid: {', '.join(settings)}"


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}


def _describe(hint: Any) -> str:
    """Return the values that a type allows in words."""
    hint = without_range(hint)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        items = [_describe(part) for part in get_args(hint) if part is not Ellipsis]
        return f"[{', '.join(items)}{', ...' if get_args(hint)[-1] is Ellipsis else ''}]"
    if len(union_members(hint)) > 1:
        return " or ".join(dict.fromkeys(map(_describe, union_members(hint))))
    if issubclass(hint, Duration):
        return "a duration such as '500 steps', '30 epochs', '1e6 examples' or '5 %'"
    return "an import path such as my_module:MyClass" if extension_bases(hint) else _NAMES.get(hint, hint.__name__)


def _show(value: Any) -> str:
    return "settings by name" if isinstance(value, Mapping) else shown(value)
