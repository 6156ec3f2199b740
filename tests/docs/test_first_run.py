"""The benchmark of a first run: sets are unpacked from clones, and all sides see the images that vitrail sees."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks import first_run, photo_sets
from vitrail.data.sources.open import open_data


def clone(folder: Path, files: dict[str, bytes]) -> Path:
    """Return a repository with one commit."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "images"]):
        subprocess.run([*git, *words], check=True)
    return folder


@pytest.mark.processes
def test_a_set_is_unpacked_without_what_is_no_image(tmp_path: Path) -> None:
    chosen = photo_sets.SETS["tiles"]
    home = tmp_path / "clones" / chosen.repository.replace("/", "+") / "repo"
    names = ("MT_Free/Imgs/a.jpg", "MT_Free/Imgs/a.png", "dataset.jpg", "MT_Fray/Imgs/b.jpg")
    clone(home, {name: name.encode() for name in names})
    assert photo_sets.git_folder(tmp_path / "clones", chosen.repository) == home
    assert photo_sets.unpack(chosen, home, tmp_path / "tiles") == 2
    found = {str(path.relative_to(tmp_path / "tiles")) for path in (tmp_path / "tiles").rglob("*.*")}
    assert found == {"MT_Free/a.jpg", "MT_Fray/b.jpg"}


def test_probabilities_of_defects_are_classes() -> None:
    text = "images/cell1.png  0.3333333333333333  mono\nimages/cell2.png  1.0  poly\n"
    assert photo_sets.elpv_labels(text) == "image,label\nimages/cell1.png,33 %\nimages/cell2.png,100 %\n"


def write_images(folder: Path, count: int) -> None:
    """Write images of two classes that differ by the direction of their stripes."""
    rng = np.random.default_rng(0)
    for number in range(count):
        stripes = np.tile(rng.integers(0, 256, 40, dtype=np.uint8), (40, 1))
        for name, pixels in (("across", stripes), ("down", stripes.T)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.ascontiguousarray(pixels)).save(folder / name / f"{number}.png")


@pytest.mark.parametrize("tested", [True, False])
def test_all_sides_see_the_same_images(tested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_images(tmp_path / "train" if tested else tmp_path, 20)
    if tested:
        write_images(tmp_path / "test", 5)
    images, splits = first_run.opened(str(tmp_path), 1), open_data(str(tmp_path), seed=1)
    assert images.where == ("test" if tested else "validation")
    assert len(images.labels) == (40 if tested else len(splits.train)) and len(images.answers) == (10 if tested else 4)
    row = first_run.baseline("HOG + logistic regression", str(tmp_path), 1, 1)
    assert row["top1"] == row["balanced"] == 100 and row["images"] == len(images.answers)
    assert first_run.baseline("most frequent class", str(tmp_path), 1, 1)["top1"] == 50


def test_the_table_has_a_line_for_each_set_and_machine(tmp_path: Path) -> None:
    def row(side: str, seed: int, top1: float, **key: Any) -> str:
        key = {"set": "a", "side": side, "seed": seed, "threads": 1, "busy": False, **key}
        return json.dumps({"key": key, "result": {"top1": top1, "balanced": 50.0, "images": 9, "where": "test"}})

    lines = [row("vitrail finetune", 0, 10.0, version="old"), row("vitrail finetune", 0, 60.0, version="new"), ""]
    lines += [row("vitrail finetune", 1, 62.0, version="new"), row("most frequent class", 0, 30.0)]
    lines += [row("vitrail finetune", 0, 59.0, threads=2, busy=True), row("vitrail finetune", 0, 1.0, set="other")]
    (tmp_path / "log").write_text("\n".join(lines))
    found = first_run.summary({"rows": first_run.finished(tmp_path / "log", ["a"])})
    assert found[0][2:] == ("most frequent class", "vitrail finetune")
    assert found[1] == ("a, 9 test images, 1 thread", "2", "30.0 / 50.0", "61.0 ± 1.4 / 50.0 ± 0.0")
    assert found[2:] == [("a, 9 test images, 2 threads, busy", "1", "", "59.0 / 50.0")]
