"""A verb's signature as command line flags, so that a flag and a keyword of Python cannot differ.

Positional parameters are the subjects of a command, keyword-only parameters become flags, and `**settings` becomes
a flag for every field of `Run` (`--optim.lr`). tyro parses onto a `Run`; for --help this is the run that --recipe and
--config describe, so that help shows its values as defaults. The result holds only what stands on the command line,
because everything else may still follow from the data.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from vitrail.config import Duration, arms, parse_duration, sections_of
from vitrail.data.settings import Data
from vitrail.errors import UsageError, did_you_mean
from vitrail.training.run import Run
from vitrail.verbs.flags.settings import starting_run

ALIASES = {
    "weights": ("--from",),
    "class_name": ("--class",),
    "mask_after_stem": ("--mask-after-stem",),
    "show_list": ("--list",),
    "verbose": ("-v",),
    "quiet": ("-q",),
}
"""Second names of flags. `from` and `class` would be better names, but are reserved words of Python."""
SUBJECT = (Data, "path")
"""The one setting that is not a flag, because it is the subject."""


def everywhere(*, json: bool = False, quiet: bool = False, verbose: bool = False, traceback: bool = False) -> None:
    """Flags of every verb.

    Args:
        json: Print the result as JSON on stdout; everything else goes to stderr.
        quiet: Print only warnings and errors.
        verbose: Print more messages.
        traceback: Show where in the code an error was raised (or set VITRAIL_TRACEBACK=1).
    """


GLOBAL = tuple(inspect.signature(everywhere).parameters)


def parse(function: Callable[..., Any], argv: Sequence[str], prog: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and keywords for a call of `function`; the settings of a section are a dict.

    They hold only what stands in `argv`, the flags of `everywhere` included. If a verb takes any number of subjects,
    everything after "--" is a subject. For --help, tyro prints help and exits with 0; for a wrong value, it prints the
    error and exits with 2. Raises UsageError with the nearest flag for an unknown flag.
    """
    parameters = inspect.signature(function).parameters.values()
    many = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    argv, after = list(argv), []
    if many is not None and "--" in argv:
        argv, after = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    flags = _flags(function, argv)
    values, unknown = tyro.cli(
        function,
        prog=prog,
        description=docstring_parser.parse(inspect.getdoc(function) or "").description,
        args=_spread(function, argv),
        return_unknown_args=True,
        registry=_registry(function, flags),
    )
    if unknown:
        raise UsageError(_unknown(unknown, function, prog))
    given = _given(flags, values, {_flag(word) for word in argv if word.startswith("-")})
    if many is None:
        return [], given
    first = [given.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [*first, *given.pop(many, ()), *after], given


def flag_names(function: Callable[..., Any]) -> list[str]:
    """Return every flag and subject of a verb, sorted, by the names of Python ("optim.lr")."""
    return sorted(flag_texts(function))


def flag_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Return the help of every flag and subject of a verb, by the names of Python."""
    return {name: str(flag.helptext) for name, flag in _walk(_flags(function, ()))}


def _walk(flags: Iterable[StructFieldSpec], prefix: str = "") -> Iterator[tuple[str, StructFieldSpec]]:
    """Yield each flag with its name, the flags of sections as "optim.lr"."""
    for flag in flags:
        if is_dataclass(flag.type):
            yield from _walk(_settings(flag.default), f"{prefix}{flag.name}.")
        else:
            yield prefix + flag.name, flag


def _given(
    flags: Iterable[StructFieldSpec], values: dict[str, Any], typed: set[str], prefix: str = ""
) -> dict[str, Any]:
    """Return the values whose flag is among those `typed`, and the subjects that are not their default."""
    given: dict[str, Any] = {}
    for flag in flags:
        name, value = flag.name, values[flag.name]
        if is_dataclass(flag.type):
            if inner := _given(_settings(flag.default), value, typed, f"{prefix}{name}."):
                given[name] = inner
        elif Positional in get_args(flag.type):
            if value is not flag.default:
                given[name] = value
        elif typed & _spellings(prefix, name):
            given[name] = value
    return given


def _spellings(prefix: str, name: str) -> set[str]:
    """Return the words that set a flag: its name, its aliases, and for a switch their opposites."""
    aliases = ALIASES.get(name, ())
    opposites = {_flag(f"{prefix}no_{name}"), *(f"--no-{alias.lstrip('-')}" for alias in aliases)}
    return {_flag(prefix + name), *aliases, *opposites}


def _flag(word: str) -> str:
    """Return the flag that a word of the command line or a name of Python is: "--optim.lr=1" is "--optim.lr"."""
    dashed = word.partition("=")[0].replace("_", "-")
    return dashed if dashed.startswith("-") else f"--{dashed}"


def _spread(function: Callable[..., Any], argv: Sequence[str]) -> list[str]:
    """Give each value of a list a flag of its own: "--shots 1 5" and "--shots 1,5" become "--shots 1 --shots 5".

    This is for lists of numbers and of known words. A list ends at the first other word, so that a subject may follow.
    """
    lists = {_flag(name): hint for name, hint in _hints(function).items() if _is_list(hint)}
    words: list[str] = []
    flag = ""
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        if _flag(word) in lists and _all_of(lists[_flag(word)], following):
            flag = word  # stands again in front of each of its values
        elif flag and _all_of(lists[_flag(flag)], word):
            words += [part for value in word.split(",") for part in (flag, value)]
        else:
            flag = ""
            words.append(word)
    return words


def _is_list(hint: Any) -> bool:
    """Is this a list of numbers or of known words?"""
    each, *rest = get_args(hint) or (None,)
    return rest == [Ellipsis] and (each in (int, float) or get_origin(each) is Literal)


def _all_of(hint: Any, word: str) -> bool:
    """Is the word a value of such a list, or several with commas?"""
    each = get_args(hint)[0]
    return all(
        value in get_args(each) if get_origin(each) is Literal else _is_number(value) for value in word.split(",")
    )


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _unknown(words: list[str], function: Callable[..., Any], prog: str) -> str:
    """Say which word is unknown, and which flag is near; "--weight-decay" is near "--optim.weight-decay"."""
    names = flag_names(function)
    flags = {_flag(name) for name in names} | {alias for name in names for alias in ALIASES.get(name, ())}
    wrong = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if wrong is None:
        return f"{prog} does not know what to do with {' '.join(words)!r}: see {prog} --help"
    last = {_flag(name.rpartition(".")[2]): _flag(name) for name in names}
    near = did_you_mean(wrong.replace("_", "-"), flags | last.keys())
    for short, flag in last.items():
        near = near.replace(f"'{short}'", f"'{flag}'") if short not in flags else near
    return f"{prog} has no flag {wrong!r}.{near} All are in {prog} --help"


@dataclass(frozen=True)
class Objectives:
    """The flags of all objectives. --objective.kind chooses the objective, and the other flags its settings."""

    current: Any
    kinds: tuple[Any, ...]
    text: str
    """Help of --objective.kind."""


def _flags(function: Callable[..., Any], argv: Sequence[str]) -> list[StructFieldSpec]:
    """Return the flags of a verb; a section of settings is one entry, whose default is the section."""
    parameters = inspect.signature(function).parameters.values()
    flags = _parameters(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        own = {flag.name for flag in flags}
        run = Run()
        if {"-h", "--help"} & {*argv}:  # nothing else shows a default
            run = starting_run(function.__name__, _values("--recipe", argv), _values("--config", argv))
        flags += [flag for flag in _settings(run) if flag.name not in own]
    return flags + _parameters(everywhere)


def _values(flag: str, argv: Sequence[str]) -> list[str]:
    """Return the values of a flag, before anything is parsed."""
    apart = [following for word, following in pairwise(argv) if word == flag]
    return apart + [word.partition("=")[2] for word in argv if word.startswith(f"{flag}=")]


def _parameters(function: Callable[..., Any]) -> list[StructFieldSpec]:
    """Return one flag or subject for each parameter of a function."""
    hints = _hints(function)
    texts = _texts(docstring_parser.parse(inspect.getdoc(function) or ""))
    flags = []
    for name, p in inspect.signature(function).parameters.items():
        text, hint = texts.get(name, ""), hints[name]
        if p.kind is p.VAR_POSITIONAL:
            typed = _typed(tuple[hint, ...], (), Positional, metavar=f"[{name.upper()} ...]")  # type: ignore[valid-type]
            flags.append(StructFieldSpec(name, typed, tyro.MISSING, text))
        elif p.kind is p.POSITIONAL_OR_KEYWORD:
            required = p.default is p.empty
            default = tyro.MISSING if required else p.default
            metavar = name.upper() if required else f"[{name.upper()}]"
            typed = _typed(hint, default, Positional, null=_null(), metavar=metavar)
            flags.append(StructFieldSpec(name, typed, default, text))
        elif p.kind is p.KEYWORD_ONLY:
            many = get_args(hint)[1:] == (...,)
            marker = UseAppendAction if many else FlagCreatePairsOff
            typed = _typed(hint, p.default, marker, aliases=ALIASES.get(name))
            default = () if many else p.default  # tyro would append to the default of a list
            flags.append(StructFieldSpec(name, typed, default, text))
    return flags


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters; the result's may be one that only a type checker imports."""
    parameters = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    return get_type_hints(SimpleNamespace(__annotations__=parameters), function.__globals__)


def _settings(section: Any) -> list[StructFieldSpec]:
    """Return one flag for each field of a dataclass of settings, with its values as defaults."""
    if isinstance(section, Objectives):
        return _settings_of_kinds(section)
    hints, texts = get_type_hints(type(section)), _texts(docstring_parser.parse_from_object(type(section)))
    flags = []
    for field in fields(section):
        name, value = field.name, getattr(section, field.name)
        inner = sections_of(hints[name])
        if len(inner) > 1:
            flags.append(StructFieldSpec(name, Objectives, Objectives(value, tuple(inner), texts.get(name, ""))))
        elif inner:
            flags.append(StructFieldSpec(name, inner[0], inner[0]() if value is None else value))
        elif (type(section), name) != SUBJECT:
            typed = _typed(hints[name], value, aliases=ALIASES.get(name))
            flags.append(StructFieldSpec(name, typed, value, texts.get(name, "")))
    return flags


def _settings_of_kinds(objectives: Objectives) -> list[StructFieldSpec]:
    """Return `kind`, and a flag for every field of any kind of objective, which says to which kinds it belongs."""
    owners: dict[str, list[Any]] = {}
    for kind in objectives.kinds:
        for field in fields(kind):
            owners.setdefault(field.name, []).append(kind)
    flags = []
    for name, kinds in owners.items():
        of = ", ".join(kind.kind for kind in kinds)
        text = f"{_texts(docstring_parser.parse_from_object(kinds[0])).get(name, '')} Used by {of}."
        hint: Any = Union[tuple(get_type_hints(kind)[name] for kind in kinds)]  # noqa: UP007
        default = getattr(objectives.current if type(objectives.current) in kinds else kinds[0](), name)
        typed = _typed(hint, default, aliases=ALIASES.get(name))
        flags.append(StructFieldSpec(name, typed, default, objectives.text if name == "kind" else text))
    return flags


def _texts(docstring: docstring_parser.Docstring) -> dict[str, str]:
    """Return what a docstring says of each parameter or field."""
    return {p.arg_name: " ".join(p.description.split()) for p in docstring.params if p.description}


def _typed(hint: Any, default: Any, *markers: Any, null: Any = None, **more: Any) -> Any:
    """Return a type as tyro reads it from words, with help that ends in the default."""
    if default is tyro.MISSING:
        shown = "(required)"
    elif default is None or default is False or default == ():
        shown = ""
    else:
        shown = f"(default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
    return Annotated[(_from_words(hint, null), arg(help_behavior_hint=shown, **more), *markers)]


def _from_words(hint: Any, null: Any = None) -> Any:
    """Return a type with what tyro reads from words: text for paths, "null" and "none" for None.

    "none" is text if it is one of the setting's own words.
    """
    if get_args(hint)[1:] == (...,):
        return tuple[_from_words(get_args(hint)[0]), ...]  # type: ignore[misc]
    words = {word for arm in arms(hint) if get_origin(arm) is Literal for word in get_args(arm)}
    text = [str if arm is Path else arm for arm in arms(hint) if arm in (str, Path) or get_origin(arm) is list]
    options = [arm for arm in arms(hint) if arm not in (NoneType, Path, *text)]
    if NoneType in arms(hint):
        options.append(null or _null("null", "None", *({"none"} - words)))
    return Union[tuple([*options, *text])]  # noqa: UP007  # text comes last, because it takes every word


def _null(*words: str) -> Any:
    """Return None as a type that tyro reads from one of `words`."""
    spec = PrimitiveConstructorSpec[None](
        nargs=1,
        metavar="null",
        instance_from_str=lambda _: None,
        is_instance=lambda value: value is None,
        str_from_instance=lambda _: ["null"],
        choices=words,
    )
    return Annotated[None, spec]


def _registry(function: Callable[..., Any], flags: list[StructFieldSpec]) -> ConstructorRegistry:
    """Return tyro's rules for a verb, for the sections of its settings, and for durations."""
    registry = ConstructorRegistry()

    @registry.struct_rule
    def sections(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type is function:
            return StructConstructorSpec(dict, tuple(flags))
        if is_dataclass(info.type) and is_dataclass(info.default):
            return StructConstructorSpec(dict, tuple(_settings(info.default)))
        return None

    @registry.primitive_rule
    def durations(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Duration] | None:
        if info.type is not Duration:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="DURATION",
            instance_from_str=_read_duration,
            is_instance=lambda value: isinstance(value, Duration),
            str_from_instance=lambda duration: [str(duration)],
        )

    return registry


def _read_duration(words: list[str]) -> Duration:
    try:
        return parse_duration(words[0])
    except UsageError as error:
        raise ValueError(str(error)) from None  # tyro reports it with the flag's name
