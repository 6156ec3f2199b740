"""The images of a run are found from every working directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.training.recorded import recorded_run


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
