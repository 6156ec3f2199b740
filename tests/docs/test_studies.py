"""The committed results of studies: complete, of today's grids, and read in docs/studies.md as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vitrail.studies.catalog import NAMES
from vitrail.studies.results import read, redraw
from vitrail.studies.study import COUNTED, LaptopData

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "results" / "studies"
FOUND = sorted(FOLDER.glob("*.json"))
TEXT = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")


def contents(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.full_size
@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_result_is_complete_and_its_verdicts_follow_from_its_numbers(path: Path) -> None:
    found, ours = contents(path), read(path)
    assert path.stem == found["study"] and path.with_suffix(".png").is_file() and path.with_suffix(".md").is_file()
    assert not ours.missing and len(found["seeds"]) >= (2 if ours.study.claims else 1)
    grid = ours.study.cells("laptop", LaptopData(found["images"], found["sets"]))
    own = {(cell.table, cell.row, cell.at) for cell in grid}
    assert {(result.cell.table, result.cell.row, result.cell.at) for result in ours.results} >= own
    assert [(answer.claim.text, answer.verdict) for answer in ours.answers()] == [
        (claim["claim"], claim["verdict"]) for claim in found["claims"]
    ]
    percent = {cell.table for cell in grid if cell.metric not in COUNTED and cell.metric != "stored"}
    assert all(0 <= row["mean"] <= 100 for table in percent for row in found["tables"][table])


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_the_documentation_reads_every_claim_as_it_was_found(path: Path) -> None:
    for answer in read(path).answers():
        assert f"| {answer.claim.text} | {answer.verdict} |" in TEXT


def test_accuracies_in_the_documentation_were_measured() -> None:
    rows = [row for path in FOUND for table in contents(path)["tables"].values() for row in table]
    quoted = re.findall(r"(?<![.\d])\d+\.\d(?= %)", TEXT)
    assert len(quoted) > 10 and set(quoted) <= {f"{row['mean']:.1f}" for row in rows}


def test_every_study_has_a_result() -> None:
    assert {path.stem for path in FOUND} == set(NAMES)


@pytest.mark.full_size
def test_figures_are_drawn_from_the_numbers_alone(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    some = [path for path in FOUND if not read(path).study.tiles][:2]
    for path in some:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    old, lost = (tmp_path / path.with_suffix(".png").name for path in some)
    old.write_bytes(b"an old picture")
    redraw(tmp_path)
    assert old.read_bytes().startswith(b"\x89PNG") and lost.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.pdf"))  # drawn anew only where there is one
