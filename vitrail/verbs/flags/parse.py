"""A verb's signature as command line flags, so that a flag and a keyword of Python cannot differ.

Positional parameters are the subjects of a command, keyword-only parameters become flags, `**settings` becomes a flag
for every field of `Run` (`--optim.lr`), and `**reading` a flag for every field of `Data` (`--data.label-from`). If
`--optim my.optimisers:Lion` names a class of the user's own, its fields become flags, too. The help of a flag is its
text in the verb's docstring, or else the text of the field of `Compute` or `Cells` with its name. tyro parses onto a
`Run`; for --help this is the run that --recipe and --config describe, so that help shows its values as defaults. The
result holds only what stands on the command line, because everything else may still follow from the data.
"""

from __future__ import annotations

import inspect
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from vitrail.config import CLASS, arms, merge
from vitrail.data.settings import Data
from vitrail.durations import Duration, parse_duration
from vitrail.errors import UsageError, did_you_mean
from vitrail.ranges import check, ranged_types, refuse_empty
from vitrail.training.run import Run
from vitrail.verbs.flags.cells import Cells
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.fields import (
    ALIASES,
    READING,
    documented,
    field_texts,
    flag_of,
    flag_type,
    is_size,
    is_whole,
    named_classes,
    null_word,
    reading_flags,
    recorded_configs,
    section_flags,
    values_of,
)


def everywhere(
    *,
    json: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    traceback: bool = False,
    modules: tuple[str, ...] = (),
) -> None:
    """Flags of every verb.

    Args:
        modules: Import a Python module of your own first, from the current folder or PYTHONPATH. Models and runs with
            classes of your own need it. May be repeated.
        json: Print the result as JSON on stdout; everything else goes to stderr.
        quiet: Print only warnings and errors.
        verbose: Print more messages.
        traceback: Show where in the code an error was raised (or set VITRAIL_TRACEBACK=1).
    """


NUMBERS = {int: "a whole number", float: "a number"}
GLOBAL = tuple(inspect.signature(everywhere).parameters)


