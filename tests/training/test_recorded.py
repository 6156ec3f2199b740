"""The images of a run are found from every working directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.config import to_yaml
from vitrail.data.item import IndexedSource
from vitrail.errors import DataError
from vitrail.training.recorded import recorded_run
from vitrail.training.run import Run
from vitrail.verbs.features import open_train_and_test
from vitrail.verbs.network import run_images


@pytest.mark.train
def test_a_run_with_a_relative_path_is_evaluated_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, colour in enumerate(((200, 30, 30), (30, 200, 30)) * 10):
        place = tmp_path / "work" / "images" / "gr"[number % 2 == 0]
        place.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(-20, 20, (8, 8, 3))
        Image.fromarray((np.array(colour) + noise).astype(np.uint8)).save(place / f"{number}.png")
    monkeypatch.chdir(tmp_path / "work")
    run = vitrail.train("images", model="Ti/4", image_size=8, batch_size=8, duration="4 steps", device="cpu")
    trained = Path("work") / run.folder
    here = vitrail.evaluate(run.folder)
    monkeypatch.chdir(tmp_path)
    recorded = recorded_run(trained)
    assert recorded is not None and Path(recorded.data.path) == tmp_path / "work" / "images"
    there = vitrail.evaluate(trained)
    assert here.results.metrics() == there.results.metrics() and there.results.count
    longer = vitrail.train(resume=trained, duration="5 steps")
    assert longer.steps == 5
    again = recorded_run(trained)
    assert again is not None and Path(again.data.path) == tmp_path / "work" / "images"
    assert recorded_run(tmp_path / "work" / "images") is None


def test_weights_and_a_teacher_are_found_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run", "work/before", "work/teacher"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"directory": str(tmp_path / "work")}))
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(Run(weights="before", teacher="teacher")))
    found = recorded_run("run")
    assert found is not None
    assert (found.weights, found.teacher) == (str(tmp_path / "work/before"), str(tmp_path / "work/teacher"))
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(Run(weights="vitrail/tiny")))
    assert recorded_run("run") == Run(weights="vitrail/tiny")


@pytest.fixture(scope="module")
def held_out_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and the images that a share of was held out of."""
    place = tmp_path_factory.mktemp("trained")
    paint(place / "photos", range(40))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        settings: dict[str, Any] = {"model": "Ti/4", "image_size": 8, "batch_size": 8, "duration": "2 steps"}
        found = vitrail.train("photos", **settings, device="cpu", data={"holdout": 0.2}, out=".")
        found.folder.rename("r")
    return place


def paint(place: Path, numbers: range) -> None:
    for number in numbers:
        file = place / "gr"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 60, (8, 8, 3))
        Image.fromarray((np.array((40, 160 * (number % 2), 90)) + noise).astype(np.uint8)).save(file)


def copied(place: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copy the images and the run to a working directory of its own; return the images that the run held out."""
    shutil.copytree(place, to)
    (to / "r" / "run.json").write_text((to / "r" / "run.json").read_text().replace(str(place), str(to)))
    monkeypatch.chdir(to)
    return list(json.loads((to / "r" / "split.json").read_text())["ids"])


def used(run: Path) -> list[str]:
    """Return the images that verbs measure a run on, if they are given none."""
    found = open_train_and_test(run, None, None)
    assert not set(names(found.train)) & set(names(found.test))
    recorded = recorded_run(run)
    assert recorded is not None
    images = run_images(run, recorded, recorded.data, ("test", "validation"))
    assert images is not None and names(images.source) == names(found.test)
    return names(found.test)


def names(source: IndexedSource) -> list[str]:
    return [source.id(index) for index in range(len(source))]


@pytest.mark.train
def test_images_that_came_later_are_not_among_those_that_were_held_out(
    held_out_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = copied(held_out_of, tmp_path / "grown", monkeypatch)
    assert used(Path("r")) == held and not vitrail.evaluate("r").notes
    paint(Path("photos"), range(40, 140))
    assert sorted(used(Path("r"))) == sorted(held)
    found = vitrail.evaluate("r")
    assert found.results.count == len(held) == 8
    assert "photos is not what r was trained on" in found.notes[0] and "8 are left" in found.notes[1]
    (Path("photos") / held[0]).unlink()
    assert sorted(used(Path("r"))) == sorted(held[1:])
    assert "of the 8 images that r held out, 7 are left" in vitrail.evaluate("r").notes[1]
    for name in held[1:]:
        (Path("photos") / name).unlink()
    with pytest.raises(DataError, match="none of the 8 images that r held out is left in photos"):
        vitrail.evaluate("r")


@pytest.mark.train
def test_images_that_are_divided_anew_may_be_training_images(
    held_out_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(held_out_of, tmp_path / "anew", monkeypatch)
    found = vitrail.evaluate("r", holdout=0.5)
    assert found.results.count == 20 and "may be training images" in found.notes[0]


@pytest.mark.train
def test_another_folder_of_the_same_name_is_not_measured(
    held_out_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint(tmp_path / "photos", range(100, 130))
    monkeypatch.chdir(tmp_path)
    found = vitrail.evaluate(held_out_of / "r")
    assert found.data == f"the validation images of {held_out_of / 'photos'}" and not found.notes
