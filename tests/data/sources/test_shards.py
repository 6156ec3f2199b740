from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.images.decode import decode
from vitrail.data.loading.pack import pack, pack_data
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.sources.open import open_data, open_path
from vitrail.data.sources.shard_files import LocalFiles
from vitrail.data.sources.shards import INDEX, ShardSource
from vitrail.errors import DataError, DecodeError, UsageError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def picture(number: int, height: int = 12, width: int = 16, format: str = "PNG") -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, format)
    return stream.getvalue()


def photos(root: Path, sizes: list[tuple[int, int]], format: str = "JPEG") -> Path:
    for number, (height, width) in enumerate(sizes):
        path = root / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, height, width, format))
    return root


def hashes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# webdataset


def test_webdataset_shards_with_every_kind_of_label(tmp_path: Path) -> None:
    images = [picture(number) for number in range(6)]
    write_tar(
        tmp_path / "d" / "train-0000.tar",
        [
            ("000.png", images[0]), ("000.cls", b"10\n"),
            ("x/001.cls", b"9"), ("x/001.jpg", images[1]),
            ("002.seg.png", images[2]), ("002.json", json.dumps({"label": 10, "caption": "?"}).encode()),
            ("._003.png", b"junk"), ("004.txt", b"a caption"),
        ],
    )  # fmt: skip
    write_tar(tmp_path / "d" / "train-0001.tar", [("000.png", images[3]), ("000.cls", b"9")])
    write_tar(tmp_path / "d" / "val-0000.tar", [("000.png", images[4]), ("000.cls", b"10")])
    write_tar(tmp_path / "d" / "test" / "a.tar", [("000.png", images[5])])
    before = sorted((tmp_path / "d").rglob("*"))
    splits = open_data(str(tmp_path / "d"))
    assert [splits.train[i].image for i in range(4)] == images[:4]
    assert splits.class_names == ["9", "10"] and splits.train.labels.tolist() == [1, 0, 1, 0]
    assert splits.train.sizes.tolist() == [len(image) for image in images[:4]]
    assert splits.train.id(3) == "train-0001.tar/000.png"
    assert splits.validation[0].image == images[4] and splits.validation.labels.tolist() == [1]
    assert splits.test[0].image == images[5] and splits.test.labels.tolist() == [-1]
    assert sorted((tmp_path / "d").rglob("*")) == before


def test_of_several_images_of_a_sample_one_is_used_and_the_others_are_told(tmp_path: Path) -> None:
    images = [picture(number) for number in range(10)]
    names = ["0.jpg", "0.cls", "0.seg.png", "1.seg.png", "1.jpg", "1.cls", "2.npy", "2.png", "3.b0.png", "3.b1.png"]
    tar = write_tar(
        tmp_path / "d" / "0.tar",
        [(name, b"5" if name.endswith("cls") else image) for name, image in zip(names, images, strict=True)],
    )
    data = open_path(str(tar.parent))
    source = data.splits[""]
    assert [source.id(index) for index in range(4)] == ["0.tar/0.jpg", "0.tar/1.jpg", "0.tar/2.png", "0.tar/3.b0.png"]
    assert [source[index].image for index in range(4)] == [images[number] for number in (0, 4, 7, 8)]
    assert source.labels.tolist() == [0, 0, -1, -1]
    left_out = {item.id: item.reason for item in data.findings.dropped}
    assert list(left_out) == ["0.tar/0.seg.png", "0.tar/1.seg.png", "0.tar/2.npy", "0.tar/3.b1.png"]
    assert set(left_out.values()) == {"another image of this sample"}


def test_more_shards_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.sources.shard_files._OPEN", 2)
    for number in range(5):
        write_tar(tmp_path / f"s-{number}.tar", [("0.png", picture(number)), ("0.cls", str(number % 2).encode())])
    (source,) = open_path(str(tmp_path)).splits.values()
    for _ in range(2):
        assert [source[i].image for i in range(5)] == [picture(number) for number in range(5)]
    opened = [place for number in os.listdir("/proc/self/fd") if (place := open_file(number)).startswith(str(tmp_path))]
    assert sorted(opened) == [str(tmp_path / "s-0.tar"), str(tmp_path / "s-1.tar")]


def open_file(number: str) -> str:
    """Return what a descriptor of this process leads to; "" for one that is closed meanwhile."""
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""


