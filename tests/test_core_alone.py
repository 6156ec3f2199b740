"""An installation without extras: it loads, predicts, embeds and serves, and every other verb names its extra.

The installation is a folder of links to the distributions that pyproject's dependencies need, and nothing else is on
the path (`python -S`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

import core_alone
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image
from rich.cells import cell_len

import vitrail
from vitrail.server import health
from vitrail.terminal import columns_wide
from vitrail.version import extra_of

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def needed(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """The distributions that requirements bring, as they are installed here."""
    found: dict[str, metadata.Distribution] = {}
    done, waiting = set(), [(Requirement(one), ("",)) for one in requirements]
    while waiting:
        one, extras = waiting.pop()
        if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = canonicalize_name(one.name)
        if (name, *sorted(one.extras)) in done:
            continue
        done.add((name, *sorted(one.extras)))
        found[name] = metadata.distribution(name)
        waiting += [(Requirement(other), ("", *one.extras)) for other in found[name].requires or []]
    return found


def installed(folder: Path, requirements: list[str]) -> None:
    """Link what requirements bring into a folder, and describe vitrail there as pip would."""
    folder.mkdir()
    for one in needed(requirements).values():
        for file in {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            if not (folder / file).exists():
                (folder / file).symlink_to(str(one.locate_file(file)))
    lines = [f"Name: vitrail\nVersion: {PROJECT['version']}"]
    lines += [f"Requires-Dist: {one}" for one in PROJECT["dependencies"]]
    for extra, members in EXTRAS.items():
        for one in members:
            package, _, marker = one.partition(";")
            both = f"{marker.strip()} and " * bool(marker)
            lines.append(f'Requires-Dist: {package}; {both}extra == "{extra}"')
    about = folder / f"vitrail-{PROJECT['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.4\n" + "\n".join(lines) + "\n")
    (folder / "vitrail").symlink_to(ROOT / "vitrail")


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONNOUSERSITE": "1", "VITRAIL_CACHE": str(folder / "cache")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("core")
    numbers = np.random.default_rng(0)
    for name in ("a/1.png", "a/2.png", "b/3.jpg"):
        (place / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(place / "photos" / name)
    return place


def asked(place: Path, folder: Path) -> dict[str, Any]:
    """What core_alone.py printed in an installation without extras."""
    installed(folder, PROJECT["dependencies"])
    done = subprocess.run(
        [sys.executable, "-S", core_alone.__file__], env=environment(folder), cwd=place, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def the_core_loads_predicts_and_embeds(found: dict[str, Any], place: Path) -> None:
    worked = found["worked"]
    assert [worked[verb][0] for verb in ("predict", "embed", "evaluate")] == [0, 0, 0], worked
    assert [Path(path).name for path, _ in worked["rows"]] == ["1.png", "2.png", "3.jpg"]
    assert worked["features"] == [3, 192] and worked["loaded"]
    whole = [row.probabilities[0] for row in vitrail.predict(place / "model", place / "photos").rows]
    assert worked["python"] == pytest.approx(whole, abs=1e-5)
    assert [share for _, share in worked["rows"]] == pytest.approx(whole, abs=1e-5)
    assert found["help"] == []


def a_verb_that_lacks_a_package_names_the_extra(found: dict[str, Any]) -> None:
    for command, extra in core_alone.REFUSED.items():
        code, _, error = found["refused"][command]
        if not extra:
            assert code == 1 and "(vitrail's extra medical)" in error, command
            continue
        assert code in (1, 2) and error.splitlines()[-1].endswith(f"(vitrail's extra {extra})"), error
        assert all(Requirement(one).name in error for one in EXTRAS[extra]), error
    assert found["left"] == []  # what is refused leaves nothing behind


def public_names_are_there_or_name_the_extra(found: dict[str, Any]) -> None:
    assert all(error.startswith("UsageError: this needs the package ") for error in found["names"].values())
    assert "sklearn" in found["names"] and not {"load", "predict", "embed", "train", "Data"} & found["names"].keys()


def the_core_and_the_extra_serve_answer_requests(found: dict[str, Any], place: Path, folder: Path) -> None:
    installed(folder, [*PROJECT["dependencies"], *EXTRAS["serve"]])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    server = subprocess.Popen(
        [sys.executable, "-S", "-m", "vitrail", "serve", "model", "--port", port],
        env=environment(folder), cwd=place, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        assert "ready\n" in server.stderr
        picture = (place / "photos" / "a" / "1.png").read_bytes()
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/predict", picture, {"Content-Type": "image/png"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            (image,) = json.load(answer)["images"]
        assert health.main(str(server.pid)) == 0
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert image["top"][0]["probability"] == pytest.approx(found["worked"]["python"][0], abs=1e-5)


@pytest.mark.processes
def test_the_core_alone(place: Path, tmp_path: Path) -> None:
    """Everything that is asked of an installation without extras, in one process, and a server with its extra."""
    found = asked(place, tmp_path / "installed")
    the_core_loads_predicts_and_embeds(found, place)
    a_verb_that_lacks_a_package_names_the_extra(found)
    public_names_are_there_or_name_the_extra(found)
    the_core_and_the_extra_serve_answer_requests(found, place, tmp_path / "serving")


def test_the_core_is_small() -> None:
    """The issue's bound: 150 MB for what is not torch's own. Compiled files count in neither installation."""
    torch = needed(["torch"])
    sizes = {
        name: sum(
            file.locate().stat().st_size  # type: ignore[attr-defined]
            for file in one.files or []
            if file.suffix != ".pyc" and Path(str(file.locate())).is_file()
        )
        for name, one in needed(PROJECT["dependencies"]).items()
        if name not in torch
    }
    assert sum(sizes.values()) < 150e6, sizes


def test_the_extras_for_development_hold_the_others() -> None:
    assert {*EXTRAS["train"], *EXTRAS["serve"], *EXTRAS["export"]} <= {*EXTRAS["test"]}
    assert {*EXTRAS["engines"]} <= {*EXTRAS["export"]}
    assert not {*EXTRAS["train"]} & {*PROJECT["dependencies"]}


def test_each_module_of_an_extra_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [f'{one}; extra == "{extra}"' for extra in ("test", "train", "engines") for one in EXTRAS[extra]]
    monkeypatch.setattr(metadata, "requires", lambda _name: declared)
    for module in ("pyarrow", "datasets", "google_crc32c", "sklearn", "scipy", "matplotlib", "jinja2", "rich"):
        assert extra_of(module) == "train"
    assert (extra_of("onnx"), extra_of("timm"), extra_of("nothing")) == ("engines", None, None)


@pytest.mark.parametrize("text", ["cat", "\u732b\u732b", "cafe\u0301", "\uac00", "a\u200bb", "\U0001f431", ""])
def test_widths_are_those_of_rich(text: str) -> None:
    assert columns_wide(text) == cell_len(text)
