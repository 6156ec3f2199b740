"""A run folder or a configuration of somebody else, with code of theirs beside it: the command line names what runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from own import SMALL, config

from vitrail import cli

TRACED = """\
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
from dataclasses import dataclass
from vitrail import Metric, Supervised
@dataclass(frozen=True)
class Theirs(Supervised):
    gentle: float = 1.0
@dataclass(frozen=True)
class Score(Metric):
    def value(self, found):
        return 0.5
"""
MODULE = "received.theirs"
CLASS = f"{MODULE}:Theirs"


YAML = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"


@contextmanager
def current(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context in a current folder, after which this process can no longer import what stands in it."""
    patch.chdir(folder)
    before = [*sys.path]
    yield
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "received"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, no_page: None) -> Path:
    """A folder with a run in received/digits-1, whose configuration names classes in a module beside it."""
    home = tmp_path_factory.mktemp("home")
    (home / "received").mkdir()
    (home / "received/theirs.py").write_text(TRACED)
    (home / "own.yaml").write_text(f"objective: {{class: '{CLASS}'}}\n")
    with pytest.MonkeyPatch.context() as patch, current(home, patch):
        classes = ("--objective", CLASS, "--metric", f"{MODULE}:Score")
        assert cli.main(["train", "digits", *SMALL, "--out", "received", *classes]) == 0
    assert config(home / "received/digits-1")["objective"]["class"] == CLASS
    return home


@pytest.fixture
def home(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of `trained` as the current one, in which no code has run."""
    (trained / "received/theirs.ran").unlink(missing_ok=True)
    with current(trained, monkeypatch):
        yield trained


def ran(home: Path) -> bool:
    """Return whether the module beside the run was imported."""
    return (home / "received/theirs.ran").exists()


RESUME = ("train", "--resume", "received/digits-1")


@pytest.mark.parametrize(
    "words",
    [
        RESUME,
        (*RESUME, "--help"),
        (*RESUME, "--print-config"),
        (*RESUME, "--dry-run"),
        (*RESUME, "--nproc", "2"),
        (*RESUME, "--unknown-flag"),
        ("train", "--resume=received/digits-1"),
        ("train", "--resume", "latest", "--out", "received"),
        ("finetune", "--resume", "received/digits-1"),
        ("train", "digits", "--config", "own.yaml"),
        ("train", "digits", "--config", "own.yaml", "--help"),
        ("train", "digits", "--config=own.yaml", "--print-config"),
        ("train", "digits", "--config", "own.yaml", "--unknown-flag"),
        ("finetune", "digits", "--config", "own.yaml", "--print-config"),
        ("sweep", "digits", "--config", "own.yaml", "--lr", "0.1", "--dry-run"),
        ("launch", "slurm", "train", "digits", "--config", "own.yaml"),
        ("evaluate", "received/digits-1", "digits"),
        ("predict", "received/digits-1", "--", "--import", MODULE),  # after "--" stand names of files
    ],
    ids=lambda words: " ".join(words[:1] + words[1:][-2:]),
)
def test_code_beside_a_received_file_does_not_run(
    words: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = cli.main(words), capsys.readouterr().err
    assert not ran(home), said
    if words[0] in ("train", "finetune", "sweep"):
        assert code == 2 and f"--import {MODULE}" in said, said


@pytest.mark.train
@pytest.mark.parametrize(
    "words",
    [
        (*RESUME, "--import", MODULE, "--duration", "7 steps"),
        (*RESUME, "--objective", CLASS, "--metric", f"{MODULE}:Score", "--duration", "8 steps"),
        ("train", "digits", *SMALL, "--config", "own.yaml", "--import", MODULE),
    ],
    ids=["import", "objective", "config"],
)
def test_code_that_the_command_line_names_runs(words: tuple[str, ...], home: Path) -> None:
    assert cli.main(words) == 0 and ran(home)


def test_the_flags_of_a_class_in_a_file_need_its_module_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "digits", "--config", "own.yaml", "--import", MODULE, "--help"]) == 0
    assert "--objective.gentle" in capsys.readouterr().out


@pytest.mark.processes
def test_processes_run_code_that_the_command_line_names_and_no_other(home: Path) -> None:
    """A module in the current folder does not take the place of a library."""
    (home / "yaml.py").write_text(YAML)
    code = cli.main([*RESUME, f"--import={MODULE}", "--nproc", "2", "--metric", "null", "--duration", "9 steps"])
    (home / "yaml.py").unlink()
    assert code == 0 and ran(home) and not (home / "yaml.ran").exists()


@pytest.mark.processes
@pytest.mark.nightly("test_two_processes_train_side_by_side_what_one_trains_alone: a trial's Python has the flag -P")
def test_a_trial_runs_no_module_of_the_current_folder_in_place_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "yaml.py").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    words = ("--parallel", "1", "--lr", "0.01", "--seeds", "1", "--duration", "1 steps")
    assert cli.main(["sweep", "digits", *SMALL[:-1], *words]) == 0
    assert not (tmp_path / "yaml.ran").exists()
