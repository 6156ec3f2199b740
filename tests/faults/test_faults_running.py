"""Faults 17 to 22, 35 to 41, 46, 54 and 55: what can happen to a command while it runs."""

from __future__ import annotations

import csv
import ctypes
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Command, run, start
from forked import ROOT
from scenes import SHORT, as_nobody, draw, open_to_all

from vitrail.errors import TrainingError
from vitrail.training.checkpoints import state
from vitrail.training.guard import LossSpikes
from vitrail.version import install_extra


@pytest.fixture
def trained(photos_run: Path) -> Path:
    """The folder of a finished run."""
    return photos_run / "train-1"


def train(photos: Path, cwd: Path, *flags: str, steps: int = 4, **options: Any) -> Command:
    return run("train", photos, *SHORT, f"{steps} steps", *flags, cwd=cwd, **options)


def until(happened: Callable[[], bool], command: Command) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert command.process.exitcode is None and time.monotonic() < deadline, command.err
        time.sleep(0.01)


# threads, and reads that hang


def impatient(seconds: float) -> None:
    """Whoever reads gives up after so many seconds."""
    from vitrail.data.loading import loader, prefetch

    prefetch.TIMEOUT = loader.TIMEOUT = seconds
    prefetch.ThreadPool.close.__defaults__ = (0.1,)


def hang(victim: str) -> None:
    """From now on the disk does not respond when a file is opened."""
    from vitrail.data.sources import folder

    original = folder.open_regular

    def opened(path: str | bytes | Path) -> Any:
        if os.fsdecode(path) == victim:
            threading.Event().wait()
        return original(path)

    folder.open_regular = opened


def stalling(seconds: float, victim: str, module: str, when: str) -> None:
    """After the call of `module.when`, reading a file never ends."""
    place = importlib.import_module(module)
    impatient(seconds)
    original = getattr(place, when)

    def function(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        hang(victim)
        return found

    setattr(place, when, function)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "when", "said"),
    [
        ("vitrail.data.sources.open", "split_data_set", "reading red/3.png"),
        ("vitrail.training.feed", "endless", "reading image red/3.png"),
    ],
)
def test_18_a_read_that_hangs_is_named_in_training(tmp_path: Path, module: str, when: str, said: str) -> None:
    """Before the first step, when sizes are looked at, and by the loader's threads."""
    photos = draw(tmp_path / "photos")
    flags = ("--workers", "2", "--data.holdout", "0", "--cache", "no")
    given = (0.5, str(photos / "red" / "3.png"), module, when)
    command = train(photos, tmp_path, *flags, steps=9, before=stalling, given=given)
    assert command.process.exitcode == 1
    assert said in command.err and "has taken more than 0.5 s" in command.err


@pytest.mark.processes
def test_18_a_read_that_hangs_is_named_by_predict(tmp_path: Path, trained: Path) -> None:
    photos = draw(tmp_path / "photos", count=2)
    given = (0.5, str(photos / "red" / "1.png"))
    command = run("predict", trained, photos, cwd=tmp_path, before=stalling_reads, given=given)
    assert command.process.exitcode == 1
    assert command.err.endswith(f"reading {photos}/red/1.png has taken more than 0.5 s: the disk or network "
                                "does not respond. Check it and try again\n")  # fmt: skip


def stalling_reads(seconds: float, victim: str) -> None:
    """Reading a file never ends."""
    impatient(seconds)
    hang(victim)


@pytest.mark.processes
@pytest.mark.parametrize("words", [("check",), ("pack", "shards"), ("dedup",)], ids=lambda words: words[0])
def test_18_a_read_that_hangs_is_named_by_all_that_read_data(tmp_path: Path, words: tuple[str, ...]) -> None:
    photos = draw(tmp_path / "photos", count=2)
    verb, *flags = words
    given = (0.5, str(photos / "red" / "1.png"))
    command = run("data", verb, photos, *flags, "--workers", "1", cwd=tmp_path, before=stalling_reads, given=given)
    assert command.process.exitcode == 1
    assert "red/1.png has taken more than 0.5 s" in command.err and "Traceback" not in command.err


