"""Processes forked from one that has imported torch and vitrail already (multiprocessing's fork server), so that each
of them starts in a fraction of a second in place of five to ten."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
        "vitrail.training.processes",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
    ),
    "forked_imports",
]


def server() -> Any:
    """Return the context whose `Process` is forked from the server, which is started where it does not run yet."""
    from multiprocessing import forkserver, get_context

    context = get_context("forkserver")
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


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], env: dict[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(env)
    function(*arguments)
    sys.stdout.flush()


def in_two_processes(function: Callable[..., Any], *arguments: Any, seconds: float = 300) -> list[int]:
    """Call `function(*arguments)` in two processes that may form a group, and return their exit codes."""
    from vitrail.training.processes import process_environment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    members = [Forked(function, *arguments, env=process_environment(rank, 2, port)) for rank in range(2)]
    return [member.wait(seconds) for member in members]
