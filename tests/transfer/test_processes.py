"""Trials as processes: how many at once and where, what becomes of them when they or the sweep are ended."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from forked import Forked
from tiny_runs import signal_at

from vitrail.data.settings import Augment, Data
from vitrail.durations import Steps
from vitrail.errors import UsageError
from vitrail.training.guard import Interrupted
from vitrail.training.run import Model, Optim, Run
from vitrail.transfer import trial as module
from vitrail.transfer.grid import Sweep, Trials
from vitrail.transfer.on_ray import OnRay
from vitrail.transfer.processes import Processes
from vitrail.transfer.sweep import sweep
from vitrail.transfer.trial import Outcome, Trial, finished, here

PRELUDE = """
import json, os, signal, sys, time
folder, device = sys.argv[1], sys.argv[2]
def end(**values):
    with open(os.path.join(folder, "outcome.json"), "w") as file:
        json.dump({"status": "done", **values}, file)
"""


def trials(folder: Path, count: int) -> list[Trial]:
    made = []
    for number in range(count):
        lr = 0.1 * (number + 1)
        trial = Trial.of(Run(optim=Optim(lr=lr)), f"key{number}", folder, {"optim.lr": lr}, final=False)
        trial.prepare()
        made.append(trial)
    return made


def outcomes(processes: Processes, every: list[Trial]) -> dict[str, Outcome]:
    return {trial.key: outcome for trial, outcome in processes(every)}


def scripted(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have trials run a few lines of Python in place of training, which would import torch first."""

    def command(self: Processes, trial: Trial, device: str | None) -> list[str]:
        return [sys.executable, "-S", "-c", PRELUDE + script, str(trial.folder), str(device)]

    monkeypatch.setattr(Processes, "command", command)


@pytest.mark.processes
def test_each_slot_has_one_trial_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
where = os.path.join(folder, "..", "busy-" + device)
os.mkdir(where)  # fails where another one is still there
time.sleep(0.02)
os.rmdir(where)
end(reason=device + " " + os.environ["OMP_NUM_THREADS"])
"""
    scripted(monkeypatch, script)
    monkeypatch.setattr("vitrail.transfer.processes.available_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    every = trials(tmp_path, 7)
    ended = outcomes(Processes(["cuda:0", "cuda:1"]), every)
    assert ended.keys() == {trial.key for trial in every} and {outcome.status for outcome in ended.values()} == {"done"}
    assert {outcome.reason for outcome in ended.values()} == {"cuda:0 3", "cuda:1 3"}


@pytest.mark.processes
def test_a_single_process_has_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "end(reason=os.environ.get('OMP_NUM_THREADS', 'all'))")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ((_, outcome),) = Processes()(trials(tmp_path, 1))
    assert outcome.reason == "all"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL .*memory.*: it printed nothing"),
        ("print('step 3'); sys.exit('no space on device 7')", "exit code 1: no space on device 7"),
        ("1 / 0", "exit code 1: ZeroDivisionError"),
    ],
)
def test_a_process_that_dies_is_a_failure_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    scripted(monkeypatch, f"if '0.1' in folder:\n    {script}\nend()")
    broken, sound = trials(tmp_path, 2)
    ended = outcomes(Processes(), [broken, sound])
    assert ended[sound.key].status == "done"
    assert ended[broken.key].status == "failed" and re.search(told, ended[broken.key].reason)
    assert finished(broken.folder) is None and finished(sound.folder) is not None


@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_every_process_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    script = f"""
def saves(*_):
    with open(os.path.join(folder, "saved"), "a") as file:
        file.write("once")
    sys.exit(143)
signal.signal(signal.SIGTERM, saves)
open(os.path.join(folder, "ready"), "w").close()
others = os.path.dirname(folder)
while not all(os.path.exists(os.path.join(others, name, "ready")) for name in os.listdir(others)):
    time.sleep(0.01)
if "0.1" in folder:
    os.kill(os.getppid(), {int(number)})