def without_shared_memory() -> None:
    """A mount namespace of this process's own, in which /dev/shm holds one page."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        lambda: libc.unshare(0x00020000),  # CLONE_NEWNS
        lambda: libc.mount(None, b"/", None, 1 << 18 | 1 << 14, None),  # MS_PRIVATE | MS_REC
        lambda: libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=4k"),
    )
    if any(step() != 0 for step in steps):
        os._exit(77)


@pytest.mark.processes
def test_17_19_decoding_needs_no_shared_memory_and_no_processes(photos: Path, tmp_path: Path) -> None:
    command = train(photos, tmp_path, "--workers", "2", before=without_shared_memory)
    if command.process.exitcode == 77:
        pytest.skip("this user may not mount")
    assert command.process.exitcode == 0, command.err


def crashing() -> None:
    """The decoder of one image kills the whole process, as a fault in a library does."""
    from vitrail.data.images import pixels

    original, calls = pixels.decode, iter(range(10**6))

    def decode(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 60:
            os.kill(os.getpid(), signal.SIGSEGV)
        return original(*arguments, **options)

    pixels.decode = decode


@pytest.mark.processes
def test_17_a_thread_that_crashes_takes_the_process_along_and_nothing_else(photos: Path, tmp_path: Path) -> None:
    flags = ("--workers", "1", "--cache", "no", "--checkpoint-every", "1 steps")
    command = train(photos, tmp_path, *flags, steps=40, before=crashing)
    assert command.process.exitcode == -signal.SIGSEGV
    command = run("train", "--resume", "--duration", "10 steps", cwd=tmp_path)
    assert command.process.exitcode == 0, command.err
    assert "resuming from runs/scratch-small-1/checkpoints/step-0000" in command.err


# flags, folders


@pytest.mark.processes
def test_20_what_is_wrong_with_flags_and_settings_is_said_without_a_traceback(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("optim:\n  lr: 1\n bad: 3\n")
    (tmp_path / "key.yaml").write_text("optim:\n  lrr: 1\n")
    for flags, said in (
        (["--lrr", "3"], "Did you mean '--lr'?"),
        (["--batch-size", "many"], "--batch-size"),
        (["--optim.lr", "-1"], "optim.lr is -1.0; it must be greater than 0"),
        (["--config", "bad.yaml"], "bad.yaml:3: not YAML"),
        (["--config", "key.yaml"], "key.yaml:2: optim.lrr: unknown setting. Did you mean 'lr'?"),
    ):
        command = train(photos, tmp_path, *flags)
        assert command.process.exitcode == 2
        assert said in command.err and "Traceback" not in command.err
    assert not (tmp_path / "runs").exists()


def holding(gate: str) -> None:
    """Wait in the first step until `gate` is there."""
    from vitrail.training import step as stepping

    original = stepping.seed_step

    def seed_step(seed: int, step: int, rank: int) -> None:
        while step == 1 and not os.path.exists(gate):
            time.sleep(0.01)
        original(seed, step, rank)

    stepping.seed_step = seed_step


@pytest.mark.processes
def test_21_two_commands_in_one_folder(photos: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    words = ["train", photos, *SHORT, "4 steps", "--checkpoint-every", "1 steps"]
    first = start(*words, cwd=tmp_path, before=holding, given=(str(gate),))
    folder = tmp_path / "runs" / "scratch-small-1"
    until(lambda: (folder / "checkpoints" / "step-000001").exists(), first)
    second = run("train", "--resume", folder, cwd=tmp_path)
    assert second.process.exitcode == 2
    assert f"another process (pid {first.pid}) is writing {folder}" in second.err
    third = run(*words, cwd=tmp_path)  # a new run beside it is a folder of its own
    assert third.process.exitcode == 0 and (tmp_path / "runs" / "scratch-small-2").is_dir()
    gate.touch()
    assert first.wait() == 0, first.err


@pytest.mark.processes
@pytest.mark.page
def test_22_a_place_that_cannot_be_written(photos: Path, tmp_path: Path) -> None:
    open_to_all(tmp_path)
    open_to_all(photos)
    (tmp_path / "closed").mkdir(mode=0o555)
    for out, said in (("closed", "Permission denied"), ("x" * 300, "File name too long"), ("/proc/x", "cannot write")):
        command = train(photos, tmp_path, "--out", out, before=as_nobody)
        assert command.process.exitcode == 2
        assert "cannot write a run folder in" in command.err and said in command.err and "Traceback" not in command.err
    assert train(photos, tmp_path, "--out", "rüns größe 😀").process.exitcode == 0
    assert (tmp_path / "rüns größe 😀" / "scratch-small-1" / "report.html").is_file()


# signals


PHASES = {
    "opening the data": ("vitrail.training.assemble", "decide", 1),
    "a save": ("vitrail.training.checkpoints.checkpoint", "write_durably", 1),
    "the report": ("vitrail.reports.page", "write_report", 1),
}
"""Where a signal comes: a function, and at which of its calls. Before a run, within it, and after it; the moments
within it are those of tests/properties/test_resumed.py."""


def signalled(numbers: list[int], module: str, name: str, call: int) -> None:
    """Send this process signals when a function is called for the `call`-th time."""
    import importlib

    place = importlib.import_module(module)
    original, calls = getattr(place, name), iter(range(1, 10**6))

    def function(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            for number in numbers:
                os.kill(os.getpid(), number)
        return original(*arguments, **options)

    setattr(place, name, function)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("divided") / "data"
    for seed, split in enumerate(("train", "val", "test")):
        draw(data / split, count=12 if split == "train" else 4, seed=seed)
    return data


@pytest.mark.processes
@pytest.mark.page
@pytest.mark.parametrize("phase", PHASES)
def test_35_ctrl_c_before_in_and_after_a_run(divided: Path, tmp_path: Path, phase: str) -> None:
    flags = ("--evaluate-every", "2 steps", "--checkpoint-every", "2 steps")
    command = train(divided, tmp_path, *flags, steps=4, before=signalled, given=([signal.SIGINT], *PHASES[phase]))
    assert command.process.exitcode == 130, command.err
    assert "Traceback" not in command.err
    folder = tmp_path / "runs" / "scratch-small-1"
    if phase == "opening the data":
        assert not folder.exists()
        return
    if phase != "the report":
        assert f"Continue with vitrail train --resume {folder.relative_to(tmp_path)}" in command.err
    again = run("train", "--resume", folder, "--json", cwd=tmp_path)
    assert again.process.exitcode == 0, again.err
    assert json.loads(again.out)["steps"] == 4


@pytest.mark.kill
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_35_other_signals_save_too(divided: Path, tmp_path: Path, number: int, code: int) -> None:
    command = train(
        divided, tmp_path, steps=40, before=signalled, given=([number], "vitrail.training.step", "seed_step", 3)
    )
    assert command.process.exitcode == code
    assert "after step 3, saved at step 3" in command.err


@pytest.mark.kill
def test_35_a_second_ctrl_c_quits_at_once(divided: Path, tmp_path: Path) -> None:
    given = ([signal.SIGINT, signal.SIGINT], "vitrail.training.step", "seed_step", 3)
    command = train(divided, tmp_path, "--checkpoint-every", "1 steps", steps=40, before=signalled, given=given)
    assert command.process.exitcode == 130 and command.err.endswith("vitrail: interrupted\n")
    again = run("train", "--resume", "--duration", "4 steps", cwd=tmp_path)
    # the checkpoint of step 2 is written while step 3 begins: it is there, or the one before it is
    assert again.process.exitcode == 0 and re.search("checkpoints/step-00000[12]\\n", again.err)


def test_37_a_save_that_takes_long_is_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = iter([0.0, 14.0, 100.0, 117.0, 200.0, 290.0])
    monkeypatch.setattr(state.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(state.checkpoint, "save", lambda *_, **__: None)
    folder: Any = type("Folder", (), {"checkpoints": Path("x")})()
    checkpoints = state.Checkpoints(folder, 2, said.append)
    for step in (1, 2, 3):
        status = saving_state(step)
        checkpoints.save(status)
    assert len(said) == 1 and "saving a checkpoint took 17 s" in said[0] and "30 s after SIGTERM" in said[0]


def saving_state(step: int) -> Any:
    from torch import nn

    from vitrail.training.checkpoints.state import RunStatus

    parts = {"status": RunStatus(step=step), "sharded": False, "objective": nn.Identity()}
    return type("State", (), {**parts, "state_dict": lambda self: {}})()


# losses and memory


@pytest.mark.processes
def test_39_a_loss_that_jumps_is_named(divided: Path, tmp_path: Path) -> None:
    command = train(divided, tmp_path, steps=30, before=jumping, given=(25,))
    assert command.process.exitcode == 0, command.err
    assert "warning: step 25 has loss" in command.err and "times the median before it; its images: " in command.err
    log = (tmp_path / "runs/scratch-small-1/metrics.jsonl").read_text().splitlines()
    (line,) = [line for line in map(json.loads, log) if line["kind"] == "spike"]
    assert line["step"] == 25 and line["times"] > 10 and len(line["images"]) == 8


def jumping(at: int) -> None:
    from vitrail.training import step as stepping

    original = stepping.backward

    def backward(*arguments: Any, step: int, **options: Any) -> Any:
        outcome = original(*arguments, step=step, **options)
        outcome.values[outcome.names.index("loss")] *= 40 if step == at else 1
        return outcome

    stepping.backward = backward


def test_39_what_counts_as_a_jump() -> None:
    spikes = LossSpikes()
    assert [spikes.times(100.0) for _ in range(19)] == [None] * 19
    assert spikes.times(5000.0) is None  # too few before it
    assert spikes.times(999.0) is None and spikes.times(1001.0) == pytest.approx(10.01)
    assert spikes.times(float("nan")) is None and spikes.times(float("inf")) is None
    low = LossSpikes()
    assert [low.times(loss) for loss in (1.4, *[0.01] * 30)] == [None] * 31
    assert low.times(0.7) is None  # one difficult image after everything else is known by heart
    assert low.times(1.5) == pytest.approx(150)


def poisoned(first: int, last: int) -> None:
    """Weights stay, but the gradient of some steps is NaN."""
    from vitrail.training import step as stepping

    original = stepping.backward

    def backward(objective: Any, batch: Any, *, step: int, **options: Any) -> Any:
        outcome = original(objective, batch, step=step, **options)
        if first <= step <= last:
            next(objective.parameters()).grad.fill_(float("nan"))
        return outcome

    stepping.backward = backward


@pytest.mark.processes
def test_38_nan_once_is_skipped_and_for_ever_ends_the_run(divided: Path, tmp_path: Path) -> None:
    flags = ("--checkpoint-every", "2 steps")
    command = train(divided, tmp_path, *flags, steps=8, before=poisoned, given=(4, 4))
    assert command.process.exitcode == 0
    assert "warning: skipped an update that is not finite: step 4" in command.err and ".png" in command.err
    command = train(divided, tmp_path, *flags, steps=20, before=poisoned, given=(4, 99))
    assert command.process.exitcode == 1
    assert "3 consecutive steps were not finite" in command.err and "Traceback" not in command.err
    from vitrail.weights.load import load

    for name in ("best", "last"):
        model = load(tmp_path / "runs" / "scratch-small-2" / "model" / name)
        assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


WIDE = ("--vit.depth", "3", "--vit.mlp-dim", "4096", "--batch-size", "256", "--progressive.start", "1")
"""A network that keeps 140 MB a block of each batch, and computes little with them."""


def short_of_memory(megabytes: int) -> None:
    """Until the first step is done, this process may take so much address space as it had, and so much more.

    What the rest of a run takes, such as the stacks and heaps of new threads, depends on the machine.
    """
    from vitrail.training import step as stepping

    original, whole_step, waiting = stepping.seed_step, stepping.TrainingStep.__call__, [0]
    resource.setrlimit(resource.RLIMIT_AS, (2**50, resource.RLIM_INFINITY))  # there is a limit from the start

    def seed_step(seed: int, step: int, rank: int) -> None:
        if step in waiting:  # once: the step is repeated in smaller pieces
            waiting.remove(step)
            here = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (here + megabytes * 2**20, resource.RLIM_INFINITY))
        original(seed, step, rank)

    def call(*arguments: Any, **options: Any) -> None:
        whole_step(*arguments, **options)
        resource.setrlimit(resource.RLIMIT_AS, (2**50, resource.RLIM_INFINITY))

    stepping.seed_step = seed_step
    stepping.TrainingStep.__call__ = call


@pytest.mark.processes
def test_40_out_of_memory_goes_on_in_smaller_pieces_and_says_so(tmp_path: Path) -> None:
    """A real limit: the whole batch does not fit, a part of it does, and the batch stays what it was."""
    photos = draw(tmp_path / "photos", count=150)
    flags = (*WIDE, "--workers", "0")
    command = train(photos, tmp_path, *flags, steps=1, before=short_of_memory, given=(200,))
    assert command.process.exitcode == 0, command.err
    assert (
        "warning: out of memory at step 0: continuing with accumulate: 2, the same batch of 256 images" in command.err
    )
    folder = tmp_path / "runs" / "scratch-small-1"
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    parts = [line["accumulate"] for line in log if line["kind"] == "out of memory"][-1]
    assert parts >= 2 and f"accumulate: {parts}\n" in (folder / "config.yaml").read_text()
    again = run("train", "--resume", folder, "--duration", "2 steps", cwd=tmp_path)
    assert again.process.exitcode == 0, again.err
    assert f"batch: 256 images, as before; accumulate: {parts}, since memory ran out at step 0" in again.err


def exhausted(after: int) -> None:
    """Every allocation of a step fails from some step on."""
    from vitrail.training import step as stepping

    original = stepping.backward

    def backward(*arguments: Any, step: int, **options: Any) -> Any:
        if step >= after:
            import torch

            torch.empty(2**60)
        return original(*arguments, step=step, **options)

    stepping.backward = backward


@pytest.mark.processes
def test_40_out_of_memory_for_good_keeps_the_state(divided: Path, tmp_path: Path) -> None:
    command = train(divided, tmp_path, "--checkpoint-every", "1 steps", steps=9, before=exhausted, given=(3,))
    assert command.process.exitcode == 1
    assert "vitrail: out of memory (" in command.err and "Traceback" not in command.err
    again = run("train", "--resume", "--duration", "4 steps", cwd=tmp_path)
    assert again.process.exitcode == 0 and "step-000003" in again.err


def exhausted_evaluation() -> None:
    """Every allocation of an evaluation fails."""
    from vitrail.tasks import classes

    def classify(*arguments: Any, **options: Any) -> Any:
        import torch

        return torch.empty(2**60)

    classes.classify = classify  # type: ignore[assignment]


@pytest.mark.processes
def test_40_out_of_memory_in_an_evaluation_keeps_the_state(divided: Path, tmp_path: Path) -> None:
    flags = ("--checkpoint-every", "1 steps", "--evaluate-every", "2 steps")
    command = train(divided, tmp_path, *flags, steps=4, before=exhausted_evaluation)
    assert command.process.exitcode == 1
    assert "vitrail: out of memory (" in command.err and "Traceback" not in command.err
    again = run("train", "--resume", cwd=tmp_path)
    assert again.process.exitcode == 0 and "step-000001" in again.err


# predict


@pytest.mark.processes
def test_46_predict_goes_on_past_bad_files_and_strict_says_so(trained: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.png").write_bytes((photos / "red" / "0.png").read_bytes()[:50])
    files = [str(photos / "red" / "0.png"), str(tmp_path / "torn.png"), str(photos / "blue")]
    for flags, code in (([], 0), (["--strict"], 1)):
        command = run("predict", trained, *files, "--out", "answers.csv", *flags, cwd=tmp_path)
        assert command.process.exitcode == code
        assert "13 images predicted; 1 file could not be read (1 truncated)" in command.out
        assert len(list(csv.DictReader((tmp_path / "answers.csv").open()))) == 13
        (row,) = csv.DictReader((tmp_path / "answers.csv.errors.csv").open())
        assert row["path"] == str(tmp_path / "torn.png") and row["reason"] == "truncated"
    shown = run("predict", trained, *files, "--strict", cwd=tmp_path)
    assert shown.process.exitcode == 1 and shown.out.count("\n") == 14
    nothing = run("predict", trained, tmp_path / "torn.png", cwd=tmp_path)
    assert nothing.process.exitcode == 1 and "skipped" in nothing.err  # none of the files could be read


def killed_after(rows: int) -> None:
    """The process is killed when so many files have been looked at."""
    from vitrail.data.images import pixels

    original, calls = pixels.decode, iter(range(1, 10**6))

    def decode(*arguments: Any, **options: Any) -> Any:
        if next(calls) > rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    pixels.decode = decode


@pytest.mark.kill
def test_46_predict_goes_on_where_it_was_killed(trained: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.png").write_bytes(b"no image")
    words = ["predict", trained, tmp_path / "torn.png", photos, "--batch-size", "4", "--workers", "1"]
    whole = run(*words, "--out", "whole.csv", cwd=tmp_path)
    assert whole.process.exitcode == 0
    command = run(*words, "--out", "answers.csv", cwd=tmp_path, before=killed_after, given=(20,))
    assert command.process.exitcode == -signal.SIGKILL and not (tmp_path / "answers.csv").exists()
    with (tmp_path / ".answers.csv.part").open("a") as file:
        file.write('["/torn/line')
    again = run(*words, "--out", "answers.csv", cwd=tmp_path, before=killed_after, given=(20,))
    assert again.process.exitcode == 0, again.err  # it had fewer than 20 left to look at
    assert "continuing after" in again.err
    assert (tmp_path / "answers.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not (tmp_path / ".answers.csv.part").exists()
    assert "torn.png" in (tmp_path / "answers.csv.errors.csv").read_text()
    run(*words, "--out", "answers.csv", cwd=tmp_path, before=killed_after, given=(20,))
    other = run(*words, "--top", "1", "--out", "answers.csv", cwd=tmp_path)  # another question: from the start
    assert other.process.exitcode == 0 and "continuing after" not in other.err


def small_files(most: int) -> None:
    """No file may grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.processes
