"""Names of files and classes that a spreadsheet would run as formulas, through every command that writes a CSV."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import commands
import pytest
import torch
from scenes import draw

from vitrail.data.settings import Preprocess
from vitrail.data.sources.open import open_path
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

NUMBERS = ("+1", "-2")
"""Names that a spreadsheet reads as numbers, and does not run."""
NAMES = (*NUMBERS, "'=a", "+1+1", "-2+3", "=cmd|' C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "cat")
COMMANDS = {
    "predict": (["predict", "../model", "*.png", "--out", "out.csv"], "loose/out.csv"),
    "predict's errors": (["predict", "../model", "*.png", "--out", "out.csv"], "loose/out.csv.errors.csv"),
    "evaluate": (["evaluate", "../model", "../photos", "--out", "eval"], "loose/eval/classes.csv"),
    "inspect": (["inspect", "../model", "*.png", "--what", "relevance"], "loose/inspect/relevance-classes.csv"),
    "check": (["data", "check", "../photos", "--out", "out.csv"], "loose/out.csv"),
    "dedup": (["data", "dedup", "../photos", "--out", "../out.csv"], "out.csv"),
    "keep list": (["data", "dedup", "../photos", "--keep-list", "../out.csv"], "out.csv"),
}
WRITTEN = {
    "predict": [f"{name}.png" for name in NAMES],
    "predict's errors": ["=broken.png"],
    "evaluate": [*NAMES],
    "inspect": [f"{name}.png" for name in NAMES],
    "check": [f"{name}/copy.png" for name in NAMES],
    "dedup": [f"{name}/copy.png" for name in NAMES],
    "keep list": [*NAMES, *(f"{name}/0.png" for name in NAMES)],
}
"""Text that stands in a cell of its own."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose classes have these names, images with these classes, and images with these file names."""
    root = tmp_path_factory.mktemp("scene")
    draw(root / "photos", classes=NAMES, count=2)
    (root / "loose").mkdir()
    for name in NAMES:
        folder = root / "photos" / name
        shutil.copy(folder / "0.png", root / "loose" / f"{name}.png")
        shutil.copy(folder / "0.png", folder / "copy.png")
    (root / "loose" / "=broken.png").write_bytes(b"no picture")
    torch.manual_seed(0)
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=len(NAMES))
    save_model(root / "model", build(config), Card(config, sorted(NAMES), Preprocess(image_size=(8, 8))))
    return root


def written(scene: Path, tmp_path: Path, case: str, *more: str) -> tuple[Path, list[str]]:
    """Return the CSV file that a command writes, and its cells."""
    shutil.copytree(scene, tmp_path, dirs_exist_ok=True)
    argv, file = COMMANDS[case]
    done = commands.run(*argv, *more, cwd=tmp_path / "loose")
    assert done.process.exitcode == 0, done.err
    (path,) = tmp_path.glob(file)
    with open(path, newline="", encoding="utf-8") as stream:
        return path, [cell for row in csv.reader(stream) for cell in row]


@pytest.mark.processes
@pytest.mark.parametrize("case", COMMANDS)
def test_66_no_command_writes_a_formula(scene: Path, tmp_path: Path, case: str) -> None:
    _, cells = written(scene, tmp_path, case)
    for cell in cells:
        assert cell in NUMBERS or not cell.startswith(("=", "+", "-", "@", "\t", "\r")), cell
    for name in WRITTEN[case]:
        assert (name if name in NUMBERS or name.startswith("cat") else f"'{name}") in cells


@pytest.mark.processes
@pytest.mark.parametrize("case", COMMANDS)
def test_66_raw_names_are_written_as_they_are(scene: Path, tmp_path: Path, case: str) -> None:
    _, cells = written(scene, tmp_path, case, "--raw")
    doubled = case == "keep list"  # it is read back
    for name in WRITTEN[case]:
        assert (f"'{name}" if doubled and name.startswith("'") else name) in cells


@pytest.mark.processes
def test_66_predictions_on_stdout(scene: Path) -> None:
    for more, first in (([], "'=cmd"), (["--raw"], "=cmd")):
        done = commands.run("predict", "../model", "=cmd*.png", *more, cwd=scene / "loose")
        assert done.process.exitcode == 0 and done.out.splitlines()[1].startswith(first), done.err


@pytest.mark.processes
@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_66_lists_are_read_back_with_the_true_names(scene: Path, tmp_path: Path, raw: list[str]) -> None:
    file, _ = written(scene, tmp_path, "keep list", *raw)
    found = open_path(str(file)).splits
    assert {name for source in found.values() for name in source.class_names} == set(NAMES)


@pytest.mark.processes
def test_66_predictions_are_a_table_with_the_true_names(scene: Path, tmp_path: Path) -> None:
    file, _ = written(scene, tmp_path, "predict")
    done = commands.run("predict", "../model", "*.png", "--json", cwd=tmp_path / "loose")
    expected = {row["path"]: row["class"] for row in json.loads(done.out)["images"]}
    (table,) = open_path(str(file)).splits.values()
    found = {table.id(i): table.class_names[label] for i, label in enumerate(table.labels)}
    assert found == expected and set(found) == set(WRITTEN["predict"])
