"""Settings as flags: one flag for each field of a section, with its help, its valid values and its default.

An `Open` section also has a flag for a class of the user's own: --optim my.optimisers:Lion, or --optim.class. The
fields of that class are flags, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import docstring_parser
import tyro
from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec, StructFieldSpec

from vitrail.config import CLASS, arms, doors_of, field_types, sections_of
from vitrail.data.settings import Data
from vitrail.durations import Duration, in_minutes, parse_duration, parse_minutes
from vitrail.errors import UsageError
from vitrail.import_path import import_path, is_own
from vitrail.ranges import InputSize, limits, ranged_types

ALIASES = {
    "weights": ("--from",),
    "class_name": ("--class",),
    "modules": ("--import",),
    "mask_after_stem": ("--mask-after-stem",),
    "show_list": ("--list",),
    "verbose": ("-v",),
    "quiet": ("-q",),
    **{f"data.{name}": (f"--{name.replace('_', '-')}",) for name in ("label_from", "channels", "bits", "holdout")},
}
"""Second names of flags. `from`, `class` and `import` would be better names, but are reserved words of Python."""
READING = "reading"
"""Name of the parameter `**reading` of a verb that only reads images. Its keywords are fields of `Data`."""
REPEATED = ("include", "exclude")
"""Settings with several values whose flag is repeated for each value, so that a subject may follow."""
SUBJECT = (Data, "path")
"""The one setting that is not a flag, because it is the subject."""


@dataclass(frozen=True)
class OpenSection:
    """The flags of a section whose class may be the user's own; with several kinds, those of all of them."""

    current: Any
    kinds: tuple[Any, ...]
    """The class of `current`; or all built-in kinds, among which --objective.kind chooses."""
    place: str
    """Name of the section: "optim", "vit.stem"."""
    text: str = ""
    """Help of --objective.kind."""


def section_flags(section: Any) -> list[StructFieldSpec]:
    """Return one flag for each field of a dataclass of settings, with its values as defaults."""
    if isinstance(section, OpenSection):
        flags = [_class_flag(section)]
        return flags + (_flags_of_kinds(section) if len(section.kinds) > 1 else section_flags(section.current))
    kind: Any = type(section)
    hints, ranges, texts = field_types(kind), ranged_types(kind), field_texts(kind)
    flags = []
    for field in fields(section):
        name, value = field.name, getattr(section, field.name)
        inner, place = sections_of(hints[name]), f"{kind.section}.{name}".lstrip(".")
        if is_own(type(value)) or (len(inner) == 1 and doors_of(hints[name])):
            flags.append(StructFieldSpec(name, OpenSection, OpenSection(value, (type(value),), place)))
        elif len(inner) > 1:
            text = texts.get(name, "")
            flags.append(StructFieldSpec(name, OpenSection, OpenSection(value, tuple(inner), place, text)))
        elif inner:
            flags.append(StructFieldSpec(name, inner[0], inner[0]() if value is None else value))
        elif not (issubclass(kind, SUBJECT[0]) and name == SUBJECT[1]):
            markers = (UseAppendAction,) if name in REPEATED else ()
            others = ALIASES.get(place) or ALIASES.get(name)
            typed = flag_type(hints[name], value, *markers, ranges=ranges.get(name), aliases=others)
            flags.append(StructFieldSpec(name, typed, () if markers else value, texts.get(name, "")))
    return flags


def reading_flags() -> list[StructFieldSpec]:
    """Return the flags --data.* of a verb with the parameter `**reading`."""
    flags = section_flags(Data())
    types: list[Any] = [Annotated[flag.type, FlagCreatePairsOff] for flag in flags]
    named = [f"{Data.section}.{flag.name}" for flag in flags]
    return [
        StructFieldSpec(name, typed, flag.default, flag.helptext)
        for name, typed, flag in zip(named, types, flags, strict=True)
    ]


