"""Faults 68 and 69: targets that cannot be written, and folders that change, disappear or fill up during the work."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run
from forked import ROOT
from random_inputs import MANY
from scenes import CHANGES, HIDE, SHORT, changing, interrupted, read_only, small_disk, snapshot, vanishing
from writers import (
    EACH_WAY,
    HIDDEN,
    NOTHING,
    TUNED,
    WRITERS,
    Scene,
    by_turns,
    debris,
    files,
    scene_in,
    write,
    write_capped,
    written_alone,
)

from vitrail import cli
from vitrail.data.cache import refuse_within
from vitrail.errors import DataError, WriteError
from vitrail.evaluation.feature_files import growing_npy, growing_npz
from vitrail.files import beside, check_writable, replacing, replacing_text
from vitrail.verbs.streams import Terminated, terminating

ADDRESSES = ("http://host.invalid/", "s3://bucket/folder/")

pytestmark = pytest.mark.page  # it is one of the files that are written


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_in(tmp_path_factory.mktemp("scene"))


@pytest.fixture(autouse=True)
def _sources_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    if not {"scene", "here"} & {*request.fixturenames}:
        yield
        return
    scene = request.getfixturevalue("scene")
    before = [snapshot(folder) for folder in (scene.photos, scene.weights, scene.run)]
    yield
    assert [snapshot(folder) for folder in (scene.photos, scene.weights, scene.run)] == before


def refused(said: str, *texts: str) -> None:
    assert "Traceback" not in said and "Exception" not in said, said
    assert all(text in said for text in ("vitrail: ", "cannot ", *texts)), said


@pytest.mark.processes
@pytest.mark.parametrize("name", WRITERS)
def test_68_missing_folders_are_made_and_everything_is_written(name: str, scene: Scene) -> None:
    place = written_alone(name, scene)
    assert not [file for file in files(place.parents[1]) if HIDDEN.search(file)]
    written = place / WRITERS[name].out
    assert any(written.iterdir()) if WRITERS[name].folder else written.stat().st_size


@pytest.mark.processes
@pytest.mark.parametrize("name", WRITERS)
def test_68_a_place_that_is_read_only(name: str, scene: Scene, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = write(WRITERS[name], scene, place, before=read_only, given=(str(place),))
    if command.process.exitcode == 77:
        pytest.skip("this user may not mount")
    assert command.process.exitcode in (1, 2)
    refused(command.err, str(place), "Choose a place that can be written")
    assert command.out == "" and files(place) == {}


Here = Callable[..., tuple[str, str]]


@pytest.fixture
def here(scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Run a writer, which refuses its target before it works, in this process; return what it printed."""
    monkeypatch.setenv("VITRAIL_CACHE", str(scene.cache))

    def run_here(name: str, target: str | Path) -> tuple[str, str]:
        assert cli.main(WRITERS[name].argv(scene, target)) in (1, 2)
        said = capsys.readouterr()
        return said.out, said.err

    return run_here


@pytest.mark.processes
@pytest.mark.parametrize("name", WRITERS)
def test_68_a_file_where_a_folder_should_be(name: str, here: Here, tmp_path: Path) -> None:
    (tmp_path / "place").write_text("of the user")
    _, said = here(name, tmp_path / "place" / WRITERS[name].out)
    refused(said, str(tmp_path / "place"))
    assert files(tmp_path) == {"place": 11}


@pytest.mark.processes
@pytest.mark.parametrize("name", WRITERS)
def test_68_the_other_kind_of_thing_at_the_target(name: str, here: Here, tmp_path: Path) -> None:
    """A file where the folder should be, or a folder where the file should be."""
    writer = WRITERS[name]
    target = tmp_path / writer.out
    if writer.folder:
        target.write_text("of the user")
    else:
        target.mkdir()
        (target / "own").write_text("of the user")
    before = files(tmp_path)
    _, said = here(name, target)
    assert str(target) in said and files(tmp_path) == before


