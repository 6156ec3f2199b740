from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vitrail.data.sources import folder
from vitrail.data.sources.folder import read_file, read_folder
from vitrail.data.sources.open import find, open_data
from vitrail.errors import DataError, DecodeError


def tree(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.lower().endswith((".png", ".jpg", ".jpeg")):
            Image.new("RGB", (4, 4), (number, 0, 0)).save(path, "PNG")
        else:
            path.write_text("text")
    return root


def ids(source) -> list[str]:
    return [source.id(index) for index in range(len(source))]


def snapshot(root: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*"))


def test_classes_are_the_sorted_folder_names_and_items_the_files(tmp_path: Path) -> None:
    root = tree(tmp_path, "dog/1.jpg", "cat/b.PNG", "cat/a.jpeg", "cat/deep/er/c.png", "Zoo/x.png")
    before = snapshot(root)
    source = read_folder(root).splits[""]
    assert source.class_names == ["Zoo", "cat", "dog"]
    assert sorted(ids(source)) == ["Zoo/x.png", "cat/a.jpeg", "cat/b.PNG", "cat/deep/er/c.png", "dog/1.jpg"]
    for index in range(len(source)):
        item = source[index]
        assert item.image == (root / item.id).read_bytes()
        assert source.class_names[item.label] == item.id.split("/")[0]
        assert source.sizes[index] == len(item.image)
    assert snapshot(root) == before  # nothing written, nothing touched


def test_junk_is_ignored_and_counted(tmp_path: Path) -> None:
    root = tree(
        tmp_path, "a/1.png", "b/1.png", "a/.DS_Store", "a/._1.png", "b/Thumbs.db", "b/notes.txt", "b/README",
        ".ipynb_checkpoints/1.png", "__MACOSX/a/1.png", "labels.csv", ".hidden",
        "a/.ipynb_checkpoints/1-checkpoint.png",
    )  # fmt: skip
    found = find(str(root))
    assert len(found.splits[""]) == 2
    assert found.findings.ignored == {
        "hidden or system file": 7,
        "not an image (.txt)": 1,
        "not an image (no extension)": 1,
        "file beside the class folders": 1,
    }
    assert any("ignored 7 x hidden" in line for line in found.findings.lines())


@pytest.mark.parametrize(
    ("train", "validation"),
    [("train", "val"), ("training", "validation"), ("Train", "Valid"), ("train", "dev")],
)
def test_split_folders_by_their_usual_names(tmp_path: Path, train: str, validation: str) -> None:
    root = tree(tmp_path, f"{train}/a/1.png", f"{train}/b/1.png", f"{validation}/b/2.png", "extra/c/1.png", "x.txt")
    splits = open_data(str(root))
    assert ids(splits.train) == ["a/1.png", "b/1.png"] and ids(splits.validation) == ["b/2.png"]
    assert any("'extra'" in line for line in splits.report.lines())
    assert splits.report.ignored == {"file beside the split folders": 1}


@pytest.mark.parametrize(
    "names",
    [
        ("train/1.png", "bus/1.png", "tram/1.png"),
        ("train/1.png", "test/1.png", "bus/1.png"),
        ("train/steam/1.png", "train/electric/1.png", "bus/1.png", "tram/1.png"),
    ],
)
def test_a_class_may_be_called_train(tmp_path: Path, names: tuple[str, ...]) -> None:
    found = read_folder(tree(tmp_path, *names))
    assert list(found.splits) == [""]
    assert "train" in found.splits[""].class_names and "bus" in found.splits[""].class_names


def test_split_folders_without_class_folders_are_no_classes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)test/ and train/ hold images but no class folders.*photos/cat"):
        open_data(str(tree(tmp_path, "train/1.png", "test/1.png")))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "holds no images"),
        (("a/notes.txt",), "holds no images"),
        (("1.png", "2.png"), "holds 2 images and no class folder"),
    ],
)
def test_no_class_folders_shows_the_expected_tree(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=rf"(?s){message}.*photos/cat/1\.jpg"):
        open_data(str(tree(tmp_path, *names)))


def test_an_empty_class_folder_is_warned_of_by_name(tmp_path: Path) -> None:
    root = tree(tmp_path, "a/1.png", "b/1.png", "ghost/notes.txt")
    found = read_folder(root)
    assert found.splits[""].class_names == ["a", "b"]
    assert any("'ghost'" in warning for warning in found.findings.warnings)


