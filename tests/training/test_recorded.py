"""The images of a run are found from every working directory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.config import to_yaml
from vitrail.training.recorded import recorded_run
from vitrail.training.run import Run


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
