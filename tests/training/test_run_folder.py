from __future__ import annotations

import json
import shlex
import sys
import threading
from pathlib import Path

import pytest

import vitrail
from vitrail.errors import CheckpointError, UsageError
from vitrail.files import json_value
from vitrail.training.folder import RunFolder
from vitrail.training.record import command
from vitrail.training.run import Run


def lines(folder: RunFolder) -> list[dict[str, object]]:
    return [json.loads(text) for text in folder.metrics.read_text().splitlines()]


def test_every_run_gets_the_next_number(tmp_path: Path) -> None:
    names = [RunFolder.create(tmp_path / "runs", "train").path.name for _ in range(3)]
    assert names == ["train-1", "train-2", "train-3"]
    (tmp_path / "runs" / "train-12").mkdir()
    (tmp_path / "runs" / "train-x").mkdir()
    assert RunFolder.create(tmp_path / "runs", "train").path.name == "train-13"
    assert RunFolder.create(tmp_path / "runs", "train-13").path.name == "train-13-1"


def test_runs_that_start_together_get_folders_of_their_own(tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(RunFolder.create(tmp_path, "r").path)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 16


def test_names_and_places_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be named"):
        RunFolder.create(tmp_path, "a/b")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write a run folder"):
        RunFolder.create(tmp_path / "file", "train")


def test_opening_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        RunFolder.open(tmp_path / "typo")
    with pytest.raises(CheckpointError, match=r"holds no run\.json"):
        RunFolder.open(tmp_path)


def test_json_is_strict_and_replaced_at_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    value = {"loss": float("nan"), "path": tmp_path, 3: (1, None, True, "ü")}
    folder.write_json("run.json", value)
    expected = {"loss": None, "path": str(tmp_path), "3": [1, None, True, "ü"]}
    assert folder.read_json("run.json") == expected == json_value(value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]
    assert folder.read_json("absent.json") == {}


def test_rewinding_drops_later_and_torn_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, 6):
        folder.log("train", step, loss=1 / step)
    with open(folder.metrics, "a") as file:
        file.write('{"kind": "train", "st')
    folder.rewind(3)
    assert [line["step"] for line in lines(folder)] == [1, 2, 3]
    folder.log("train", 4, loss=float("inf"))
    assert lines(folder)[-1]["loss"] is None


def test_a_disk_that_fails_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "gone")
    folder.log("train", 1, loss=1.0)
    folder.write_text("config.yaml", "a: 1")
    with folder.tolerating("the best model"):
        raise OSError(28, "No space left on device")
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "Training continues" in said


def test_events_hold_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path)
    folder.track(Run(), 0)
    for step in (1, 2):
        folder.log("train", step, loss=1 / step, images=["a"], good=True)
    folder.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]


def test_a_broken_tracker_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    folder = RunFolder(tmp_path)
    folder.track(Run(), 0)
    folder.log("train", 1, loss=1.0)
    folder.close()
    assert lines(folder)[0]["loss"] == 1.0
    assert "TensorBoard" in capsys.readouterr().err


def test_the_command_can_be_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vitrail", "train", "my photos"])
    assert command() == "/usr/bin/vitrail train 'my photos'"
    main = Path(vitrail.__file__).parent / "__main__.py"  # the name that `python -m vitrail` goes by
    monkeypatch.setattr(sys, "argv", [str(main), "train", "my photos"])
    assert command() == f"{shlex.quote(sys.executable)} -m vitrail train 'my photos'"
