from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vitrail.data.loading.pack import pack_data
from vitrail.data.settings import Data
from vitrail.data.sources import folder
from vitrail.data.sources.folder import read_file, read_folder
from vitrail.data.sources.open import open_data, open_path
from vitrail.errors import DataError, DecodeError, UsageError


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
    found = open_path(str(root))
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


# Folders of strangers: what systems leave, splits by a word, order of classes, links to the outside


def test_what_systems_leave_is_no_class_and_is_named(tmp_path: Path) -> None:
    left = ["@eaDir", "$RECYCLE.BIN", "lost+found", "#recycle", "System Volume Information", "@Recycle", "FOUND.000"]
    root = tree(tmp_path, "a/1.png", "b/1.png", *(f"{name}/x.png" for name in left), "a/@eaDir/1.png", "notes.txt")
    found = open_path(str(root))
    assert found.splits[""].class_names == ["a", "b"] and ids(found.splits[""]) == ["a/1.png", "b/1.png"]
    assert found.findings.ignored["hidden or system file"] == len(left) + 1
    assert "ignored 1 x file beside the class folders: notes.txt" in found.findings.lines()


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("training_set", "test_set"),
        ("Training Set", "Test Set"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("train/images", "test/images"),
    ],
)
def test_a_word_in_the_name_of_a_folder_marks_a_split(tmp_path: Path, train: str, test: str) -> None:
    root = tree(tmp_path, *(f"{part}/{name}" for part in (train, test) for name in ("a/1.png", "b/1.png", "b/2.png")))
    splits = open_data(str(root))
    assert splits.class_names == ["a", "b"] and splits.test is not None
    assert ids(splits.test) == ["a/1.png", "b/1.png", "b/2.png"]
    assert open_path(str(root)).splits.keys() == {train.split("/")[0], test.split("/")[0]}


def test_folders_are_splits_where_settings_name_them(tmp_path: Path) -> None:
    root = tree(tmp_path, "one/a/1.png", "one/b/1.png", "two/a/2.png", "two/b/2.png", "last/a/3.png", "last/b/3.png")
    splits = open_data(Data(path=str(root), train="one+two", test="last"))
    assert splits.class_names == ["a", "b"] and ids(splits.test) == ["a/3.png", "b/3.png"]
    several = [line for line in open_path(str(root)).findings.warnings if "class folders hold only folders" in line]
    assert len(several) == 1 and "'one' holds 'a', 'b'" in several[0] and "--data.train" in several[0]


def test_two_folders_of_one_role_are_not_chosen_from_in_silence(tmp_path: Path) -> None:
    root = tree(tmp_path, *(f"train_{part}/{name}/1.png" for part in (1, 2) for name in "ab"))
    with pytest.raises(UsageError, match=r"'train_1', 'train_2'.*train_1\+train_2"):
        open_data(str(root))
    assert len(open_data(Data(path=str(root), train="train_1+train_2", holdout=0)).train) == 4


def test_nested_class_folders_are_warned_of_with_their_names(tmp_path: Path) -> None:
    root = tree(tmp_path, "animal/cat/1.png", "animal/dog/1.png", "plant/oak/1.png", "plant/oak/2.png")
    found = open_path(str(root))
    (warning,) = found.findings.warnings
    assert found.splits[""].class_names == ["animal", "plant"]
    assert "'animal' holds 'cat', 'dog'" in warning and str(root / "animal") in warning and "'plant'" not in warning


def test_folders_and_tables_have_one_order_of_classes(tmp_path: Path) -> None:
    names = [str(number) for number in range(12)]
    root = tree(tmp_path / "d", *(f"{name}/1.png" for name in names))
    (root / "notes").mkdir()  # an empty folder has no say
    source = open_path(str(root)).splits[""]
    table = tmp_path / "t.csv"
    table.write_text("path,label\n" + "".join(f"d/{name}/1.png,{name}\n" for name in names))
    assert source.class_names == names == open_path(str(table)).splits[""].class_names
    assert all(source.class_names[source[index].label] == source.id(index).split("/")[0] for index in range(12))


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (("Cat", "cat", "dog"), True),
        (("cat", "cat ", "dog"), True),
        (("7", "007"), True),
        (("0", "0.0"), True),
        (("caf\u00e9", "cafe\u0301"), True),
        (("cat", "cats", "1", "10"), False),
        (("12345678901234567890", "12345678901234567891"), False),
    ],
)
def test_classes_with_names_that_are_alike_are_warned_of(tmp_path: Path, names: tuple[str, ...], alike: bool) -> None:
    found = open_path(str(tree(tmp_path, *(f"{name}/1.png" for name in names))))
    warned = [line for line in found.findings.warnings if "equal but for" in line]
    assert bool(warned) is alike
    assert not alike or all(repr(name) in warned[0] for name in names[:2])


