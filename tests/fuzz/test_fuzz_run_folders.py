"""Any file of a run folder may be missing, damaged, huge or another thing, and any verb may be asked to read the run:
it works or says in words what is wrong, in bounded memory and time, and leaves the rest of the folder as it is."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import re
import resource
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import commands
import pytest
from random_inputs import EXAMPLES
from scenes import SHORT, draw, snapshot

pytestmark = pytest.mark.fuzz

MEMORY = 4 << 30
"""Bytes that a verb may allocate; a read of a huge file as a whole takes more."""
HUGE = 10 << 30


def fill(content: bytes) -> Callable[[Path], object]:
    """What writes this content in place of a file's."""
    return lambda path: path.write_bytes(content)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 0x41
    path.write_bytes(data)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def dead_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone") / "at-all")  # not elsewhere: root may make what a link names


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def numbers(path: Path) -> None:
    """Every number becomes NaN, in the way of the file's kind."""
    word = b".nan" if path.suffix == ".yaml" else b"NaN"
    path.write_bytes(re.sub(rb"(?<=[ :\[,])-?\d+(\.\d+)?(e-?\d+)?\b", word, path.read_bytes()))


def texts(path: Path) -> None:
    """Every number becomes a text."""
    path.write_bytes(re.sub(rb"(?<=[ :\[,])(-?\d+(\.\d+)?)\b", rb'"x\1"', path.read_bytes()))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": fill(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": flip,
    "folder": folder,
    "loop": loop,
    "dead link": dead_link,
    "pipe": pipe,
    "device": device,
    "unreadable": lambda path: path.chmod(0),
    "huge": lambda path: os.truncate(path, HUGE),
    "a list": fill(b"[1, 2]"),
    "a number": fill(b"5"),
    "null": fill(b"null"),
    "nested": fill(b'{"a":' * 5000),
    "NaN": numbers,
    "text": texts,
    "UTF-16": lambda path: path.write_bytes(path.read_bytes().decode("latin-1").encode("utf-16")),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}
"""What happens to a file; "another run" is added, which has that run's file in its place."""

VERBS: dict[str, list[str]] = {
    "resume": ["train", "--resume", "RUN", "--duration", "3 epochs"],
    "predict": ["predict", "RUN", "photos", "--out", "out/p.csv", "--device", "cpu"],
    "evaluate": ["evaluate", "RUN", "--device", "cpu"],
    "embed": ["embed", "RUN", "photos", "--out", "out/f.npz", "--device", "cpu"],
    "inspect": ["inspect", "RUN", "--what", "rollout", "--out", "out/figures", "--device", "cpu"],
    "report": ["report", "RUN"],
    "compare": ["report", "RUN", "other", "--out", "out/compared.html"],
    "export": ["export", "RUN", "--to", "program", "--out", "out/program"],
    "knn": ["probe", "knn", "RUN", "--k", "1", "--device", "cpu"],
    "info": ["weights", "info", "RUN"],
    "verify": ["weights", "verify", "RUN"],
    "convert": ["weights", "convert", "RUN", "out/model"],
    "finetune": ["finetune", "photos", "--from", "RUN", "--print-config"],
    "config": ["train", "photos", "--config", "RUN/config.yaml", "--print-config"],
    "serve": ["serve", "RUN", "--port", "0"],
}


def stopped() -> None:
    """The process is told to end when its first checkpoint has been written."""
    from vitrail.training.checkpoints import checkpoint

    publish, left = checkpoint._publish, [1]

    def publish_and_end(temporary: Path, final: Path) -> None:
        publish(temporary, final)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGTERM)

    checkpoint._publish = publish_and_end


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs, a finished run, one that was ended before, and another finished one."""
    place = tmp_path_factory.mktemp("scene")
    draw(place / "photos")
    save = ("--checkpoint-every", "1 steps")
    for name, seed, before in (("finished", "0", None), ("ended", "0", stopped), ("other", "1", None)):
        argv = ["train", "photos", *SHORT, "2 epochs", "--seed", seed, *save, "--out", "runs", "--name", name]
        done = commands.run(*argv, cwd=place, before=before)
        assert done.process.exitcode == (143 if before else 0), done.err
        (place / "runs" / f"{name}-1").rename(place / name)
    return place


def bound_by_modes() -> None:
    """Root may no longer read and write what the modes of files forbid their owner."""
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    found, libc = ctypes.create_string_buffer(24), ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, found) == 0
    effective, *rest = struct.unpack("=6I", found.raw)
    kept = effective & ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, struct.pack("=6I", kept, *rest)) == 0


def bounded(serving: bool) -> None:
    """This process may not use more memory than `MEMORY`, and a server ends itself after a while."""
    bound_by_modes()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    if serving:
        signal.setitimer(signal.ITIMER_REAL, 6)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


def files(run: Path) -> list[str]:
    """Names of the files of a run; of TensorBoard's, whose names differ, none."""
    return sorted(
        str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and "tfevents" not in path.name
    )


