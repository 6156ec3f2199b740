"""The processes of one run: starting them, joining them into a group, and how many of them fit on this machine.

`launch` (`--nproc N`) starts them on this machine; torchrun starts them on one machine or several. A process that fails
writes the reason into the file NOTE before it ends, and so before the other processes notice that it has ended. They
fail as well, find the note, and stay silent. If none fails, the main process writes the result into NOTE.

A child process ends when its parent has ended, however it ended (`start`, `end_with_parent`). The parent holds the
writing end of the child's stdin and writes nothing. The kernel closes it with the parent, also after SIGKILL, and a
thread of the child sees this. Linux's PR_SET_PDEATHSIG would not do: it also fires when only the thread that started
the child ends, a parent that dies before the call goes unnoticed, and other systems lack it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from vitrail import world
from vitrail.config import from_yaml, to_yaml
from vitrail.costs.count import activation_bytes, learned_values
from vitrail.costs.memory import state_bytes
from vitrail.device import (
    BEGAN,
    SIGKILL,
    available_cores,
    choose_device,
    command_seconds,
    compute_precision,
    free_memory,
    has_cuda,
    keep_freed_memory,
)
from vitrail.errors import TrainingError, UsageError, VitrailError
from vitrail.files import write_once
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.training.batch_size import LARGEST, OVERHEAD, SHARE, OutOfMemory
from vitrail.training.checkpoints import checkpoint
from vitrail.training.decide import network_config
from vitrail.training.guard import SIGNALS, Interrupted
from vitrail.training.loop import training
from vitrail.training.python_objects import PythonObjects
from vitrail.training.result import Result
from vitrail.training.run import Run, check_batch
from vitrail.weights.load import read_card

AT_START, LATER = 1800.0, 600.0
"""Default seconds that a process waits for the others: until the first step has been taken, and from then on."""
GRACE = 10.0
"""Seconds that the other processes have to end after one has failed."""
STOPPED = tuple(128 + number for number in SIGNALS)
"""Exit codes of a process that saved and ended after a signal."""
NO_STEP = b"\xff" * world.STEP_BYTES
"""What stands for a process that has begun no step."""
log = logging.getLogger("vitrail")
PER_CORE = 4
"""Maximum number of processes that share one core."""
PROCESS_BYTES = 400 << 20
"""Memory of one process that it shares with no other: torch takes 320 MiB, a small network and its batches the rest."""
PATIENCE = 60.0
"""Seconds that a process has to save and end after its parent has ended."""
ROOT = Path(__file__).resolve().parents[2]
"""Where `vitrail` is imported from."""


class Failed(TrainingError):
    """A process of a run failed; `exit_code` is the exit code of that process."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def launch(
    run: Run,
    resume: Path | None,
    processes: int,
    module: str = "vitrail.training.processes",
    asked: Mapping[str, str] | None = None,
) -> Result:
    """Train `run` with several processes on this machine, and return what `fit` returns with one process.

    module: The module that each process runs; it calls the `main` of the default one. asked: See `fit`.

    Raises Failed with the message and exit code of the process that failed first or was stopped by a signal.
    """
    check_processes(processes, run)
    while True:
        with tempfile.TemporaryDirectory(prefix="vitrail-") as scratch:
            note = Path(scratch) / "note.json"
            try:
                _train(run, resume, processes, module, asked or {}, note)
                result = json.loads(note.read_text("utf-8"))
                return Result(**{**result, "folder": Path(result["folder"])})
            except Failed as failed:
                again = json.loads(note.read_text("utf-8")).get("again") if note.exists() else None
                if again is None:
                    raise
                log.warning("%s", failed)
        # the other processes were waiting inside a sum for the one that lacked memory, and could not repeat the step
        run, resume = _with_less_memory(run, resume, again)


