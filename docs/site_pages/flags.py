"""Reference pages for verbs and settings, made from the same declarations as `vitrail VERB --help`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

import docstring_parser
from tyro.constructors import StructFieldSpec

from vitrail.config import arms
from vitrail.durations import Duration
from vitrail.verbs.flags.fields import ALIASES, flag_of
from vitrail.verbs.flags.parse import GLOBAL, each_flag, is_subject
from vitrail.verbs.table import GROUPS, VERBS

INDEX = "reference/verbs/index.md"
SETTINGS = "reference/settings.md"
WORDS = {int: "INT", float: "FLOAT", str: "TEXT", Duration: "DURATION"}
"""Type -> its placeholder in a command."""
ABOUT_VERBS = """\
# Verbs

These pages are made from the program's own help when the site is built. In a terminal, `vitrail VERB --help` prints the
same text. Most verbs are also a function of Python with the same name: see the [Python API](../api.md).
"""
EXIT_CODES = """\
## Exit codes

| code | meaning |
|---|---|
| 0 | everything that was asked for has been written |
| 1 | the input is invalid, or the output cannot be written |
| 2 | the command is invalid |
| 130 | interrupted (Ctrl-C); a run has saved its state |
| 143 | terminated (SIGTERM); a run has saved its state |
"""
OF_EVERY_VERB = "[Flags of every verb](index.md#flags-of-every-verb): `--json`, `-q`, `-v` and more.\n"
ABOUT_SETTINGS = """\
# Settings of a run

A run is one value, `vitrail.Run`. Each of its fields is a flag of `train`, `finetune` and `sweep`, a key of a YAML file
(`--config`), and an argument in Python. Values come from the recipe, then from configuration files, then from flags.
`--print-config` prints all of them, and `config.yaml` in the run folder repeats the run.

This page is made from the dataclasses when the site is built. The defaults are those without a recipe. Durations are
written as `30 epochs`, `1000 steps`, `1e6 examples` or, where a share makes sense, `5 %`.
"""


def pages() -> dict[str, str]:
    """Return the page of every verb, their index, and the page of all settings, by their places in the site."""
    verbs = {verb_page(name): _verb(name) for name in VERBS}
    return {INDEX: _index(), SETTINGS: _settings(), **verbs}


def verb_page(name: str) -> str:
    """Return the place of a verb's page: reference/verbs/data-check.md."""
    return f"reference/verbs/{name.replace(' ', '-')}.md"


def _index() -> str:
    """Return the page of all verbs, with the flags that every verb has."""
    lines = [ABOUT_VERBS]
    for title, verbs in GROUPS.items():
        lines += [f"## {title.capitalize()}", "", "| verb | what it does |", "|---|---|"]
        for name, verb in verbs.items():
            lines.append(f"| [`vitrail {name}`]({verb_page(name).rpartition('/')[2]}) | {verb.summary} |")
        lines.append("")
    shared = _table((name, flag) for name, flag in each_flag(VERBS["doctor"].load()[1]) if name in GLOBAL)
    return "\n".join([*lines, "## Flags of every verb", "", *shared, "", EXIT_CODES])


def _verb(name: str) -> str:
    """Return the page of a verb. Settings of `Run` have a page of their own, because three verbs share all of them."""
    _, function = VERBS[name].load()
    own = inspect.signature(function).parameters
    flags = [pair for pair in each_flag(function) if pair[0] not in GLOBAL]
    listed = [pair for pair in flags if pair[0] in own]
    described = docstring_parser.parse(inspect.getdoc(function) or "").description or ""
    subjects = [_arg(flag).metavar for _, flag in listed if is_subject(flag)]
    usage = " ".join(["vitrail", name, *subjects, "[OPTIONS]"])
    lines = [f"# vitrail {name}", "", _prose(described, cell=False), "", "```text", usage, "```", ""]
    lines += [*_table(listed), ""] if listed else []
    if len(listed) < len(flags):
        settings = f"all {len(flags) - len(listed)} [settings of a run](../settings.md)"
        lines += [f"It also takes {settings} as flags, such as `--optim.lr 3e-4`.", ""]
    return "\n".join([*lines, OF_EVERY_VERB])


def _settings() -> str:
    """Return the page of all settings of `Run`, a table for each section."""
    _, train = VERBS["train"].load()
    own = {*inspect.signature(train).parameters, *GLOBAL}
    sections: dict[str, list[tuple[str, StructFieldSpec]]] = {}
    for name, flag in each_flag(train):
        if name not in own:
            sections.setdefault(name.rpartition(".")[0], []).append((name, flag))
    lines = [ABOUT_SETTINGS]
    for section, flags in sections.items():
        lines += [f"## `{section}`" if section else "## The run", "", *_table(flags), ""]
    return "\n".join(lines)


def _table(flags: Iterable[tuple[str, StructFieldSpec]]) -> list[str]:
    """Return a table of flags: the words that set each, its values, its text with limits and default."""
    return ["| flag | values | meaning |", "|---|---|---|", *(_row(name, flag) for name, flag in flags)]


def _row(name: str, flag: StructFieldSpec) -> str:
    words = [_arg(flag).metavar] if is_subject(flag) else [*ALIASES.get(name, ()), flag_of(name)]
    text = " ".join(filter(None, (_prose(str(flag.helptext)), _prose(_arg(flag).help_behavior_hint))))
    return f"| {', '.join(f'`{word}`' for word in words)} | {_values(get_args(flag.type)[0])} | {text} |"


def _arg(flag: StructFieldSpec) -> Any:
    """Return what tyro shows of a flag: metavar, and limits and default."""
    return next(mark for mark in get_args(flag.type)[1:] if hasattr(mark, "help_behavior_hint"))


def _values(hint: Any) -> str:
    """Return the values of a flag: its words, or a placeholder for its type; nothing for a switch."""
    found: list[str] = []
    for arm in arms(hint):
        bare = get_args(arm)[0] if hasattr(arm, "__metadata__") else arm
        if get_origin(bare) is Literal:
            found += [f"`{word}`" for word in get_args(bare)]
        elif get_origin(bare) is tuple:
            found.append(f"{_values(get_args(bare)[0])} ...")
        elif bare in (type(None), None):
            found.append("`null`")
        elif bare is not bool:
            found.append(WORDS.get(bare, "TEXT"))
    return " ".join(dict.fromkeys(found))


def _prose(text: str, cell: bool = True) -> str:
    """Return text without accidental markup; in a cell of a table, without bars and line breaks, too."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = "".join(part if part.startswith("`") else re.sub(r"([*_<>\[\]])", r"\\\1", part) for part in parts)
    return plain.replace("|", r"\|").replace("\n", " ") if cell else plain
