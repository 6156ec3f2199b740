"""The notebooks and scripts of examples/ really run, and the notebooks are pages of the site."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import numpy as np
import pytest
from documents import ROOT, anchors
from forked import Forked
from notebook_cells import run_cells
from PIL import Image
from site_pages import notebooks, repository
from sklearn.datasets import load_digits

import vitrail

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def write_digits(folder: Path, each: int) -> Path:
    """Write `each` handwritten digits of every class, one folder per class."""
    digits = load_digits()
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
        for number, pixels in enumerate(digits.images[digits.target == label][:each]):
            Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(folder / str(label) / f"{number}.png")
    return folder


FEWER = """
_write = write


def write(folder, kinds, each, **more):
    return _write(folder, kinds, min(each, 20), **more)
"""
"""What makes the notebooks draw few flowers, of which they need a batch."""

RUN_OF = {
    "ten-flowers": "finetune-small",
    "where-does-it-look": "honest",
    "few-labels": "tuned",
    "train-export-serve": "digits",
    "wrong-labels-and-leaks": "half-1",
}
"""Notebook -> a run that it leaves."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.export if "export" in path.stem else pytest.mark.processes, id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    drawn = (EXAMPLES / "notebooks" / "drawn_flowers.py").read_text()
    (tmp_path / "drawn_flowers.py").write_text(drawn + FEWER)
    environment = {**os.environ, "STEPS": "4"}  # the notebook's own setting
    process = Forked(run_cells, str(path), str(tmp_path), env=environment)
    code, text = process.wait(300), (tmp_path / "printed").read_text()
    assert code == 0, text
    (run,) = (tmp_path / "runs").glob(f"{RUN_OF[path.stem]}-1")
    assert (run / "model/best/model.safetensors").is_file()
    if path.stem == "wrong-labels-and-leaks":  # these need no trained network
        assert len(re.findall(r"^.*/copy-\d\.jpg = test ", text, re.MULTILINE)) == 6
        assert len(list((tmp_path / "faulty/train").glob("*/photo-*"))) == 10
    if path.stem == "train-export-serve":
        asked, predicted = re.search(r'"class": "(\d)"', text), re.search(r"^(\d) \d+%$", text, re.MULTILINE)
        assert asked and predicted and asked[1] == predicted[1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_has_run_to_its_end_and_is_small(path: Path) -> None:
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [output.ename for cell in cells for output in cell.outputs if output.output_type == "error"] == []
    assert path.stat().st_size < 400_000
    assert re.search(r"/(home|tmp|root|work|opt)/", path.read_text()) is None, "a path of the machine that ran it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_states_its_images_and_its_steps_at_the_top(path: Path) -> None:
    first = next(cell.source for cell in read(path).cells if cell.cell_type == "code")
    assert re.search(r"^(PHOTOS|LABELLED) = None  # a folder", first, re.MULTILINE)
    assert re.search(r'^STEPS = int\(os.environ.get\("STEPS", \d+\)\)  # ', first, re.MULTILINE)
    assert "http" not in re.sub(r'"http://"', "", first)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_page_whose_links_and_pictures_are_there(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    text, pictures = notebooks.page(name)
    assert text.startswith("# ") and "```python" in text and "\x1b" not in text
    for link in repository.links(text):
        target = repository.target(link, name)
        assert target is None or target in pictures or (ROOT / target).exists(), link
        if target and "#" in link and target.endswith(".md"):
            assert link.partition("#")[2] in anchors((ROOT / target).read_text()), link
    assert pictures and all(data.startswith(b"\x89PNG") for data in pictures.values())


def test_every_notebook_is_listed() -> None:
    assert {path.relative_to(ROOT).as_posix() for path in NOTEBOOKS} == set(repository.NOTEBOOKS)
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"(notebooks/{path.name})" in listed for path in NOTEBOOKS)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a script of examples/ in the folder of the test, and return what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.train
@pytest.mark.page
def test_the_script_of_a_new_objective_trains_and_measures(script: Callable[..., str], tmp_path: Path) -> None:
    write_digits(tmp_path / "written", 8)
    text = script("rotation.py", "written")
    assert re.search(r"^runs/rotation-1: \d+\.\d% of the test images .*\n\Z", text, re.MULTILINE)
    assert "What it predicts" in (tmp_path / "runs/rotation-1/report.html").read_text()
    del sys.modules["rotation"]


def test_the_script_of_neighbours_finds_an_image_first(script: Callable[..., str], tmp_path: Path) -> None:
    images = write_digits(tmp_path / "digits", 3)
    model = vitrail.create("Ti/4", width=24, depth=1, heads=2, mlp_dim=24, image_size=(8, 8), classes=2)
    model.card = vitrail.Card(model.config, ["a", "b"])
    vitrail.save(model, tmp_path / "model")
    text = script("nearest.py", "model", "digits", images / "7/1.png", images / "0/2.png")
    asked = re.findall(r"^like (.*):\n  (\S+)  (.*)$", text, re.MULTILINE)
    assert [(query, float(similarity), path) for query, similarity, path in asked] == [
        (str(images / name), 1.0, f"digits/{name}") for name in ("7/1.png", "0/2.png")
    ]
