"""The server ends after its time for open requests, whatever a thread still does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from vitrail.server.process import end_after

HANGS = """
import signal, sys, threading, time
from vitrail.server.process import end_after
threading.Thread(target=time.sleep, args=(600,)).start()
end_after(1, signal.SIGTERM)
if sys.argv[1] == "lock":
    sys.setswitchinterval(600)
    import re
    re.match("(a|a)*b", "a" * 60)  # holds the lock of the interpreter
"""


@pytest.mark.processes
@pytest.mark.parametrize(("hold", "codes"), [("sleep", (143,)), ("lock", (143, -14))])
def test_a_thread_that_hangs_does_not_keep_the_server(hold: str, codes: tuple[int, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", HANGS, hold], timeout=120, capture_output=True, check=False)
    assert done.returncode in codes, done.stderr


def test_a_server_that_ended_in_time_leaves_the_process_alone() -> None:
    cancel = end_after(60, signal.SIGTERM)
    cancel()
    assert signal.alarm(0) == 0  # the seconds that were left
