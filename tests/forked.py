"""Processes forked from one that has imported torch and vitrail already (multiprocessing's fork server), so that each
of them starts in a fraction of a second in place of five to ten."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = [
    *(
        "vitrail.cli",
        "vitrail.verbs.flags.parse",
        "vitrail.verbs.predict",
        "vitrail.training.loop",
        "vitrail.reports.page",
    ),
    *("torch._dynamo", "torch.utils.tensorboard", "matplotlib.figure", "rich.console", "sklearn.datasets"),
    *(
        "vitrail.verbs.data.check",
        "vitrail.training.processes.child",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
    ),
    "forked_imports",
]


def server() -> Any:
    """Return the context whose `Process` is forked from the server, which is started where it does not run yet."""
    from multiprocessing import forkserver, get_context

    context = get_context("forkserver")
    running = forkserver._forkserver
    if running._forkserver_pid is None and running._forkserver_address is not None:  # this process is forked itself
        running.ensure_running = lambda: None
        return context
    before = dict(os.environ)
    # the server is a new interpreter
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), before.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        context.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class Forked:
    """`function(*arguments)` in a process of its own, which is used as a `subprocess.Popen` is.

    `function` must end the process itself where its exit code is to be another than 0 or 1.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, env: Mapping[str, str]) -> None:
        self._process = server().Process(target=_child, args=(function, arguments, dict(env)))
        self._process.start()
        self.stdin: Any = None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, minus the signal where one killed it; None while it runs."""
        return self._process.exitcode  # type: ignore[no-any-return]

    def poll(self) -> int | None:
        """See `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        self._process.kill()

    def terminate(self) -> None:
        """Ask it to end, unless it has ended."""
        self._process.terminate()


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], env: dict[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(env)
    function(*arguments)
    sys.stdout.flush()


class _Descriptor:
    """A file descriptor of this process, open in the process that it is sent to."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[..., int], tuple[Any]]:
        return _received, (DupFd(self.number),)


def _received(descriptor: Any) -> int:
    return int(descriptor.detach())


def in_place_of_interpreters(patch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let what starts `python -P -m MODULE ...` in this process have it forked; return the commands it starts.

    The child has the environment, folder and process group that it would have, and the streams that it is given.
    """
    popen, commands = subprocess.Popen, []

    def started(command: Sequence[str], *rest: Any, **options: Any) -> Any:
        if command[:3] != [sys.executable, "-P", "-m"]:
            return popen(command, *rest, **options)
        commands.append([*command])
        out, err = options.get("stdout"), options.get("stderr")
        assert err in (None, subprocess.STDOUT)
        read, write = os.pipe()
        files = [_Descriptor(read), out and _Descriptor(out.fileno()), 1 if err else None]
        place = os.getcwd(), 0 if options.get("process_group") == 0 else os.getpgrp()
        child = Forked(_module, command[3:], files, *place, env=options.get("env") or os.environ)
        os.close(read)
        child.stdin = os.fdopen(write, "wb")  # closed when this process has ended, or nobody knows the child any more
        return child

    patch.setattr(subprocess, "Popen", started)
    return commands


def _module(words: list[str], files: Sequence[int | None], folder: str, group: int) -> None:
    os.setpgid(0, group)
    os.chdir(folder)
    for descriptor, file in enumerate(files):
        if file is not None:
            os.dup2(file, descriptor)
    sys.argv = words
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the server has imported the module
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
