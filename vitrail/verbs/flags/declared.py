"""The flags of a verb, declared by its signature and by the settings of a run.

Positional parameters are the subjects of a command, keyword-only parameters become flags, `**settings` becomes a flag
for every field of `Run` (`--optim.lr`), and `**reading` a flag for every field of `Data` (`--data.label-from`), so that
a flag and a keyword of Python cannot differ. A section that is `Extensible` has a flag for a class of the user's own,
too: --optim my.optimisers:Lion, or --optim.class. The fields of that class are then flags. The text of a flag is that
of the verb's docstring, or else that of the field with its name. Torch-free.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin

import docstring_parser

from vitrail.config import CLASS, extension_bases, field_types, merge, sections_of, union_members
from vitrail.data.settings import REPEATED, Data
from vitrail.import_path import import_path, is_own
from vitrail.ranges import InputSize, limits, parameter_types, without_range
from vitrail.training.run import Run
from vitrail.verbs.flags.compute import Compute

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
SUBJECT = (Data, "path")
"""The one setting that is not a flag, because it is the subject."""
REQUIRED = inspect.Parameter.empty
RAW = (
    "Write names into CSV files as they are. By default, names that a spreadsheet would run as a formula (=, +, -, @) "
    "begin with an apostrophe."
)
"""Text of --raw, which every verb with CSV files has."""


def global_flags(
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


GLOBAL = tuple(inspect.signature(global_flags).parameters)


@dataclass(frozen=True)
class Flag:
    """A flag of a verb, or a subject, which stands without a flag."""

    name: str
    """Its name in Python and in YAML, such as "optim.lr"."""
    hint: Any
    """Its type, with the ranges of numbers. Words are read as a configuration file's are (`vitrail.config`)."""
    default: Any
    """REQUIRED: a subject without a default."""
    describe: Callable[[], str]
    """Returns its text. It stands in a source file, which takes milliseconds to read."""
    subject: bool = False
    repeated: bool = False
    """Whether each of several values has a flag of its own, or a list needs a value."""
    aliases: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What it does, in full sentences."""
        return self.describe()

    @property
    def is_switch(self) -> bool:
        """Whether it has no value: --compile, --no-compile."""
        return self.hint in (bool, bool | None)

    @property
    def is_optional(self) -> bool:
        """Whether it may have a value, and is true without one: --shard, --shard 8, --no-shard."""
        return {bool, int} <= {*map(without_range, union_members(self.hint))}

    @property
    def several(self) -> list[Any]:
        """Those of its types that hold several values."""
        return [part for part in union_members(self.hint) if is_list(part) or get_origin(part) is tuple]

    @property
    def words(self) -> tuple[str, ...]:
        """The words that set it, the main one first; for a switch, those that set it to true."""
        return flag_of(self.name), *self.aliases

    @property
    def opposites(self) -> tuple[str, ...]:
        """The words that set a switch to false."""
        if not (self.is_switch or self.is_optional):
            return ()
        section, _, name = self.name.rpartition(".")
        own = f"{section}.no_{name}" if section else f"no_{name}"
        return flag_of(own), *(f"--no-{alias.lstrip('-')}" for alias in self.aliases if alias.startswith("--"))

    @property
    def in_range(self) -> str:
        """Its range in words, in parentheses; "" without one."""
        ranges = ", or ".join(dict.fromkeys(limit.words() for limit in limits(self.hint)))
        return f"({ranges})" if ranges else ""

    @property
    def shown_default(self) -> str:
        """Its default in words, in parentheses; "" for none."""
        if self.default is REQUIRED:
            return "(required)"
        if self.default is True:
            return "(on by default; this flag switches it off)"
        if self.default in (None, False, ()):
            return ""
        value = " ".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        return f"(default: {value})"


def flags_of(function: Callable[..., Any], argv: Sequence[str] = (), *, shown: bool = False) -> list[Flag]:
    """Return every flag and subject of a verb.

    The words `argv` may name classes of the user's own, whose fields are then flags. shown: Have the defaults that the
    recipe and the files among the words give, as help does. Raises UsageError.
    """
    parameters = inspect.signature(function).parameters.values()
    flags = _parameters(function)
    settings = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    if settings == [READING]:
        flags += _of_section(Data(), f"{Data.section}.")
    elif settings:
        own = {flag.name for flag in flags}
        flags += [flag for flag in _of_section(_run(function, argv, shown)) if flag.name not in own]
    return flags + _parameters(global_flags)


def _run(function: Callable[..., Any], argv: Sequence[str], shown: bool) -> Run:
    """Return the run whose fields are flags, and whose values are their defaults."""
    merge(Run(), named_classes(Run(), argv), imports=True)  # for files that name a class of the command line, too
    run, files = Run(), [*values_of("--config", argv), *_recorded_configs(argv)]
    if not shown:  # no default is shown, but a file may name a class
        files = [file for file in files if Path(file).is_file()]
    if shown or files:
        from vitrail.recipes.asked import starting_run

        run = starting_run(function.__name__, values_of("--recipe", argv), files)
    return merge(run, named_classes(run, argv), imports=True)


def _parameters(function: Callable[..., Any]) -> list[Flag]:
    """Return one flag or subject for each parameter of a function."""
    hints, flags = parameter_types(function), []
    for name, p in inspect.signature(function).parameters.items():
        text = partial(_text, function, name)
        flag = Flag(name, hints.get(name, Any), p.default, text, aliases=ALIASES.get(name, ()))
        if p.kind is p.VAR_POSITIONAL:
            flags.append(replace(flag, hint=tuple[flag.hint, ...], subject=True, repeated=True))  # type: ignore[name-defined]
        elif p.kind is p.POSITIONAL_OR_KEYWORD:
            flags.append(replace(flag, subject=True))
        elif p.kind is p.KEYWORD_ONLY:
            flags.append(replace(flag, repeated=get_args(flag.hint)[1:] == (...,)))
    return flags


def _text(owner: Any, name: str) -> str:
    return _texts(owner).get(name, "")


@cache
def _texts(owner: Any) -> dict[str, str]:
    """Return the text of each field of a dataclass, or of each parameter of a function.

    A parameter without a text in the docstring has that of the field of `Compute` with its name. Texts of fields are
    read from source, which takes milliseconds.
    """
    if not isinstance(owner, type):
        said = _documented(docstring_parser.parse(inspect.getdoc(owner) or ""))
        return {"raw": RAW, **_texts(Compute), **said}
    texts: dict[str, str] = {}
    for each in reversed(owner.__mro__):
        texts |= _documented(docstring_parser.parse_from_object(each)) if is_dataclass(each) else {}
    return texts


def _of_section(section: Any, prefix: str = "") -> list[Flag]:
    """Return one flag for each field of a dataclass of settings, and of the sections in it, with their values."""
    kind: Any = type(section)
    hints, flags = field_types(kind), list[Flag]()
    for field in fields(section):
        name, value, hint = field.name, getattr(section, field.name), hints[field.name]
        inner, place = sections_of(hint), f"{prefix}{name}."
        if is_own(type(value)) or (len(inner) == 1 and extension_bases(hint)):
            flags += [_class_flag(value, place), *_of_section(value, place)]
        elif len(inner) > 1:
            flags += [_class_flag(value, place), *_of_kinds(value, inner, place, partial(_text, kind, name))]
        elif inner:
            flags += _of_section(inner[0]() if value is None else value, place)
        elif not (issubclass(kind, SUBJECT[0]) and name == SUBJECT[1]):
            whole = prefix + name
            aliases = ALIASES.get(whole) or ALIASES.get(name) or ()
            of_name = Flag(whole, hint, value, partial(_text, kind, name), aliases=aliases)
            flags.append(replace(of_name, repeated=True, default=()) if name in REPEATED else of_name)
    return flags


def _class_flag(section: Any, place: str) -> Flag:
    """Return the flag that names a class of the user's own for a section: --optim my.optimisers:Lion."""
    named = f"my_package.{place[:-1].rpartition('.')[2]}s:Mine"
    text = f"Import path of a class of your own for this section, such as {named}. Its module is imported."
    default = import_path(type(section)) if is_own(type(section)) else None
    return Flag(f"{place}{CLASS}", str | None, default, lambda: text, aliases=(flag_of(place[:-1]),))


