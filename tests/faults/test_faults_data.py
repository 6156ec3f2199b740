"""Faults 1 to 16 and 44: data that are missing, wrong, damaged or hostile, met by the real command."""

from __future__ import annotations

import csv
import io
import json
import os
import resource
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from commands import Command, run
from peak_memory import peak_growth
from PIL import Image
from scenes import SHORT, as_nobody, draw, open_to_all, snapshot

from vitrail.data.check import leaked
from vitrail.data.settings import Preprocess
from vitrail.data.sources import folder as folder_module
from vitrail.data.sources.arrays import read_npz
from vitrail.data.sources.folder import read_file
from vitrail.data.sources.open import open_data, open_path
from vitrail.errors import DataError, DecodeError
from vitrail.files import open_regular
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.store import save_model


def train(data: Path, *flags: str, steps: int = 2, **options: object) -> Command:
    return run("train", data, *SHORT, f"{steps} steps", *flags, cwd=data.parent, **options)


def notes(folder: Path) -> list[str]:
    return json.loads((folder / "run.json").read_text())["data"]["notes"]


@pytest.mark.processes
def test_01_no_data_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    kinds = {"missing": "looked for", "file": "no known kind", "empty": "holds no images", "pipe": "nor a regular file"}
    for name, said in kinds.items():
        began = time.process_time()
        with pytest.raises(DataError, match=said) as error:
            open_data(str(tmp_path / name))
        assert str(tmp_path / name) in str(error.value) and time.process_time() - began < 1
    command = run("train", "missing", cwd=tmp_path)
    assert command.process.exitcode == 1
    assert command.err.startswith(f"vitrail: no data at 'missing': looked for {tmp_path}/missing")
    assert command.err.count("\n") == 1 and not (tmp_path / "runs").exists()


@pytest.mark.processes
def test_02_one_class_or_none(tmp_path: Path) -> None:
    draw(tmp_path / "one", classes=("red",))
    (tmp_path / "loose").mkdir()
    for picture in (tmp_path / "one" / "red").iterdir():
        (tmp_path / "loose" / picture.name).write_bytes(picture.read_bytes())
    for name, said in (("one", "one class only, 'red'"), ("loose", "8 images and no class folder")):
        command = train(tmp_path / name)
        assert command.process.exitcode == 1
        assert said in command.err and "photos/cat/1.jpg" in command.err


@pytest.mark.processes
def test_03_05_10_what_is_left_out_is_said_and_refused_where_asked(tmp_path: Path) -> None:
    """An empty class folder, junk, a dangling link, a loop, a folder and a device of an image's name."""
    photos = draw(tmp_path / "photos")
    (photos / "green").mkdir()
    for name in (".DS_Store", "red/._0.png", "red/Thumbs.db", "__MACOSX/x.png", "red/.ipynb_checkpoints/0.png"):
        (photos / name).parent.mkdir(exist_ok=True)
        (photos / name).write_bytes(b"junk")
    (photos / "red" / "dangling.png").symlink_to("nowhere.png")
    (photos / "red" / "loop").symlink_to(".")
    (photos / "red" / "folder.png").mkdir()
    os.mkfifo(photos / "red" / "pipe.png")
    command = train(photos)
    assert command.process.exitcode == 0
    for said in (
        "warning: class folder 'green'",
        "ignored 5 x hidden or system file",
        "left out red/dangling.png: dangling link",
        "left out red/loop: symbolic link to a folder it lies in",
        "left out red/folder.png: a folder",
        "left out red/pipe.png: not a regular file",
    ):
        assert said in command.err
    facts = json.loads((tmp_path / "runs" / "scratch-small-1" / "run.json").read_text())["data"]
    assert facts["classes"] == 2 and facts["images"] == {"train": 14, "validation": 2}
    strict = train(photos, "--data.strict")
    assert strict.process.exitcode == 1
    assert "data.strict is set: class folder 'green'" in strict.err and "(and 4 more)" in strict.err


