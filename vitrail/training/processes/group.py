"""The processes of one run: how they are started, meet, wait for one another, and end.

They are started by `launch` (`--nproc N`), or by torchrun on one host or many; what a step computes then follows from
`vitrail.world` alone. One that fails says why before it ends, and so before the others notice that it is gone.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from vitrail import world
from vitrail.config import to_yaml
from vitrail.errors import TrainingError, UsageError
from vitrail.training.checkpoints.state import Result
from vitrail.training.guard import SIGNALS, Interrupted
from vitrail.training.run import Run

GRACE = 10.0
"""Seconds that the others have to end after one has failed."""
Member = subprocess.Popen[bytes]
STOPPED = tuple(128 + number for number in SIGNALS)
"""Exit codes of a process that was stopped by a signal and has saved."""


@contextmanager
def joined(timeout: float = Run.timeout) -> Iterator[None]:
    """Context in which this process is one of a run's, where torchrun or `launch` has started it as one.

    timeout: seconds that it waits for others in a collective.
    """
    if world.active() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    patience = timedelta(seconds=timeout)
    store, rank, size = next(dist.rendezvous("env://"))
    meeting = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=patience)
    try:
        with world.Pulse(dist.PrefixStore("pulse", store.clone()), timeout):
            yield
        world.barrier()  # gloo aborts a process whose partner has left in the middle of its farewell
    except Interrupted:  # of all alike: who started them may kill the others when the first has ended
        with suppress(RuntimeError):
            world.barrier()
        raise
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


class Failed(TrainingError):
    """A process of a run failed; `exit_code` is its own."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def launch(run: Run, resume: Path | None, processes: int) -> Result:
    """Train `run` with so many processes on this machine, as `fit` does with one.

    Raises Failed with the message and exit code of the process that failed first, or was stopped by a signal.
    """
    if processes < 1:
        raise UsageError(f"nproc is {processes}; a run needs at least one process")
    with tempfile.TemporaryDirectory(prefix="vitrail-") as scratch:
        config, note = Path(scratch) / "run.yaml", Path(scratch) / "note.json"
        config.write_text(to_yaml(run))
        command = [sys.executable, "-m", "vitrail.training.processes.member", str(config), str(note), str(resume or "")]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        members: list[Member] = []
        with _forwarding(members):
            for rank in range(processes):
                # a group of its own: Ctrl-C in a terminal is forwarded, and must not come twice
                members.append(subprocess.Popen(command, env=environment(rank, processes, port), process_group=0))
            try:
                code, late = _wait(members)
            finally:
                for member in members:
                    member.kill()
        if code:
            raise _failure(note, code, [None if member in late else member.returncode for member in members])
        said = json.loads(note.read_text())
    return Result(**{**said, "folder": Path(said["folder"])})


def _failure(note: Path, code: int, codes: list[int | None]) -> Failed:
    """Return the cause: a process that ended without leaving a note of its own, else what the first note says."""
    for rank, status in enumerate(codes):
        if status and not own_note(note, rank).exists():
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            memory = "; did memory run out?" if status == -signal.SIGKILL else ""
            return Failed(f"process {rank} ended without a word, {how}{memory}", status if status > 0 else 128 - status)
    return Failed(json.loads(note.read_text())["error"], code)


def own_note(note: Path, rank: int) -> Path:
    """Return where a process says why it fails; the first of these is `note`, too."""
    return note.with_name(f"{note.name}.{rank}")


def environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the environment of a process: torchrun's names, for one host, meeting at a free `port`."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
    return {**threads, **os.environ, **{name: str(value) for name, value in own.items()}, **meeting}


def _wait(members: list[Member]) -> tuple[int, list[Member]]:
    """Wait for all; return the exit status of the first that failed, else 0, and those that had to be killed.

    After a failure the others have `GRACE` seconds; after a signal as long as they need, since they save.
    """
    first, deadline, late = 0, float("inf"), list[Member]()
    while running := [member for member in members if member.poll() is None]:
        first = first or next((member.returncode for member in members if member.returncode), 0)
        if first and first not in STOPPED:
            deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            late = running
            for member in running:
                member.kill()
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(0.1)
    return first or next((member.returncode for member in members if member.returncode), 0), late


@contextmanager
def _forwarding(members: list[Member]) -> Iterator[None]:
    """Context in which a signal to this process goes to all members, which save and end."""

    def forward(number: int, _: FrameType | None) -> None:
        for member in members:
            if member.poll() is None:
                member.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """End this process now: one that has been part of a group may be aborted on the orderly way out (gloo)."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