def _of_kinds(current: Any, kinds: list[Any], place: str, text: Callable[[], str]) -> list[Flag]:
    """Return the flag `kind`, and one flag for each field of any kind of objective. Its text names these kinds."""
    owners: dict[str, list[Any]] = {}
    for kind in kinds:
        for field in fields(kind):
            owners.setdefault(field.name, []).append(kind)
    flags = []
    for name, having in owners.items():
        hint: Any = Union[tuple(field_types(kind)[name] for kind in having)]  # noqa: UP007
        default = getattr(current if type(current) in having else having[0](), name)
        about = text if name == "kind" else partial(_of_kinds_text, name, tuple(having))
        flags.append(Flag(place + name, hint, default, about, aliases=ALIASES.get(name, ())))
    return flags


def _of_kinds_text(name: str, kinds: tuple[Any, ...]) -> str:
    return f"{_text(kinds[0], name)} Used by {', '.join(kind.kind for kind in kinds)}."


def _documented(docstring: docstring_parser.Docstring) -> dict[str, str]:
    """Return the text of each parameter or field in a docstring."""
    return {p.arg_name: " ".join(p.description.split()) for p in docstring.params if p.description}


def named_classes(section: Any, argv: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Return the classes of the user's own that the command line names, as settings: {"optim": {"class": ...}}."""
    found: dict[str, Any] = {}
    kind: Any = type(section)
    for name, hint in field_types(kind).items():
        flag = flag_of(prefix + name)
        named = [*values_of(flag, argv), *values_of(f"{flag}.{CLASS}", argv)] if extension_bases(hint) else []
        if named and {":", "."} & {*named[-1]}:
            found[name] = {CLASS: named[-1]}
        elif is_dataclass(value := getattr(section, name, None)) and (
            inner := named_classes(value, argv, f"{prefix}{name}.")
        ):
            found[name] = inner
    return found


def named_modules(argv: Sequence[str]) -> list[str]:
    """Return the modules that --import names."""
    words = before_dashes(argv)
    return [module for flag in (flag_of("modules"), *ALIASES["modules"]) for module in values_of(flag, words)]


def before_dashes(argv: Sequence[str]) -> Sequence[str]:
    """Return the words before "--". A word after it is a subject, whatever it looks like."""
    return argv[: argv.index("--")] if "--" in argv else argv


def _recorded_configs(argv: Sequence[str]) -> list[str]:
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


def listed_words(hint: Any) -> tuple[str, ...]:
    """Return the words that a type lists, those of its parts included."""
    own = get_args(hint) if get_origin(hint) is Literal else ()
    inner = () if own else tuple(word for part in get_args(hint) for word in listed_words(part))
    return tuple(dict.fromkeys([*map(str, own), *inner]))


def is_list(hint: Any) -> bool:
    """Return whether this is a type of several values, of any number."""
    return get_origin(hint) is list or get_args(hint)[1:] == (...,)


def is_size(hint: Any) -> bool:
    """Return whether this is the type of the size of a network's input."""
    return {*union_members(InputSize)} <= {*union_members(hint)}


def may_be_null(hint: Any) -> bool:
    """Return whether a type allows None."""
    return NoneType in union_members(hint)
