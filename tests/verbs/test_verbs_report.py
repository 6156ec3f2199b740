"""`vitrail report`: from the command line to the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import Page, answers, run_folder

import vitrail
from vitrail import cli
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.training.run import Optim, Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place, root = Data("digits"), tmp_path_factory.mktemp("runs")
    splits = open_data(place)
    assert splits.validation is not None
    mark = {"path": "digits", "fingerprint": splits.fingerprint, "images": {"train": len(splits.train)}}
    folders = []
    for number, lr in enumerate((1e-3, 3e-3)):
        found = answers(splits.class_names, len(splits.validation), seed=number, labels=splits.validation.labels)
        run = Run(data=place, model="Ti/2", batch_size=16, optim=Optim(lr=lr))
        folders.append(run_folder(root / f"r-{number + 1}", place, found, run=run, data=mark))
    return folders


@pytest.mark.full_size
def test_the_report_of_one_run_is_written_again(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    page = runs[0] / "report.html"
    page.write_text("old")
    assert cli.main(["report", str(runs[0])]) == 0
    assert capsys.readouterr().out == f"report: {page}\n"
    text = Page(page.read_text(encoding="utf-8")).text
    headings = ("How far attention reaches", "What it knows about positions", "What it cost", "How to repeat the run")
    for heading in headings:
        assert heading in text, heading
    assert "FLOPs of training" in text and "Not in this report" not in text


@pytest.mark.full_size
def test_elsewhere_with_out(runs: list[Path], tmp_path: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in runs[1].rglob("*"))
    out = tmp_path / "new" / "one.html"
    assert cli.main(["report", str(runs[1]), "--out", str(out)]) == 0
    assert "r-2" in Page(out.read_text(encoding="utf-8")).text
    assert before == sorted((path, path.stat().st_mtime_ns) for path in runs[1].rglob("*"))


@pytest.mark.full_size
def test_several_runs_are_compared(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *map(str, runs)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "report: comparison.html" and (tmp_path / "comparison.html").is_file()
    assert printed[3].startswith("r-2 against r-1: ") and "McNemar p = " in printed[3]

    assert cli.main(["report", *map(str, runs), "--out", "b.html", "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    right = []
    for folder in runs:
        with np.load(folder / "evaluation.npz") as file:
            right.append(file["classes"][:, 0] == file["labels"])
    assert [run["validation"]["right"] for run in value["runs"]] == [int(one.sum()) for one in right]
    (one,) = value["against_first"]
    assert one["only_first_right"] == int((right[0] & ~right[1]).sum())
    assert one["only_this_right"] == int((right[1] & ~right[0]).sum())
    assert one["difference"] == pytest.approx(right[1].mean() - right[0].mean())
    assert value["settings"] == {"optim.lr": {"r-1": 1e-3, "r-2": 3e-3}}


def test_the_keyword_is_the_flag(runs: list[Path], tmp_path: Path) -> None:
    result = vitrail.report(*runs, out=tmp_path / "c.html")
    assert result.path == tmp_path / "c.html" and result.comparison is not None
    assert result.comparison.labels == ["r-1", "r-2"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{empty}"], 1, "is not a run folder"),
        (["{run}", "{empty}"], 1, "is not a run folder"),
        (["{run}", "{run}"], 2, "given twice"),
        (["{run}", "--out", "{empty}"], 2, "is a folder. Give the file to write"),
        (["{run}", "--out", "{file}/a.html"], 2, "cannot write"),
    ],
)
def test_what_is_wrong_is_said(
    runs: list[Path], tmp_path: Path, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    names = {"run": runs[0], "empty": tmp_path / "empty", "file": tmp_path / "file"}
    assert cli.main(["report", *(word.format(**names) for word in words)]) == code
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "empty").iterdir())
