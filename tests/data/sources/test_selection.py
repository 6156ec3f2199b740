"""`data.include` and `data.exclude`: patterns of the images that count, in every kind of data and every spelling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.config import from_yaml, merge, to_yaml
from vitrail.data.settings import Data, Selection
from vitrail.data.sources.files import find_images
from vitrail.data.sources.open import open_data, open_data_set, open_path
from vitrail.errors import DataError, UsageError
from vitrail.training.run import Run
from vitrail.verbs.data.check import stats
from vitrail.verbs.flags.parse import parse
from vitrail.verbs.train.train import train


def photos(root: Path, *names: str) -> Path:
    """Files of random colours at these paths below a folder."""
    rng = np.random.default_rng(0)
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return root


def ids(data: Data) -> list[str]:
    """The names of all images, with their splits."""
    splits = open_data_set(data).splits
    return sorted(
        f"{name}/{source.id(row)}".lstrip("/") for name, source in splits.items() for row in range(len(source))
    )


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("*.jpg", "cat/1.jpg", True),
        ("*.jpg", "cat/1.JPG", True),  # a camera's spelling
        ("*.jpg", "cat/1.jpg.png", False),
        ("cat", "train/cat/1.jpg", True),
        ("cat", "train/cats/1.jpg", False),
        ("cat/", "cat/1.jpg", True),
        ("./cat/*", "cat/1.jpg", True),
        ("cat/*.jpg", "train/cat/1.jpg", True),
        ("train/cat/*", "val/cat/1.jpg", False),
        ("*_mask.*", "cat/1_mask.png", True),
        ("**/*.jpg", "1.jpg", True),
        ("**/*.jpg", "a/b/1.jpg", True),
        ("[ab]/?.jpg", "b/1.jpg", True),
        ("[ab]/?.jpg", "c/1.jpg", False),
        ("a(1)+.jpg", "x/a(1)+.jpg", True),  # characters of regular expressions are plain
    ],
)
def test_what_a_pattern_fits(pattern: str, path: str, fits: bool) -> None:
    assert (Selection.of((pattern,), ()).reason(path) == "") == fits
    assert (Selection.of((), (pattern,)).reason(path) != "") == fits


def test_class_folders_with_and_without_splits(tmp_path: Path) -> None:
    root = photos(tmp_path / "a", "cat/1.jpg", "cat/1.png", "cat/thumbs/2.jpg", "dog/1.jpg", "dog/2.png")
    assert ids(Data(str(root), include="*.jpg")) == ["cat/1.jpg", "cat/thumbs/2.jpg", "dog/1.jpg"]
    assert ids(Data(str(root), include=("*.jpg",), exclude=("thumbs", "dog"))) == ["cat/1.jpg"]
    split = photos(tmp_path / "b", "train/cat/1.jpg", "train/dog/1.jpg", "val/cat/1.jpg", "val/dog/1.jpg")
    assert ids(Data(str(split), exclude=("val/cat/*",))) == ["train/cat/1.jpg", "train/dog/1.jpg", "val/dog/1.jpg"]
    one = open_data_set(Data(str(root), exclude=("dog",)))
    assert one.splits[""].class_names == ["cat"]
    assert any("'dog'" in line and "patterns leave" in line for line in one.findings.warnings)


def test_the_folder_of_the_data_is_no_part_of_a_pattern(tmp_path: Path) -> None:
    root = photos(tmp_path / "cat", "cat/1.jpg", "dog/1.jpg")
    assert ids(Data(str(root), exclude=("cat",))) == ["dog/1.jpg"]


def test_other_kinds_of_data(tmp_path: Path) -> None:
    root = photos(tmp_path / "flat", "a_1.jpg", "a_1.png", "b_1.jpg", "b_2.jpg")
    named = Data(str(root), include=("*.jpg",), label_from="name: ^(.)")
    assert ids(named) == ["a_1.jpg", "b_1.jpg", "b_2.jpg"]
    unlabelled = open_path(str(root), Data(include=("*.png",)).columns, labels=False)
    assert len(unlabelled.splits[""]) == 1
    (root / "list.csv").write_text("image,label\na_1.jpg,x\nb_1.jpg,y\nb_2.jpg,z\n")
    found = open_data_set(Data(str(root / "list.csv"), exclude=("b_2*",)))
    assert found.splits[""].class_names == ["x", "y"] and len(found.splits[""]) == 2  # no image of class z is left


def test_arrays_are_taken_where_pictures_are_left_out(tmp_path: Path) -> None:
    root = photos(tmp_path / "d", "cat/1.jpg", "dog/1.jpg")
    for name in ("cat", "dog"):
        np.save(root / name / "1.npy", np.zeros((4, 4, 3), np.uint8))
    assert ids(Data(str(root), include=("*.npy",))) == ["cat/1.npy", "dog/1.npy"]


def test_a_pattern_in_the_place_of_a_folder(tmp_path: Path) -> None:
    root = photos(tmp_path / "d", "cat/1.jpg", "cat/1.png", "dog/1.jpg")
    assert ids(Data(f"{root}/*/*.jpg")) == ["cat/1.jpg", "dog/1.jpg"]
    with pytest.raises(DataError, match=r"none of the images in .* is left by the pattern '\*/\*.gif'"):
        open_data_set(Data(f"{root}/*/*.gif"))


def test_patterns_that_fit_nothing(tmp_path: Path) -> None:
    root = photos(tmp_path / "d", "cat/1.jpg", "dog/1.jpg")
    with pytest.raises(DataError, match=r"none of the images in .* is left by data.include '\*.jpeg'"):
        open_data_set(Data(str(root), include=("*.jpeg",)))
    found = open_data_set(Data(str(root), exclude=("*_msk.*", "cat", "cat/*")))
    assert [line for line in found.findings.warnings if "fits no image" in line] == [
        "data.exclude '*_msk.*' fits no image"
    ]
    with pytest.raises(DataError, match=r"data\.strict"):
        stats(root, exclude=("*_msk.*",), strict=True)


def test_files_to_predict(tmp_path: Path) -> None:
    root = photos(tmp_path / "d", "1.jpg", "1_mask.png", "more/2.jpg")
    chosen = find_images([root], Selection.of((), ("*_mask.*",)))
    assert [path.name for path in chosen] == ["1.jpg", "2.jpg"]
    with pytest.raises(DataError, match="none of the images"):
        find_images([root], Selection.of(("*.gif",), ()))
    with pytest.raises(UsageError, match="list of images of a data set"):
        find_images([root], Selection.of((), ("doubts.csv",)))


def test_flags_yaml_and_python_say_the_same(tmp_path: Path) -> None:
    words = ["photos", "--data.include", "*.jpg", "--data.exclude", "a", "--data.exclude", "b.csv"]
    asked = {"include": ("*.jpg",), "exclude": ("a", "b.csv")}
    assert parse(train, words, "train")[1] == {"path": "photos", "data": asked}
    assert parse(stats, words, "stats")[1] == {"path": "photos", **asked}
    data = merge(Run(), {"data": asked}).data
    assert data == Data(include=("*.jpg",), exclude=("a", "b.csv")) == merge(Run(), {"data": data}).data
    assert from_yaml("data: {include: '*.jpg', exclude: [a, b.csv]}", Run()).data == data
    assert from_yaml(to_yaml(merge(Run(), {"data": asked})), Run()).data == data
    for none in ("null", "[]"):  # runs of earlier versions recorded null
        assert from_yaml(f"data: {{exclude: {none}}}", Run()).data == Data()
    assert merge(Run(), {"data": {"exclude": "one.csv"}}).data.exclude == ("one.csv",)


@pytest.mark.train
def test_a_run_records_its_patterns(tmp_path: Path) -> None:
    names = [f"{kind}/{number}.{ending}" for kind in ("cat", "dog") for number in range(4) for ending in ("jpg", "png")]
    root = photos(tmp_path / "d", *names)
    small = dict(data={"include": "*.jpg"}, image_size=8, batch_size=2, workers=0, device="cpu", out=tmp_path / "runs")
    run = train(root, epochs=1, vit={"width": 12, "depth": 1, "heads": 3, "patch": 4}, **small).folder
    recorded = from_yaml(Path(run) / "config.yaml", Run()).data
    assert recorded.include == ("*.jpg",) and len(open_data(recorded).train) < 8
