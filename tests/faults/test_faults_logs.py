"""What is only a log stops neither a resume nor a report: what can be read is kept, and what was dropped is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import commands
import pytest
from run_folders import answers, run_folder
from scenes import SHORT, draw

from vitrail.config import from_yaml
from vitrail.data.settings import Data
from vitrail.errors import UsageError
from vitrail.reports.page import write_report
from vitrail.reports.run_record import read_run
from vitrail.run_log import LARGEST, fitting
from vitrail.training.checkpoints.checkpoint import problem, save
from vitrail.training.folder import RunFolder
from vitrail.training.run import Run

FIRST, SECOND = b'{"kind": "train", "step": 1, "loss": 2}\n', b'{"kind": "train", "step": 2, "loss": 1}\n'
BAD_LINES = {
    "a byte": b'{"kind": "train", "step": 1, "name": "\xff"}',
    "half a character": b'{"kind": "train", "step": 1, "error": "\xc3',
    "a step of text": b'{"kind": "train", "step": "x"}',
    "a step of NaN": b'{"kind": "train", "step": NaN}',
    "a negative step": b'{"kind": "train", "step": -1}',
    "a huge step": b'{"kind": "train", "step": %d}' % (LARGEST + 1),
    "a true step": b'{"kind": "train", "step": true}',
    "no step": b'{"kind": "train"}',
    "no kind": b'{"step": 1}',
    "no object": b"[1, 2]",
    "nesting": b'{"a":' * 10_000,
    "a list": b'{"kind": "train", "step": 1, "loss": [1]}',
    "text for a number": b'{"kind": "train", "step": 1, "loss": "x", "lr": 1}',
    "infinity": b'{"kind": "train", "step": 1, "loss": 1e999}',
    "too many digits": b'{"kind": "train", "step": 1, "loss": ' + b"9" * 6000 + b"}",
    "an image of no reason": b'{"kind": "unreadable", "step": 1, "image": "a.png"}',
    "images that are a number": b'{"kind": "spike", "step": 1, "images": 5}',
    "zeros": b"\0" * 1000,
}


def folder_there(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 << 30)


IN_ITS_PLACE: dict[str, Callable[[Path], None]] = {
    "folder": folder_there,
    "pipe": os.mkfifo,
    "dangling link": lambda path: path.symlink_to("/nowhere/at-all"),
    "circular link": lambda path: path.symlink_to(path.name),
    "endless device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_65_a_bad_line_is_left_out_and_said(tmp_path: Path, line: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(FIRST + line + b"\n" + SECOND)
    said = folder.rewind(2)
    assert "metrics.jsonl: 1 line could not be read" in said and "line 2: " in said
    assert folder.metrics.read_bytes() == FIRST + SECOND


def test_65_a_mark_returns_and_a_last_line_of_a_kill_are_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(b"\xef\xbb\xbf" + FIRST.replace(b"\n", b"\r\n") + b"\n" + SECOND + FIRST[:-10])
    assert folder.rewind(2) == ""
    assert [json.loads(line)["step"] for line in folder.metrics.read_text("utf-8-sig").splitlines()] == [1, 2]


@pytest.mark.parametrize("put", IN_ITS_PLACE.values(), ids=IN_ITS_PLACE.keys())
def test_65_what_lies_where_the_log_should_be_is_moved_aside(tmp_path: Path, put: Callable[[Path], None]) -> None:
    folder = RunFolder(tmp_path)
    put(folder.metrics)
    assert "a new file begins" in folder.rewind(2)
    folder.log("train", 3, loss=1.0)
    assert json.loads(folder.metrics.read_text())["step"] == 3 and not folder.lost
    (aside,) = tmp_path.glob("metrics.jsonl.unreadable-*")
    assert not aside.is_dir() or (aside / "mine.txt").read_text() == "mine"


def test_65_a_pipe_that_nobody_reads_does_not_stop_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    os.mkfifo(folder.metrics)
    folder.log("train", 1, loss=1.0)
    assert list(folder.lost) == ["lines of metrics.jsonl"]


@pytest.mark.full_size
def test_65_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with open(folder.metrics, "wb") as file:
        file.write(FIRST)
        file.truncate(200 << 20)
    assert "longer than" in folder.rewind(2)
    assert folder.metrics.read_bytes() == FIRST


def test_65_facts_of_other_types_are_left_out() -> None:
    facts = {"seed": "x", "result": {"steps": 5, "seconds": "y", "best": {"top1": 0.5, "nll": []}}, "resumed": [1, {}]}
    kept, wrong = fitting({**facts, "machine": 5, "own": [1], "ended": None})
    assert kept == {"result": {"steps": 5, "best": {"top1": 0.5}}, "resumed": [{}], "own": [1], "ended": None}
    assert wrong == ["seed", "result.seconds", "result.best.nll", "resumed.0", "machine"]


def test_65_a_name_that_is_not_utf8_is_logged(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log("unreadable", 1, image=os.fsdecode(b"\xff.png"), reason="truncated")
    assert json.loads(folder.metrics.read_text(encoding="utf-8"))["image"] == os.fsdecode(b"\xff.png")
    assert folder.rewind(1) == ""


@pytest.mark.full_size
def test_65_a_report_says_what_it_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run-1", Data(path=str(tmp_path)), answers(["a", "b"], 20), seed="x")
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b"\n" + b"\n".join(BAD_LINES.values()) + b'\n{"kind": "unreadable", "step": 1, "count": 3}\n')
    notes = read_run(folder).notes
    assert any("metrics.jsonl: 19 lines could not be read" in note for note in notes)  # with the torn one of run_folder
    assert "run.json: seed cannot be used" in notes
    assert write_report(folder, tmp_path / "page.html").stat().st_size > 1000


@pytest.mark.parametrize("name", ["config.yaml", "run.json", "classes.json", "evaluation.npz", "batch.png"])
def test_65_a_report_waits_for_no_pipe_and_reads_no_endless_file(tmp_path: Path, name: str) -> None:
    folder = run_folder(tmp_path / "run-1", Data(path=str(tmp_path)), answers(["a", "b"], 20))
    for put in (os.mkfifo, IN_ITS_PLACE["endless device"], huge):
        (folder / name).unlink()
        put(folder / name)
        assert any(note.startswith(f"{name} cannot be used") for note in read_run(folder).notes)


def test_65_a_configuration_and_a_manifest_have_a_size_and_a_depth(tmp_path: Path) -> None:
    large = tmp_path / "config.yaml"
    large.write_bytes(b"seed: 1 # " + b"x" * (1 << 20))
    with pytest.raises(UsageError, match=r"config\.yaml.*more than 1,048,576 bytes"):
        from_yaml(large, Run())
    path = save(tmp_path / "checkpoints", 1, {"model": {}})
    manifest = path / "manifest.json"
    manifest.write_bytes(b'{"a":' * 100_000)
    assert problem(path) == "manifest.json is damaged"
    os.truncate(manifest, 10 << 30)
    assert "more than" in str(problem(path))
    manifest.unlink()
    os.mkfifo(manifest)
    assert "not a regular file" in str(problem(path))


@pytest.mark.processes
@pytest.mark.parametrize("damage", ["a byte", "folder", "run.json"])
def test_65_a_resume_goes_on_without_its_log(tmp_path: Path, damage: str) -> None:
    draw(tmp_path / "photos")
    first = commands.run("train", "photos", *SHORT, "2 epochs", "--out", "runs", "--name", "t", cwd=tmp_path)
    assert first.process.exitcode == 0, first.err
    log, facts = tmp_path / "runs/t-1/metrics.jsonl", tmp_path / "runs/t-1/run.json"
    if damage == "run.json":
        facts.write_text('{"result": [1], "resumed": "x", "out_of_memory": [{}]}')
    elif damage == "folder":
        log.unlink()
        log.mkdir()
    else:
        log.write_bytes(log.read_bytes() + b"\xff\n")
    again = commands.run("train", "--resume", "runs/t-1", "--duration", "3 epochs", cwd=tmp_path)
    assert again.process.exitcode == 0, again.err
    assert ("run.json" if damage == "run.json" else "metrics.jsonl") in again.err and "Traceback" not in again.err
    assert json.loads(log.read_text().splitlines()[-1])["step"] == 3
    assert json.loads(facts.read_text())["result"]["steps"] == 3