@pytest.mark.processes
@pytest.mark.parametrize("name", WRITERS)
def test_68_an_address_is_not_a_place_to_write(
    name: str, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked of the network, and no folder of the address's name appears."""
    monkeypatch.chdir(tmp_path)
    target = ADDRESSES[[*WRITERS].index(name) % 2] + WRITERS[name].out
    out, said = here(name, target)
    refused(said, f"cannot write {target}: ", "this is an address", "Give a path of this machine")
    assert out == "" and files(tmp_path) == {}


@pytest.mark.processes
@pytest.mark.parametrize("name", WRITERS)
def test_68_a_name_that_is_not_utf8_is_no_place_to_write(
    name: str, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some libraries refuse it at the end of the work, and others write it under another name."""
    monkeypatch.chdir(tmp_path)
    out, said = here(name, os.fsdecode(b"\xff") + WRITERS[name].out)
    refused(said, "cannot write ", "bytes that are not UTF-8. Choose another name")
    assert out == "" and files(tmp_path) == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("context", [replacing, replacing_text, beside, growing_npz, growing_npy])
def test_68_a_signal_leaves_no_part_of_a_file(context: Any, number: signal.Signals, tmp_path: Path) -> None:
    """These contexts are all the ways in which results are written."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    with (
        pytest.raises((KeyboardInterrupt, Terminated)) as stopped,
        terminating(),
        context(tmp_path / "new" / "r.csv") as found,
    ):
        if context is beside or context is replacing:
            found.write_text("half")
        signal.raise_signal(number)
    assert files(tmp_path) == {} and not (tmp_path / "new").exists()
    assert getattr(stopped.value, "exit_code", 130) == 128 + number
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        *("demo --out {target}", "study figure4 --data {photos} --out {target}"),
        "vtab --from {weights} --data {photos} --out {target}",
    ],
)
def test_68_an_address_is_not_a_place_for_long_work(words: str, scene: Scene, tmp_path: Path) -> None:
    target = "gs://bucket/x"
    argv = words.format(target=target, photos=scene.photos, weights=scene.weights).split()
    command = run(*argv, cwd=tmp_path, env={"VITRAIL_CACHE": str(scene.cache)})
    assert command.process.exitcode == 2 and command.out == ""
    refused(command.err, f"cannot write {target}: ", "this is an address")
    assert files(tmp_path) == {}


def test_68_what_is_an_address_and_what_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for address in ("s3://b/x", "HTTPS://h/x", "file:///tmp/x", "hf://datasets/a/b", "simplecache::s3://b/x"):
        for folder in (False, True):
            with pytest.raises(WriteError, match="this is an address"):
                check_writable(Path(address), folder=folder)
        with pytest.raises(DataError, match="this is an address"):
            refuse_within(address, "digits")
    assert files(tmp_path) == {}
    for name in ("12:30", "a: b.csv", "run:2/x", f"{tmp_path}/s3:/x", "://x", "c:/x"):
        check_writable(Path(name))
        check_writable(Path(name), folder=True)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), by_turns(0, 3, "0", "700", "20_000"))
def test_68_a_disk_that_is_full_at_any_byte(name: str, size: str, scene: Scene, tmp_path: Path) -> None:
    most = int(size)
    code, said = write_capped(WRITERS[name], scene, tmp_path, most)
    assert "Traceback" not in said and "Exception ignored" not in said, said
    if code == 0:
        assert all(size <= most for size in files(tmp_path).values()) and (tmp_path / WRITERS[name].out).exists()
        return
    assert code in (1, 2)
    assert "File too large" in said and ("cannot " in said or "could not " in said), said
    assert debris(WRITERS[name], tmp_path) == []


@pytest.mark.processes
def test_27_a_run_says_what_it_could_not_write(scene: Scene, tmp_path: Path) -> None:
    code, said = write_capped(WRITERS["train"], scene, tmp_path, 4000)
    assert code == 1 and "except what could not be written: " in said and "Training continues" in said, said
    names, _, reason = said.partition("except what could not be written: ")[2].splitlines()[0].partition(" (")
    lost = names.split(", ")
    assert "File too large" in reason
    there = files(tmp_path / "r" / "scratch-small-1")
    names = {"the best model": "model/best/model.safetensors", "the last model": "model/last/model.safetensors"}
    assert {"the newest checkpoint", *names} <= set(lost)
    assert not [name for name in lost if names.get(name, name) in there]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), by_turns(1, 3, "64k", "4k", "12k"))