def _with_less_memory(run: Run, resume: Path | None, again: dict[str, Any]) -> tuple[Run, Path | None]:
    """Return the run after a failure for lack of memory, and the folder in which it continues."""
    folder, parts = Path(again["folder"]), again["accumulate"]
    if (step := checkpoint.newest(folder / "checkpoints")) is None:
        log.warning("starting again with accumulate: %d, because %s has no checkpoint yet", parts, folder)
        return replace(run, accumulate=parts), resume
    log.warning("resuming %s from step %d with accumulate: %d", folder, step, parts)
    return replace(from_yaml(folder / "config.yaml", run, imports=True), accumulate=parts), folder


def _train(run: Run, resume: Path | None, processes: int, module: str, asked: Mapping[str, str], note: Path) -> None:
    """Run the processes of `launch` until all have ended; the main process writes the result into `note`.

    Raises Failed.
    """
    config, steps = note.with_name("run.yaml"), note.with_name("steps")
    config.write_text(to_yaml(run), "utf-8")
    steps.write_bytes(NO_STEP * processes)
    command = [*python(module), str(config), str(note), str(resume or ""), json.dumps(asked)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children: list[subprocess.Popen[bytes]] = []
    with _forwarding_signals(children):
        for rank in range(processes):
            environment = {**process_environment(rank, processes, port), world.STEPS: str(steps)}
            children.append(start(command, env=environment))
        try:
            code, killed = _wait(children)
        finally:
            for child in children:
                kill(child)
    if code:
        raise _failure(note, code, [None if child in killed else child.returncode for child in children])


def _failure(note: Path, code: int, codes: list[int | None]) -> Failed:
    """Return the cause: a process that ended without writing a note, or else the message in the first note.

    codes: The exit status of each process; None of one that had to be killed.
    """
    for rank, status in enumerate(codes):
        if status and not own_note(note, rank).exists():
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            more = ". The machine may have run out of memory" if status == -SIGKILL else ""
            more = _waited(note, codes) if status == -signal.SIGABRT else more
            exit_code = status if status > 0 else 128 - status
            return Failed(f"Process {rank} ended without a message, {how}{more}.", exit_code)
    return Failed(json.loads(note.read_text("utf-8"))["error"], code)


def _waited(note: Path, codes: list[int | None]) -> str:
    """Return what is known if NCCL's watchdog ended a process, which has no time for a message of its own."""
    stored = note.with_name("steps").read_bytes()
    places = (stored[at : at + world.STEP_BYTES] for at in range(0, len(stored), world.STEP_BYTES))
    begun = ["no step" if place == NO_STEP else f"step {int.from_bytes(place, 'little')}" for place in places]
    stuck = [rank for rank, status in enumerate(codes) if status is None]
    where = ", ".join(f"process {rank} in {step}" for rank, step in enumerate(begun))
    which = f"; it waited for process {' and '.join(map(str, stuck))}, which may be stuck" * bool(stuck)
    return (
        f". NCCL ends a process in this way if a collective fails or takes longer than --timeout{which}. At the end, "
        f"{where} (counted from 0). What torch says about it stands above"
    )


def process_environment(rank: int, processes: int, port: int) -> dict[str, str]:
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
                stop(child, number)

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
def in_process_group(timeout: float | None = None, device: str | None = None) -> Iterator[None]:
    """Context in which this process belongs to the group of the run, if torchrun or `launch` has started it.

    timeout, device: See `Run`. Raises UsageError if `device` is a single GPU.
    """
    if world.active() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    refuse_one_gpu(device)
    gpu = None
    if _on_gpu(device):
        gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(gpu)
    backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
    first, later = (AT_START, LATER) if timeout is None else (timeout, timeout)
    store, rank, size = next(dist.rendezvous("env://"))
    meeting, patience = dist.PrefixStore("group", store), timedelta(seconds=first)
    # with its device NCCL connects now, and not in the first collective, whose failure would be harder to read
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=patience, device_id=gpu)
    try:
        with world.Pulse(dist.PrefixStore("pulse", store.clone()), first, later):
            yield
        world.barrier()  # gloo aborts a process if another one has left while it closes the group
    except Interrupted:  # raised in all processes; a launcher may kill the others as soon as the first has ended
        with suppress(RuntimeError):
            world.barrier()
        raise
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def main(config: str, note: str, resume: str, asked: str, *, report: Callable[[Result], Result] | None = None) -> int:
    """Train the run in the file `config` and return the exit code; `resume` is a run folder, or "" for a new run.

    asked: See `fit`, in JSON. report: Writes report.html, and returns the result.
    """
    try:
        if resume:  # the command that started this process has read it, and refused modules that nobody has named
            from_yaml(Path(resume) / "config.yaml", Run(), imports=True)
        run = from_yaml(Path(config), Run(), imports=True)
        keep_freed_memory()
        objects, reported = PythonObjects(asked=json.loads(asked)), report is not None
        with in_process_group(run.timeout, run.device):
            with training(run, objects, resume=resume or None, reported=reported) as result:
                result = result if report is None else report(result)
            if world.is_main():
                _write_note(Path(note), {**asdict(result), "folder": str(result.folder)})
        return 0
    except (VitrailError, KeyboardInterrupt) as error:
        said: dict[str, Any] = {"error": str(error) or "interrupted"}
        if isinstance(error, OutOfMemory) and error.again is not None:
            said["again"] = {"accumulate": error.again, "folder": str(error.folder)}
        _write_note(Path(note), said)
        return error.exit_code if isinstance(error, VitrailError) else 130
    except BaseException as error:
        if _write_note(Path(note), {"error": f"process {os.environ['RANK']}: {type(error).__name__}: {error}"}):
            traceback.print_exc()
        return 1


