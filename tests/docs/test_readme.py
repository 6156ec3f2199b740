"""The README is short, its set-up commands install, and its table has every verb. test_site.py tries the rest of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from documents import ROOT, blocks, code, refused, shell_commands, tables

README = ROOT / "README.md"
BLOCKS = blocks(README)
COMMANDS = [words for block in BLOCKS if block.language == "bash" for words in shell_commands(block.text)]


def test_it_has_at_most_150_lines() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_every_command_is_vitrail_or_of_python_pip_and_pytest() -> None:
    assert {Path(words[0]).name for words in COMMANDS} == {"vitrail", "python", "pip", "pytest"}


def test_the_two_commands_install_and_run_in_a_fresh_environment() -> None:
    first, second = (block.text.strip() for block in BLOCKS if "venv" in block.text)
    for text, last in ((first, "vitrail demo"), (second, "pytest")):
        assert text.startswith("python -m venv .venv && .venv/bin/pip install ")
        assert text.endswith(f" && .venv/bin/{last}")
    assert "'.[test]'" in second


@pytest.mark.parametrize(("extra", "first"), [("test", "pytest"), ("docs", "mkdocs")])
def test_the_extras_are_there(extra: str, first: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(requirement.startswith(first) for requirement in project["optional-dependencies"][extra])


def verbs() -> list[list[str]]:
    """The words of each command in the table of verbs."""
    (rows,) = (table for table in tables(README) if "verbs" in table[0])
    return [command.split() for row in rows for command in code(row["verbs"])]


def test_the_table_of_verbs_is_the_programs() -> None:
    from vitrail.verbs.table import VERBS

    listed = {" ".join(words[1:3]) if " ".join(words[1:3]) in VERBS else words[1] for words in verbs()}
    assert listed == {name.removesuffix(" list") for name in VERBS if name.split()[1:] not in (["show"], ["cp"])}


@pytest.mark.full_size
def test_every_command_line_of_the_table_of_verbs_is_accepted() -> None:
    assert {" ".join(words): why for words in verbs() if (why := refused(words))} == {}


def test_a_wrong_command_is_refused() -> None:
    assert "recipee" in refused(["vitrail", "train", "photos/", "--recipee", "x"])
    assert refused(["vitrail", "tranform"])
    assert refused(["pytest", "tests/docs/test_readme.py::test_that_is_not_there"])
    assert refused(["python", "-m", "benchmarks.nothing"])
    assert not refused(["vitrail", "train", "photos/"])