def attempt(scene: Path, place: Path, which: str, file: str, how: str, verb: str) -> str:
    """Return what is wrong with what a verb did with a damaged run; "" for nothing."""
    for name in ("photos", which, "other"):
        target = place / ("RUN" if name == which else name)
        shutil.copytree(scene / name, target, dirs_exist_ok=True)
    run = place / "RUN"
    (place / "out").mkdir(exist_ok=True)
    if how == "another run":
        theirs = scene / "other" / file
        if not theirs.is_file():
            return ""
        shutil.copy(theirs, run / file)
    if how != "another run":
        DAMAGE[how](run / file)
    before = snapshot_but(run, file)
    done = commands.start(*VERBS[verb], cwd=place, before=bounded, given=(verb == "serve",))
    try:
        code = done.wait(60)
    except AssertionError as error:
        return str(error)
    after = snapshot_but(run, file)
    return judged(code, done.err, before, after, verb, file)


def snapshot_but(run: Path, file: str) -> dict[str, tuple[int, str]]:
    """Files and hashes of a run without the damaged file."""
    hidden = run / file
    if hidden.is_file() and not hidden.is_symlink() and hidden.stat().st_size > 1 << 30:
        size = hidden.stat().st_size
        os.truncate(hidden, 0)
        try:
            found = snapshot(run)
        finally:
            os.truncate(hidden, size)
    else:
        found = snapshot_of(run, hidden)
    return {name: value for name, value in found.items() if name != file and not name.startswith(file + "/")}


def snapshot_of(run: Path, hidden: Path) -> dict[str, tuple[int, str]]:
    """A snapshot, also where a link leads to a device."""
    if not hidden.is_symlink():
        return snapshot(run)
    leads = os.readlink(hidden)
    hidden.unlink()
    try:
        return snapshot(run)
    finally:
        hidden.symlink_to(leads)


WRITES = {"report": {"report.html", "comparison.html"}, "resume": {".lock"}}
"""Files of a run that a verb may write even if it ends with an error."""


def judged(
    code: int, said: str, before: dict[str, tuple[int, str]], after: dict[str, tuple[int, str]], verb: str, file: str
) -> str:
    """Return what is wrong; "" for nothing."""
    if "Traceback" in said:
        return f"traceback: {said[-400:]}"
    if "emory" in said:
        return f"memory: {said[-300:]}"
    if code not in (0, 1, 2, 143, -15):
        return f"exit code {code}: {said[-300:]}"
    if code in (1, 2) and not said.strip():
        return "an error without a word"
    if code in (1, 2) and not any(part in said for part in (file, Path(file).name, str(Path(file).parent), "RUN")):
        return f"the error names no file: {said[-300:]}"
    if verb == "resume" and (code == 0 or "could not write" in said):  # it went on, and says what it lost
        return (
            "" if set(before) - {name for name in before if name.startswith("checkpoints/")} <= set(after) else "lost"
        )
    changed = {name for name in before if after.get(name) != before[name]} - WRITES.get(verb, set())
    return f"changed {sorted(changed)}" if changed else ""


def test_65_any_file_of_a_run_folder_and_any_verb(scene: Path, tmp_path: Path) -> None:
    cases = [
        (which, file, how, verb)
        for which in ("finished", "ended")
        for file, how, verb in itertools.product(files(scene / which), [*DAMAGE, "another run"], VERBS)
    ]
    chosen = random.sample(cases, min(EXAMPLES, len(cases)))
    wrong = {}
    for number, case in enumerate(chosen):
        if problem := attempt(scene, tmp_path / str(number), *case):
            wrong[" ".join(case)] = problem
        for path in (tmp_path / str(number)).rglob("*"):
            path.is_symlink() or not path.exists() or path.chmod(0o755)
        shutil.rmtree(tmp_path / str(number))
    assert not wrong, "\n".join(f"{case}: {problem}" for case, problem in wrong.items())
