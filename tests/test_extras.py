"""The command that installs an extra works wherever vitrail came from."""

import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vitrail.version import install_extra, requirements

ROOT = Path(__file__).resolve().parents[1]
DECLARED = [
    "torch>=2.11",
    'ray>=2.40; extra == "ray"',
    'fsspec[gcs,http,s3]>=2025.3; extra == "remote"',
    'onnx>=1.18; extra == "export"',
    'openvino>=2025.2; extra == "export"',
    'ray>=2.40; python_version < "3.14" and extra == "test"',
]
"""Requires-Dist of an installed distribution, as the core metadata specification writes it."""


def test_the_packages_of_an_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _name: DECLARED)
    assert requirements()[0] == ("torch>=2.11", None) and requirements()[-1] == ("ray>=2.40", "test")
    assert install_extra("export").startswith("pip install 'onnx>=1.18' 'openvino>=2025.2' (")
    command, _, name = install_extra("remote").partition(" (")
    assert shlex.split(command) == ["pip", "install", "fsspec[gcs,http,s3]>=2025.3"] and "remote" in name


def test_without_an_installation_the_copy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    folder, _, extra = shlex.split(install_extra("serve").partition(" (")[0])[-1].partition("[")
    project = tomllib.loads((Path(folder) / "pyproject.toml").read_text())["project"]
    assert Path(folder) == ROOT and extra.rstrip("]") in project["optional-dependencies"]


def test_every_dependency_has_a_reason() -> None:
    """The table of CONTRIBUTING.md names the packages of pyproject.toml, extra by extra, no others, each once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    wanted = {(extra, Requirement(one).name) for extra, some in extras.items() for one in some}
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    told = [(extra, name, why) for extra, name, why in rows if name != "package"]
    pairs = [(extra, name) for many, name, _ in told for extra in many.split(", ")]
    assert {*pairs} == {pair for pair in wanted if pair[0] not in ("docs", "test")} and len({*pairs}) == len(pairs)
    assert all(why for _, _, why in told)


def test_no_text_tells_to_install_vitrail_from_a_package_index() -> None:
    """`pip install vitrail` would install what someone else may have published under that name."""
    files = [*(ROOT / "vitrail").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert [file for file in files if "pip install 'vitrail" in file.read_text()] == []
