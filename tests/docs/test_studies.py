"""The committed results of studies: complete, of today's grids, and read in docs/studies.md as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vitrail.studies.catalog import NAMES, study_named
from vitrail.studies.study import COUNTED, Given
from vitrail.studies.table import Result, Tables

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "results" / "studies"
FOUND = sorted(FOLDER.glob("*.json"))
TEXT = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def tables(path: Path) -> Tables:
    """The numbers of the file in today's grid. A cell that the grid does not have raises KeyError."""
    found = read(path)
    study = study_named(found["study"])
    cells = {(cell.table, cell.row, cell.at): cell for cell in study.laptop(Given(found["images"], found["sets"]))}
    results = [
        Result(cells[one["table"], one["row"], one["at"]], one["seed"], one["score"], one["reason"])
        for one in found["cells"]
    ]
    return Tables(study, results)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_result_is_complete_and_its_verdicts_follow_from_its_numbers(path: Path) -> None:
    found, ours = read(path), tables(path)
    assert path.stem == found["study"] and path.with_suffix(".png").is_file() and path.with_suffix(".md").is_file()
    assert not ours.missing and len(found["seeds"]) >= 2
    grid = ours.study.laptop(Given(found["images"], found["sets"]))
    own = {(cell.table, cell.row, cell.at) for cell in grid}
    assert {(result.cell.table, result.cell.row, result.cell.at) for result in ours.results} >= own
    assert [(answer.claim.text, answer.verdict) for answer in ours.answers()] == [
        (claim["claim"], claim["verdict"]) for claim in found["claims"]
    ]
    percent = {cell.table for cell in grid if cell.metric not in COUNTED and cell.metric != "stored"}
    assert all(0 <= row["mean"] <= 100 for table in percent for row in found["tables"][table])


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_the_documentation_reads_every_claim_as_it_was_found(path: Path) -> None:
    for answer in tables(path).answers():
        assert f"| {answer.claim.text} | {answer.verdict} |" in TEXT


def test_the_documentation_says_which_studies_were_not_run() -> None:
    open_studies = [name for name in NAMES if name not in {path.stem for path in FOUND}]
    listed = [line.removeprefix("- `").split("`")[0] for line in TEXT.splitlines() if line.startswith("- `")]
    assert sorted(listed) == sorted(open_studies)
