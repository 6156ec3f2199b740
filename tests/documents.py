"""How the tests read the documents: tables, code blocks, anchors, and whether a command line would be accepted."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Block:
    """A fenced block of a Markdown file."""

    language: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    """Every fenced block of a Markdown file."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in pattern.finditer(text)]


def anchors(text: str) -> set[str]:
    """The anchors of the titles of a page, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def tables(path: Path) -> list[list[dict[str, str]]]:
    """Every table of a Markdown file, its rows as {column: cell}."""
    found: list[list[dict[str, str]]] = []
    header: list[str] | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if header is None:
            header = cells
            found.append([])
        elif not set(line) <= set("|-: "):
            found[-1].append(dict(zip(header, cells, strict=True)))
    return found


def code(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def shell_commands(text: str) -> list[list[str]]:
    """The single commands of shell lines: split at && and newlines, comments dropped, as words."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                words.append(word)
            elif words:
                commands.append(words)
                words = []
    return commands


def refused(words: list[str]) -> str:
    """Why the program would not accept this command, or "" where it would; nothing is run.

    `vitrail ...` is parsed as the program parses it; of `pytest FILE::TEST` the test must exist, of
    `python -m MODULE FLAGS` the module and the flags.
    """
    if words[0] == "vitrail":
        return _refused_by_vitrail(tuple(words[1:]))
    if words[0] == "pytest":
        file, _, test = words[1].partition("::") if len(words) > 1 else ("tests", "", "")
        if not (ROOT / file).exists():
            return f"there is no {file}"
        return "" if not test or f"def {test}(" in (ROOT / file).read_text() else f"{file} has no {test}"
    if words[:2] == ["python", "-m"]:
        return "" if (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists() else f"no module {words[2]}"
    return f"{words[0]} is no command of ours"


@functools.cache
def _refused_by_vitrail(words: tuple[str, ...]) -> str:
    from vitrail import cli
    from vitrail.errors import VitrailError
    from vitrail.verbs.flags.help import help_of
    from vitrail.verbs.flags.parse import parse

    try:
        name, rest = cli._find([*words], False)
        _, function = cli.VERBS[name].load()
        if cli.HELP[1] in rest:
            return "" if help_of(function, rest, f"vitrail {name}") else "no help"
        parse(function, cli._with_latest(rest), f"vitrail {name}")
    except (VitrailError, ImportError) as error:
        return str(error)
    return ""


def resolve(reference: str) -> object:
    """The object that "path/to/file.py:Class.method" names; raises AttributeError or ImportError."""
    file, _, symbol = reference.partition(":")
    found: object = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for name in filter(None, symbol.split(".")):
        found = getattr(found, name)
    return found