def test_a_shard_that_is_cut_off_is_used_up_to_there(tmp_path: Path) -> None:
    members = [part for n in range(4) for part in ((f"{n}.cls", b"ab"[n % 2 : n % 2 + 1]), (f"{n}.png", picture(n)))]
    path = write_tar(tmp_path / "s.tar", members)
    with tarfile.open(path) as tar:
        third = tar.getmember("2.png")
    os.truncate(path, third.offset_data + third.size // 2)
    found = open_path(str(path))
    assert [found.splits[""][i].image for i in range(2)] == [picture(0), picture(1)]
    assert len(found.splits[""]) == 2
    assert [item.id for item in found.findings.dropped] == ["s.tar"]


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no program tar")
def test_sparse_members_are_left_out_and_a_damaged_map_of_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(picture(0))
    (tmp_path / "1.png").write_bytes(picture(1))
    os.truncate(tmp_path / "1.png", 1 << 20)  # a hole at the end
    shard = tmp_path / "shards" / "s.tar"
    shard.parent.mkdir()
    for kind in ("gnu", "pax"):
        command = ["tar", "--sparse", f"--format={kind}", "-cf", str(shard), "-C", str(tmp_path), "0.png", "1.png"]
        subprocess.run(command, check=True)
        found = open_path(str(shard.parent))
        assert [found.splits[""][i].image for i in range(len(found.splits[""]))] == [picture(0)]
        assert [(item.id, item.reason) for item in found.findings.dropped] == [("s.tar/1.png", "a sparse file")]
    content = shard.read_bytes()  # of pax: the map is text before the bytes of the file
    shard.write_bytes(content.replace(b"\n1048576\n0\n", b"\nno map!\n0\n", 1))
    (dropped,) = open_path(str(shard.parent)).findings.dropped
    assert shard.read_bytes() != content and dropped.id == "s.tar" and "damaged" in dropped.reason


@pytest.mark.parametrize("content", [b"", b"no tar at all" * 100])
def test_what_is_no_tar(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"tar|no images"):
        open_path(str(tmp_path))


def test_compressed_shards_say_what_to_do(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", [("0.png", picture(0))], "w:gz")
    with pytest.raises(DataError, match="gunzip"):
        open_path(str(tmp_path))


def test_nothing_is_ever_unpacked(tmp_path: Path) -> None:
    inside = tmp_path / "deep" / "inside"
    write_tar(inside / "s.tar", [("../../evil.png", picture(0)), ("/abs.png", picture(1)), ("0.cls", b"1")])
    (source,) = open_path(str(inside)).splits.values()
    assert len(source) == 2 and source[0].image == picture(0)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["s.tar"]


def test_a_shard_that_vanishes_is_a_decode_error(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", [("0.png", picture(0))])
    (source,) = open_path(str(tmp_path)).splits.values()
    (tmp_path / "s.tar").unlink()
    with pytest.raises(DecodeError) as caught:
        source[0]
    assert caught.value.reason == "unreadable"


# packed


def test_packed_images_are_small_and_look_the_same(tmp_path: Path) -> None:
    sizes = [(40, 60), (80, 30), (20, 24), (64, 64), (33, 200)]
    root = tmp_path / "photos"
    for number, (height, width) in enumerate(sizes):  # smooth pictures: noise is no test of a JPEG
        down, right = np.mgrid[0:height, 0:width]
        values = np.stack([down * 255 // height, right * 255 // width, 0 * down + 40 * number], -1).astype(np.uint8)
        path = root / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(path)
    packed = pack_data(str(root), tmp_path / "out", short_side=32)[""]
    assert packed.count == 5 and not packed.bad and packed.folder == tmp_path / "out"
    before, after = open_path(str(root)).splits[""], open_path(str(tmp_path / "out")).splits[""]
    assert isinstance(after, ShardSource)
    assert after.class_names == before.class_names and after.labels.tolist() == before.labels.tolist()
    for index in range(5):
        original, small = decode(before[index].image), decode(after[index].image)
        height, width = original.shape[:2]
        scale = min(1, 32 / min(height, width))
        assert small.shape == (round(height * scale), round(width * scale), 3)
        theirs = Image.fromarray(original).resize(small.shape[1::-1], Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(theirs).astype(int) - small).mean() < 3
        assert after.id(index) == before.id(index)  # an image keeps its name


def test_a_small_jpeg_is_copied_and_raw_pixels_are_exact(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", [(20, 24), (24, 20), (20, 20)])
    source = open_path(str(root)).splits[""]
    pack(source, tmp_path / "jpeg", short_side=32)
    copied = open_path(str(tmp_path / "jpeg")).splits[""]
    assert [copied[i].image for i in range(3)] == [source[i].image for i in range(3)]
    pack(source, tmp_path / "raw", short_side=32, quality=None)
    raw = open_path(str(tmp_path / "raw")).splits[""]
    for index in range(3):
        np.testing.assert_array_equal(raw[index].image, decode(source[index].image))


def test_packing_arrays_keeps_every_value(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 9, 8, 3), dtype=np.uint8)
    source = ArraySource("s", images, np.arange(7) % 2, ["a", "b"])
    pack(source, tmp_path / "out", quality=None, shard_bytes=1_500)
    again = open_path(str(tmp_path / "out")).splits[""]
    np.testing.assert_array_equal(np.stack([again[i].image for i in range(7)]), images)


def test_packed_shards_are_webdataset_tars(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", [(20, 24)] * 5)
    packed = pack(open_path(str(root)).splits[""], tmp_path / "out", shard_bytes=3_000)
    assert packed.shards > 1
    members: dict[str, bytes] = {}
    for shard in sorted((tmp_path / "out").glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                stream = tar.extractfile(member)
                assert stream is not None
                members[member.name] = stream.read()
    source = open_path(str(root)).splits[""]
    assert [members[f"{i:09d}.jpg"] for i in range(5)] == [source[i].image for i in range(5)]
    assert [int(members[f"{i:09d}.cls"]) for i in range(5)] == source.labels.tolist()
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.tar")) == packed.bytes


def test_bad_images_are_left_out_and_listed(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", [(20, 24)] * 4)
    (root / "b" / "1.jpg").write_bytes(b"<html>")
    progress: list[tuple[int, int]] = []
    packed = pack_data(str(root), tmp_path / "out", progress=lambda *done: progress.append(done))[""]
    assert packed.count == 3 and packed.bad == [("b/1.jpg", "not-an-image")]
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    ids = [open_path(str(tmp_path / "out")).splits[""].id(i) for i in range(3)]
    assert ids == ["a/0.jpg", "a/2.jpg", "b/3.jpg"]


def test_splits_are_packed_into_folders_of_their_own(tmp_path: Path) -> None:
    photos(tmp_path / "d" / "train", [(20, 24)] * 6)
    photos(tmp_path / "d" / "val", [(20, 24)] * 2)
    assert {name: packed.count for name, packed in pack_data(str(tmp_path / "d"), tmp_path / "out").items()} == {
        "train": 6,
        "val": 2,
    }
    splits = open_data(str(tmp_path / "out"))
    assert (len(splits.train), len(splits.validation), splits.class_names) == (6, 2, ["a", "b"])


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 4, 7, 10])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_pack_goes_on_to_the_same_bits(tmp_path: Path, stop: int, workers: int) -> None:
    root = photos(tmp_path / "photos", [(20 + i, 24) for i in range(10)])
    (root / "b" / "1.jpg").write_bytes(b"")
    source = open_path(str(root)).splits[""]
    pack(source, tmp_path / "whole", shard_bytes=4_000)

    def interrupt(done: int, total: int) -> None:
        if done == stop:
            raise Interrupted

    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        pack(source, out, shard_bytes=4_000, workers=workers, progress=interrupt)
    assert not (out / INDEX).exists()
    (out / ".shard-00009.tar.tmp-1").write_bytes(b"of a process that was killed")
    seen: list[int] = []
    packed = pack(source, out, shard_bytes=4_000, workers=workers, progress=lambda done, _: seen.append(done))
    assert hashes(out) == hashes(tmp_path / "whole")
    assert packed.bad == [("b/1.jpg", "empty")] and packed.count == 9
    assert not list(out.glob(".*"))
    if stop == 10:
        assert seen[0] > 1  # the finished shards were not written again
    assert pack(source, out, shard_bytes=4_000) == packed  # nothing left to do


def test_packing_refuses_what_would_destroy_or_mix(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", [(20, 24)] * 4)
    source = open_path(str(root)).splits[""]
    with pytest.raises(DataError, match="lies within the data set"):
        pack_data(str(root), root / "packed")
    pack(source, tmp_path / "out")
    with pytest.raises(DataError, match="short_side 256 instead of 128"):
        pack(source, tmp_path / "out", short_side=128)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(DataError, match=r"other files \(thesis\.tex\)"):
        pack(source, tmp_path / "full")
    with pytest.raises(UsageError, match="quality is 0"):
        pack(source, tmp_path / "new", quality=0)


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_damaged_pack_is_refused_when_opened(tmp_path: Path, harm: str) -> None:
    root = photos(tmp_path / "photos", [(20, 24)] * 4)
    pack_data(str(root), tmp_path / "out")
    shard = tmp_path / "out" / "shard-00000.tar"
    if harm == "missing":
        shard.unlink()
    else:
        os.truncate(shard, 1_000)
    with pytest.raises(DataError, match=r"shard-00000\.tar (is missing|has 1000 bytes)"):
        open_data(str(tmp_path / "out"))


def test_files_are_read_without_pread_as_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shard.tar"
    file.write_bytes(bytes(range(100)))
    monkeypatch.delattr("os.pread")
    files = LocalFiles([file])
    assert files.read(0, 90, 5) == bytes(range(90, 95))
    assert files.read(0, 3, 4) == bytes(range(3, 7))


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_took_the_place_of_a_shard_is_not_read(put: Callable[[Path], object], tmp_path: Path) -> None:
    put(tmp_path / "shard.tar")
    with pytest.raises(DecodeError, match=r"shard\.tar: it is not a regular file") as caught:
        LocalFiles([tmp_path / "shard.tar"]).read(0, 0, 4)
    assert caught.value.reason == "unreadable"


@pytest.mark.parametrize("content", ["class folders", "a split", "shards of another program", "a foreign index"])
def test_packing_never_writes_among_other_files(tmp_path: Path, content: str) -> None:
    for split in ("train", "val"):
        photos(tmp_path / "photos" / split, [(20, 24)] * 4)
    path, out = str(tmp_path / "photos"), tmp_path / "mine"
    if content == "class folders":
        photos(out, [(20, 24)] * 4)
    elif content == "a split":  # its name is that of a split to pack
        photos(out / "val", [(20, 24)] * 4)
    elif content == "shards of another program":
        path = str(tmp_path / "photos" / "train")
        out.mkdir()
        (out / "shard-00000.tar").write_bytes(b"theirs")
    else:
        path = str(tmp_path / "photos" / "train")
        out.mkdir()
        (out / INDEX).write_bytes(b"theirs")
    before = {str(file): file.is_dir() or file.read_bytes() for file in out.rglob("*")}
    with pytest.raises(DataError, match=re.escape(str(out))):
        pack_data(path, out)
    assert {str(file): file.is_dir() or file.read_bytes() for file in out.rglob("*")} == before


def test_a_pack_killed_between_part_and_shard_goes_on(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", [(20, 24)] * 8)
    source = open_path(str(root)).splits[""]

    def interrupt(done: int, total: int) -> None:
        if done == 6:
            raise Interrupted

    pack(source, tmp_path / "whole", shard_bytes=4_000)
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        pack(source, out, shard_bytes=4_000, progress=interrupt)
    shard = max(out.glob("shard-*.tar"))
    shard.rename(out / f".{shard.name}.tmp-1")
    (out / f".{INDEX}-abc").write_bytes(b"of a process that was killed")
    pack(source, out, shard_bytes=4_000)
    assert hashes(out) == hashes(tmp_path / "whole") and not list(out.glob(".*"))


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    root = os.fsencode(photos(tmp_path / "photos", [(20, 24)] * 4))
    os.rename(root + b"/a/0.jpg", root + b"/a/caf\xe9.jpg")
    os.rename(root + b"/b", root + b"/b\xe9")
    pack_data(os.fsdecode(root), tmp_path / "packed")
    packed = open_path(str(tmp_path / "packed")).splits[""]
    assert packed.class_names == ["a", "b\\xe9"] and sorted(packed.labels.tolist()) == [0, 0, 1, 1]
    assert "a/caf\\xe9.jpg" in [packed.id(i) for i in range(4)]
    with tarfile.open(tmp_path / "mine.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(os.fsdecode(root + b"/a/caf\xe9.jpg"), "caf\udce9.jpg")
    assert open_path(str(tmp_path / "mine.tar")).splits[""].id(0) == "mine.tar/caf\\xe9.jpg"


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_a_header_that_claims_gigabytes_is_not_read(tmp_path: Path, kind: bytes) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, 3 << 30
    file = tmp_path / "a.tar"
    file.write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    os.truncate(file, (3 << 30) + 10_240)  # a sparse file, which takes no room on the disk
    tracemalloc.start()
    with pytest.raises(DataError, match=r"a\.tar is not a readable .*a header of"):
        open_path(str(file))
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
