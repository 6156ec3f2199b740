from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.data.sources.open import open_data, open_path
from vitrail.errors import DataError, UsageError
from vitrail.verbs.data.dedup import dedup

TINY: dict[str, Any] = dict(
    recipe="scratch-small",
    model="Ti/4",
    vit=dict(width=16, depth=1, heads=2, mlp_dim=32),
    image_size=16,
    batch_size=8,
    workers=0,
    device="cpu",
)


def picture(number: int, size: int = 32) -> Image.Image:
    noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pretrain`: 24 images in two classes, of which four are test images of `task`: two exact, two re-encoded."""
    root = tmp_path_factory.mktemp("sets")
    for number in range(24):
        folder = root / "pretrain" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / f"{number:02}.png")
    for number in (0, 1, 2, 3, 90, 91):
        folder = root / "task" / "test" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        if number in (2, 3):
            picture(number).resize((48, 48)).save(folder / f"{number:02}.jpg", quality=80)
        else:
            picture(number).save(folder / f"{number:02}.png")
        (root / "task" / "train" / ("cat", "dog")[number % 2]).mkdir(parents=True, exist_ok=True)
        # its training images are no matter: they are not what is reported on
        picture(4 + number).save(root / "task" / "train" / ("cat", "dog")[number % 2] / f"{number:02}.png")
    return root


def contents(root: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.mark.train
def test_training_images_that_are_test_images(sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(sets)
    pairs, kept, sheet = (tmp_path / "lists" / name for name in ("pairs.csv", "kept.csv", "sheet.png"))
    against = ("--against", sets / "task")
    assert run("data", "dedup", sets / "pretrain", *against, "--out", pairs, "--keep-list", kept, "--sheet", sheet) == 0
    with Image.open(sheet) as drawn:
        assert drawn.format == "PNG"
    text = "".join(capsys.readouterr().out.split())  # lines break where a path ends
    assert "20of24imagesremain" in text and "".join(str(kept).split()) in text
    assert contents(sets) == before
    with open(pairs, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["other_split"], row["other_id"], row["exact"]) for row in rows] == [
        ("cat/00.png", "test", "cat/00.png", "1"),
        ("cat/02.png", "test", "cat/02.jpg", "0"),
        ("dog/01.png", "test", "dog/01.png", "1"),
        ("dog/03.png", "test", "dog/03.jpg", "0"),
    ]
    left = open_data(str(kept)).train
    assert len(left) + len(open_data(str(kept)).validation or ()) == 20
    result = vitrail.train(kept, out=str(tmp_path / "runs"), duration="2 steps", **TINY)
    assert result.steps == 2  # what remains is a data set like any other


def test_as_json_and_without_a_second_reading(sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data", "dedup", sets / "pretrain", "--against", sets / "task", "--json")
    assert run(*words) == 0
    first = json.loads(capsys.readouterr().out)
    assert run(*words) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert first["remaining"] == 20 and first["images"] == 24 and first["found"] == 4
    assert first["shared"] == [
        {
            "data": str(sets / "pretrain"),
            "split": "",
            "other_data": str(sets / "task"),
            "other_split": "test",
            "exact": 2,
            "near": 2,
            "others": 4,
            "alike": 0,
        }
    ]
    assert first["pairs"][0]["id"] == "cat/00.png" and first["pairs"][0]["exact"] == 1


def test_several_test_sets_are_told_apart(sets: Path, tmp_path: Path) -> None:
    (tmp_path / "second" / "x").mkdir(parents=True)
    picture(7).save(tmp_path / "second" / "x" / "seven.bmp")
    result = dedup(sets / "pretrain", against=(sets / "task", tmp_path / "second"))
    assert [(one.other_data, one.exact, one.near) for one in result.shared] == [
        (str(sets / "task"), 2, 2),
        (str(tmp_path / "second"), 0, 1),
    ]
    assert result.remaining == 19


def test_a_set_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (0, 90):
        folder = tmp_path / "alone" / "train" / "cat"
        folder.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / f"{number}.png")
        picture(number).save(folder / f"{number} again.jpg", quality=70)
    (tmp_path / "alone" / "test" / "cat").mkdir(parents=True)
    picture(90).save(tmp_path / "alone" / "test" / "cat" / "same.png")
    assert run("data", "dedup", tmp_path / "alone", "--keep-list", tmp_path / "kept.csv") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2 of 5 images remain" in text and "earlier" in text
    splits = open_path(str(tmp_path / "kept.csv")).splits
    assert [splits[name].id(0) for name in ("train", "test")] == ["cat/0 again.jpg", "cat/same.png"]


def test_copies_with_different_labels_and_look_alikes_are_listed_and_remain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, other = (np.asarray(picture(number, 128), np.float64) for number in (0, 1))
    slices = [Image.fromarray((base + share * (other - base)).astype(np.uint8)) for share in (0, 0.25)]
    others = [(f"dog/{number}.png", picture(number, 128)) for number in range(2, 12)]
    for name, image in (("cat/a.png", slices[0]), ("cat/next.png", slices[1]), ("dog/a.png", slices[0]), *others):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "set" / name)
    slices[0].save(tmp_path / "set" / "cat" / "again.jpg", quality=80)
    out = tmp_path / "pairs.csv"
    assert run("data", "dedup", tmp_path / "set", "--out", out, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    with open(out, newline="") as file:
        copy = {(row["id"], row["other_id"]): row["copy"] for row in csv.DictReader(file)}
    assert copy[("cat/a.png", "cat/again.jpg")] == "1"
    assert copy[("cat/a.png", "cat/next.png")] == "0" and copy[("cat/a.png", "dog/a.png")] == "0"
    assert result["remaining"] == 13 and result["alike"] == result["found"] - 1
    assert run("data", "dedup", tmp_path / "set") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "cat/a.png = cat/again.jpg" in text and "cat/a.png ~ dog/a.png: same bytes" in text
    assert "their images remain" in text and "13 of 14 images remain" in text


@pytest.mark.train
def test_a_model_confirms(sets: Path, tmp_path: Path) -> None:
    trained = vitrail.train(sets / "pretrain", out=str(tmp_path / "runs"), duration="2 steps", **TINY)
    choices: dict[str, Any] = dict(against=(sets / "task",), model=trained.folder, workers=0, device="cpu")
    result = dedup(sets / "pretrain", cosine=0.5, **choices)
    assert result.found == 4 and all(float(str(pair[-2])) >= 0.5 for pair in result.pairs)
    assert [pair[-2] for pair in result.pairs if pair[-4]] == ["1.0000", "1.0000"]
    strict = dedup(sets / "pretrain", cosine=1.0, **choices)
    assert {pair[-4] for pair in strict.pairs} == {1}  # only those of the same bytes


def test_what_cannot_be_asked(sets: Path, tmp_path: Path) -> None:
    data = sets / "pretrain"
    for place in (data / "kept.csv", sets / "task" / "kept.csv"):
        with pytest.raises(DataError, match="nothing is written"):
            dedup(data, against=(sets / "task",), keep_list=place)
    with pytest.raises(UsageError, match=r"end in \.csv"):
        dedup(data, out=tmp_path / "pairs.json")
    with pytest.raises(UsageError, match=r"end in \.png"):
        dedup(data, sheet=tmp_path / "pairs.jpg")
    (tmp_path / "file").write_text("")
    for choice in ("out", "keep_list"):
        with pytest.raises(UsageError, match="cannot write"):
            dedup(data, **{choice: tmp_path / "file" / "a.csv"})
    with pytest.raises(UsageError, match=r"cosine is 1\.5"):
        dedup(data, cosine=1.5)
    with pytest.raises(UsageError, match="distance is 40"):
        dedup(data, distance=40)
    with pytest.raises(DataError, match="no data at"):
        dedup(data, against=(tmp_path / "nowhere",))


@pytest.mark.train
def test_training_on_a_subset_stops_early_by_the_validation_images_of_all(sets: Path, tmp_path: Path) -> None:
    common = dict(
        TINY, out=str(tmp_path / "runs"), duration="40 steps", evaluate_every="1 steps", early_stop=2, lr=1e-30, seed=1
    )
    result = vitrail.train(sets / "pretrain", data=dict(subset=8, holdout=0.25), **common)
    assert result.steps == 3  # the first evaluation is the best, two more are not better
    assert result.best["count"] == 6  # all that was held out, not a share of the subset
    assert "subset: 8" in (result.folder / "config.yaml").read_text()
    with pytest.raises(UsageError, match=r"valid are 1\.\.18"):
        vitrail.train(sets / "pretrain", data=dict(subset=19, holdout=0.25), **common)
