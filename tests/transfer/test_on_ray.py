"""Trials as tasks of a Ray that is started here; only where the extra is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_processes import tiny

from vitrail.transfer.grid import Planned, Sweep
from vitrail.transfer.on_ray import OnRay
from vitrail.transfer.sweep import sweep
from vitrail.transfer.trial import here

pytest.importorskip("ray", reason="the extra [ray] is not installed")


@pytest.mark.slow
def test_a_sweep_on_ray_gives_what_it_gives_here(tmp_path: Path) -> None:
    plan = Sweep(tiny(tmp_path), {"optim.lr": (0.001, 0.01)}, seeds=(0,))
    ours = sweep(Planned.of(plan, tmp_path / "ray"), OnRay(parallel=2))
    theirs = sweep(Planned.of(plan, tmp_path / "here"), here)
    assert [row.outcome.dev for row in ours.search] == [row.outcome.dev for row in theirs.search]
    assert ours.chosen == theirs.chosen and ours.top1 == theirs.top1
    assert "step 4" in (ours.final[0].trial.folder / "log.txt").read_text()
