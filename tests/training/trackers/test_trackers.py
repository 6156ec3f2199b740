"""Trackers: what each gets, read back by its own library, and that none of them ever stops a run."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vitrail.config import merge
from vitrail.data.settings import Data
from vitrail.training import trackers
from vitrail.training.folder import RunFolder
from vitrail.training.loop import training
from vitrail.training.python_objects import PythonObjects
from vitrail.training.run import Run
from vitrail.training.trackers import TRACKERS, TrackedRun, Tracker, without_credentials
from vitrail.version import install_extra

ROOT = Path(__file__).resolve().parents[3]
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_aSecretOfTheHub",
    "MLFLOW_TRACKING_PASSWORD": "aSecretOfMLflow",
}
ADDRESS = "https://me:aSecretOfTheUser@host.example/photos.tar?signature=aSecretOfTheBucket"
PAGE = "<!doctype html><p>how good it is"


@dataclass
class Seen:
    """A run as a tracker shows it."""

    numbers: dict[tuple[str, int], float]
    settings: dict[str, Any]
    pictures: list[Image.Image]
    reports: list[str]


def wandb_run(folder: Path) -> Seen:
    """Read the file of an offline run: records of protobuf in the framing of LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    (place,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    until = time.monotonic() + 30.0
    while b"html-file" not in place.read_bytes() and time.monotonic() < until:
        time.sleep(0.01)  # another process of W&B writes it, at once, a moment after `finish` has returned
    data, at, body, seen = place.read_bytes(), 7, b"", Seen({}, {}, [], [])
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        body, at = body + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a whole record, or the end of one
            record = Record.FromString(body)
            body = b""
            seen.settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            numbers = {name: value for name, value in row.items() if name.startswith(("train/", "validation/"))}
            seen.numbers |= {(name, row["step"]): value for name, value in numbers.items()}
    files = place.parent / "files" / "media"
    return replace(
        seen,
        pictures=[Image.open(path) for path in files.glob("images/batch*")],
        reports=[path.read_text() for path in files.glob("html/report*")],
    )


def mlflow_run(folder: Path) -> Seen:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("vitrail").experiment_id])
    assert run.info.run_name == "train-1" and run.info.status == "FINISHED"
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    files = Path(client.download_artifacts(run.info.run_id, ""))
    return Seen(
        {(name, one.step): one.value for name, values in history.items() for one in values},
        dict(run.data.params),
        [Image.open(files / "pictures" / "batch.png")],
        [(files / "report.html").read_text()],
    )


READ = {"wandb": wandb_run, "mlflow": mlflow_run}


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (200, 10, 10)).save(file, "PNG")
    return file.getvalue()


def written(folder: RunFolder, run: Run) -> None:
    """Write a run of two steps into `folder`, as the loop does."""
    folder.path.mkdir(parents=True)
    folder.write_json("run.json", {"name": folder.path.name, "started": "2026-01-01T00:00:00+00:00"})
    folder.track(run, 0)
    folder.write_bytes("batch.png", picture())
    folder.log("train", 1, loss=0.5, lr=0.1)
    folder.log("train", 2, loss=0.25, lr=0.1, images=["a"])
    folder.log("validation", 2, top1=0.75)
    folder.write_json("run.json", {**folder.facts(), "result": {"steps": 2}})
    folder.write_text("report.html", PAGE)
    folder.close()


