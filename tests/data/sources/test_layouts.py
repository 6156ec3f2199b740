"""Folders that hold several kinds of data: one kind is used, and a warning or an error names all."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vitrail.data.check import check, stats
from vitrail.data.loading.pack import pack_data
from vitrail.data.settings import Columns
from vitrail.data.sources.open import open_data, open_path
from vitrail.data.sources.shards import INDEX
from vitrail.errors import DataError, UsageError


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (10, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def tree(root: Path, classes: tuple[str, ...] = ("blue", "red"), count: int = 4) -> Path:
    for place, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(png(100 * place + i))
    return root


def tar(file: Path, count: int = 8, labels: bool = False) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as out:
        for i in range(count):
            members = {f"photos/{i}.png": png(i)} | ({f"photos/{i}.cls": str(i % 2).encode()} if labels else {})
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                out.addfile(info, io.BytesIO(data))


def table(file: Path, **columns: list) -> None:
    pq.write_table(pa.table(columns), file)


def arrow(file: Path) -> None:
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_file(stream, pa.schema({"a": pa.int64()})) as writer:
        writer.write_table(pa.table({"a": [1]}))


STRAYS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "archive in a class folder": (r"tar shards red/a\.tar \(8 images without labels\)", lambda p: tar(p / "red/a.tar")),
    "the archive left in place": (
        r"tar shards photos\.tar \(8 images without labels\)",
        lambda p: tar(p / "photos.tar"),
    ),
    "labelled shards": (r"tar shards a\.tar \(8 images of 2 classes\)", lambda p: tar(p / "a.tar", labels=True)),
    "empty tar": (r"tar shards a\.tar \(which cannot be used: .*empty file", lambda p: (p / "a.tar").touch()),
    "no tar": (r"red/a\.tar is not a readable", lambda p: (p / "red/a.tar").write_bytes(b"text" * 500)),
    "validation images in a tar": (r"tar shards val\.tar", lambda p: tar(p / "val.tar", count=30, labels=True)),
    "metadata in parquet": (r"m\.parquet has no image column", lambda p: table(p / "m.parquet", a=[1, 2])),
    "metadata in a class folder": (r"red/m\.parquet has no image", lambda p: table(p / "red/m.parquet", a=[1, 2])),
    "parquet of images": (
        r"parquet files m\.parquet \(3 images of 2 classes\)",
        lambda p: table(p / "m.parquet", image=[png(1), png(2), png(3)], label=[0, 1, 1]),
    ),
    "empty parquet": (r"m\.parquet is not a readable", lambda p: (p / "m.parquet").touch()),
    "a table": (
        r"tables m\.csv \(1 image of 1 class\)",
        lambda p: (p / "m.csv").write_text("path,label\nred/0.png,x\n"),
    ),
    "records": (r"TensorFlow Datasets \(which", lambda p: (p / "a-train.tfrecord-00000-of-00001").write_bytes(b"xx")),
    "a saved state": (r"saved hub data set \(which", lambda p: (p / "state.json").write_text("{}")),
    "a saved dictionary": (r"saved hub data", lambda p: (p / "dataset_dict.json").write_text('{"splits": ["train"]}')),
    "an index": (r"packed shards \(which cannot be used", lambda p: (p / INDEX).write_bytes(b"x")),
    "an Arrow file": (r"packed shards in red \(which cannot be used", lambda p: arrow(p / "red" / INDEX)),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_class_folders_stay_what_they_are(tmp_path: Path, stray: str) -> None:
    root = tree(tmp_path / "photos")
    said, add = STRAYS[stray]
    add(root)
    counted = stats(root)
    assert (counted.kind, counted.count, counted.class_names) == ("folder", 8, ["blue", "red"])
    (warning,) = counted.findings.warnings
    assert warning.startswith(f"{root} holds 2 kinds of data: class folders (8 images of 2 classes), ")
    assert re.search(said, warning)
    assert warning in check(root).warnings
    assert open_data(root).report.warnings == [warning]


IGNORED: dict[str, Callable[[Path], None]] = {
    "a table of other things": lambda p: (p / "README.csv").write_text("a,b\n1,2\n"),
    "a table in a class folder": lambda p: (p / "red" / "m.csv").write_text("path,label\n0.png,x\n"),
    "arrays": lambda p: np.savez(p / "a.npz", images=np.zeros((4, 5, 5), np.uint8), labels=np.arange(4) % 2),
    "a hidden archive": lambda p: tar(p / ".a.tar"),
    "an archive below a class folder": lambda p: tar(p / "red" / "old" / "a.tar"),
    "a compressed archive": lambda p: (p / "photos.tar.gz").write_bytes(b"x"),
    "records in a class folder": lambda p: (p / "red" / "a-train.tfrecord-00000-of-00001").write_bytes(b"x"),
}


@pytest.mark.parametrize("stray", IGNORED)
def test_other_files_are_counted_as_ignored(tmp_path: Path, stray: str) -> None:
    root = tree(tmp_path / "photos")
    IGNORED[stray](root)
    findings = open_data(root).report
    assert findings.kind == "folder" and not findings.warnings and sum(findings.ignored.values()) == 1


def test_the_kind_with_more_images_is_used(tmp_path: Path) -> None:
    tree(tmp_path / "few", count=1)
    tar(tmp_path / "few" / "a.tar", count=8, labels=True)
    found = open_path(str(tmp_path / "few"))
    assert found.findings.kind == "shards" and len(found.splits[""]) == 8
    (warning,) = found.findings.warnings
    assert "tar shards a.tar (8 images of 2 classes), class folders (2 images of 2 classes)" in warning
    (tmp_path / "both").mkdir()
    tar(tmp_path / "both" / "a.tar", count=8, labels=True)
    table(tmp_path / "both" / "m.parquet", image=[png(1), png(2), png(3)], label=[0, 1, 1])
    assert open_path(str(tmp_path / "both")).findings.kind == "shards"


def test_training_images_count_before_more_validation_images(tmp_path: Path) -> None:
    tree(tmp_path / "train", count=2)
    tar(tmp_path / "val.tar", count=30, labels=True)
    opened = open_data(tmp_path)
    assert opened.report.kind == "folder" and len(opened.train) < 30
    assert "tar shards val.tar (30 images of 2 classes)" in opened.report.warnings[0]


def test_a_list_of_all_images_of_the_folder_is_no_mixture(tmp_path: Path) -> None:
    root = tree(tmp_path / "photos", count=2)
    lines = [f"{name}/{i}.png {name}" for name in ("blue", "red") for i in range(2)]
    (root / "train.txt").write_text("\n".join(lines))
    assert open_path(str(root)).findings.warnings == []
    (root / "train.txt").write_text("\n".join(lines[1:]))
    found = open_path(str(root))
    assert found.findings.kind == "lists" and len(found.splits["train"]) == 3
    (warning,) = found.findings.warnings
    assert "index lists train.txt (3 images of 2 classes), class folders (4 images of 2 classes)" in warning
    (root / "train.txt").write_text("blue/0.png blue\nblue/1.png\n")
    with pytest.raises(DataError, match=r"train\.txt, line 2"):
        open_path(str(root))


def test_a_packed_folder_among_class_folders(tmp_path: Path) -> None:
    root = tree(tmp_path / "photos")
    pack_data(str(root), tmp_path / "packed")
    (tmp_path / "packed").rename(root / "packed")
    found = open_path(str(root))
    assert found.findings.kind == "folder" and list(found.splits) == [""]
    assert any("packed shards in packed (8 images of 2 classes)" in line for line in found.findings.warnings)


def test_packed_splits_are_data_of_one_kind(tmp_path: Path) -> None:
    root = tree(tmp_path / "photos" / "train").parent
    shutil.copytree(root / "train", root / "val")
    pack_data(str(root), tmp_path / "packed")
    found = open_path(str(tmp_path / "packed"))
    assert found.findings.kind == "packed" and found.splits.keys() == {"train", "val"}
    assert found.findings.warnings == []
    tar(tmp_path / "packed" / "a.tar")  # and no other is overlooked
    assert "tar shards a.tar (8 images" in open_path(str(tmp_path / "packed")).findings.warnings[0]
    pack_data(str(root / "train"), tmp_path / "one")
    assert open_path(str(tmp_path / "one")).findings.warnings == []


@pytest.mark.parametrize("where", ["a.tar", "blue/a.tar"])
def test_shards_without_labels_are_refused_for_training_only(tmp_path: Path, where: str) -> None:
    tar(tmp_path / "shards" / where)
    (tmp_path / "shards" / "empty").mkdir()
    root = tmp_path / "shards"
    with pytest.raises(DataError, match=r"8 of 8 images of /.*shards \(shards\) have no label"):
        open_data(root)
    assert len(open_data(root, labels=False).train) > 0
    assert stats(root).splits[0].unlabelled == 8
    assert "8 of 8 images of the data have no label" in check(root).warnings


def test_data_without_images_are_an_error(tmp_path: Path) -> None:
    table(tmp_path / "m.parquet", image=pa.array([], pa.binary()), label=pa.array([], pa.int64()))
    for read in (open_path, stats, check, open_data):
        with pytest.raises(DataError, match=rf"{tmp_path} \(parquet\) holds no images"):
            read(str(tmp_path))


def test_a_split_without_images_is_left_out(tmp_path: Path) -> None:
    table(tmp_path / "train.parquet", image=[png(i) for i in range(4)], label=[0, 1, 0, 1])
    table(tmp_path / "test.parquet", image=pa.array([], pa.binary()), label=pa.array([], pa.int64()))
    found = open_path(str(tmp_path))
    assert list(found.splits) == ["train"] and found.findings.warnings == ["split 'test' holds no images: left out"]


def test_several_kinds_that_cannot_be_used_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    table(tmp_path / "m.parquet", a=[1])
    with pytest.raises(DataError, match=r"2 kinds of data, and none can be used: .*no image column.*empty file"):
        open_path(str(tmp_path))


def test_a_tar_that_disappears_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar(tmp_path / "a.tar", labels=True)

    def gone(files: list[Path]) -> dict[str, list[Path]]:
        files[0].unlink()
        return {"": files}

    monkeypatch.setattr("vitrail.data.sources.shards.group_by_split", gone)
    with pytest.raises(DataError, match=r"a\.tar"):
        open_path(str(tmp_path))


def test_named_columns_are_those_of_the_data_not_of_a_stray_table(tmp_path: Path) -> None:
    root = tree(tmp_path / "photos")
    (root / "README.csv").write_text("a,b\n1,2\n")
    assert open_path(str(root), Columns("picture", "kind")).findings.kind == "folder"
    table(root / "m.parquet", picture=[png(1)], label=[0])
    with pytest.raises(UsageError, match=r"m\.parquet has no column 'kind'"):
        open_path(str(root), Columns("picture", "kind"))
