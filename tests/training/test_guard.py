from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from vitrail.errors import TrainingError, UsageError
from vitrail.training.guard import (
    COLLECTED,
    FiniteGuard,
    Interrupted,
    Signals,
    Stop,
    garbage_in_turns,
    require_finite,
    run_lock,
)
from vitrail.training.step import FinishedStep, StepSums

NAN = float("nan")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_only_sets_a_flag(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with Signals() as signals:
        assert signals.requested() is None
        signals.check()
        os.kill(os.getpid(), number)
        assert signals.requested() == number
        with pytest.raises(Stop):
            signals.check()
    assert signal.getsignal(number) is before
    assert Interrupted("stopped", number).exit_code == code


def test_the_second_ctrl_c_quits_at_once() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_sigterm_does_not() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requested() == signal.SIGTERM


def test_outside_the_main_thread_nothing_is_installed() -> None:
    seen: list[object] = []

    def work() -> None:
        with Signals() as signals:
            seen.append(signals.requested())

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_interruption_says_what_was_saved_and_how_to_go_on(tmp_path: Path) -> None:
    saved = Interrupted.after(signal.SIGINT, tmp_path, 7, 7)
    assert "Ctrl-C after step 7, saved at step 7" in str(saved)
    assert f"--resume {tmp_path}" in str(saved)
    assert str(Interrupted.after(signal.SIGINT, Path("my runs/a"), 7, 7)).endswith("--resume 'my runs/a'")
    assert "newest checkpoint is that of step 4" in str(Interrupted.after(signal.SIGTERM, tmp_path, 7, 4))


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(UsageError, match=f"pid {os.getpid()}"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):  # free again
        pass


@pytest.mark.kill
def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from vitrail.training.guard import run_lock\n"
        "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match=f"pid {process.pid}"), run_lock(tmp_path):
        pass
    process.kill()
    process.wait()
    with run_lock(tmp_path):
        pass


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (1.0, NAN), (float("inf"), 1.0), (1.0, float("inf"))])
def test_steps_that_are_not_finite_count_in_a_row(loss: float, norm: float) -> None:
    def is_finite(*numbers: float) -> bool:
        sums = StepSums(["loss", "count", "norm"], torch.tensor([numbers[0], 1.0, numbers[1]]))
        return FinishedStep(0, torch.tensor([0]), 0.1, sums).finite

    assert is_finite(1.0, 1.0) and not is_finite(loss, norm)
    guard = FiniteGuard(nn.Linear(1, 1), limit=3)
    guard.before_step()
    for start in (0, 3, 6):  # a good step in between starts the count anew
        for step in (start, start + 1):
            assert "cat/1.jpg" in guard.skip(step, loss, norm, ["cat/1.jpg"])
    guard.skip(9, loss, norm, [])
    guard.skip(10, loss, norm, [])
    with pytest.raises(TrainingError, match="3 consecutive steps") as error:
        guard.skip(11, loss, norm, [f"dog/{i}.jpg" for i in range(20)])
    assert "dog/7.jpg and 12 more" in str(error.value)


def test_a_skipped_step_leaves_running_statistics_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.randn(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    guard = FiniteGuard(model, limit=2)
    guard.before_step()
    model(torch.full((8, 2), NAN))
    assert not torch.isfinite(model[1].running_mean).all()
    guard.restore(unless=torch.tensor(False))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_weights_that_are_not_finite_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    require_finite(model)
    with torch.no_grad():
        model[0].bias[1] = NAN
    with pytest.raises(TrainingError, match=r"0\.bias"):
        require_finite(model)


@pytest.mark.parametrize("processes", [1, 2])
def test_several_processes_collect_garbage_at_the_same_steps(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr("vitrail.world.size", lambda: processes)
    with garbage_in_turns() as collect:
        assert gc.isenabled() == (processes == 1)
        monkeypatch.setattr(gc, "collect", lambda generation: collected.append(step))
        for step in range(1, 2 * COLLECTED + 2):
            collect(step)
    assert gc.isenabled()
    assert collected == ([] if processes == 1 else [COLLECTED, 2 * COLLECTED])
