"""A run folder or a configuration of somebody else, with code of theirs beside it: the command line names what runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from own import SMALL, command, config

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in received/digits-1, whose configuration names classes in a module beside it."""
    home = tmp_path_factory.mktemp("home")
    (home / "received").mkdir()
    (home / "received/theirs.py").write_text(TRACED)
    classes = ("--objective", CLASS, "--metric", f"{MODULE}:Score")
    done = command(home, "train", "digits", *SMALL, "--out", "received", *classes)
    assert done.returncode == 0, done.stderr
    assert config(home / "received/digits-1")["objective"]["class"] == CLASS
    (home / "own.yaml").write_text(f"objective: {{class: '{CLASS}'}}\n")
    return home


@pytest.fixture
def home(trained: Path) -> Path:
    """The folder of `trained`, in which no code has run."""
    (trained / "received/theirs.ran").unlink(missing_ok=True)
    return trained


def ran(home: Path) -> bool:
    """Return whether the module beside the run was imported."""
    return (home / "received/theirs.ran").exists()


RESUME = ("train", "--resume", "received/digits-1")


@pytest.mark.processes
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
def test_code_beside_a_received_file_does_not_run(words: tuple[str, ...], home: Path) -> None:
    done = command(home, *words)
    assert not ran(home), done.stderr
    assert "Traceback" not in done.stderr
    if words[0] in ("train", "finetune", "sweep"):
        assert done.returncode == 2 and f"--import {MODULE}" in done.stderr, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        (*RESUME, "--import", MODULE, "--duration", "7 steps"),
        (*RESUME, "--objective", CLASS, "--metric", f"{MODULE}:Score", "--duration", "8 steps"),
        (*RESUME, f"--import={MODULE}", "--nproc", "2", "--metric", "null", "--duration", "9 steps"),
        ("train", "digits", *SMALL, "--config", "own.yaml", "--import", MODULE),
    ],
    ids=["import", "objective", "processes", "config"],
)
def test_code_that_the_command_line_names_runs(words: tuple[str, ...], home: Path) -> None:
    done = command(home, *words)
    assert ran(home) and done.returncode == 0, done.stderr


@pytest.mark.processes
def test_the_flags_of_a_class_in_a_file_need_its_module_too(home: Path) -> None:
    shown = command(home, "train", "digits", "--config", "own.yaml", "--import", MODULE, "--help")
    assert shown.returncode == 0 and "--objective.gentle" in shown.stdout, shown.stderr


@pytest.mark.processes
@pytest.mark.parametrize("words", [("train", "digits", *SMALL, "--nproc", "2"), ("sweep", "digits", *SMALL[:-1])])
def test_a_module_in_the_current_folder_does_not_take_the_place_of_a_library(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "yaml.py").write_text("from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n")
    more = ("--lr", "0.01", "0.02", "--seeds", "1") if words[0] == "sweep" else ()
    done = command(tmp_path, *words, *more)
    assert not (tmp_path / "yaml.ran").exists(), done.stderr
    assert done.returncode == 0, done.stderr