def parse(function: Callable[..., Any], argv: Sequence[str], prog: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and keywords for a call of `function`; the settings of a section are a dict.

    They hold only what stands in `argv`, the flags of `everywhere` included. If a verb takes any number of subjects,
    everything after "--" is a subject. For --help, tyro prints help and exits with 0; for a wrong value, it prints the
    error and exits with 2. Raises UsageError with the nearest flag for an unknown flag.
    """
    parameters = inspect.signature(function).parameters
    many = next((p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    argv, after = list(argv), []
    if many is not None and "--" in argv:
        argv, after = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    flags = _flags(function, argv)
    words = {flag_of(word) for word in argv if word.startswith("-")}
    read = flags if {"-h", "--help"} & words else _typed(flags, words)
    values, unknown = tyro.cli(
        function,
        prog=prog,
        description=docstring_parser.parse(inspect.getdoc(function) or "").description,
        args=_spread(function, _joined(read, argv)),
        return_unknown_args=True,
        registry=_registry(function, read),
    )
    if unknown:
        raise UsageError(_unknown(unknown, flags, prog))
    given = _given(read, values)
    subjects = {name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY}
    named = {name: name if name in subjects else flag_of(name) for name in given}
    for name, hint in ranged_types(inspect.unwrap(function)).items():
        if name in given:
            check(hint, given[name], named[name])
    refuse_empty(function, given, named.__getitem__)
    if READING in parameters:  # takes the names of the fields, without "data."
        data = {flag.name: flag.name.removeprefix(f"{Data.section}.") for flag in reading_flags()}
        # a wrong value is told before a network is loaded or images are looked for, as for all other flags
        merge(Run(), {Data.section: {data[name]: value for name, value in given.items() if name in data}})
        given = {data.get(name, name): value for name, value in given.items()}
    if many is None:
        return [], given
    first = [given.pop(p.name) for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [*first, *given.pop(many, ()), *after], given


def flag_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Return the help of every flag and subject of a verb, by the names of Python ("optim.lr")."""
    return {name: str(flag.helptext) for name, flag in each_flag(function)}


def each_flag(function: Callable[..., Any]) -> Iterator[tuple[str, StructFieldSpec]]:
    """Yield every flag and subject of a verb with its type, default and help, by the names of Python ("optim.lr")."""
    return _walk(_flags(function, ()))


def is_subject(flag: StructFieldSpec) -> bool:
    """Return whether this is a subject, which stands without a flag."""
    return Positional in get_args(flag.type)


def _walk(flags: Iterable[StructFieldSpec], prefix: str = "") -> Iterator[tuple[str, StructFieldSpec]]:
    """Yield each flag with its name, the flags of sections as "optim.lr"."""
    for flag in flags:
        if is_dataclass(flag.type):
            yield from _walk(_flags_of(flag.default), f"{prefix}{flag.name}.")
        else:
            yield prefix + flag.name, flag


@dataclass(frozen=True)
class _Section:
    """The flags of a section that stand on the command line."""

    flags: list[StructFieldSpec]


def _typed(flags: Iterable[StructFieldSpec], words: set[str], prefix: str = "") -> list[StructFieldSpec]:
    """Return the subjects, and the flags that stand among the words: tyro needs 0.1 s for all flags of a run."""
    typed = []
    for flag in flags:
        if is_dataclass(flag.type):
            if inner := _typed(section_flags(flag.default), words, f"{prefix}{flag.name}."):
                typed.append(StructFieldSpec(flag.name, _Section, _Section(inner), flag.helptext))
        elif is_subject(flag) or words & _spellings(prefix, flag.name):
            typed.append(flag)
    return typed


def _flags_of(section: Any) -> list[StructFieldSpec]:
    """Return the flags of a section, or those of them that stand on the command line."""
    return section.flags if isinstance(section, _Section) else section_flags(section)


def _given(flags: Iterable[StructFieldSpec], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the flags, which are those that were typed, and the subjects that are not their default."""
    given: dict[str, Any] = {}
    for flag in flags:
        name, value = flag.name, values[flag.name]
        if is_dataclass(flag.type):
            given[name] = _given(_flags_of(flag.default), value)
        elif not is_subject(flag) or value is not flag.default:
            given[name] = value
    return given


def _spellings(prefix: str, name: str) -> set[str]:
    """Return the words that set a flag: its name, its aliases, and for a switch their opposites."""
    own = ALIASES.get(prefix + name) or ALIASES.get(name) or ()
    aliases = (f"--{prefix[:-1]}",) if name == CLASS else own
    opposites = {flag_of(f"{prefix}no_{name}"), *(f"--no-{alias.lstrip('-')}" for alias in aliases)}
    return {flag_of(prefix + name), *aliases, *opposites}


def _joined(flags: Iterable[StructFieldSpec], argv: Sequence[str]) -> list[str]:
    """Write height and width as one word, so that a subject may follow: "--image-size 32 64" becomes "... 32x64".

    Raises UsageError if the second number is also the name of a file or folder here.
    """
    sizes = {flag_of(name) for name, flag in _walk(flags) if is_size(get_args(flag.type)[0])}
    words: list[str] = []
    for word in argv:
        if len(words) > 1 and words[-2] in sizes and is_whole(words[-1]) and is_whole(word):
            if os.path.lexists(word):
                raise UsageError(
                    f"{words[-2]} {words[-1]} {word}: {word} may be a width, and something here has this name. For a "
                    f"width write {words[-2]} {words[-1]}x{word}; for the file or folder write ./{word}"
                )
            words[-1] += f"x{word}"
        else:
            words.append(word)
    return words


def _spread(function: Callable[..., Any], argv: Sequence[str]) -> list[str]:
    """Give each value of a list a flag of its own: "--shots 1 5" and "--shots 1,5" become "--shots 1 --shots 5".

    This is for lists of numbers and of known words. A list ends at the first other word, so that a subject may follow.
    """
    lists = {flag_of(name): hint for name, hint in _hints(function).items() if _is_list(hint)}
    words: list[str] = []
    flag = ""
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        if flag_of(word) in lists and _all_of(lists[flag_of(word)], following):
            flag = word  # stands again in front of each of its values
        elif flag and _all_of(lists[flag_of(flag)], word):
            words += [part for value in word.split(",") for part in (flag, value)]
        else:
            flag = ""
            words.append(word)
    return words


def _is_list(hint: Any) -> bool:
    """Return whether this is a list of numbers or of known words."""
    each, *rest = get_args(hint) or (None,)
    return rest == [Ellipsis] and (each in (int, float) or get_origin(each) is Literal)


def _all_of(hint: Any, word: str) -> bool:
    """Return whether the word is a value of such a list, or several values with commas."""
    each = get_args(hint)[0]
    return all(
        value in get_args(each) if get_origin(each) is Literal else _is_number(value) for value in word.split(",")
    )


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _unknown(words: list[str], known: Iterable[StructFieldSpec], prog: str) -> str:
    """Return the error for an unknown word, with the nearest flag: "--optim.weight-decay" for "--weight-decay"."""
    names = [name for name, flag in _walk(known) if not is_subject(flag)]
    flags = {flag_of(name) for name in names} | {alias for name in names for alias in ALIASES.get(name, ())}
    wrong = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    files = [word for word in words if os.path.exists(word)]
    # a pattern becomes paths that are all absolute, or all relative
    if wrong is None and len(files) == len(words) > 1 and len({*map(os.path.isabs, files)}) == 1:
        return _unquoted(files, prog, any(name == "data.include" for name, _ in _walk(known)))
    if wrong is None:
        return f"{prog} takes no more words, but got {' '.join(words)!r}: see {prog} --help"
    named = {flag_of(name.rpartition(".")[2]).lstrip("-"): flag_of(name) for name in names}
    named |= {flag.lstrip("-"): flag for flag in flags}
    word = flag_of(wrong).strip("-")  # the dashes would make any two flags similar
    begun = [name for name in named if name.startswith(word)]
    near = did_you_mean(word, begun, similarity=0) or did_you_mean(word, named, similarity=0.7)
    for short, flag in named.items():
        near = near.replace(f"'{short}'", f"'{flag}'")
    return f"{prog} has no flag {wrong!r}.{near or _about(word, known)} {prog} --help lists all flags."


def _unquoted(files: list[str], prog: str, include: bool) -> str:
    """Return the error for names that a shell has put in the place of a pattern. include: Has the verb this flag?"""
    folder = os.path.commonpath([os.path.dirname(file) for file in files]) or "."
    endings = {os.path.splitext(file)[1] for file in files}
    name = f"*{endings.pop()}" if len(endings) == 1 else "*"
    return (
        f"{prog} takes one path, but got {len(files)} more names of files, such as {files[0]}. The shell puts them in "
        f"the place of a pattern that is not quoted. Give the folder: {prog} {shlex.quote(folder)}"
        + f" --data.include '{name}'" * (include and name != "*")
        + f", or quote the pattern: '{folder}/**/{name}'"
    )


def _about(word: str, known: Iterable[StructFieldSpec]) -> str:
    """Return the flags in whose description the word stands, the shortest first: --time-limit for "minutes"."""
    phrase = f" {word.replace('-', ' ')} "
    sentences = {name: str(flag.helptext).partition(".")[0] for name, flag in _walk(known) if not is_subject(flag)}
    found = [name for name, text in sentences.items() if phrase in f" {text.lower()} "]
    found = sorted(found, key=lambda name: len(sentences[name]))[:3]
    return f" About {phrase.strip()}: {', '.join(map(flag_of, found))}." if found else ""


def _flags(function: Callable[..., Any], argv: Sequence[str]) -> list[StructFieldSpec]:
    """Return the flags of a verb; a section of settings is one entry, whose default is the section."""
    parameters = inspect.signature(function).parameters.values()
    flags = _parameters(function)
    settings = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    if settings == [READING]:
        flags += reading_flags()
    elif settings:
        own = {flag.name for flag in flags}
        merge(Run(), named_classes(Run(), argv), imports=True)  # for files that name a class of the command line, too
        run, files = Run(), [*values_of("--config", argv), *recorded_configs(argv)]
        if not {"-h", "--help"} & {*argv}:  # no default is shown, but a file may name a class
            files = [file for file in files if Path(file).is_file()]
        if {"-h", "--help"} & {*argv} or files:
            from vitrail.verbs.flags.settings import starting_run

            run = starting_run(function.__name__, values_of("--recipe", argv), files)
        run = merge(run, named_classes(run, argv), imports=True)
        flags += [flag for flag in section_flags(run) if flag.name not in own]
    return flags + _parameters(everywhere)


def _parameters(function: Callable[..., Any]) -> list[StructFieldSpec]:
    """Return one flag or subject for each parameter of a function."""
    hints, ranges = _hints(function), ranged_types(inspect.unwrap(function))
    said = documented(docstring_parser.parse(inspect.getdoc(function) or ""))
    texts = {**field_texts(Compute), **field_texts(Cells), **said}
    flags = []
    for name, p in inspect.signature(function).parameters.items():
        text, hint = texts.get(name, ""), hints[name]
        if p.kind is p.VAR_POSITIONAL:
            many: Any = tuple[hint, ...]  # type: ignore[valid-type]
            typed = flag_type(many, (), Positional, ranges=ranges.get(name), metavar=f"[{name.upper()} ...]")
            flags.append(StructFieldSpec(name, typed, tyro.MISSING, text))
        elif p.kind is p.POSITIONAL_OR_KEYWORD:
            required = p.default is p.empty
            default = tyro.MISSING if required else p.default
            metavar = name.upper() if required else f"[{name.upper()}]"
            typed = flag_type(hint, default, Positional, ranges=ranges.get(name), null=null_word(), metavar=metavar)
            flags.append(StructFieldSpec(name, typed, default, text))
        elif p.kind is p.KEYWORD_ONLY:
            listed = get_args(hint)[1:] == (...,)
            marker = UseAppendAction if listed else FlagCreatePairsOff
            typed = flag_type(hint, p.default, marker, ranges=ranges.get(name), aliases=ALIASES.get(name))
            default = () if listed else p.default  # tyro would append to the default of a list
            flags.append(StructFieldSpec(name, typed, default, text))
    return flags


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters; the result's may be one that only a type checker imports."""
    parameters = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    return get_type_hints(SimpleNamespace(__annotations__=parameters), inspect.unwrap(function).__globals__)


def _registry(function: Callable[..., Any], flags: list[StructFieldSpec]) -> ConstructorRegistry:
    """Return tyro's rules for a verb, for the sections of its settings, and for durations."""
    registry = ConstructorRegistry()
    known: dict[int, tuple[Any, StructConstructorSpec]] = {}  # tyro asks for the same section again and again

    @registry.struct_rule
    def sections(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type is function:
            return StructConstructorSpec(dict, tuple(flags))
        if is_dataclass(info.type) and is_dataclass(info.default):
            if id(info.default) not in known:
                spec = StructConstructorSpec(dict, tuple(_flags_of(info.default)))
                known[id(info.default)] = info.default, spec
            return known[id(info.default)][1]
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

    @registry.primitive_rule
    def numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        return _number_or_null(info.type)

    return registry


def _number_or_null(hint: Any) -> PrimitiveConstructorSpec[Any] | None:
    """Return how a number, or a number or null, is read. Errors then name no types of Python. None for other types."""
    kinds = [kind for kind in arms(hint) if kind in NUMBERS]
    nulls = [get_args(arm)[1].choices for arm in arms(hint) if get_args(arm)[:1] == (NoneType,)]
    if len(kinds) != 1 or len(kinds + nulls) != len(arms(hint)):
        return None
    kind, name = kinds[0], kinds[0].__name__.upper()

    def read(words: list[str]) -> Any:
        if nulls and words[0] in nulls[0]:
            return None
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"{words[0]!r} is not {NUMBERS[kind]}{' or null' * len(nulls)}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{name}|null" if nulls else name,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int | float) or (bool(nulls) and value is None),
        str_from_instance=lambda value: ["null" if value is None else str(value)],
    )


def _read_duration(words: list[str]) -> Duration:
    try:
        return parse_duration(words[0])
    except UsageError as error:
        raise ValueError(str(error)) from None  # tyro reports it with the flag's name