def test_68_a_small_disk(name: str, size: str, scene: Scene, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size) as disk:
        command = write(WRITERS[name], scene, disk)
        assert "Traceback" not in command.err
        if command.process.exitcode:
            assert "No space left on device" in command.err or "disk full" in command.err, command.err
            assert debris(WRITERS[name], disk) == []


@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name, _ in by_turns(2, 3, "it disappears")])
def test_69_a_target_that_disappears_during_the_work(name: str, scene: Scene, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = write(WRITERS[name], scene, place, before=vanishing, given=(str(place),))
    assert "Traceback" not in command.err, command.err
    if command.process.exitcode:
        assert command.process.exitcode in (1, 2) and str(place) in command.err, command.err


@pytest.mark.processes
@pytest.mark.parametrize("name", EACH_WAY)
def test_68_ctrl_c_when_the_first_file_is_written(name: str, scene: Scene, tmp_path: Path) -> None:
    """It says so and leaves no part of a file; what is kept is gone on from. Other moments: tests/properties."""
    writer = WRITERS[name]
    command = write(writer, scene, tmp_path, before=interrupted, given=(str(tmp_path),))
    assert command.process.exitcode == 130 and "Traceback" not in command.err, command.err
    assert command.out == "" and command.err.splitlines()[-1].startswith("vitrail: "), command.err
    assert debris(writer, tmp_path) == []
    if writer.kept != NOTHING:
        again = write(writer, scene, tmp_path)
        assert again.process.exitcode == 0 and (tmp_path / writer.out).exists(), again.err


@pytest.mark.processes
@pytest.mark.parametrize("flags", [(), ("--duration", "4 steps")], ids=["finished", "longer"])
def test_68_a_run_that_is_resumed_where_nothing_can_be_written(
    flags: tuple[str, ...], scene: Scene, tmp_path: Path
) -> None:
    shutil.copytree(scene.run, tmp_path / "run")
    before = snapshot(tmp_path)
    words = ["train", "--resume", tmp_path / "run", *flags]
    command = run(*words, cwd=tmp_path, before=read_only, given=(str(tmp_path / "run"),))
    if command.process.exitcode == 77:
        pytest.skip("this user may not mount")
    assert command.process.exitcode == 2 and snapshot(tmp_path) == before
    refused(command.err, str(tmp_path / "run"))


@pytest.mark.processes
@pytest.mark.parametrize("words", ["data dedup {photos}", "data stats {packed}", "train {packed}"])
def test_68_a_cache_that_cannot_be_written(words: str, scene: Scene, tmp_path: Path) -> None:
    assert run("data", "pack", scene.photos, tmp_path / "packed", cwd=tmp_path).process.exitcode == 0
    (tmp_path / "packed" / "index.arrow").unlink()  # a tar of another program has no index
    (tmp_path / "closed").mkdir()
    argv = words.format(photos=scene.photos, packed=tmp_path / "packed").split()
    argv += [*SHORT, "2 steps"] if argv[0] == "train" else []
    closed = {"before": read_only, "given": (str(tmp_path / "closed"),)}
    command = run(*argv, cwd=tmp_path, env={"VITRAIL_CACHE": str(tmp_path / "closed" / "cache")}, **closed)
    if command.process.exitcode == 77:
        pytest.skip("this user may not mount")
    assert command.process.exitcode == 1
    refused(command.err, str(tmp_path / "closed" / "cache"), "Set VITRAIL_CACHE to a folder that can be written")


def full(descriptor: int) -> None:
    """Let a descriptor of this process write to a disk that is full."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)


@pytest.mark.processes
@pytest.mark.parametrize(
    "words", ["recipes list", "recipes show smoke --yaml", "recipes list --json", "--help", "train --help"]
)
def test_68_standard_output_that_is_full(words: str, tmp_path: Path) -> None:
    command = run(*words.split(), cwd=tmp_path, before=full, given=(1,))
    assert command.process.exitcode == 1
    assert command.err.startswith("vitrail: cannot write to standard output: ") and command.err.count("\n") == 1
    command = run(*words.split(), cwd=tmp_path, before=full, given=(2,))
    assert command.process.exitcode == 0 and command.out


@pytest.mark.processes
@pytest.mark.parametrize(("to", "code"), [(">/dev/full", 1), (">&-", 1), ("2>/dev/full", 0), ("2>&-", 0)])
def test_68_standard_output_that_is_full_or_closed_in_a_shell(to: str, code: int) -> None:
    command = f"{sys.executable} -m vitrail recipes show smoke --yaml {to}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code
    told = done.stderr.startswith("vitrail: cannot write to standard output: ") and done.stderr.count("\n") == 1
    assert told if code else done.stdout


READERS = {
    "data check {photos}": None,  # a failure if it has read no image before
    "data stats {photos}": False,
    "data dedup {photos}": False,
    "data pack {photos} {out}": True,
    "predict {weights} {photos}": True,
    "predict {weights} {photos} --out {out}": True,
    "embed {weights} {photos} --out {out}": True,
    "embed {weights} {photos} --out {out}.npz": True,
    "evaluate {weights} {photos}": True,
    "inspect {weights} --data {photos} --what map --out {out}": True,
    "probe linear {weights} {photos}": True,
    f"train {{photos}} {' '.join(SHORT)} 2 --out {{out}}": True,
    f"finetune {{photos}} --from {{weights}} {TUNED} --out {{out}}": True,
}
"""Verb -> whether it fails if no image can be read; the others list the images or do not read them."""


READ = [
    (words, change)
    for place, words in enumerate(READERS)
    for number, change in enumerate(CHANGES)
    # by turns, unless a long run is asked for; each verb has an answer of its own where the folder is removed
    if MANY or change == "the folder is removed" or number % len(READERS) == place
]


@pytest.mark.processes
@pytest.mark.parametrize(("words", "change"), READ, ids=lambda text: " ".join(text.split()[:4]))
def test_69_photographs_that_change_during_the_work(words: str, change: str, scene: Scene, tmp_path: Path) -> None:
    photos, expected = tmp_path / "photos", tmp_path / "expected"
    for copy in (photos, expected):
        shutil.copytree(scene.photos, copy)
    argv = words.format(photos=photos, weights=scene.weights, out=tmp_path / "out").split()
    env = {"VITRAIL_CACHE": str(tmp_path / "cache")}
    command = run(*argv, cwd=tmp_path, env=env, before=changing, given=(change, str(photos)))
    assert command.process.exitcode in (0, 1) and "Traceback" not in command.err, command.err
    if change == "the folder is removed":
        assert READERS[words] in (None, command.process.exitcode), command.err
        assert not READERS[words] or "be read" in command.err or "No such file" in command.err, command.err
    CHANGES[change](expected)
    if argv[1] != "stats":  # it starts no threads, so the change does not come
        assert hashes(photos) == hashes(expected)


def hashes(folder: Path) -> dict[str, str]:
    return {name: found for name, (_, found) in snapshot(folder).items()}


@pytest.mark.processes
def test_69_a_part_that_the_disk_did_not_give_is_not_recorded_as_done(scene: Scene, tmp_path: Path) -> None:
    """The folder comes back, and the same command ends with the same results as if nothing had happened."""
    shutil.copytree(scene.photos, tmp_path / "photos")
    for verb in (["data", "pack", tmp_path / "photos"], ["embed", scene.weights, tmp_path / "photos", "--out"]):
        for name, before in (("whole", {}), ("torn", {"before": changing, "given": (HIDE, str(tmp_path / "photos"))})):
            command = run(*verb, tmp_path / f"{name}-{verb[0]}", cwd=tmp_path, **before)
            assert command.process.exitcode == int(name == "torn"), command.err
        (tmp_path / "photos-hidden").rename(tmp_path / "photos")
        again = run(*verb, tmp_path / f"torn-{verb[0]}", cwd=tmp_path)
        assert again.process.exitcode == 0, again.err
        assert hashes(tmp_path / f"torn-{verb[0]}") == hashes(tmp_path / f"whole-{verb[0]}")


def test_68_a_lack_of_memory_is_no_error_of_the_disk(tmp_path: Path) -> None:
    for error in (MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))):
        with pytest.raises(type(error)) as caught, replacing(tmp_path / "r.csv"):
            try:
                raise OSError(errno.ENOSPC, "of another file, and handled")
            except OSError:
                raise error from None
        assert caught.value is error
    with pytest.raises(MemoryError), replacing(tmp_path / "r.csv"):
        try:
            raise OSError(errno.ENOSPC, "of another file, and handled")
        except OSError:
            raise MemoryError  # noqa: B904 - as a decoder does, which is in the context of the other error
