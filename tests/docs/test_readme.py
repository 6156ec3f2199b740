"""The README can be followed: its commands are accepted, its Python runs, its links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from documents import ROOT, blocks, code, refused, shell_commands, tables

README = ROOT / "README.md"
BLOCKS = blocks(README)
COMMANDS = [(block.line, words) for block in BLOCKS if block.language == "bash" for words in shell_commands(block.text)]
VITRAIL = [(line, ["vitrail", *words[1:]]) for line, words in COMMANDS if Path(words[0]).name == "vitrail"]
SNIPPETS = [block for block in BLOCKS if block.language == "python"]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "words"), VITRAIL, ids=[" ".join(words) for _, words in VITRAIL])
def test_every_command_is_accepted(line: int, words: list[str]) -> None:
    assert refused(words) == "", f"README.md:{line}"


def test_every_other_command_is_one_of_python_pip_and_pytest() -> None:
    others = {Path(words[0]).name for _, words in COMMANDS} - {"vitrail"}
    assert others == {"python", "pip", "pytest"}


def test_the_two_commands_install_and_run_in_a_fresh_environment() -> None:
    first, second = (block.text.strip() for block in BLOCKS if "venv" in block.text)
    for text, last in ((first, "vitrail demo"), (second, "pytest")):
        assert text.startswith("python -m venv .venv && .venv/bin/pip install ")
        assert text.endswith(f" && .venv/bin/{last}")
    assert "'.[test]'" in second


def test_the_test_extra_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(requirement.startswith("pytest") for requirement in project["optional-dependencies"]["test"])


@pytest.mark.slow
@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: f"line-{block.line}")
def test_every_python_snippet_runs(block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * block.line + block.text, str(README), "exec"), {"__name__": "__main__"})


def test_the_table_of_verbs_is_the_programs() -> None:
    from vitrail.cli import VERBS

    (rows,) = (table for table in tables(README) if "verb" in table[0])
    groups = {name.removesuffix(" list") for name in VERBS if name.split()[1:] not in (["show"], ["cp"])}
    words = [code(row["verb"])[0].split()[1:3] for row in rows]
    assert {" ".join(two) if " ".join(two) in groups else two[0] for two in words} == groups


@pytest.mark.slow
def test_every_command_line_of_the_table_of_verbs_is_accepted() -> None:
    (rows,) = (table for table in tables(README) if "verb" in table[0])
    wrong = {command: why for row in rows for command in code(row["verb"]) if (why := refused(command.split()))}
    assert wrong == {}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "PAPER.md", "CHANGELOG.md"])
def test_every_link_leads_to_a_file(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / document).read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.slow
def test_a_wrong_command_is_refused() -> None:
    assert "recipee" in refused(["vitrail", "train", "photos/", "--recipee", "x"])
    assert refused(["vitrail", "tranform"])
    assert refused(["pytest", "tests/docs/test_readme.py::test_that_is_not_there"])
    assert refused(["python", "-m", "benchmarks.nothing"])
    assert not refused(["vitrail", "train", "photos/"])