@pytest.mark.processes
@pytest.mark.parametrize("name", READ)
def test_a_tracker_shows_a_run_without_the_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in [one for one in os.environ if one.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(variable)
    store = {"MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    for variable, value in {**SECRETS, **store}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    connect, asked = socket.socket.connect, []

    def connecting(self: socket.socket, address: Any) -> None:
        local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost", "::1")
        if not local:
            asked.append(address)
            raise OSError("no network")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connecting)
    pytest.importorskip(name, reason=f"needs vitrail[{name}]")
    written(RunFolder(tmp_path / "runs" / "train-1"), Run(track=(name,), data=Data(path=ADDRESS)))  # type: ignore[arg-type]
    shown = capfd.readouterr()
    assert shown.out == "" and "warning" not in shown.err.lower()
    seen = READ[name](tmp_path)
    assert {key: value for key, value in seen.numbers.items() if key[0] != "train/lr"} == {
        ("train/loss", 1): 0.5,
        ("train/loss", 2): 0.25,
        ("validation/top1", 2): 0.75,
    }
    assert float(seen.settings["optim.lr"]) == Run().optim.lr and str(seen.settings["seed"]) == "0"
    assert seen.settings["data.path"] == "https://***host.example/photos.tar?***"
    assert [shown.size for shown in seen.pictures] == [(8, 6)] and seen.pictures[0].getpixel((0, 0))[0] == 200
    assert len(seen.reports) == 1 and PAGE in seen.reports[0]
    assert asked == []
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    secrets = [*SECRETS.values(), "aSecretOfTheUser", "aSecretOfTheBucket"]
    assert [(path, secret) for path, text in kept.items() for secret in secrets if secret.encode() in text] == []


def test_a_resumed_run_is_the_same_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pytest.importorskip("mlflow", reason="needs vitrail[mlflow]")
    folder, run = RunFolder(tmp_path / "train-1"), Run(track=("mlflow",))
    written(folder, run)
    folder.track(merge(run, {"optim": {"lr": 0.5}}), 2)
    folder.log("train", 3, loss=0.125)
    folder.close()
    assert mlflow_run(tmp_path).numbers["train/loss", 3] == 0.125


class Recorder(Tracker):
    """Notes what it gets, and fails in the step that `FAILS` names."""

    FAILS = ""
    got: list[Any]

    def __init__(self, run: TrackedRun) -> None:
        type(self).got = []
        self.note("start", run)

    def note(self, step: str, *values: Any) -> None:
        if step == self.FAILS:
            raise ConnectionError("no route to https://me:aSecret@host.example")
        self.got.append((step, *values))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.note("log", dict(numbers), step)

    def picture(self, name: str, png: bytes, step: int) -> None:
        self.note("picture", name, png, step)

    def report(self, page: Path) -> None:
        self.note("report", page.read_text())

    def close(self, *, finished: bool) -> None:
        self.note("close", finished)


@pytest.mark.parametrize("step", ["start", "log", "picture", "report", "close"])
def test_a_tracker_that_fails_is_left_out_with_one_warning(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = type("Failing", (Recorder,), {"FAILS": step})
    working = type("Working", (Recorder,), {})
    monkeypatch.setattr(trackers, "TRACKERS", {"wandb": ("W&B", failing), "mlflow": ("MLflow", working)})
    folder = RunFolder(tmp_path / "train-1")
    written(folder, Run(track=("wandb", "mlflow")))
    assert capsys.readouterr().err == (
        "warning: W&B stopped: no route to https://***host.example. Training continues without W&B.\n"
    )
    assert [what for what, *_ in working.got] == ["start", "picture", "log", "log", "log", "report", "close"]
    assert len(folder.metrics.read_text().splitlines()) == 3


def test_a_tracker_that_is_not_installed_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] in READ]:
        monkeypatch.delitem(sys.modules, module)
    for name in READ:
        monkeypatch.setitem(sys.modules, name, None)
    written(RunFolder(tmp_path / "train-1"), Run(track=tuple(READ)))  # type: ignore[arg-type]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(READ)
    for line, name in zip(said, READ, strict=True):
        assert f"stopped: it is not installed: {install_extra(name)}. Training continues" in line


@pytest.mark.train
def test_a_run_gives_its_trackers_what_its_folder_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "wandb", ("W&B", Recorder))
    tiny = {"width": 16, "depth": 1, "heads": 2, "mlp_dim": 16, "patch": 4}
    settings = {"data": {"path": "digits", "subset": 64}, "vit": tiny, "image_size": 8, "batch_size": 16}
    short = {"duration": "2 steps", "evaluate_every": "2 steps", "checkpoint_every": "2 steps", "out": str(tmp_path)}
    run = merge(Run(), {**settings, **short, "track": ["wandb", "tensorboard"]})

    with training(run, PythonObjects()) as result:
        folder = result.folder
        (folder / "report.html").write_text(PAGE)
    got = Recorder.got
    assert got[0][1].folder == folder and got[0][1].settings["vit.width"] == 16
    assert ("picture", "batch", (folder / "batch.png").read_bytes(), 0) in got
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [
        (values["train/loss"], step)
        for what, *rest in got
        if what == "log"
        for values, step in [rest]
        if "train/loss" in values
    ] == [(line["loss"], line["step"]) for line in written if line["kind"] == "train"]
    assert got[-2:] == [("report", PAGE), ("close", True)]
    assert len(list(folder.glob("events.out*"))) == 1


def test_tensorboard_shows_every_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begins, ends, loss in ((0, 4, 2.0), (3, 6, 1.0)):  # the first process was lost after step 4
        tracker = TRACKERS["tensorboard"][1](TrackedRun(tmp_path, "run", {}, begins))
        for step in range(begins + 1, ends + 1):
            tracker.log({"train/loss": loss}, step)
        tracker.close(finished=True)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        *((step, 2.0) for step in (1, 2, 3)),
        *((step, 1.0) for step in (4, 5, 6)),
    ]


def test_a_run_is_told_apart_from_others_and_found_again(tmp_path: Path) -> None:
    facts = {"name": "train-1", "started": "2026-01-01T00:00:00+00:00", "directory": "/a", "command": "vitrail train x"}
    same = TrackedRun.of(Run(), tmp_path, {**facts, "resumed": [{"step": 3}]}, 3).identifier
    assert TrackedRun.of(Run(), tmp_path, facts, 0).identifier == same
    for name in facts:
        assert TrackedRun.of(Run(), tmp_path, {**facts, name: "other"}, 0).identifier != same


def test_credentials_of_addresses_are_left_out() -> None:
    assert without_credentials("s3://key:secret@bucket/a?token=1 and b") == "s3://***bucket/a?*** and b"
    assert without_credentials("photos@home/what?") == "photos@home/what?"
    assert without_credentials("hf://datasets/me/photos@main") == "hf://datasets/me/photos@main"


@pytest.mark.processes
def test_no_tracker_is_imported_before_it_is_used() -> None:
    code = """
import sys, vitrail.training.trackers
found = sys.modules.keys() & {"torch", "tensorboard", "wandb", "mlflow"}
sys.exit(str(found) if found else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