@pytest.mark.processes
def test_04_splits_that_do_not_have_the_same_classes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    draw(data / "train", classes=("a", "b", "c"))
    draw(data / "val", classes=("c", "a"), seed=1)
    draw(data / "test", classes=("a", "b", "zebra"), seed=2)
    splits = open_data(str(data))
    assert splits.validation is not None
    truth = {splits.validation.id(i): splits.class_names[n] for i, n in enumerate(splits.validation.labels.tolist())}
    assert all(name.startswith(f"{label}/") for name, label in truth.items()) and len(truth) == 16
    command = train(data)
    assert command.process.exitcode == 0 and "warning: split 'test' left out" in command.err
    assert "'zebra'" in command.err
    command = train(data, "--data.validation", "test")
    assert command.process.exitcode == 1 and "'zebra'; known are 'a', 'b', 'c'" in command.err


@pytest.mark.processes
def test_06_07_rows_of_a_table_that_cannot_be_used(tmp_path: Path) -> None:
    draw(tmp_path / "photos")
    table = tmp_path / "table.csv"
    names = [f"{name}/{i}.png" for name in ("blue", "red") for i in range(8)]
    rows = [f'"photos/{name}",{name.partition("/")[0]}' for name in names]
    rows[1] = rows[1].replace("/", "\\")  # as Windows writes paths
    rows += ["photos/blue/0.png,blue", "photos/red/gone.png,red"]
    table.write_text("\ufefffile,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    command = train(table)
    assert command.process.exitcode == 0
    assert "left out photos/blue/0.png: row 18: listed before, in row 2" in command.err
    assert "left out photos/red/gone.png: row 19: no such file" in command.err
    assert run("data", "check", table, "--out", "rejects.csv", cwd=tmp_path).process.exitcode == 0
    rejects = list(csv.DictReader((tmp_path / "rejects.csv").open()))
    assert [row["id"] for row in rejects if row["reason"] == "left-out"] == ["photos/blue/0.png", "photos/red/gone.png"]
    table.write_text("file,label\nphotos/blue/0.png,blue\nphotos/red/0.png,nan\n")
    command = train(table)
    assert command.process.exitcode == 1 and "row 3: no label for 'photos/red/0.png' (found 'nan')" in command.err


@pytest.mark.processes
def test_08_damaged_files_are_listed_and_left_as_they_are(tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos", count=40)
    whole = (photos / "red" / "0.png").read_bytes()
    Image.open(photos / "red" / "1.png").resize((64, 64)).save(tmp_path / "whole.jpg", quality=95)
    bad = {
        "cut.png": (whole[: len(whole) // 2], "truncated"),
        "cut.jpg": ((tmp_path / "whole.jpg").read_bytes()[:-200], "truncated"),
        "nothing.jpg": (b"", "empty"),
        "page.jpg": (b"<!DOCTYPE html><html>404</html>", "not-an-image"),
    }
    for name, (content, _) in bad.items():
        (photos / "red" / name).write_bytes(content)
    (photos / "red" / "really-a-png.jpg").write_bytes(whole)  # read by what it is
    before = snapshot(photos)
    command = train(photos, "--data.max-bad", "0.1", steps=10)
    assert command.process.exitcode == 0, command.err
    log = tmp_path / "runs" / "scratch-small-1" / "metrics.jsonl"
    told = [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "unreadable"]
    expected = {f"red/{name}": reason for name, (_, reason) in bad.items()}
    assert {line["image"]: line["reason"] for line in told}.items() <= expected.items()
    assert len(told) >= 3  # one may have been held out
    run("data", "check", photos, "--out", "bad_images.csv", cwd=tmp_path)
    listed = {row["id"]: row["reason"] for row in csv.DictReader((tmp_path / "bad_images.csv").open())}
    listed.pop("red/really-a-png.jpg")  # a copy, by content
    assert listed == expected
    assert snapshot(photos) == before


@pytest.mark.processes
def test_09_too_many_bad_images_or_all_of_a_class(tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos", count=10)
    for number in range(3):
        (photos / "red" / f"{number}.png").write_bytes(b"no image")
    command = train(photos, steps=30)
    assert command.process.exitcode == 1
    assert "training images cannot be read, more than --data.max-bad, 5.0%" in command.err
    rare = draw(tmp_path / "rare", count=40)
    (rare / "green").mkdir()
    (rare / "green" / "only.png").write_bytes(b"no image")
    command = train(rare, steps=30)
    assert command.process.exitcode == 1
    assert "the only training image of class 'green' cannot be read" in command.err
    (rare / "green" / "only.png").unlink()
    (rare / "green").rmdir()
    (rare / "red" / "0.png").write_bytes(b"no image")
    assert train(rare, steps=30).process.exitcode == 0
    command = train(rare, "--data.strict", "--data.holdout", "0", steps=30)
    assert command.process.exitcode == 1 and "1 of 80 training images cannot be read" in command.err


@pytest.mark.processes
def test_10_what_this_user_may_not_read(tmp_path: Path) -> None:
    """Not even root's rights help: the command runs as nobody."""
    photos = draw(tmp_path / "photos")
    open_to_all(tmp_path)
    (photos / "red" / "0.png").chmod(0)
    (photos / "secret").mkdir(mode=0)
    command = run("data", "check", photos, "--json", cwd=tmp_path, before=as_nobody)
    (photos / "secret").chmod(0o700)
    assert command.process.exitcode == 0, command.err
    found = json.loads(command.out)
    assert [(bad["id"], bad["reason"]) for bad in found["bad"]] == [("red/0.png", "unreadable")]
    assert found["findings"]["dropped"] == [["secret", "unreadable folder: Permission denied"]]


def limited(megabytes: int) -> None:
    """Take no more address space than this process has, and so much on top."""
    here = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (here + megabytes * 2**20,) * 2)


@pytest.mark.processes
def test_11_44_bombs_cost_neither_memory_nor_the_run(tmp_path: Path) -> None:
    """A picture of 2.5 gigapixels in 300 KB, a file of 8 GB of nothing, a tar member and an .npz that unpack to as
    much: all met with 1 GB to spare."""
    photos = draw(tmp_path / "photos", count=40)
    header = b"P5 50000 50000 255\n"
    (photos / "red" / "bomb.pgm").write_bytes(header)
    with (photos / "red" / "zeros.png").open("wb") as file:
        file.truncate(8 * 2**30)
    command = train(photos, "--data.holdout", "0", "--workers", "1", steps=12, before=limited, given=(1000,))
    assert command.process.exitcode == 0, command.err
    assert "red/bomb.pgm (too-many-pixels)" in command.err and "red/zeros.png (too-large)" in command.err
    with pytest.raises(DecodeError, match="8,589,934,592 bytes, more than") as error:
        read_file(photos / "red" / "zeros.png")
    assert error.value.reason == "too-large"


def test_44_archives_with_ways_out_or_bombs(tmp_path: Path) -> None:
    """Nothing is unpacked, so that a member called ../../evil.jpg is only a name; what claims gigabytes is refused."""
    picture = (draw(tmp_path / "photos") / "red" / "0.png").read_bytes()
    place = tmp_path / "shards"
    place.mkdir()
    with tarfile.open(place / "train.tar", "w") as tar:
        for key, label in (("../../evil", b"red"), ("/etc/evil", b"blue"), ("good", b"red")):
            for suffix, data in (("png", picture), ("cls", label)):
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        big = tarfile.TarInfo("zeros.png")
        big.size = 8 * 2**30
        tar.addfile(big)  # the header alone; the file is made as long as it says
        offset = tar.offset
    with (place / "train.tar").open("r+b") as file:
        file.truncate(offset + big.size + 1024)
    before = sorted(tmp_path.rglob("*"))
    (source,) = open_path(str(place)).splits.values()
    assert len(source) == 4 and [source[i].image == picture for i in range(3)] == [True] * 3
    with pytest.raises(DecodeError) as error:
        source[3]
    assert error.value.reason == "too-large"
    assert sorted(tmp_path.rglob("*")) == before and not (tmp_path.parent / "evil.png").exists()

    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("../../evil/1.png", picture)
    with pytest.raises(DataError, match="no known kind"):
        open_path(str(tmp_path / "photos.zip"))


@pytest.mark.parametrize(("count", "stored"), [(3 * 2**30, 3 * 2**30), (2**50, 100)])
def test_44_an_npz_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, count: int, stored: int) -> None:
    """By what its directory says before anything is unpacked, and by what its header says before allocating."""
    bomb = tmp_path / "bomb.npz"
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (count // 64, 8, 8)})
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("images.npy", "w", force_zip64=True) as stream:
            stream.write(head.getvalue())
            for _ in range(min(stored, 2**26) // 2**20):
                stream.write(bytes(2**20))
        archive.writestr("labels.npy", b"")
    if stored > 2**26:  # the directory says more than is there, as that of a longer file would
        content = bomb.read_bytes()
        claimed = (len(head.getvalue()) + 2**26).to_bytes(4, "little")
        assert content.count(claimed) >= 1
        bomb.write_bytes(content.replace(claimed, (len(head.getvalue()) + stored).to_bytes(4, "little")))
    with peak_growth() as growth:
        with pytest.raises(DataError, match="images"):
            read_npz(bomb)
        assert growth() < 300 * 1024


@pytest.mark.processes
def test_13_15_odd_sizes_and_fewer_images_than_a_batch(tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos", count=2)
    Image.new("RGB", (1, 1), "red").save(photos / "red" / "dot.png")
    Image.new("RGB", (5000, 1), "blue").save(photos / "blue" / "strip.png")
    refused = train(photos, "--batch-size", "64", "--data.holdout", "0", steps=3)
    assert refused.process.exitcode == 2
    assert "6, not 64: there are only 6 training images" in refused.err
    command = train(photos, "--batch-size", "6", "--data.holdout", "0", steps=3)
    assert command.process.exitcode == 0, command.err
    assert "odd sizes: 2 of 6 images have a side below 8 px, or" in command.err
    losses = [json.loads(line) for line in (tmp_path / "runs/scratch-small-1/metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["loss"]) for line in losses if line["kind"] == "train")


@pytest.mark.processes
def test_14_held_out_images_that_were_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    draw(data / "train", count=8)
    draw(data / "val", count=3, seed=1)
    for number in range(2):
        (data / "val" / "red" / f"copy{number}.png").write_bytes((data / f"train/red/{number}.png").read_bytes())
    command = train(data)
    assert command.process.exitcode == 0
    assert "warning: 2 validation images are training images, too, the first is red/copy0.png" in command.err
    splits = open_data(str(data))
    assert splits.validation is not None
    assert leaked(splits.train, splits.validation) == ["red/copy0.png", "red/copy1.png"]
    monkeypatch.setattr("vitrail.data.check.READ_AT_MOST", 100)
    assert leaked(splits.train, splits.validation) is None


def test_16_a_read_that_fails_once_and_one_that_fails_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = draw(tmp_path / "photos") / "red" / "0.png"
    failures = iter([True, False, True, True])

    def flaky(path: Path) -> object:
        if next(failures):
            raise OSError(5, "Input/output error")
        return open_regular(path)

    monkeypatch.setattr(folder_module, "open_regular", flaky)
    assert read_file(picture) == picture.read_bytes()
    with pytest.raises(DecodeError, match="Input/output error"):
        read_file(picture)


def vanishing(victim: str) -> None:
    """Delete a file as soon as the data have been opened."""
    from vitrail.data.sources import open as opening

    original = opening.split_data_set

    def split_data_set(*arguments: object, **options: object) -> object:
        splits = original(*arguments, **options)  # type: ignore[arg-type]
        os.unlink(victim)
        return splits

    opening.split_data_set = split_data_set  # type: ignore[assignment]


@pytest.mark.processes
def test_16_a_file_deleted_after_the_start(tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos", count=40)
    victim = photos / "red" / "3.png"
    command = train(photos, "--data.holdout", "0", steps=12, before=vanishing, given=(str(victim),))
    assert command.process.exitcode == 0, command.err
    assert "unreadable image, skipped: red/3.png (unreadable)" in command.err


@pytest.mark.processes
def test_58_every_verb_says_that_a_folder_holds_two_kinds_of_data(tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos")
    with tarfile.open(photos / "red" / "photos.tar", "w") as tar:
        for number, picture in enumerate(sorted((photos / "red").glob("*.png"))):
            tar.add(picture, f"{number}.png")
    before = snapshot(photos)
    mixture = "holds 2 kinds of data: class folders (16 images of 2 classes), tar shards red/photos.tar (8 images"
    trained = train(photos, "--out", str(tmp_path / "run"))
    commands = [trained]
    for words in (
        ("data", "stats", photos),
        ("data", "check", photos),
        ("data", "dedup", photos),
        ("data", "pack", photos, tmp_path / "packed"),
        ("evaluate", *(tmp_path / "run").iterdir(), photos),
        ("embed", *(tmp_path / "run").iterdir(), photos, "--out", tmp_path / "features.npz"),
    ):
        commands.append(run(*words, cwd=tmp_path, env={"COLUMNS": "500"}))
    for command in commands:
        assert command.process.exitcode == 0, command.err
        assert mixture in command.out + command.err, command.argv
    assert any(mixture in note for note in notes(next((tmp_path / "run").iterdir())))
    assert snapshot(photos) == before


@pytest.mark.processes
def test_59_packing_leaves_a_folder_of_images_alone(tmp_path: Path) -> None:
    for split in ("train", "val"):
        draw(tmp_path / "photos" / split)
    mine = draw(tmp_path / "mine")
    before = snapshot(tmp_path / "mine")
    command = run("data", "pack", "photos", "mine", cwd=tmp_path)
    assert command.process.exitcode == 1
    assert command.err == (
        f"vitrail: {mine} holds other files (blue, red), and nothing is written among them. Choose a new folder\n"
    )
    assert snapshot(mine) == before and sorted(path.name for path in mine.iterdir()) == ["blue", "red"]


@pytest.mark.processes
@pytest.mark.parametrize("verb", ["evaluate", "inspect", "embed", "data pack"])
def test_59_results_are_not_written_into_the_images(tmp_path: Path, verb: str) -> None:
    photos = draw(tmp_path / "photos", count=2)
    before, out = snapshot(photos), photos / "results"
    words = {
        "evaluate": ("evaluate", "model", photos, "--out", out),
        "inspect": ("inspect", "model", "--data", photos, "--out", out),
        "embed": ("embed", "model", photos, "--out", out),
        "data pack": ("data", "pack", photos, out),
    }
    command = run(*words[verb], cwd=tmp_path)
    assert command.process.exitcode == 1
    assert command.err.startswith(f"vitrail: {out} lies within the data set {photos}, where nothing is written.")
    assert snapshot(photos) == before and not out.exists()


@pytest.mark.processes
def test_73_a_pipe_is_read_where_it_is_named_and_nowhere_else(tmp_path: Path) -> None:
    """`cat x.png | vitrail predict MODEL /dev/stdin` and `<(...)` are read; a pipe in a folder does not block."""
    photos = draw(tmp_path / "photos", count=2)
    image, model = photos / "red" / "1.png", small_model(tmp_path / "model")
    os.mkfifo(photos / "red" / "9.png")
    program = ("predict", model, "--device", "cpu", "--workers", "1")

    def predict(named: str | Path, command: str = "true", at: int = 0) -> Command:
        return run(*program, named, cwd=tmp_path, before=piped, given=(command, at))

    answers: set[str] = set()
    for done in (predict("/dev/stdin", f"cat {image}"), predict("/dev/fd/63", f"cat {image}", 63), predict(image)):
        assert done.process.exitcode == 0 and "skipped" not in done.err, done.err
        answer = done.out.splitlines()[1].partition(",")[2]
        assert answer.startswith(("red,", "blue,"))
        answers.add(answer)
    assert len(answers) == 1
    done = predict(photos)
    assert done.process.exitcode == 0 and len(done.out.splitlines()) == 5
    assert "9.png: it is not a regular file" in done.err
    for done in (predict("/dev/zero"), predict("/dev/fd/63", f"cat {__file__}", 63), predict("/dev/fd/63", "true", 63)):
        assert "skipped" in done.err and "Traceback" not in done.err, done.err


def piped(command: str, at: int) -> None:
    """The output of another program comes through a pipe with the descriptor `at`, as a shell starts two programs."""
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        os.dup2(other.stdout.fileno(), at)
        other.stdout = None  # so that nothing waits for it here
        other.returncode = 0


def small_model(folder: Path) -> Path:
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=2)
    save_model(folder, build(config), Card(config, ["blue", "red"], Preprocess(image_size=(8, 8))))
    return folder
