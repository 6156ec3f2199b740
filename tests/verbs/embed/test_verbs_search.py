"""`vitrail search`: images by the similarity of their features."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.data.settings import Preprocess
from vitrail.errors import DataError, UsageError
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search") / "model"
    torch.manual_seed(0)
    save_model(folder, ViT(CONFIG), Card(CONFIG, ["a", "b"], Preprocess((16, 16), resize="squash")))
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve photos and one broken file."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(12):
        tint = rng.integers(0, 200, 3)
        picture = (tint + rng.integers(0, 56, (20, 24, 3))).astype(np.uint8)
        Image.fromarray(picture).save(folder / f"={number}.png")  # a name that a spreadsheet would run
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


def found(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    capsys.readouterr()
    assert cli.main(["search", *map(str, argv), "--device", "cpu", "--precision", "float32", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("count", [1, 2])
def test_images_are_ranked_by_cosine_similarity(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    like = [photos / f"={number}.png" for number in range(count)]
    asked = [word for path in like for word in ("--like", path)]
    result = found(capsys, model, photos, *asked, "--top", 5, "--out", tmp_path / "found.csv")
    vitrail.embed(model, photos, out=tmp_path / "f.npz", device="cpu", precision="float32")
    arrays = np.load(tmp_path / "f.npz")
    unit = arrays["features"] / np.linalg.norm(arrays["features"], axis=1, keepdims=True)
    ids = arrays["ids"].tolist()
    mean = np.mean([unit[ids.index(str(path))] for path in like], axis=0)
    ranked = sorted(((float(row @ mean / np.linalg.norm(mean)), id_) for row, id_ in zip(unit, ids, strict=True)))
    expected = [(similarity, id_) for similarity, id_ in ranked[::-1] if id_ not in map(str, like)][:5]
    assert [match["image"] for match in result["matches"]] == [id_ for _, id_ in expected]
    assert [match["similarity"] for match in result["matches"]] == pytest.approx([x for x, _ in expected], abs=1e-5)
    assert result["images"] == 12 and result["unreadable"] == [
        {"image": str(photos / "broken.png"), "reason": "not-an-image"}
    ]
    # the same from features that were written before
    again = found(capsys, model, "--features", tmp_path / "f.npz", *asked, "--top", 5)
    assert again["matches"] == result["matches"]
    with open(tmp_path / "found.csv", newline="", encoding="utf-8") as file:
        assert [row["image"] for row in csv.DictReader(file)] == [match["image"] for match in result["matches"]]


def test_the_shards_of_a_data_set_are_searched(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, file in enumerate(sorted(photos.glob("=*.png"))):
        (tmp_path / "data" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / "data" / "ab"[number % 2])
    like = ("--like", photos / "=0.png", "--top", 4)
    for out in ("shards", "f.npz"):
        vitrail.embed(model, tmp_path / "data", out=tmp_path / out, device="cpu", precision="float32")
    shards, single = (found(capsys, model, "--features", tmp_path / out, *like) for out in ("shards", "f.npz"))
    ranked, expected = ([(Path(m["image"]).name, m["similarity"]) for m in one["matches"]] for one in (shards, single))
    assert shards["images"] == 12 and ranked == expected
    other = tmp_path / "other"
    save_model(other, ViT(CONFIG), Card(CONFIG, ["a", "b"], Preprocess((16, 16), resize="squash")))
    with pytest.raises(DataError, match="features of another network"):
        vitrail.search(other, features=tmp_path / "shards", like=(photos / "=0.png",))
    (tmp_path / "shards" / "complete.json").unlink()
    with pytest.raises(DataError, match="not complete"):
        vitrail.search(model, features=tmp_path / "shards", like=(photos / "=0.png",))
    with pytest.raises(DataError, match="does not hold features"):
        vitrail.search(model, features=photos, like=(photos / "=0.png",))


def test_every_split_is_searched_and_the_given_image_is_left_out(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(photos.glob("=*.png"))
    for number, file in enumerate(files):
        place = tmp_path / "all" / ("train", "validation", "test")[number % 3] / "ab"[number // 3 % 2]
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place / file.name)
    every = sorted(str(file) for file in (tmp_path / "all").glob("*/*/*.png"))
    like = every[0]
    asked = [model, tmp_path / "all", "--like", like, "--top", 20, "--out"]
    result = found(capsys, *asked, tmp_path / "f.csv")
    assert sorted(match["image"] for match in result["matches"]) == every[1:] and result["images"] == 12
    with open(tmp_path / "f.csv", newline="", encoding="utf-8") as file:
        assert all(Path(row["image"]).is_file() for row in csv.DictReader(file))
    found(capsys, *asked, tmp_path / "f.png")
    assert (tmp_path / "f.png").is_file()
    # stored features know the images by their paths below the data set
    for out in (tmp_path / "f.npz", tmp_path / "f"):
        vitrail.embed(model, tmp_path / "all", out=out, device="cpu", precision="float32")
        again = found(capsys, model, "--features", out, "--like", like, "--top", 20)
        assert len(again["matches"]) == again["images"] - 1 == (11 if out.is_dir() else 7)
        assert all(match["similarity"] < 0.9999 for match in again["matches"])


def test_embed_says_which_images_get_no_features(
    model: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, file in enumerate(sorted(photos.glob("=*.png"))):
        place = tmp_path / "all" / ("train", "validation", "test")[number % 3] / "ab"[number // 3 % 2]
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place / file.name)
    vitrail.embed(model, tmp_path / "all", out=tmp_path / "f.npz", device="cpu", precision="float32")
    assert "4 images of" in caplog.text and "neither training nor test images" in caplog.text


@pytest.mark.full_size
def test_a_data_set_with_splits_is_searched_whole(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Image.new("RGB", (16, 16), "white").save(tmp_path / "white.png")
    vitrail.embed(model, "digits", out=tmp_path / "f.npz", device="cpu", precision="float32")
    result = found(capsys, model, "--features", tmp_path / "f.npz", "--like", tmp_path / "white.png", "--top", 2000)
    assert result["images"] == 1797 and len(result["matches"]) == 1797


def test_features_of_another_network_of_this_width_are_refused(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    save_model(tmp_path / "other", ViT(CONFIG), Card(CONFIG, ["a", "b"], Preprocess((16, 16), resize="squash")))
    vitrail.embed(tmp_path / "other", photos, out=tmp_path / "f.npz", device="cpu", precision="bf16")
    asked = ["--features", tmp_path / "f.npz", "--like", photos / "=0.png"]
    assert cli.main(["search", str(model), *map(str, asked), "--device", "cpu"]) == DataError.exit_code
    assert "holds the features of another network" in capsys.readouterr().err
    assert found(capsys, tmp_path / "other", *asked)["images"] == 12  # in another number format


def test_features_of_a_network_tuned_from_the_same_weights_are_named(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(2)
    loaded = vitrail.load(model)
    card = loaded.card
    assert card is not None
    with torch.no_grad():
        loaded.head.weight.add_(1.0)
    save_model(tmp_path / "head", loaded, card)  # its features are the same
    with torch.no_grad():
        weight = dict(loaded.named_parameters())["blocks.0.mlps.0.mlp.fc1.weight"]
        weight.add_(torch.randn_like(weight), alpha=0.08)
    save_model(tmp_path / "tuned", loaded, card)
    asked = ["--like", photos / "=0.png", "--device", "cpu", "--precision", "float32"]
    for name in ("head", "tuned"):
        vitrail.embed(tmp_path / name, photos, out=tmp_path / f"{name}.npz", device="cpu", precision="float32")
        capsys.readouterr()
        assert cli.main(["search", str(model), "--features", str(tmp_path / f"{name}.npz"), *map(str, asked)]) == 0
        said = capsys.readouterr().err
        assert (f"was written with {tmp_path / name}, and this model has other weights" in said) == (name == "tuned")
    capsys.readouterr()
    assert (
        cli.main(["search", str(tmp_path / "tuned"), "--features", str(tmp_path / "tuned.npz"), *map(str, asked)]) == 0
    )
    assert "other weights" not in capsys.readouterr().err


def test_features_of_unknown_origin_are_searched_with_a_warning(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "f.npz", features=np.eye(3, 16, dtype=np.float32), ids=np.array(["a", "b", "c"]))
    asked = ["--features", tmp_path / "f.npz", "--like", photos / "=0.png"]
    assert cli.main(["search", str(model), *map(str, asked), "--device", "cpu"]) == 0
    assert "does not say which network its features are from" in capsys.readouterr().err


@pytest.mark.full_size
def test_a_picture_shows_them(model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found(capsys, model, photos, "--like", photos / "=0.png", "--out", tmp_path / "found.png")
    with Image.open(tmp_path / "found.png") as picture:
        colours = np.asarray(picture.convert("RGB"))
    with Image.open(photos / "=0.png") as given:
        exact = np.asarray(given)[10, 12]
    assert (np.abs(colours.astype(int) - exact).max(axis=2) < 12).any()  # the given picture is there


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["PHOTOS"], UsageError, "no image to compare with"),
        (["PHOTOS", "--like", "none.png"], DataError, "none.png: No such file or directory"),
        (["PHOTOS", "--like", "PHOTOS/broken.png"], DataError, "broken.png, cannot be read: not-an-image"),
        (["--like", "PHOTOS/=0.png"], UsageError, "--features FEATURES.npz --like IMAGE"),
        (["PHOTOS", "--like", "PHOTOS/=0.png", "--features", "f.npz"], UsageError, "give either images"),
        (["PHOTOS", "--like", "PHOTOS/=0.png", "--out", "x.txt"], UsageError, "must end in .csv, .png"),
        (["--like", "PHOTOS/=0.png", "--features", "WIDE"], DataError, "holds 7 features for each image"),
        (["--like", "PHOTOS/=0.png", "--features", "NONE"], DataError, "does not hold features and ids"),
    ],
)
def test_what_is_refused(
    model: Path, photos: Path, tmp_path: Path, words: list[str], error: type[Exception], said: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "wide.npz", features=np.ones((2, 7), np.float32), ids=np.array(["a", "b"]))
    np.savez(tmp_path / "none.npz", other=np.ones(2))
    places = {"PHOTOS": str(photos), "WIDE": "wide.npz", "NONE": "none.npz"}
    argv = []
    for word in words:
        for name, place in places.items():
            word = word.replace(name, place)
        argv.append(word)
    assert cli.main(["search", str(model), *argv, "--device", "cpu"]) == error.exit_code  # type: ignore[attr-defined]
    assert said in capsys.readouterr().err
