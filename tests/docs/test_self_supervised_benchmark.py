"""What benchmarks/self_supervised.py reads of a run is what the run measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.self_supervised import curve
from vitrail.data.settings import Data
from vitrail.durations import Steps
from vitrail.objective.settings import MaskedPatch
from vitrail.training import loop
from vitrail.training.run import Model, Run


@pytest.mark.slow
def test_a_curve_has_the_loss_and_the_neighbours_of_every_evaluation(tmp_path: Path) -> None:
    run = Run(
        out=str(tmp_path),
        data=Data(path="digits", subset=140),
        model="Ti/4",
        vit=Model(width=16, depth=1, heads=2, mlp_dim=32, pool="gap"),
        objective=MaskedPatch(),
        image_size=16,
        duration=Steps(4),
        evaluate_every=Steps(2),
        batch_size=32,
        knn=3,
    )
    found = curve(loop.fit(run).folder)
    assert [point["step"] for point in found] == [2, 4]
    assert all(set(point) == {"step", "loss", "colour", "knn"} and 0 <= point["knn"] <= 1 for point in found)
