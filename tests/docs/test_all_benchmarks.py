"""One command measures all tables: what it calls a figure that moved, and that it continues where it was stopped."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import all as everything
from benchmarks import readme, record


def _result(low: float, median: float, high: float) -> dict[str, Any]:
    row = {"name": "vitrail", "images_per_second": median, "low": low, "high": high, "rounds": [low, median, high]}
    return {"machine": {"low": 0, "median": 0, "high": 9}, "results": [{"case": "S/16", "batch": 8, "rows": [row]}]}


def test_a_figure_moved_if_its_spread_does_not_overlap_the_old_one() -> None:
    before = _result(9, 10, 11)
    assert everything.moved(before, _result(11, 12, 13)) == everything.moved(before, before) == []
    (line,) = everything.moved(before, _result(12, 13, 14))
    assert line == "results/S/16, 8/rows/vitrail: 10 (9 to 11) -> 13 (12 to 14)"


def test_kept_results_have_figures_with_names_of_their_own() -> None:
    for name in ("train_step", "inference"):
        document = json.loads((record.RESULTS / f"{name}.json").read_text())
        labels = [label for label, _ in everything.figures(document)]
        assert len(labels) > 8 and len(labels) == len(set(labels))


@pytest.mark.processes
@pytest.mark.parametrize("amx", [False, True])
def test_results_that_amx_changes_are_kept_apart(amx: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "has_amx", lambda: amx)
    monkeypatch.setattr(record, "machine", dict)
    options = Namespace(quick=False)
    assert record.save("inference", options) == tmp_path / "inference.json"
    path = record.save("export", options, by_amx=True)
    assert path == (tmp_path / "amx" if amx else tmp_path) / "export.json"
    assert [place for place in record.kept("export", tmp_path) if place.exists()] == [path]


@pytest.mark.processes
@pytest.mark.parametrize("more", [[], ["--everything"]])
def test_it_continues_where_it_was_stopped(more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def measure(name: str, more: list[str]) -> dict[str, Any]:
        if len(called) == 3:
            raise SystemExit("stopped")
        called.append(name)
        return {"seconds": 1, "moved": []}

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(everything, "measure", measure)
    monkeypatch.setattr(readme, "main", lambda: called.append("documents"))
    monkeypatch.setattr(everything, "NETWORKS", tmp_path / "runs")
    monkeypatch.setattr(sys, "argv", ["all", *more])
    with pytest.raises(SystemExit, match="stopped"):
        everything.main()
    first, called[:] = list(called), []
    monkeypatch.setattr(everything, "measure", lambda name, more: (called.append(name), {"moved": []})[1])
    everything.main()
    left_out = everything.ELSEWHERE if more else (*everything.ELSEWHERE, *everything.LONG)
    wanted = [name for name in (*readme.TABLES, *everything.OTHERS) if name not in left_out]
    assert [*first, *called] == [*wanted, "documents"]
    monkeypatch.setattr(record, "processor", lambda: ("another", set()))
    with pytest.raises(SystemExit, match="one machine"):
        everything.main()
