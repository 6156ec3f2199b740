"""Types of the public functions, as a type checker sees them from outside."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import get_args

import pytest

import vitrail
from vitrail.model.build import ResNetName, ViTName
from vitrail.model.variants import NAMES, ResNetConfig, ViTConfig, variant

SCRIPT = Path(__file__).with_name("typed_script.py")
ROOT = SCRIPT.parents[2]


def test_the_names_that_type_checkers_know_are_the_names() -> None:
    assert {*get_args(ViTName), *get_args(ResNetName)} == {*NAMES}
    assert all(isinstance(variant(name), ViTConfig) for name in get_args(ViTName))
    assert all(isinstance(variant(name), ResNetConfig) for name in get_args(ResNetName))


def test_an_editable_install_is_a_path_with_a_mark_of_types() -> None:
    """Type checkers follow paths and run no import hooks; setuptools writes a path where all packages are in one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert project["package-dir"] == {"": "."} and "py.typed" in project["package-data"]["vitrail"]
    assert (ROOT / "vitrail/py.typed").is_file()


def test_what_the_script_calls_has_the_parameters_that_it_gives() -> None:
    calls = [node for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.Call)]
    ours = [call for call in calls if ast.unparse(call.func).startswith("vitrail.")]
    assert len(ours) > 20
    for call in ours:
        parameters = inspect.signature(getattr(vitrail, ast.unparse(call.func).removeprefix("vitrail."))).parameters
        named = {keyword.arg for keyword in call.keywords}
        kinds = {parameter.kind for parameter in parameters.values()}
        assert named <= {*parameters} or inspect.Parameter.VAR_KEYWORD in kinds, ast.unparse(call)


@pytest.mark.nightly(
    "test_types.py::test_an_editable_install_is_a_path_with_a_mark_of_types and "
    "test_what_the_script_calls_has_the_parameters_that_it_gives; mypy on the package"
)
@pytest.mark.processes
def test_a_strict_type_checker_accepts_a_users_script_beside_an_editable_install(tmp_path: Path) -> None:
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
    for name in ("torch", "numpy", "PIL", "typing_extensions.py"):  # mypy would read each other one that is installed
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib"), name))

    users = tmp_path / "users"
    users.mkdir()
    right = SCRIPT.read_text()
    wrong = "heads_of: int = resnet.config.heads\nname: str = model.config.width\n"
    wrong += "reveal_type(model.config.patch)\nreveal_type(model.training)\n"
    (users / "right.py").write_text(right)
    (users / "wrong.py").write_text(right + wrong)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"),
            *("--python-executable", str(tmp_path / "venv/bin/python"), f"--cache-dir={tmp_path / 'cache'}"),
            *("right.py", "wrong.py"),
        ],
        cwd=users,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.replace("builtins.", "") + done.stderr
    assert 'Revealed type is "int"' in said and 'Revealed type is "bool"' in said, said
    assert '"ResNetConfig" has no attribute "heads"' in said
    assert "Found 2 errors in 1 file" in said and "right.py" not in said, said