def _class_flag(section: OpenSection) -> StructFieldSpec:
    """Return the flag that names a class of the user's own for a section: --optim my.optimisers:Lion."""
    named = f"my_package.{section.place.rpartition('.')[2]}s:Mine"
    text = f"Import path of a class of your own for this section, such as {named}. Its module is imported."
    default = import_path(type(section.current)) if is_own(type(section.current)) else None
    typed = flag_type(str | None, default, aliases=(f"--{section.place}",), metavar="MODULE:CLASS")
    return StructFieldSpec(CLASS, typed, default, text)


def _flags_of_kinds(objectives: OpenSection) -> list[StructFieldSpec]:
    """Return the flag `kind`, and one flag for each field of any kind of objective. Its help names these kinds."""
    owners: dict[str, list[Any]] = {}
    for kind in objectives.kinds:
        for field in fields(kind):
            owners.setdefault(field.name, []).append(kind)
    flags = []
    for name, kinds in owners.items():
        of = ", ".join(kind.kind for kind in kinds)
        text = f"{field_texts(kinds[0]).get(name, '')} Used by {of}."
        hint: Any = Union[tuple(field_types(kind)[name] for kind in kinds)]  # noqa: UP007
        default = getattr(objectives.current if type(objectives.current) in kinds else kinds[0](), name)
        ranges: Any = Union[tuple(ranged_types(kind).get(name) for kind in kinds)]  # noqa: UP007
        typed = flag_type(hint, default, ranges=ranges, aliases=ALIASES.get(name))
        flags.append(StructFieldSpec(name, typed, default, objectives.text if name == "kind" else text))
    return flags