def test_images_outside_are_counted_and_packed_only_when_asked_for(tmp_path: Path) -> None:
    secret = tree(tmp_path / "secret", "s/1.png", "s/2.png")
    root = tree(tmp_path / "d", "a/1.png", "b/1.png")
    (root / "c").symlink_to(secret / "s")
    (root / "b" / "inside.png").symlink_to(root / "b" / "1.png")
    (warning,) = open_path(str(root)).findings.warnings
    assert warning.startswith(f"2 images lie outside {root}") and str(root / "c" / "1.png") in warning
    with pytest.raises(DataError, match=r"2 images lie outside.*--outside"):
        pack_data(str(root), tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    assert pack_data(str(root), tmp_path / "packed", outside=True)[""].count == 5
    table = tmp_path / "d" / "t.csv"
    (root / "link.png").symlink_to(secret / "s" / "1.png")
    (root / "all").symlink_to(secret / "s")
    table.write_text("path,label\nlink.png,x\nall/2.png,y\na/1.png,x\nb/inside.png,y\n")
    assert any(line.startswith("2 images lie outside") for line in open_path(str(table)).findings.warnings)
    table.write_text(f"path,label\n../secret/s/1.png,x\n{secret}/s/2.png,y\na/1.png,x\n{root}/b/1.png,y\n")
    assert any(line.startswith("2 images lie outside") for line in open_path(str(table)).findings.warnings)
    paths = [str(root / "a" / "1.png"), f"{root}/../secret/s/1.png", "../secret/s/2.png", "b/1.png"]
    images = pa.array([{"bytes": None, "path": path} for path in paths])
    pq.write_table(pa.table({"image": images, "label": ["x", "y", "x", "y"]}), root / "t.parquet")
    found = open_path(str(root / "t.parquet"))
    assert (found.findings.outside, found.findings.first_outside) == (2, paths[1])


def test_columns_that_are_not_used_are_listed(tmp_path: Path) -> None:
    tree(tmp_path, "1.png", "2.png")
    table = tmp_path / "t.csv"
    table.write_text("path,label,is_valid,note\n1.png,a,True,x\n2.png,b,False,y\n")
    lines = open_path(str(table)).findings.lines()
    assert any("'is_valid' of t.csv is not used" in line and "'split'" in line for line in lines)
    assert "ignored 2 x column of t.csv that is not used: is_valid, note" in lines


def test_a_split_column_in_one_of_several_tables_loses_no_image(tmp_path: Path) -> None:
    tree(tmp_path, *(f"{number}.png" for number in range(6)))
    for name, rows in (("train", range(4)), ("test", range(4, 6))):
        lines = "".join(f"{row}.png,{'ab'[row % 2]},{'xy'[row % 2]}\n" for row in rows)
        (tmp_path / f"{name}.csv").write_text(f"path,label,split\n{lines}")
    found = open_path(str(tmp_path))
    assert {name: len(source) for name, source in found.splits.items()} == {"train": 4, "test": 2}
    assert any("'split' of train.csv is not used" in line for line in found.findings.warnings)


def test_a_resumed_run_keeps_its_order_of_classes(tmp_path: Path) -> None:
    root = tree(tmp_path, *(f"{part}/{name}/1.png" for part in ("train", "val", "test") for name in ("0", "1", "10")))
    splits = open_data(str(root))
    earlier = splits.in_order(["1", "10", "0"])  # as a run of an earlier version recorded it
    for before, after in zip(splits_of(splits), splits_of(earlier), strict=True):
        assert [named_label(after, row) for row in range(3)] == [named_label(before, row) for row in range(3)]
        assert after.class_names == ["1", "10", "0"]
    assert splits.in_order(["a", "b"]) is splits  # other classes are an error elsewhere


def splits_of(splits):
    return [splits.train, splits.validation, splits.test]


def named_label(source, index: int) -> str:
    return source.class_names[source[index].label]
