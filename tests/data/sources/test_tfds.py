"""Folders prepared by TensorFlow Datasets, written by tensorboard and protobuf (`prepared`)."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from prepared import Features, prepare

from vitrail.data.benchmarks.vtab_source import locate, read_task
from vitrail.data.benchmarks.vtab_tasks import TASKS, TaskLabel, count_objects, nearest_object, nearest_vehicle
from vitrail.data.check import stats
from vitrail.data.images.decode import decode
from vitrail.data.settings import Columns
from vitrail.data.sources.lists import index_lists
from vitrail.data.sources.open import open_data, open_path
from vitrail.data.sources.tfds import read_tfds
from vitrail.errors import DataError, UsageError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def png(number: int, mode: str = "RGB", side: int = 4) -> bytes:
    shape = (side, side, 3) if mode == "RGB" else (side, side)
    pixels = np.random.default_rng(number).integers(0, 2 if mode == "1/255" else 256, shape, dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def rows(count: int, classes: int = 2, start: int = 0) -> list[Features]:
    return [{"image": png(start + i), "label": i % classes, "id": f"{start + i}"} for i in range(count)]


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    splits = {"train": rows(7), "test": rows(3, start=50)}
    return prepare(tmp_path / "animals" / "3.0.1", "animals", splits, shards=3, labels={"label": ["zebra", "ant"]})


# any prepared folder


@pytest.mark.parametrize("old", [False, True], ids=["features.json", "before it"])
def test_a_prepared_folder_is_opened(old: bool, tmp_path: Path) -> None:
    written = rows(7)
    splits = {"train": written, "test": rows(3, start=50)}
    folder = prepare(tmp_path / "1.0.0", "a", splits, shards=3, labels={"label": ["zebra", "ant"]}, old=old)
    before = sorted((file.name, file.read_bytes()) for file in folder.iterdir())
    opened = open_data(str(folder))
    assert opened.class_names == ["zebra", "ant"]  # in the data set's order
    found = open_path(str(folder))
    assert found.findings.kind == "tfds" and list(found.splits) == ["train", "test"]
    train = found.splits["train"]
    assert [train[i].image for i in range(7)] == [row["image"] for row in written]
    assert train.labels.tolist() == [i % 2 for i in range(7)]
    assert train.sizes.tolist() == [len(row["image"]) for row in written]  # type: ignore[arg-type]
    assert train.id(3) == "a-train.tfrecord-00001-of-00003[0]" and train[3].id == train.id(3)
    assert len({train.id(i) for i in range(7)}) == 7
    assert sorted((file.name, file.read_bytes()) for file in folder.iterdir()) == before  # nothing written there


def test_the_folder_above_one_version_is_the_same(animals: Path) -> None:
    above, there = (open_path(str(folder)).splits["train"].labels.tolist() for folder in (animals.parent, animals))
    assert above == there
    shutil.copytree(animals, animals.with_name("3.1.0"))
    with pytest.raises(DataError, match=r"holds the versions 3\.0\.1, 3\.1\.0: give the folder of one"):
        open_path(str(animals.parent))


def test_stats_counts_a_prepared_folder(animals: Path) -> None:
    counted = stats(str(animals))
    assert (counted.kind, counted.count, counted.formats) == ("tfds", 10, {"PNG": 10})
    assert counted.splits[0].classes == {"zebra": 4, "ant": 3}


def test_the_index_is_made_once_and_again_when_a_file_changes(animals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_path(str(animals)).splits["train"]
    reads: list[Path] = []

    def counting(path: Path) -> Any:
        reads.append(path)
        return iter(())

    monkeypatch.setattr("vitrail.data.sources.tfds.records", counting)
    again = open_path(str(animals)).splits["train"]
    assert reads == [] and again[6].image == first[6].image
    os.utime(animals / "animals-train.tfrecord-00000-of-00003", ns=(1, 1))
    with pytest.raises(DataError, match="has 0 records"):
        open_path(str(animals))
    assert len(reads) == 3  # the split that changed


def test_columns_may_be_named(tmp_path: Path) -> None:
    written = [{**row, "label_kind": 1 - row["label"], "image2": png(99)} for row in rows(4)]  # type: ignore[operator]
    folder = prepare(tmp_path / "1.0.0", "a", {"train": written}, labels={"label": ["x", "y"]}, supervised=None)
    assert open_path(str(folder)).splits["train"].labels.tolist() == [0, 1, 0, 1]
    other = open_path(str(folder), Columns("image2", "label_kind")).splits["train"]
    assert other.labels.tolist() == [1, 0, 1, 0] and other[0].image == png(99)
    assert other.class_names[:2] == ["0", "1"]  # numbers, where the classes have no names
    with pytest.raises(UsageError, match="no column 'labl'"):
        open_path(str(folder), Columns(label="labl"))


def test_labels_may_be_text_or_unknown(tmp_path: Path) -> None:
    texts = [{"image": png(i), "label": name} for i, name in enumerate(("tiger", "ant", "tiger"))]
    source = open_path(str(prepare(tmp_path / "1.0.0", "a", {"train": texts}))).splits["train"]
    assert (source.class_names, source.labels.tolist()) == (["ant", "tiger"], [1, 0, 1])
    hidden = [{"image": png(i), "label": -1} for i in range(2)]
    splits = {"train": rows(4), "test": hidden}
    found = open_path(str(prepare(tmp_path / "2.0.0", "a", splits, labels={"label": ["x", "y"]})))
    assert found.splits["test"].labels.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda f: (f / "a-train.tfrecord-00001-of-00002").unlink(), "split 'train' is in 2 files, and number 00001"),
        (lambda f: _flip(f / "a-train.tfrecord-00000-of-00002", 40), "record 0 .*checksum of its data"),
        (lambda f: _cut(f / "a-train.tfrecord-00001-of-00002", 9), "ends within record 1"),
        (lambda f: _edit(f, {"splits": [{"name": "train", "shardLengths": ["3", "2"]}]}), "4 records.* says 5"),
        (lambda f: _edit(f, {"splits": [{"name": "train"}, {"name": "test"}]}), "lacks all files of split 'test'"),
        (lambda f: _edit(f, {"fileFormat": "array_record"}), "holds array_record files"),
        (lambda f: _edit(f, {"splits": [{"name": "train", "shardLengths": ["many"]}]}), "not as TensorFlow Datasets"),
        (lambda f: (f / "dataset_info.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "label.labels.txt").write_text("x\n"), "record 1 .*label 1 is not one of the 1 classes"),
        (
            lambda f: prepare(f, "a", {"train": [{"image": [png(1), png(2)], "label": 0}] * 4}, shards=2),
            "not one image",
        ),
    ],
)
def test_what_is_missing_or_damaged_is_named(damage: Any, match: str, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "1.0.0", "a", {"train": rows(4)}, shards=2, labels={"label": ["x", "y"]})
    damage(folder)
    with pytest.raises(DataError, match=match):
        open_path(str(folder))


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def _cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:-end])


def _edit(folder: Path, values: dict[str, Any]) -> None:
    file = folder / "dataset_info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


# labels that are computed: worked by hand from the benchmark's definitions


def _numbers(**features: list[float]) -> dict[str, np.ndarray]:
    return {name.replace("__", "/"): np.array(values) for name, values in features.items()}


@pytest.mark.parametrize(("objects", "label"), [(3, 0), (4, 1), (10, 7)])
def test_clevr_counts_objects_from_three_on(objects: int, label: int) -> None:
    assert count_objects(_numbers(objects__size=[0] * objects)) == label


@pytest.mark.parametrize(
    ("depths", "label"),
    [([7.9, 12.0], 0), ([8.0], 0), ([8.01], 1), ([9.9, 8.6, 11.0], 2), ([9.5], 3), ([9.9], 4), ([10.5, 30.0], 5)],
)
def test_clevr_bins_the_nearest_depth(depths: list[float], label: int) -> None:
    coordinates = [value for depth in depths for value in (100.0, 1.0, depth)]  # x and y in pixels, then the depth
    assert nearest_object(_numbers(objects__pixel_coords=coordinates)) == label


@pytest.mark.parametrize(
    ("objects", "label"),
    [
        ([(0, 5.0), (1, 30.0)], 0),  # a car at 5 m
        ([(0, 8.0)], 0),
        ([(2, 8.5), (3, 1.0)], 1),  # a truck; the pedestrian before it does not count
        ([(1, 20.5)], 2),
        ([(3, 2.0), (7, 4.0)], 3),  # nobody drives
        ([], 3),
    ],
)
def test_kitti_bins_the_nearest_vehicle(objects: list[tuple[int, float]], label: int) -> None:
    location = [value for _, ahead in objects for value in (-3.0, 1.5, ahead)]  # metres right, down, ahead
    kinds = np.array([kind for kind, _ in objects], dtype=np.int64)
    features = {"objects/type": kinds, "objects/location": np.array(location, dtype=np.float32)}
    assert nearest_vehicle(features) == label


@pytest.mark.parametrize(
    ("task", "values", "expected"),
    [
        # 32 positions in 16 bins of 2; 40 orientations in 16 bins of 2.5
        ("dsprites-location", [0, 1, 2, 15, 30, 31], [0, 0, 1, 7, 15, 15]),
        ("dsprites-orientation", [0, 2, 3, 4, 5, 7, 8, 39], [0, 0, 1, 1, 2, 2, 3, 15]),
    ],
)
def test_dsprites_joins_neighbours(task: str, values: list[int], expected: list[int]) -> None:
    label = TASKS[task].label
    assert label.compute is not None and len(label.names) == 16
    assert [label.compute({label.keys[0]: np.array([value])}) for value in values] == expected


def test_a_label_that_cannot_be_computed_is_named(tmp_path: Path) -> None:
    row = {"image": png(0), "objects/pixel_coords": []}
    folder = prepare(tmp_path / "1.0.0", "clevr", {"train": [row]}, supervised=None)
    with pytest.raises(DataError, match=r"record 0 .*no label can be made of its objects/pixel_coords"):
        read_tfds(folder, Columns("image"), label=TASKS["clevr-distance"].label)
    with pytest.raises(DataError, match="it has no feature 'other'"):
        read_tfds(folder, Columns("image"), label=TaskLabel(("other",)))


# a task of VTAB-1k


def _no_other(path: str, image: str | None, label: str | None) -> Any:
    raise AssertionError(f"{path} was opened by other means")


def test_clevr_is_cut_and_labelled(tmp_path: Path) -> None:
    image = png(0)
    train = [{"image": image, "objects/size": [0] * (3 + i % 8), "objects/shape": [1]} for i in range(2000)]
    splits = {"train": train, "validation": train[:30], "test": train[:5]}
    prepare(tmp_path / "clevr" / "3.1.0", "clevr", splits, shards=2, supervised=None)
    found = read_task(f"vtab:clevr-count:{tmp_path}", _no_other)
    assert {name: len(source) for name, source in found.splits.items()} == {"train800": 800, "val200": 200, "test": 30}
    first, last, test = (found.splits[name] for name in ("train800", "val200", "test"))
    assert first.class_names == ["3", "4", "5", "6", "7", "8", "9", "10"]
    assert first.labels.tolist() == [i % 8 for i in range(800)]
    assert last.labels.tolist() == [i % 8 for i in range(1800, 2000)]
    assert last.id(0) == "clevr-train.tfrecord-00001-of-00002[800]" and test.labels.tolist()[:3] == [0, 1, 2]
    assert found.findings.warnings == ["30 test images, not 15,000"]


def test_pixels_of_dsprites_are_white(tmp_path: Path) -> None:
    image = png(3, "1/255")  # values 0 and 1
    assert decode(image).max() == 1
    train = [{"image": image, "label_x_position": i % 32, "label_orientation": i % 40} for i in range(1300)]
    prepare(tmp_path / "dsprites" / "2.0.0", "dsprites", {"train": train}, supervised=None)
    found = read_task(f"vtab:dsprites-location:{tmp_path}", _no_other)
    np.testing.assert_array_equal(found.splits["test"][0].image, decode(image) * np.uint8(255))
    assert found.splits["train800"].labels.tolist()[:6] == [0, 0, 1, 1, 2, 2]
    assert (
        len(found.splits["test"]) == 130
        and found.splits["val200"].id(0) == "dsprites-train.tfrecord-00000-of-00001[1040]"
    )


def test_a_version_the_benchmark_does_not_use_is_not_taken(tmp_path: Path) -> None:
    prepare(tmp_path / "kitti" / "3.2.0", "kitti", {"train": [{"image": png(0), "label": 0}]})
    with pytest.raises(DataError, match=r"kitti has version 3\.2\.0, but kitti-distance of VTAB-1k needs 3\.1\.0"):
        locate(TASKS["kitti-distance"], tmp_path)
    prepare(tmp_path / "kitti" / "3.1.0", "kitti", {"train": [{"image": png(0), "label": 0}]})
    assert locate(TASKS["kitti-distance"], tmp_path) == ("tfds", str(tmp_path / "kitti" / "3.1.0"))
    assert locate(TASKS["dtd"], tmp_path) is None


def test_of_several_versions_the_newest_that_fits_is_taken(tmp_path: Path) -> None:
    for version in ("3.0.9", "3.0.10", "4.0.0", "2.9.9"):
        prepare(tmp_path / "dtd" / version, "dtd", {"train": rows(2)})
    assert locate(TASKS["dtd"], tmp_path) == ("tfds", str(tmp_path / "dtd" / "3.0.10"))


def test_a_data_set_too_small_is_another_one(tmp_path: Path) -> None:
    prepare(tmp_path / "dtd" / "3.0.1", "dtd", {"train": rows(20), "validation": rows(20), "test": rows(5)})
    with pytest.raises(DataError, match=r"'train\[:800\]' needs more images than split 'train' has"):
        open_path(f"vtab:dtd:{tmp_path}")


# index lists


def _lists(root: Path, **lists: list[str]) -> Path:
    lines = [line for each in lists.values() for line in each if line.startswith("i") and "missing" not in line]
    for name in {line.split()[0] for line in lines}:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(len(name) + sum(map(ord, name))))
    for name, entries in lists.items():
        (root / f"{name}.txt").write_text("\n".join(entries) + "\n")
    return root


def test_index_lists_are_splits(tmp_path: Path) -> None:
    root = _lists(
        tmp_path,
        train800=["images/a.png 10", "images/b.png 9"],
        val200=["images/c.png 9"],
        train800val200=["images/a.png 10", "images/b.png 9", "images/c.png 9"],
        test=["images/d.png 2", "", "images/missing.png 2", "../out.png 2"],
    )
    (root / "readme.txt").write_text("images/a.png 1\n")
    opened = open_data(str(root))
    assert opened.class_names == ["2", "9", "10"]  # of all lists, by number
    assert opened.train.labels.tolist() == [2, 1] and opened.held_out == {"validation": "val200"}
    assert opened.validation is not None and opened.validation.id(0) == "images/c.png"
    assert opened.test is not None and opened.test[0].image == (root / "images/d.png").read_bytes()
    assert [(item.id, item.reason.split(":")[0]) for item in opened.report.dropped] == [
        ("images/missing.png", "test.txt, line 3"),
        ("../out.png", "test.txt, line 4"),
    ]


def test_a_joined_list_counts_only_without_its_parts(tmp_path: Path) -> None:
    root = _lists(tmp_path, train800val200=["i/a.png 0", "i/d.png 0", "i/b.png 1"], test=["i/c.png 0"])
    opened = open_data(str(root))
    assert len(opened.train) + len(opened.validation or ()) == 3 and opened.held_out["from"] == "train800val200"
    assert set(index_lists(_lists(tmp_path, train800=["i/a.png 0"], val200=["i/b.png 1"]))) == {
        "train800",
        "val200",
        "test",
    }


def test_a_list_that_is_none_is_named_or_passed_over(tmp_path: Path) -> None:
    root = _lists(tmp_path, train=["i/a.png 0"], test=["i/a.png 1"])
    (root / "train.txt").write_text("i/a.png 0\ni/a.png\n")
    with pytest.raises(DataError, match=r"train\.txt, line 2: expected a path and a label"):
        open_path(str(root))
    (root / "train.txt").write_text("i/missing.png 0\n")
    with pytest.raises(DataError, match=r"train\.txt lists no existing image.*no such file below"):
        open_path(str(root))
    (root / "train.txt").write_text("These are the lists.\n")
    assert index_lists(root) == {}


def test_a_task_in_another_layout_is_drawn_and_said_to_be(tmp_path: Path, shared_data: Path) -> None:
    (tmp_path / "cifar100").symlink_to(shared_data / "cifar100")
    found = open_path(f"vtab:cifar100:{tmp_path}")
    assert {name: len(source) for name, source in found.splits.items()} == {
        "train800": 800,
        "val200": 200,
        "test": 10_000,
    }
    assert "not those of VTAB-1k" in found.findings.warnings[0] and len(found.findings.warnings) == 1
    both = [found.splits[name].id(i) for name in ("train800", "val200") for i in range(len(found.splits[name]))]
    assert len(set(both)) == 1000
    again = open_path(f"vtab:cifar100:{tmp_path}").splits["val200"]
    assert [again.id(i) for i in range(200)] == both[800:]
    assert np.bincount(found.splits["train800"].labels, minlength=100).tolist() == [8] * 100


@pytest.mark.parametrize(
    ("path", "error", "match"),
    [
        ("vtab:cifar1000:x", UsageError, "no task 'cifar1000'. Did you mean 'cifar100'"),
        ("vtab:dtd", UsageError, "does not name the folder of the data"),
        ("vtab:sun397:nowhere", DataError, r"expected is sun397/tfds/4\.\*\.\* .*tfds build sun397/tfds"),
        ("vtab:clevr-count:hub", DataError, r"no data for clevr-count in hub.*cs\.stanford\.edu"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(path: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        open_path(path)