def named_classes(section: Any, argv: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Return the classes of the user's own that the command line names, as settings: {"optim": {"class": ...}}."""
    found: dict[str, Any] = {}
    kind: Any = type(section)
    for name, hint in field_types(kind).items():
        flag = flag_of(prefix + name)
        named = [*values_of(flag, argv), *values_of(f"{flag}.{CLASS}", argv)] if doors_of(hint) else []
        if named and {":", "."} & {*named[-1]}:
            found[name] = {CLASS: named[-1]}
        elif is_dataclass(value := getattr(section, name, None)) and (
            inner := named_classes(value, argv, f"{prefix}{name}.")
        ):
            found[name] = inner
    return found


def named_modules(argv: Sequence[str]) -> list[str]:
    """Return the modules that --import names. A word after "--" is a subject, whatever it looks like."""
    flags = argv[: argv.index("--")] if "--" in argv else argv
    return [module for flag in (flag_of("modules"), *ALIASES["modules"]) for module in values_of(flag, flags)]


def recorded_configs(argv: Sequence[str]) -> list[str]:
    """Return the config.yaml of the run folder that --resume names, if it names one."""
    files = [Path(run) / "config.yaml" for run in values_of("--resume", argv)]
    return [str(file) for file in files if file.is_file()]


def values_of(flag: str, argv: Sequence[str]) -> list[str]:
    """Return the values of a flag, before anything is parsed."""
    apart = [following for word, following in pairwise(argv) if word == flag]
    return apart + [word.partition("=")[2] for word in argv if word.startswith(f"{flag}=")]


def flag_of(word: str) -> str:
    """Return the flag that a word of the command line or a name of Python is: "--optim.lr=1" is "--optim.lr"."""
    dashed = word.partition("=")[0].replace("_", "-")
    return dashed if dashed.startswith("-") else f"--{dashed}"


@cache
def field_texts(section: Any) -> dict[str, str]:
    """Return the docstring of each field of a dataclass. They are read from its source, which takes milliseconds."""
    texts: dict[str, str] = {}
    for each in reversed(section.__mro__):
        texts |= documented(docstring_parser.parse_from_object(each)) if is_dataclass(each) else {}
    return texts


def documented(docstring: docstring_parser.Docstring) -> dict[str, str]:
    """Return the text of each parameter or field in a docstring."""
    return {p.arg_name: " ".join(p.description.split()) for p in docstring.params if p.description}


def flag_type(hint: Any, default: Any, *markers: Any, ranges: Any = None, null: Any = None, **more: Any) -> Any:
    """Return a type as tyro reads it from words, with help that ends in the valid values and the default."""
    if default is tyro.MISSING:
        shown = "(required)"
    elif default is None or default is False or default == ():
        shown = ""
    elif default is True:  # help names only --no-..., unless there is a pair of flags
        shown = "(on by default; this flag switches it off)" if FlagCreatePairsOff in markers else "(default: on)"
    else:
        shown = f"(default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
    valid = ", or ".join(dict.fromkeys(limit.words() for limit in limits(ranges)))
    shown = " ".join(part for part in (valid and f"({valid})", shown) if part)
    if in_minutes(ranges):
        typed = _read_or_null(hint, parse_minutes, int | float, "TIME")
    elif is_size(hint):
        typed = _read_or_null(hint, _read_size, int | tuple, "SIZE")
    elif arms(hint) == (Duration, NoneType):
        typed = _read_or_null(hint, parse_duration, Duration, "DURATION")
    else:
        typed = _from_words(hint, null)
    return Annotated[(typed, arg(help_behavior_hint=shown, **more), *markers)]


def is_size(hint: Any) -> bool:
    """Return whether this is the type of the size of a network's input."""
    return {int, tuple[int, int]} <= {*arms(hint)}


def is_whole(word: str) -> bool:
    """Return whether this is a whole number. One below 0 is no size, but read as one, so that this is what is told."""
    return word.removeprefix("-").isdecimal()


def _read_size(word: str) -> InputSize:
    """Return the size of an input: "64", or height and width as "32x64"."""
    sides = word.split("x")
    if len(sides) > 2 or not all(map(is_whole, sides)):
        raise UsageError(f"{word!r} is not a whole number, nor height and width such as 32 64")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _read_or_null(hint: Any, parse: Callable[[str], Any], kind: Any, name: str) -> Any:
    """Return a type that tyro reads from words by `parse`, such as "20s" and "30 epochs", and None if it allows it."""
    nulls = ("null", "None", "none") if NoneType in arms(hint) else ()

    def read(words: list[str]) -> Any:
        try:
            return None if words[0] in nulls else parse(words[0])
        except UsageError as error:
            raise ValueError(str(error)) from None  # tyro reports it with the flag's name

    spec = PrimitiveConstructorSpec[Any](
        nargs=1,
        metavar=f"{name}|null" if nulls else name,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, kind) or (bool(nulls) and value is None),
        str_from_instance=lambda value: ["null" if value is None else str(value)],
    )
    return Annotated[hint, spec]


def _from_words(hint: Any, null: Any = None) -> Any:
    """Return a type with what tyro reads from words: text for paths, "null" and "none" for None.

    "none" is text if it is one of the setting's own words.
    """
    if get_args(hint)[1:] == (...,):
        return tuple[_from_words(get_args(hint)[0]), ...]  # type: ignore[misc]
    words = {word for arm in arms(hint) if get_origin(arm) is Literal for word in get_args(arm)}
    doors = doors_of(hint)  # an import path is text
    text = [arm if _any_number(arm) else str for arm in arms(hint) if arm in (str, Path, *doors) or _any_number(arm)]
    options = [arm for arm in arms(hint) if arm not in (NoneType, Path, *doors, *text)]
    if NoneType in arms(hint):
        options.append(null or null_word("null", "None", *({"none"} - words)))
    return Union[tuple([*options, *text])]  # noqa: UP007  # text comes last, because it takes every word


def _any_number(hint: Any) -> bool:
    """Return whether this is a list, or a tuple of any length."""
    return get_origin(hint) is list or get_args(hint)[1:] == (...,)


def null_word(*words: str) -> Any:
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
