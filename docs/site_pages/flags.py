"""Reference pages for verbs and settings, made from the same declarations as `vitrail VERB --help`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

import docstring_parser

from vitrail.verbs.flags.declared import GLOBAL, Flag, flags_of, listed_words, may_be_null
from vitrail.verbs.flags.help import placeholder
from vitrail.verbs.table import GROUPS, VERBS

INDEX = "reference/verbs/index.md"
SETTINGS = "reference/settings.md"
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
    shared = _table(flag for flag in flags_of(VERBS["doctor"].load()[1]) if flag.name in GLOBAL)
    return "\n".join([*lines, "## Flags of every verb", "", *shared, "", EXIT_CODES])


def _verb(name: str) -> str:
    """Return the page of a verb. Settings of `Run` have a page of their own, because three verbs share all of them."""
    _, function = VERBS[name].load()
    own = inspect.signature(function).parameters
    flags = [flag for flag in flags_of(function, shown=True) if flag.name not in GLOBAL]
    listed = [flag for flag in flags if flag.name in own]
    described = docstring_parser.parse(inspect.getdoc(function) or "").description or ""
    subjects = [placeholder(flag) for flag in listed if flag.subject]
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
    sections: dict[str, list[Flag]] = {}
    for flag in flags_of(train):
        if flag.name not in own:
            sections.setdefault(flag.name.rpartition(".")[0], []).append(flag)
    lines = [ABOUT_SETTINGS]
    for section, flags in sections.items():
        lines += [f"## `{section}`" if section else "## The run", "", *_table(flags), ""]
    return "\n".join(lines)


def _table(flags: Iterable[Flag]) -> list[str]:
    """Return a table of flags: the words that set each, its values, its text with limits and default."""
    return ["| flag | values | meaning |", "|---|---|---|", *map(_row, flags)]


def _row(flag: Flag) -> str:
    words = [placeholder(flag)] if flag.subject else [*flag.words[1:], flag.words[0]]
    text = " ".join(filter(None, (_prose(flag.text), _prose(f"{flag.in_range} {flag.shown_default}".strip()))))
    return f"| {', '.join(f'`{word}`' for word in words)} | {_values(flag)} | {text} |"


def _values(flag: Flag) -> str:
    """Return the values of a flag: its words, or a placeholder for its type; nothing for a switch."""
    if flag.is_switch:
        return ""
    listed = [f"`{word}`" for word in listed_words(flag.hint)]
    plain = [] if flag.subject or placeholder(flag).startswith("WORD") else [placeholder(flag)]
    return " ".join([*listed, *plain, *(["`null`"] if may_be_null(flag.hint) else [])])


def _prose(text: str, cell: bool = True) -> str:
    """Return text without accidental markup; in a cell of a table, without bars and line breaks, too."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = "".join(part if part.startswith("`") else re.sub(r"([*_<>\[\]])", r"\\\1", part) for part in parts)
    return plain.replace("|", r"\|").replace("\n", " ") if cell else plain
