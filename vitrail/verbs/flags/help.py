"""`vitrail VERB --help`: the flags that people use, in groups; `--help all`: every flag; `--help optim`: a section."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any, get_args, get_origin

import docstring_parser

from vitrail.config import CLASS, union_members
from vitrail.durations import Duration, in_minutes
from vitrail.errors import UsageError, did_you_mean
from vitrail.ranges import without_range
from vitrail.verbs.flags.declared import GLOBAL, REQUIRED, Flag, flags_of, is_list, is_size, listed_words, may_be_null

ALL = "all"
"""The word after --help for every flag."""
WIDEST = 100
"""Largest width of a line in characters."""
COLUMN = 26
"""Width of the column of flags."""
USED: dict[str, tuple[str, ...]] = {
    "network": ("model", "weights", "tune", "image_size"),
    "training": (
        *("recipe", "config", "epochs", "time_limit", "batch_size", "lr", "optim.weight_decay", "early_stop", "seed"),
        *("augment.mixup", "objective.kind"),
    ),
    "images": ("data.label_from", "data.holdout", "preprocess.resize"),
    "this machine": ("device", "precision", "nproc"),
    "run folder": ("out", "resume"),
    "before training": ("dry_run", "print_config"),
}
"""The settings of a run that people use, by their headings. Of other verbs, their own flags are shown."""


def help_of(function: Callable[..., Any], argv: Sequence[str], prog: str, topic: str = "") -> str:
    """Return the help of a verb: the flags that people use, or of a topic, "all" or a section such as "optim".

    `argv` holds the other words of the command line: defaults are those of its recipe and files. Raises UsageError for
    an unknown topic.
    """
    flags = flags_of(function, argv, shown=True)
    said = docstring_parser.parse(inspect.getdoc(function) or "")
    own = [flag for flag in flags if flag.name not in GLOBAL]
    sections = sorted({flag.name.rpartition(".")[0] for flag in own} - {""})
    if topic not in ("", ALL, *sections):
        valid = f"{did_you_mean(topic, sections)} Valid: {', '.join([ALL, *sections])}"
        raise UsageError(f"{prog} --help {topic}: no such section.{valid}")
    subjects = [flag for flag in own if flag.subject]
    width = min(shutil.get_terminal_size().columns, WIDEST)
    usage = " ".join([f"usage: {prog}", *map(placeholder, subjects), "[FLAGS]"])
    paragraphs = (said.description or "").split("\n\n")
    wrapped = [textwrap.fill(" ".join(part.split()), width, break_on_hyphens=False) for part in paragraphs]
    parts = [usage, *wrapped]
    whole = topic != ""
    if subjects and topic in ("", ALL):
        parts.append(_table("", subjects, width, whole=True))
    groups = _groups(flags, function, topic)
    parts += [_table(heading, some, width, whole or heading in sections) for heading, some in groups if some]
    if not whole:
        section = "optim" if "optim" in sections else "".join(sections[:1])
        more = f", and --help {section} those of a section" if section else ""
        every = (
            f"{prog} --help all shows every flag{more}. Every verb also has --json, -q, -v, --traceback and --import."
        )
        parts.append(textwrap.fill(every, width, break_on_hyphens=False))
    return "\n\n".join(filter(None, parts))


def _groups(flags: Sequence[Flag], function: Callable[..., Any], topic: str) -> list[tuple[str, list[Flag]]]:
    """Return the flags that are shown, by their headings."""
    named = {flag.name: flag for flag in flags if not flag.subject}
    shared = [named.pop(name) for name in GLOBAL]
    if topic and topic != ALL:
        return [(topic, [flag for name, flag in named.items() if name.startswith(f"{topic}.")])]
    if topic == ALL:
        sections: dict[str, list[Flag]] = {}
        for name, flag in named.items():
            sections.setdefault(name.rpartition(".")[0] or "flags", []).append(flag)
        return [*sections.items(), ("of every verb", shared)]
    if "optim.lr" in named:  # a run
        used = {name for names in USED.values() for name in names}
        own = [flag for name, flag in named.items() if name in inspect.signature(function).parameters]
        others = [flag for flag in own if flag.name not in used]
        groups = [(heading, [named[name] for name in names if name in named]) for heading, names in USED.items()]
        # sections whose class is the user's own
        mine = [name[: -len(CLASS)] for name, flag in named.items() if name.endswith(f".{CLASS}") and flag.default]
        groups += [(at[:-1], [flag for name, flag in named.items() if name.startswith(at)]) for at in mine]
        return [("of this verb", others), *groups]
    return [("flags", [flag for name, flag in named.items() if "." not in name or name in USED["images"]])]


def _table(heading: str, flags: Iterable[Flag], width: int, whole: bool) -> str:
    """Return flags with their texts; the first sentence of each, or the `whole` text and the valid words."""
    lines = [f"{heading}:"] if heading else []
    for flag in flags:
        start = placeholder(flag) if flag.subject else spelled(flag)
        start += "|null" * (whole and not flag.subject and may_be_null(flag.hint))
        words = listed_words(flag.hint)
        choice = f"({' | '.join(words)})" if words and (whole or len(words) < 8) else ""
        said = (flag.text, choice, flag.in_range) if whole else (_first_sentence(flag.text), choice)
        shown = "" if flag.default is REQUIRED else flag.shown_default
        text = " ".join(part for part in (*said, shown) if part)
        indent = " " * (COLUMN + 2)
        body = textwrap.wrap(
            text, max(width, 60), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
        if len(start) < COLUMN and body:
            body[0] = f"  {start:{COLUMN}}{body[0].lstrip()}"
        else:
            body.insert(0, f"  {start}")
        lines += body
    return "\n".join(lines)


def _first_sentence(text: str) -> str:
    """Return a text up to the first full stop that ends a sentence."""
    sentence, stop, _ = text.partition(". ")
    return sentence + stop.strip() if stop else text


def spelled(flag: Flag) -> str:
    """Return the words of a flag, and what follows them: "--from, --weights TEXT"."""
    words = [*flag.aliases, flag.words[0]]
    if flag.is_switch:
        words = [flag.opposites[0]] if flag.default is True else words
        return ", ".join(words)
    return f"{', '.join(words)} {placeholder(flag)}"


def placeholder(flag: Flag) -> str:
    """Return what stands for the value of a flag in help, such as NUMBER; for a subject its name."""
    if flag.subject:
        name = flag.name.upper()
        if flag.several and not flag.repeated:
            return f"{name} [{name} ...]"
        return f"[{name} ...]" if flag.repeated else name if flag.default is REQUIRED else f"[{name}]"
    if in_minutes(flag.hint):
        return "TIME"
    if is_size(flag.hint):
        return "SIZE"
    return "[NUMBER]" if flag.is_optional else _of_type(flag.hint)


def _of_type(hint: Any) -> str:
    several = [part for part in union_members(hint) if is_list(part)]
    if several:
        return f"{_of_type(get_args(several[0])[0])} ..."
    for part in union_members(hint):
        if get_origin(part) is tuple:
            return " ".join(map(_of_type, get_args(part)))
    plain = [without_range(part) for part in union_members(hint) if part is not NoneType]
    if any(listed_words(part) for part in plain):
        return "WORD"
    if any(isinstance(part, type) and issubclass(part, Duration) for part in plain):
        return "DURATION"
    return "NUMBER" if set(plain) <= {int, float} else "TEXT"
