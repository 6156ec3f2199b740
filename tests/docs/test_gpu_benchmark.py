"""The prepared call for a GPU, rehearsed on a CPU: every row runs, is stopped in time, and is not measured twice."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from real_images import SHARED

from benchmarks import gpu, readme, record
from benchmarks.gpu_rows import REHEARSED, Place, idle_share, rows

SAMPLES = SHARED / "imagenet-samples"


def call(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> dict[str, Any]:
    """Rehearse, and return what gpu.json says."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # both are as before, afterwards
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(out), "--rehearse", "--images", str(SAMPLES), *more])
    gpu.main()
    return json.loads((out / "gpu.json").read_text())


@pytest.mark.processes
@pytest.mark.nightly("test_a_row_is_measured_once, with one of the rows")
def test_every_row_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = call(monkeypatch, tmp_path)
    assert document["missing"] == {}
    assert [row["row"] for row in document["results"]] == list(rows(REHEARSED))
    sides = [side for row in document["results"] for side in row["rows"]]
    assert all(side["images_per_second"] > 0 for side in sides if "images_per_second" in side)
    assert all(side["launches"] > 10 for side in sides if "launches" in side)
    assert all(side["different"] == {} and side["fake"] == side["real"] for side in sides if "fake" in side)
    assert all(side["difference"] < 3e-2 for side in sides if "difference" in side)
    assert all(side["counted"] == pytest.approx(side["kept"], rel=5e-3) for side in sides if "kept" in side)
    with (tmp_path / "gpu.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(sides)
    assert all(line["torch"] == torch.__version__ and line["date"] and line["row"] for line in lines)


@pytest.mark.processes
def test_a_row_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = call(monkeypatch, tmp_path, "--only", "same logits")
    log = (tmp_path / "gpu.jsonl").read_text()
    assert [row["row"] for row in first["results"]] == ["same logits"]
    again = call(monkeypatch, tmp_path, "--only", "s", "--minutes", "0")  # nothing new is begun
    assert (tmp_path / "gpu.jsonl").read_text() == log
    assert again["results"] == first["results"]
    assert set(again["missing"].values()) == {"not begun: the time was up"}
    assert "same logits" not in again["missing"]


@pytest.mark.processes
def test_a_row_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = gpu.Worker(Place(torch.device("cpu"), REHEARSED, SAMPLES))
    pid = worker._process.pid
    with pytest.raises(gpu.RowError, match="KeyError"):
        worker.measure("no such row")
    assert worker.alive  # a row with an error leaves it for the next one
    monkeypatch.setattr(gpu, "ROW_SECONDS", 0.0)
    with pytest.raises(gpu.RowError, match="not finished after 0 s"):
        worker.measure("same logits")
    assert not worker.alive and not psutil.pid_exists(pid)


def test_the_time_between_kernels_by_hand() -> None:
    assert idle_share([(0, 10), (10, 12), (15, 20)]) == (3 / 20, 1.5)
    assert idle_share([(0, 10), (2, 4), (10, 20)]) == (0.0, 0.0)  # streams that overlap
    assert idle_share([(0, 0)]) == (0.0, 0.0)


def test_figures_of_a_rehearsal_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--out", str(record.RESULTS)])
    with pytest.raises(SystemExit, match="mean nothing"):
        gpu.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_a_rehearsal_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no GPU"):
        gpu.main()


def test_the_table_compares_with_the_faster_timm() -> None:
    def side(name: str, rate: float, **more: Any) -> dict[str, Any]:
        return {"name": name, "images_per_second": rate, "rounds": [rate] * 5, **more}

    facts = {"share_of_ceiling": 0.25, "peak_bytes": 100, "launches": 700, "idle_share": 0.03}
    sides = [side("vitrail", 300.0, **facts), side("timm, autocast", 100.0), side("timm, bf16", 200.0)]
    sides[2] |= {"peak_bytes": 200, "launches": 900}
    _, line = readme.gpu(
        {"results": [{"row": "prediction", "rows": sides}, {"row": "counts", "rows": [{"name": "x"}]}]}
    )
    assert line == ("prediction", "300", "25%", "1.50x (1.50 to 1.50), timm, bf16", "0.50", "700, 900", "3%")
