"""Kills at drawn moments: whichever process of a run is ended, and how, none is left, and the run is resumed.

`VITRAIL_TEST_EXAMPLES=N` draws N / 10 kills, each of three real processes, which takes about fifteen seconds.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run
from families import Family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_inputs import EXAMPLES
from scenes import SHORT

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.nightly(
        "test_62_when_the_launcher_is_killed_its_processes_save_and_end; for the others"
        " test_when_one_fails_all_end_and_the_first_cause_is_told"
    ),
]

STEPS = 150
MOMENTS: dict[str, Callable[[Family, Path], object]] = {
    "start": lambda family, _: True,
    "processes": lambda family, _: len(family.members()) == 2,
    "folder": lambda _, folder: folder.exists(),
    "lock": lambda _, folder: (folder / ".lock").exists(),
    "calibration": lambda _, folder: (folder / "config.yaml").exists(),
    "first save": lambda _, folder: any(folder.glob("checkpoints/*")),
    "evaluation": lambda _, folder: logged(folder, "validation"),
    "last save": lambda _, folder: any(folder.glob(f"checkpoints/*{STEPS}*")),
    "model": lambda _, folder: any(folder.glob("model/*")),
    "test": lambda _, folder: logged(folder, "test"),
    "report": lambda _, folder: any(folder.glob("*report.html*")),
}
VICTIMS: dict[str, Callable[[Family], list[int]]] = {
    "launcher": lambda family: [family.launcher.pid],
    "first": lambda family: [member.pid for member in family.members()[:1]],
    "second": lambda family: [member.pid for member in family.members()[1:2]],
    "all but the launcher": lambda family: [member.pid for member in family.members()],
    "all": lambda family: [process.pid for process in family.processes()],
}
NUMBERS = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


def logged(folder: Path, kind: str) -> bool:
    file = folder / "metrics.jsonl"
    return file.exists() and f'"kind": "{kind}"' in file.read_text()


@settings(max_examples=max(1, EXAMPLES // 10), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    moment=st.sampled_from(sorted(MOMENTS)),
    after=st.floats(0, 0.5),
    victim=st.sampled_from(sorted(VICTIMS)),
    number=st.sampled_from(NUMBERS),
    stopped=st.booleans(),
)
def test_a_kill_leaves_no_process_and_a_run_that_is_resumed(
    photos: Path, moment: str, after: float, victim: str, number: signal.Signals, stopped: bool
) -> None:
    cwd = Path(tempfile.mkdtemp(prefix="kills-"))
    folder = cwd / "runs" / "scratch-small-1"
    flags = ("--checkpoint-every", "10 steps", "--evaluate-every", "20 steps", "--timeout", "20", "--nproc", "2")
    with Family("train", photos, *SHORT, f"{STEPS} steps", *flags, cwd=cwd) as family:
        family.until(lambda: MOMENTS[moment](family, folder))
        time.sleep(after)
        victims = VICTIMS[victim](family)
        if stopped:  # a stopped process gets the signal when it continues, or is killed where it stands
            family.send(signal.SIGSTOP, victims)
            time.sleep(after)
        family.send(number, victims)
        if stopped:
            family.send(signal.SIGCONT, victims)
        family.gone()
        assert "Traceback" not in family.said, family.said
    if not any(folder.glob("checkpoints/step-*[0-9]")):
        return
    resumed = run("train", "--resume", folder, cwd=cwd)
    assert resumed.process.exitcode == 0, resumed.err
    assert json.loads((folder / "run.json").read_text())["result"]["steps"] == STEPS
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [*range(20, STEPS, 20), STEPS]
