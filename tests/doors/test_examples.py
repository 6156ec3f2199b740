"""The examples that we ship: short, runnable as they say, listed in the documentation, and in the source archive."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from own import EXAMPLES, ROOT, SMALL, config, importable
from sklearn.datasets import load_digits

import vitrail
from vitrail import cli
from vitrail.config import extension_bases, field_types, sections_of
from vitrail.training.run import Run
from vitrail.verbs.flags.declared import flags_of

PAGE = ROOT / "docs" / "own-code.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("|") and "../examples/" in line
]

FILES = sorted(EXAMPLES / found[1] for row in ROWS for found in re.findall(r"(examples/)(\w+\.py)", row[4]))
"""The examples of classes of one's own; there are other examples, too."""


def lines_of_code(path: Path) -> int:
    """Lines of classes and functions without docstrings and blank lines."""
    found: set[int] = set()
    for top in ast.parse(path.read_text()).body:
        if isinstance(top, ast.ClassDef | ast.FunctionDef):
            decorators = [decorator.lineno for decorator in top.decorator_list]
            found |= {*decorators, *range(top.lineno, (top.end_lineno or 0) + 1)}
            for node in ast.walk(top):
                if (
                    isinstance(node, ast.Expr)
                    and isinstance(node.value, ast.Constant)
                    and isinstance(node.value.value, str)
                ):
                    found -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    text = path.read_text().splitlines()
    return sum(bool(text[line - 1].strip()) for line in found)


def test_the_page_shows_the_file_of_an_example() -> None:
    _docstring, code = (EXAMPLES / "focal.py").read_text().split("\n\n", 1)
    assert f"```python\n{code}```" in PAGE.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert 5 < lines_of_code(path) <= 20


@pytest.mark.train
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_command_of_an_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits = load_digits()
    pixels = (digits.images * 255 / 16).round().astype(np.uint8)
    np.savez(tmp_path / "faces.npz", pixels=pixels, labels=digits.target)
    (command,) = re.findall(r"`(vitrail train [^`]*)`", path.read_text())
    with importable(EXAMPLES):
        assert cli.main([*command.split()[1:], *SMALL]) == 0
    assert f"{path.stem}:" in (tmp_path / "runs/digits-1/config.yaml").read_text()
    assert config(tmp_path / "runs/digits-1")["duration"] == "6 steps"


def test_the_page_names_the_flag_and_the_method_of_each_example() -> None:
    own = [path for path in EXAMPLES.glob("*.py") if "@dataclass(frozen=True)" in path.read_text()]
    assert len(FILES) == 11 and sorted(own) == FILES
    flags = {flag.name for flag in flags_of(cli.VERBS["train"].load()[1])}
    for _, flag, kind, method, _ in ROWS:
        name = flag.strip("`").removeprefix("--")
        assert name in flags or f"{name}.class" in flags, flag
        owner = getattr(vitrail, kind.strip("`").removeprefix("vitrail."))
        assert callable(getattr(owner, method.strip("`").partition("(")[0]))


def sections(settings: type, prefix: str = "") -> set[str]:
    """Return the names of the settings in whose place a class of the user's own may stand."""
    found = set()
    for name, hint in field_types(settings).items():
        if extension_bases(hint):
            found.add(prefix + name)
        else:
            found = found.union(*(sections(section, f"{prefix}{name}.") for section in sections_of(hint)))
    return found


def test_every_section_that_may_be_a_class_of_ones_own_has_an_example() -> None:
    assert sections(Run) == {row[1].strip("`").removeprefix("--") for row in ROWS}


@pytest.mark.processes
def test_the_source_archive_holds_the_examples(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("vitrail", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    with tarfile.open(tmp_path / "dist" / done.stdout.split()[-1]) as archive:
        held = {Path(name).name for name in archive.getnames() if "/examples/" in name}
    assert held >= {path.name for path in FILES}