def test_46_predict_on_a_full_disk(trained: Path, photos: Path, tmp_path: Path) -> None:
    command = run("predict", trained, photos, "--out", "/dev/full/x.csv", cwd=tmp_path)
    assert command.process.exitcode == 2 and "cannot write /dev/full" in command.err
    command = run("predict", trained, photos, "--out", "answers.csv", cwd=tmp_path, before=small_files, given=(1000,))
    assert command.process.exitcode == 2 and "cannot write answers.csv: File too large" in command.err
    assert not (tmp_path / "answers.csv").exists()
    command = run("predict", trained, photos, "--out", "answers.csv", cwd=tmp_path)
    assert command.process.exitcode == 0 and "continuing after" in command.err


# the world around


def jumping_clock() -> None:
    """The wall clock goes back a year with every other look at it, and on by one with the rest; the zone changes."""
    original, jumps = time.time, iter(range(10**9))
    time.time = lambda: original() + (-1) ** next(jumps) * 365 * 86400.0
    os.environ["TZ"] = "Pacific/Kiritimati"
    time.tzset()


@pytest.mark.processes
def test_54_a_clock_that_jumps_changes_nothing(divided: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for name, before in (("calm", None), ("jumping", jumping_clock)):
        command = train(divided, tmp_path, "--name", name, "--time-limit", "5", steps=3, before=before)
        assert command.process.exitcode == 0, command.err
        seconds = json.loads((tmp_path / f"runs/{name}-1/run.json").read_text())["result"]["seconds"]
        assert 0 <= seconds < 60
    command = run("train", "--resume", "runs/jumping-1", "--duration", "4 steps", cwd=tmp_path, before=jumping_clock)
    assert command.process.exitcode == 0, command.err
    both = [
        load_file(tmp_path / f"runs/{name}-1/checkpoints/step-000003/model.safetensors") for name in ("calm", "jumping")
    ]
    assert all(bool((value == both[1][name]).all()) for name, value in both[0].items())


def homeless() -> None:
    """A user that no file knows, without a home."""
    if os.getuid() == 0:
        os.setgid(54321)
        os.setuid(54321)


@pytest.mark.processes
def test_54_without_a_home(trained: Path, photos: Path, tmp_path: Path) -> None:
    for place in (trained.parent, photos, tmp_path):
        open_to_all(place)
    env = {name: None for name in ("HOME", "VITRAIL_CACHE", "XDG_CACHE_HOME", "HF_HOME")}
    command = run("predict", trained, photos, cwd=tmp_path, before=homeless, env=env)
    assert command.process.exitcode == 0, command.err
    assert command.out.count("\n") == 25
    command = run("data", "stats", photos, "--json", cwd=tmp_path, before=homeless, env=env)
    assert command.process.exitcode == 0, command.err
    command = run("data", "stats", "owner/name", cwd=tmp_path, before=homeless, env=env)
    assert command.process.exitcode == 1 and "no data at 'owner/name'" in command.err


@pytest.mark.processes
def test_54_a_terminal_that_is_not_utf8(tmp_path: Path, trained: Path) -> None:
    """A new interpreter, since that is when Python looks at the locale; no terminal, no input, no home."""
    photos = draw(tmp_path / "phötos", classes=("größe", "red"), count=2)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    env |= {"PYTHONUTF8": "0", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "vitrail", "predict", str(trained), str(photos), "--top", "1"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.decode("ascii").splitlines()
    assert len(rows) == 5
    assert "ph\\xf6tos/gr\\xf6\\xdfe/0.png" in rows[1]


def hidden(name: str) -> None:
    sys.modules[name] = None  # type: ignore[assignment]


@pytest.mark.processes
def test_55_a_missing_extra_says_how_to_get_it(trained: Path, tmp_path: Path) -> None:
    command = run("serve", trained, cwd=tmp_path, before=hidden, given=("uvicorn",))
    assert command.process.exitcode in (1, 2)
    assert install_extra("serve") in command.err and "Traceback" not in command.err


def test_memory_errors_are_told_apart() -> None:
    from vitrail.training.batch_size import explaining_memory
    from vitrail.training.run import Run

    with pytest.raises(TrainingError, match="--accumulate 8"), explaining_memory(Run(batch_size=64), lambda: 4):
        raise RuntimeError("could not create a primitive")
    with pytest.raises(TrainingError) as error, explaining_memory(Run(batch_size=4), lambda: 4):
        raise MemoryError
    assert "accumulate" not in str(error.value)  # an image at a time already
    assert threading.active_count() >= 1
