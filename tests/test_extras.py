"""The command that installs an extra works wherever vitrail came from."""

import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from vitrail.version import install_extra, requirements

ROOT = Path(__file__).resolve().parents[1]
DECLARED = [
    "torch>=2.13",
    'ray>=2.40; extra == "ray"',
    'fsspec[gcs,http,s3]>=2025.3; extra == "remote"',
    'onnx>=1.18; extra == "export"',
    'openvino>=2025.2; extra == "export"',
    'ray>=2.40; python_version < "3.14" and extra == "test"',
]
"""Requires-Dist of an installed distribution, as the core metadata specification writes it."""


def test_the_packages_of_an_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _name: DECLARED)
    assert requirements()[0] == ("torch>=2.13", None) and requirements()[-1] == ("ray>=2.40", "test")
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


def test_no_text_tells_to_install_vitrail_from_a_package_index() -> None:
    """`pip install vitrail` would install what someone else may have published under that name."""
    files = [*(ROOT / "vitrail").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert [file for file in files if "pip install 'vitrail" in file.read_text()] == []