def test_links_and_odd_entries_are_listed(tmp_path: Path) -> None:
    root = tree(tmp_path / "d", "a/1.png", "b/1.png", "a/folder.png/inside.txt")
    (root / "a" / "gone.png").symlink_to(root / "nowhere.png")
    (root / "a" / "self.png").symlink_to("self.png")
    (root / "a" / "up").symlink_to(root / "a")
    (root / "b" / "other.png").symlink_to(root / "a" / "1.png")
    os.mkfifo(root / "b" / "pipe.png")  # opening it would wait for ever
    found = read_folder(root)
    assert ids(found.splits[""]) == ["a/1.png", "b/1.png", "b/other.png"]
    reasons = {item.id: item.reason for item in found.findings.dropped}
    assert reasons.keys() == {"a/gone.png", "a/self.png", "a/up", "a/folder.png", "b/pipe.png"}
    assert reasons["a/gone.png"] == "dangling link" and "link" in reasons["a/up"]
    assert reasons["b/pipe.png"] == "not a regular file" and reasons["a/folder.png"] == "a folder"


def test_linked_class_folders_are_followed(tmp_path: Path) -> None:
    tree(tmp_path / "store", "x/1.png", "y/1.png")
    (tmp_path / "d").mkdir()
    for name in "xy":
        (tmp_path / "d" / name).symlink_to(tmp_path / "store" / name)
    assert ids(read_folder(tmp_path / "d").splits[""]) == ["x/1.png", "y/1.png"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_folders_are_listed(tmp_path: Path) -> None:
    root = tree(tmp_path, "a/1.png", "b/1.png", "b/locked/2.png")
    (root / "b" / "locked").chmod(0)
    found = read_folder(root)
    (root / "b" / "locked").chmod(0o700)
    assert [item.id for item in found.findings.dropped] == ["b/locked"]


def test_a_file_that_vanished_is_a_decode_error(tmp_path: Path) -> None:
    source = read_folder(tree(tmp_path, "a/1.png", "b/1.png")).splits[""]
    (tmp_path / "a" / "1.png").unlink()
    with pytest.raises(DecodeError, match=r"a/1\.png") as caught:
        source[0]
    assert caught.value.reason == "unreadable"


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_what_took_the_place_of_a_file_is_a_decode_error(put: Callable[[Path], object], tmp_path: Path) -> None:
    """A pipe would wait for its writer, and a device would never end."""
    source = read_folder(tree(tmp_path, "a/1.png", "b/1.png")).splits[""]
    (tmp_path / "a" / "1.png").unlink()
    put(tmp_path / "a" / "1.png")
    with pytest.raises(DecodeError, match=r"a/1\.png: it is not a regular file") as caught:
        source[0]
    assert caught.value.reason == "unreadable"


def test_a_file_that_grows_while_it_is_read_is_read_whole_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is that of the moment of opening; some file systems do not know it."""
    path = tmp_path / "a.png"
    path.write_bytes(b"x" * 100)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result([*os.stat(path)[:6], 10, *os.stat(path)[7:]]))
    assert read_file(path) == b"x" * 100
    monkeypatch.setattr(folder, "MAX_BYTES", 99)
    with pytest.raises(DecodeError, match="more than the 99") as caught:
        read_file(path)
    assert caught.value.reason == "too-large"


def test_names_that_are_no_utf8_or_hold_odd_characters(tmp_path: Path) -> None:
    names = ["né e.png", "100% #1?.png", "日本.png", "new\nline.png"]
    root = tree(tmp_path, *(f"a/{name}" for name in names), "b/1.png")
    raw = os.fsencode(root / "b") + b"/\xff\xfe.png"
    with open(raw, "wb") as file:
        file.write((root / "b/1.png").read_bytes())
    splits = open_data(str(root))
    everything = {splits.train.id(i) for i in range(len(splits.train))}
    everything |= {splits.validation.id(i) for i in range(len(splits.validation))}
    assert everything == {*(f"a/{name}" for name in names), "b/1.png", os.fsdecode(b"b/\xff\xfe.png")}


def test_fingerprint_is_the_same_elsewhere_and_another_for_a_longer_file(tmp_path: Path) -> None:
    names = ("a/1.png", "a/2.png", "b/1.png")
    one = open_data(str(tree(tmp_path / "one", *names))).fingerprint
    assert one == open_data(str(tree(tmp_path / "two", *names))).fingerprint
    os.utime(tmp_path / "two/a/1.png", (1, 1))
    assert one == open_data(str(tmp_path / "two")).fingerprint
    with open(tmp_path / "two/a/1.png", "ab") as file:
        file.write(b"\0")
    assert one != open_data(str(tmp_path / "two")).fingerprint


def test_flowers(shared_data: Path) -> None:
    splits = open_data(str(shared_data / "flowers12"))
    assert (len(splits.train) + len(splits.validation), len(splits.test), len(splits.class_names)) == (720, 240, 12)
    assert splits.train[0].image[:2] == b"\xff\xd8"