time.sleep(60)
"""
    scripted(monkeypatch, script)
    both = trials(tmp_path, 2)
    with pytest.raises(Interrupted, match="2 trials are not finished") as caught:
        list(Processes([None, None])(both))
    assert caught.value.exit_code == code
    assert [(trial.folder / "saved").read_text() for trial in both] == ["once", "once"]


@pytest.mark.processes
def test_ending_early_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
with open(os.path.join(folder, "pid"), "w") as file:
    file.write(str(os.getpid()))
if "0.1" in folder:
    while not os.path.exists(os.path.join(os.path.dirname(folder), sys.argv[3], "pid")):
        time.sleep(0.01)
    end()
else:
    time.sleep(60)
"""
    first, second = trials(tmp_path, 2)

    def command(self: Processes, trial: Trial, device: str | None) -> list[str]:
        return [sys.executable, "-S", "-c", PRELUDE + script, str(trial.folder), "", second.folder.name]

    monkeypatch.setattr(Processes, "command", command)
    running = Processes([None, None])([first, second])
    next(running)
    running.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int((second.folder / "pid").read_text()), 0)


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'ray(\[data\])?>=\S+' \(vitrail's extra ray\)"):
        list(OnRay()(trials(tmp_path, 1)))


def pictures(folder: Path) -> Data:
    """64 images to train on and 16 to test on, in two shades."""
    file = folder / "pictures.npz"
    if file.exists():
        return Data(str(file))
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 64), ("test", 16)):
        labels = np.arange(count) % 2
        shades = 90 * labels[:, None, None, None] + rng.integers(0, 120, (count, 8, 8, 3))
        arrays |= {f"x_{split}": shades.astype(np.uint8), f"y_{split}": labels}
    np.savez(file, **arrays)
    return Data(str(file))


def tiny(folder: Path, **changes: Any) -> Run:
    settings: dict[str, Any] = dict(
        data=pictures(folder),
        model="Ti/4",
        vit=Model(width=16, depth=1, heads=2, mlp_dim=32),
        augment=Augment(crop="center", flip=False),
        duration=Steps(4),
        batch_size=16,
        accumulate=1,
        precision="float32",
        workers=0,
        device="cpu",
    )
    return Run(**{**settings, **changes})


def as_process(words: list[str], log: str) -> NoReturn:
    """What `python -m vitrail.transfer.trial WORDS` does, with its output in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
    module.end_with_parent = lambda: print("it ends with its parent")  # which is the fork server here
    os._exit(module.main(words))


def forked(command: list[str], *, stdout: Any, env: dict[str, str], **_: Any) -> Forked:
    """Start a trial without a new interpreter."""
    assert command[1:4] == ["-P", "-m", "vitrail.transfer.trial"]
    return Forked(as_process, command[4:], stdout.name, env=env)


@pytest.mark.processes
def test_two_processes_train_side_by_side_what_one_trains_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.transfer.processes.start", forked)
    planned = Trials.of(Sweep(tiny(tmp_path), {"optim.lr": (0.001, 0.01)}, seeds=(0,)), tmp_path / "two")
    for trial in planned.search:
        trial.prepare()
    began = outcomes(Processes([None, None]), planned.search)
    alone = Trials.of(planned.sweep, tmp_path / "one")
    for trial in alone.search:
        trial.prepare()
    for ours, (theirs, outcome) in zip(planned.search, here(alone.search), strict=True):
        assert ours.key == theirs.key
        assert began[ours.key].status == outcome.status == "done"
        assert began[ours.key].dev == outcome.dev
    log = (planned.search[0].folder / "log.txt").read_text()
    assert "step 4" in log and log.count("it ends with its parent") == 1


@pytest.mark.train
def test_a_sweep_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    """What becomes of its processes where it is killed is tests/faults/test_faults_processes.py's."""
    plan = Sweep(tiny(tmp_path, duration=Steps(20), checkpoint_every=Steps(5)), {"optim.lr": (0.001,)}, seeds=(0,))
    planned = Trials.of(plan, tmp_path / "s")
    (trial,) = planned.finals({"optim.lr": 0.001})
    with signal_at(7), pytest.raises(Interrupted) as caught:
        sweep(planned, here)
    assert caught.value.exit_code == 143 and finished(trial.folder) is None
    (row,) = sweep(planned, here).final
    assert (row.outcome.status, row.outcome.steps) == ("done", 20)
    resumed = json.loads((trial.folder / "run-1" / "run.json").read_text())["resumed"]
    assert [entry["step"] for entry in resumed] == [8]
    assert [path.name for path in trial.folder.glob("run-*")] == ["run-1"]
