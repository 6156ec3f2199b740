"""Types of the public functions, as a type checker sees them from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import get_args

import pytest

from vitrail.model.build import ResNetName, ViTName
from vitrail.model.variants import NAMES, ResNetConfig, ViTConfig, variant

SCRIPT = Path(__file__).with_name("typed_script.py")
ROOT = SCRIPT.parents[2]


def strict(script: Path, cache: Path) -> str:
    """Return what mypy says about a script of a user, in strict mode, outside of the repository."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={cache}", str(script)],
        cwd=script.parent,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_strict_type_checker_accepts_a_users_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text())
    assert "Success: no issues found" in strict(script, tmp_path / "cache")
    wrong = SCRIPT.read_text() + "heads_of: int = resnet.config.heads\nname: str = model.config.width\n"
    script.write_text(wrong)
    said = strict(script, tmp_path / "cache")
    assert '"ResNetConfig" has no attribute "heads"' in said and "Found 2 errors" in said


def test_the_names_that_type_checkers_know_are_the_names() -> None:
    assert {*get_args(ViTName), *get_args(ResNetName)} == {*NAMES}
    assert all(isinstance(variant(name), ViTConfig) for name in get_args(ViTName))
    assert all(isinstance(variant(name), ResNetConfig) for name in get_args(ResNetName))


@pytest.mark.slow
def test_an_editable_install_has_types(tmp_path: Path) -> None:
    """mypy reads the folders of an interpreter's .pth files, and runs no import hooks."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "vitrail", source / "vitrail", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"import setuptools.build_meta as b; b.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = tmp_path / "script.py"
    script.write_text("import vitrail\n\nreveal_type(vitrail.create('Ti/16').config.patch)\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--python-executable",
            str(tmp_path / "venv/bin/python"),
            str(script),
        ],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'Revealed type is "int"' in done.stdout.replace("builtins.", ""), done.stdout
