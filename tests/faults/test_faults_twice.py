"""Fault 64: two of everything at once on one folder."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from commands import Command, run, start
from random_inputs import EXAMPLES, MANY
from scenes import SHORT, snapshot
from writers import EACH_WAY, HIDDEN, WRITERS, Scene, files, scene_in, written_alone

ROUNDS = max(1, EXAMPLES // 100)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_in(tmp_path_factory.mktemp("scene"))


def at_once(*commands: Command) -> tuple[list[int], list[str]]:
    """Exit codes and errors of commands that run at the same time; none of them shows a traceback."""
    codes, said = [command.wait() for command in commands], [command.err for command in commands]
    assert not any("Traceback" in text or "Exception" in text for text in said), said
    return codes, said


OF_THEIR_OWN = ("train", "finetune")
"""Writers whose calls have folders of their own within the target."""
TIMED = ("sweep", "bench", "vtab")
"""Writers whose results hold times."""


@pytest.mark.processes
@pytest.mark.parametrize("name", EACH_WAY)
def test_64_two_writers_of_one_target(name: str, scene: Scene, tmp_path: Path) -> None:
    """One of them writes what it writes alone; the others do the same, or are refused."""
    writer, env = WRITERS[name], {"VITRAIL_CACHE": str(tmp_path / "cache")}
    alone = written_alone(name, scene)
    for number in range(ROUNDS):
        place = tmp_path / f"place-{number}"
        place.mkdir()
        argv = writer.argv(scene, place / writer.out)
        codes, said = at_once(*(start(*argv, cwd=scene.cache.parent, env=env) for _ in range(2)))
        assert set(codes) <= {0, 1, 2} and 0 in codes, said
        assert all(code == 0 or str(place) in text for code, text in zip(codes, said, strict=True)), said
        assert not [file for file in files(place) if HIDDEN.search(file)], files(place)
        if name in OF_THEIR_OWN:
            folders = [*(place / "r").iterdir()]
            assert codes == [0, 0] and len(folders) == 2
            assert all((folder / "model" / "best" / "model.safetensors").exists() for folder in folders)
        elif name in TIMED:
            assert untimed(place) == untimed(alone), said
        else:
            assert hashes(place) == hashes(alone)


def untimed(place: Path) -> set[str]:
    """Names of files without the times and processes in them."""
    return {re.sub(r"tfevents.*", "tfevents", name) for name in files(place)}


READERS = [
    *("evaluate {run} {photos}", "predict {run} {photos}", "embed {run} {photos} --out {out}", "report {run}"),
    *("inspect {run} --what filters --out {out}", "weights info {run}", "weights verify {run}"),
    *("weights convert {run} {out}", "probe knn {run} {photos} --k 3", "data dedup {photos}", "data stats {photos}"),
    *(
        "train {photos} --resume {run}",
        "finetune {photos} --from {run} --dry-run",
        "export {run} --to program --out {out}",
    ),
]


@pytest.mark.kill
def test_64_a_run_that_is_read_while_it_trains(scene: Scene, tmp_path: Path) -> None:
    often = ["--checkpoint-every", "1 steps", "--evaluate-every", "1 steps", "--early-stop", "1000000"]
    trained = start("train", scene.photos, *SHORT, "100000 steps", *often, cwd=tmp_path)
    folder = tmp_path / "runs" / "scratch-small-1"
    for number, words in enumerate(READERS if MANY else READERS[::4]):  # before the first model, or while it is written
        refused_or_right(words, folder, scene, tmp_path / f"early-{number}", trained)
    while not (folder / "model" / "best").exists():
        time.sleep(0.05)
    for number, words in enumerate(READERS * ROUNDS if MANY else READERS[:-1]):  # what exports reads as what converts
        command = refused_or_right(words, folder, scene, tmp_path / f"out-{number}", trained)
        assert command.process.exitcode == 0 or "--resume" in words, command.err
    os.kill(trained.pid, signal.SIGTERM)
    assert trained.wait() == 143, trained.err
    assert "Traceback" not in trained.err and "warning" not in trained.err.lower(), trained.err
    assert run("train", "--resume", folder, "--duration", "1 steps", cwd=tmp_path).process.exitcode in (0, 2)


def refused_or_right(words: str, folder: Path, scene: Scene, out: Path, trained: Command) -> Command:
    """Run a command on the folder of a run that trains; it ends right or says what is wrong."""
    argv = [word.format(run=folder, photos=scene.photos, out=out) for word in words.split()]
    command = run(*argv, cwd=scene.cache.parent, env={"VITRAIL_CACHE": str(scene.cache)})
    assert command.process.exitcode in (0, 1, 2), command.err
    assert "Traceback" not in command.err and "Exception" not in command.err, command.err
    assert command.process.exitcode == 0 or str(folder) in command.err, command.err
    assert trained.process.exitcode is None, trained.err
    print(command.process.exitcode, words, command.err[-150:])
    return command


def hashes(folder: Path) -> dict[str, str]:
    return {name: found for name, (_, found) in snapshot(folder).items()}