def own_note(note: Path, rank: int) -> Path:
    """Return the file in which process `rank` writes why it failed; `note` is that of the first."""
    return note.with_name(f"{note.name}.{rank}")


def _write_note(path: Path, value: dict[str, Any]) -> bool:
    """Write the note unless another process has written it; return whether this process wrote it."""
    own_note(path, int(os.environ["RANK"])).write_text(json.dumps(value), "utf-8")
    return write_once(path, json.dumps(value))


def python(module: str) -> list[str]:
    """Return the start of a command that runs a module of vitrail. It needs `python_path`.

    -P: the current folder is not the first in which modules are looked for, so that a file yaml.py in a folder that
    the user has received is not run in place of the library.
    """
    return [sys.executable, "-P", "-m", module]


def python_path() -> str:
    """Return the PYTHONPATH with which a process of Python finds this vitrail."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that calls `end_with_parent`; `options` are those of `subprocess.Popen`."""
    # in a process group of its own: Ctrl-C in a terminal is forwarded and must not arrive twice
    group: dict[str, Any] = {"process_group": 0}
    if sys.platform == "win32":
        group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return subprocess.Popen(command, stdin=subprocess.PIPE, **group, **options)


def stop(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    """Ask a process that `start` has started to save and end. To Windows a process can only send Ctrl-Break."""
    if sys.platform == "win32":
        number = signal.CTRL_BREAK_EVENT
    process.send_signal(number)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that `start` has started, and what is left of the processes that it has started itself."""
    process.kill()
    if sys.platform != "win32":
        with suppress(ProcessLookupError, PermissionError):  # the group is empty, or nothing but an ended process
            os.killpg(process.pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Make this process save and end, as after SIGTERM, when its parent has ended; kill it if it does not end."""
    threading.Thread(target=_follow, name="parent", daemon=True).start()


def _follow() -> None:
    """Read stdin until it closes. A thread that reads sys.stdin would hold its lock when the interpreter ends."""
    while os.read(0, 1):
        pass
    if sys.platform == "win32":  # os.kill would end it without a save
        signal.raise_signal(signal.SIGTERM)
        time.sleep(PATIENCE)
        os._exit(128 + signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.killpg(0, signal.SIGKILL)  # it hangs; its compilers and the like belong to its group


def check_processes(processes: int, run: Run) -> None:
    """Raise UsageError if this machine cannot train `run` with so many processes, or its batch cannot be shared."""
    if processes < 1:
        raise UsageError(f"--nproc is {processes}. It must be at least 1.")
    check_devices(processes, run)
    if run.batch_size is not None:
        check_batch(run.batch_size, processes)


def check_devices(processes: int, run: Run) -> None:
    """Raise UsageError if `run` has fewer GPUs than processes, or uses none and `check_room` rejects the number.

    A single GPU is refused with several processes, and not replaced by others: it was asked for.
    """
    if processes > 1:
        refuse_one_gpu(run.device)
    count = torch.cuda.device_count() if _on_gpu(run.device) else processes
    if processes > count:
        raise UsageError(
            f"--nproc is {processes}, but this machine has {count} GPU{'s' if count > 1 else ''}, and each process "
            f"needs one. Give --nproc {count} or less, or train with --device cpu."
        )
    check_room("--nproc", processes, run)


def check_room(flag: str, processes: int, run: Run, device: str | None = None) -> None:
    """Raise UsageError if memory or cores do not suffice for `processes` of `run`; warn if they share cores.

    The memory of a process is `PROCESS_BYTES`, and on a CPU the training state (`state_bytes`). Processes
    cut their batches to the memory that is free, so activations are not counted. One process is never rejected.
    """
    if processes <= 1:
        return
    gpu, cores, free = _on_gpu(device or run.device), available_cores(), free_memory(torch.device("cpu"))
    each = PROCESS_BYTES
    if not gpu:
        each += state_bytes(learned_values(_network(run)))
    fitting = max(1, min(free // each, processes if gpu else PER_CORE * cores))
    if processes > fitting:
        raise UsageError(
            f"{flag} is {processes}, but only {fitting} fit{'s' if fitting == 1 else ''} on this machine. It has "
            f"{free / 2**30:.1f} GiB of free memory, of which each process needs about {each / 2**30:.1f} GiB, and "
            f"{cores} core{'s' if cores > 1 else ''} for at most {PER_CORE} processes each. "
            f"Give {flag} {fitting} or less."
        )
    if processes > cores and not gpu:
        log.warning("%s is %d, but there are %d cores: the processes share them and are slower", flag, processes, cores)


def trials_at_once(runs: Sequence[Run]) -> int:
    """Return the number of trials to train at the same time if nobody has chosen it: 1 on accelerators.

    On a CPU small networks leave cores idle, and several trials of one thread do more than one trial of several
    threads. So there is one trial for each core, as far as the memory holds whole batches of the largest run.
    """
    cpu = torch.device("cpu")
    if not runs or any(choose_device(run.device) != cpu for run in runs):
        return 1
    most = min(len(runs), available_cores())
    if most == 1:
        return 1
    return max(1, min(most, int(SHARE * free_memory(cpu) / max(_bytes_of_batches(runs)))))


def _bytes_of_batches(runs: Sequence[Run]) -> Iterator[float]:
    """Yield the bytes that a process of each different network takes on a CPU with a whole batch."""
    for config, batch, precision in {(_network(run), run.batch_size or LARGEST, run.precision) for run in runs}:
        activations = activation_bytes(config, None, compute_precision(torch.device("cpu"), precision), "cpu")
        yield PROCESS_BYTES + state_bytes(learned_values(config)) + OVERHEAD * activations * batch


def _network(run: Run) -> ViTConfig | ResNetConfig:
    """Return the config of the network of `run`, without a classifier."""
    return network_config(run, None if run.weights is None else read_card(run.weights))[0]


def _on_gpu(device: str | None) -> bool:
    """Return whether processes of a run on `device` (None: the fastest) compute on a CUDA device."""
    return has_cuda() and (device or "cuda").startswith("cuda")


def refuse_one_gpu(device: str | None) -> None:
    """Raise UsageError if `device` names a single GPU, which several processes cannot share."""
    if device is not None and device.startswith("cuda:"):
        raise UsageError(
            f"--device is {device}, a single GPU, but each process of a run needs its own. Use --device cuda, and "
            f"choose GPUs with CUDA_VISIBLE_DEVICES=0,1"
        )


if __name__ == "__main__":
    end_with_parent()
    world.leave(main(*sys.argv[1:]))
