"""Windows and macOS, as far as Linux can show them: vitrail's modules lack what those systems lack.

`elsewhere/sitecustomize.py` removes it from every process of a command. On both, readers of images are not forked from
a process that Linux alone has; on Windows no folder is opened, a signal ends a process at once, and some names of files
are refused. Text that is opened with the encoding of the system is an error.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ("train", "digits", "--out", "runs", "--name", "run", "--duration")
PROCESSES = ("--workers", "2", "--worker-kind", "processes")


def environment(system: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "tests" / "elsewhere"), str(ROOT)])
    pretended = {"VITRAIL_PRETENDS": system, "PYTHONWARNDEFAULTENCODING": "1", "PYTHONPATH": path}
    return {**os.environ, **pretended, "OMP_NUM_THREADS": "1"}


def vitrail(system: str, folder: Path, *argv: str) -> str:
    """The standard output of a command on a system, which must end well."""
    command = [sys.executable, "-m", "vitrail", *argv]
    done = subprocess.run(command, cwd=folder, env=environment(system), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.processes
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_help_training_and_prediction_need_nothing_that_the_system_lacks(system: str, tmp_path: Path) -> None:
    assert "vitrail train" in vitrail(system, tmp_path, "--help")
    vitrail(system, tmp_path, *TRAIN, "4 steps", *PROCESSES)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png")
    vitrail(system, tmp_path, "predict", "runs/run-1", "a.png", "--out", "classes.csv")
    assert (tmp_path / "classes.csv").read_text(encoding="utf-8").splitlines()[1].startswith("a.png,")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "classes.csv", "runs"}  # no lock is left
    assert '"tested": false' in vitrail(system, tmp_path, "doctor", "--json")


@pytest.mark.processes
def test_several_processes_save_after_the_signal_that_windows_has(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vitrail", *TRAIN, "100000 steps", "--nproc", "2"]
    ours = environment("win32")
    with subprocess.Popen(command, cwd=tmp_path, env=ours, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("step "):
                process.send_signal(signal.SIGINT)
                break
        said = "".join([*lines, process.stderr.read()])
    assert process.returncode == 128 + signal.SIGUSR1, said  # stands for SIGBREAK
    assert "saved at step" in said and "Traceback" not in said


@pytest.mark.processes
def test_what_stands_in_for_another_system_lacks_something(tmp_path: Path) -> None:
    """So that the tests above can fail: each of these would be an error on Windows."""
    (tmp_path / "vitrail_module.py").write_text(
        "import os, signal, sys\n"
        "def failed(act, error):\n"
        "    try:\n        act()\n"
        "    except error:\n        return True\n"
        "def posix():\n    import fcntl\n"
        "checks = [sys.platform == 'win32', not hasattr(signal, 'SIGHUP'), failed(posix, ImportError),\n"
        "    failed(lambda: os.open('.', os.O_RDONLY), PermissionError), failed(lambda: os.mkdir('a:b'), OSError),\n"
        "    failed(lambda: os.fork, AttributeError), failed(lambda: open('con.txt', 'w'), OSError),\n"
        "    failed(lambda: open('a', 'w'), EncodingWarning)]\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-c", "import vitrail_module; print(vitrail_module.checks)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment("win32"), capture_output=True, text=True)
    assert done.stdout == f"{[True] * 8}\n", done.stdout + done.stderr
