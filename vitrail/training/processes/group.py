"""The processes of one run: starting them, joining them into a group, and explaining how one of them was lost.

`launch` (`--nproc N`) starts them on this machine; torchrun starts them on one machine or several. A process that fails
writes down the reason before it ends, and so before the other processes notice that it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from vitrail import world
from vitrail.config import to_yaml
from vitrail.device import BEGAN, available_cores, command_seconds, has_cuda
from vitrail.errors import TrainingError, UsageError
from vitrail.training.checkpoints.saving import Checkpoints
from vitrail.training.checkpoints.state import Result
from vitrail.training.guard import SIGNALS, Interrupted
from vitrail.training.processes.parent import kill, python, python_path, start
from vitrail.training.processes.room import check_devices
from vitrail.training.run import Run, check_batch

GRACE = 10.0
"""Seconds that the other processes have to end after one has failed."""
STOPPED = tuple(128 + number for number in SIGNALS)
"""Exit codes of a process that saved and ended after a signal."""
TIMED_OUT = ("Timed out waiting", "timeout", "timed out")
"""Words with which torch and gloo report a collective that took longer than its timeout."""
DISCONNECTED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed")
"""Words with which they report that another process has ended."""


@contextmanager
def joined(timeout: float = Run.timeout) -> Iterator[None]:
    """Context in which this process belongs to the group of the run, if torchrun or `launch` has started it.

    timeout: seconds that a collective waits for the other processes.
    """
    if world.active() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if has_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"
    patience = timedelta(seconds=timeout)
    store, rank, size = next(dist.rendezvous("env://"))
    meeting = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=patience)
    try:
        with world.Pulse(dist.PrefixStore("pulse", store.clone()), timeout):
            yield
        world.barrier()  # gloo aborts a process if another one has left while it closes the group
    except Interrupted:  # raised in all processes; a launcher may kill the others as soon as the first has ended
        with suppress(RuntimeError):
            world.barrier()
        raise
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


class Failed(TrainingError):
    """A process of a run failed; `exit_code` is the exit code of that process."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def launch(
    run: Run,
    resume: Path | None,
    processes: int,
    module: str = "vitrail.training.processes.child",
    asked: Mapping[str, str] | None = None,
) -> Result:
    """Train `run` with several processes on this machine, and return what `fit` returns with one process.

    module: The module that each process runs; it calls the `main` of the default one. asked: See `fit`.

    Raises Failed with the message and exit code of the process that failed first or was stopped by a signal.
    """
    if processes < 1:
        raise UsageError(f"--nproc is {processes}. It must be at least 1.")
    check_devices(processes, run)
    if run.batch_size is not None:
        check_batch(run.batch_size, processes)
    with tempfile.TemporaryDirectory(prefix="vitrail-") as scratch:
        config, note = Path(scratch) / "run.yaml", Path(scratch) / "note.json"
        config.write_text(to_yaml(run))
        command = [*python(module), str(config), str(note), str(resume or ""), json.dumps(asked or {})]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children: list[subprocess.Popen[bytes]] = []
        with _forwarding_signals(children):
            for rank in range(processes):
                children.append(start(command, env=environment(rank, processes, port)))
            try:
                code, killed = _wait(children)
            finally:
                for child in children:
                    kill(child)
        if code:
            raise _failure(note, code, [None if child in killed else child.returncode for child in children])
        result = json.loads(note.read_text())
    return Result(**{**result, "folder": Path(result["folder"])})


def _failure(note: Path, code: int, codes: list[int | None]) -> Failed:
    """Return the cause: a process that ended without writing a note, or else the message in the first note."""
    for rank, status in enumerate(codes):
        if status and not own_note(note, rank).exists():
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            memory = ". The machine may have run out of memory" if status == -signal.SIGKILL else ""
            exit_code = status if status > 0 else 128 - status
            return Failed(f"Process {rank} ended without a message, {how}{memory}.", exit_code)
    return Failed(json.loads(note.read_text())["error"], code)


def own_note(note: Path, rank: int) -> Path:
    """Return the file in which process `rank` writes why it failed; `note` is that of the first."""
    return note.with_name(f"{note.name}.{rank}")


def environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the environment of a process on this machine, with torchrun's variables; `port` is a free port."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": python_path()}
    threads = {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}
    threads[BEGAN] = str(time.time() - command_seconds())
    return {**threads, **os.environ, **{name: str(value) for name, value in ranks.items()}, **address}


def _wait(children: list[subprocess.Popen[bytes]]) -> tuple[int, list[subprocess.Popen[bytes]]]:
    """Wait for all processes; return the exit status of the first that failed, or 0, and the killed processes.

    After a failure the other processes have `GRACE` seconds to end. After a signal they have as long as they need,
    because they save.
    """
    first, deadline = 0, float("inf")
    killed: list[subprocess.Popen[bytes]] = []
    while running := [child for child in children if child.poll() is None]:
        first = first or _first_failure(children)
        if first and first not in STOPPED:
            deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            killed = running
            for child in running:
                child.kill()
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(0.1)
    return first or _first_failure(children), killed


def _first_failure(children: list[subprocess.Popen[bytes]]) -> int:
    return next((child.returncode for child in children if child.returncode), 0)


@contextmanager
def _forwarding_signals(children: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Context in which a signal to this process is sent on to all `children`, which save and end."""

    def forward(number: int, _: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def explaining_lost_processes(run: Run, checkpoints: Checkpoints) -> Iterator[None]:
    """Context in which a collective that fails because another process hangs or has ended raises TrainingError.

    The message names the process and the newest checkpoint.
    """
    try:
        yield
    except RuntimeError as error:
        pulse, text = world.pulse(), str(error)
        timed_out, disconnected = (any(words in text for words in known) for known in (TIMED_OUT, DISCONNECTED))
        if pulse is None or not (timed_out or disconnected):
            raise
        if disconnected:
            what = "Another process of the run has ended; see its own message"
        else:
            silent = pulse.silent()
            which = f"Process {' and '.join(map(str, silent))}" if silent else "Another process"
            what = f"{which} did not respond within {run.timeout:g} s (--timeout) and may be stuck"
        step, folder = checkpoints.newest(), checkpoints.folder.path
        advice = f"The newest checkpoint is that of step {step}. Resume with vitrail train --resume {folder}"
        raise TrainingError(f"{what}. {'There is no checkpoint yet' if step is None else advice}.") from error


def leave(code: int) -> NoReturn:
    """End this process at once: gloo may abort a process that was in a group while the interpreter shuts down."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
