"""A measurement of many cells continues where it was stopped, and repeats nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cells import Cells


def test_a_stopped_measurement_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    log, asked = tmp_path / "log.jsonl", []

    def cell(name: str, cells: Cells) -> Any:
        return cells.get(lambda: asked.append(name) or {"value": name}, name=name, epochs=1)

    first = Cells(log)
    assert [cell("a", first), cell("b", first), cell("a", first)] == [{"value": "a"}, {"value": "b"}, {"value": "a"}]
    spent = Cells(log, minutes=0)
    assert cell("a", spent) == {"value": "a"} and cell("c", spent) is None and spent.missing == 1
    again = Cells(log)
    assert cell("c", again) == {"value": "c"} and again.missing == 0
    assert asked == ["a", "b", "c"]
    assert again.get(lambda: {"value": "new"}, name="a", epochs=1.0) == {"value": "a"}  # a default, and the same typed
    assert again.get(lambda: {"value": "other"}, name="a", epochs=2) == {"value": "other"}  # other settings


def test_a_cell_of_runs_that_is_stopped_gets_its_folder_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places: list[Path] = []

    def stopped(place: Path) -> dict[str, Any]:
        places.append(place)
        (place / "checkpoint").touch()
        raise KeyboardInterrupt

    def finished(place: Path) -> dict[str, Any]:
        places.append(place)
        return {"found": (place / "checkpoint").exists()}

    log = tmp_path / "log.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Cells(log).train(stopped, seed=0)
    assert Cells(log).train(finished, seed=1) == {"found": False}
    assert Cells(tmp_path / "other.jsonl").train(finished, seed=0) == {"found": False}
    assert Cells(log).train(finished, seed=0) == {"found": True}
    assert places[0] == places[-1] and len(set(places)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "other.jsonl"]
