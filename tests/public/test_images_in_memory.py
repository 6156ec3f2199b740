"""`predict`, `embed`, `evaluate` and `search` take images that Python holds, and answer as for files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.data.settings import Bands, Preprocess
from vitrail.errors import DataError, UsageError
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=2)
HOW: dict[str, Any] = dict(device="cpu", precision="float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "model"
    torch.manual_seed(0)
    network = ViT(CONFIG)
    torch.nn.init.normal_(network.head.weight)
    save_model(folder, network, Card(CONFIG, ["a", "b"], Preprocess((16, 16), resize="squash")))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Photos with and without an alpha channel, one of them turned by its EXIF tag."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    found = []
    for number, mode in enumerate(("RGB", "RGBA", "L", "RGB")):
        picture = Image.fromarray(rng.integers(0, 256, (20, 24, 4), dtype=np.uint8), "RGBA").convert(mode)
        exif = Image.Exif()
        exif[0x0112] = 6 if number == 3 else 1
        found.append(folder / f"{number}.png")
        picture.save(found[-1], exif=exif)
    return found


def shares(found: Any) -> list[dict[str, float]]:
    return [dict(zip(row.classes, row.probabilities, strict=True)) for row in found.rows]


def test_pictures_are_predicted_as_their_files(model: Path, files: list[Path]) -> None:
    expected = shares(vitrail.predict(model, *files, **HOW))
    assert shares(vitrail.predict(model, files, **HOW)) == expected
    found = vitrail.predict(model, [Image.open(file) for file in files], **HOW)
    assert shares(found) == expected and [row.path for row in found.rows] == [f"images[{i}]" for i in range(4)]
    mixed = vitrail.predict(model, files[0], Image.open(files[1]), **HOW)
    assert shares(mixed) == expected[:2] and [row.path for row in mixed.rows] == [str(files[0]), "images[1]"]


def test_pictures_and_tensors_of_other_bands_are_predicted_as_their_files(tmp_path: Path) -> None:
    rng, config = np.random.default_rng(2), replace(CONFIG, channels=1)
    bands = Bands("16", (30000.0,), (9000.0,), (0.0,), (65535.0,))
    card = Card(config, ["a", "b"], Preprocess((16, 16), resize="squash", bands=bands))
    torch.manual_seed(0)
    network = ViT(config)
    torch.nn.init.normal_(network.head.weight)
    save_model(tmp_path / "model", network, card)
    grey = rng.integers(0, 65536, (20, 24), dtype=np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(grey).save(tmp_path / "0.png", exif=exif)
    expected = shares(vitrail.predict(tmp_path / "model", tmp_path / "0.png", **HOW))
    turned = np.rot90(grey, -1)
    held = [Image.open(tmp_path / "0.png"), turned, torch.from_numpy(turned.copy())[None]]
    one_by_one = {**HOW, "batch_size": 1}  # several images at once may round differently
    assert shares(vitrail.predict(tmp_path / "model", held, **one_by_one)) == expected * 3


def test_arrays_and_tensors_alone_and_many_in_one(model: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (3, 20, 24, 3), dtype=np.uint8)
    expected = shares(vitrail.predict(model, *map(Image.fromarray, pixels), **HOW))
    tensors = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    for images in (list(pixels), pixels, [pixels[:2], pixels[2]], list(tensors), tensors):
        assert shares(vitrail.predict(model, images, **HOW)) == expected


def test_features_are_returned_and_searched(model: Path, files: list[Path], tmp_path: Path) -> None:
    vitrail.embed(model, files, out=tmp_path / "f.npz", **HOW)
    pictures = [Image.open(file) for file in files]
    found = vitrail.embed(model, pictures, **HOW)
    assert np.array_equal(found.features, np.load(tmp_path / "f.npz")["features"])
    by_file = vitrail.search(model, *files, like=files[0], **HOW)
    by_picture = vitrail.search(model, files, like=Image.open(files[0]), **HOW)
    assert by_picture.matches[0].image == str(files[0]) and by_picture.matches[0].similarity == pytest.approx(1)
    assert [match.image for match in by_picture.matches[1:]] == [match.image for match in by_file.matches]
    among = vitrail.search(model, pictures, like=(files[0],), **HOW)
    assert among.matches[0].image == "images[0]" and len(among.matches) == 4


def test_what_is_no_image_and_what_is_for_files(model: Path, tmp_path: Path) -> None:
    pixels = np.zeros((20, 24, 3), np.uint8)
    for wrong, words in (
        (pixels / 255, "uint8"),
        (np.zeros((2, 20, 24), np.uint8), r"\(2, 20, 24\)"),
        (3, "Valid are"),
    ):
        with pytest.raises(DataError, match=words):
            vitrail.predict(model, [wrong], **HOW)
    for verb in (vitrail.predict, vitrail.embed, partial(vitrail.search, like=pixels)):
        with pytest.raises(UsageError, match=r"out is a setting of files.*use the result.*or save the images to files"):
            verb(model, pixels, out=tmp_path / "x.csv", **HOW)
    with pytest.raises(UsageError, match="tokens is a setting of files"):
        vitrail.embed(model, pixels, tokens=True, **HOW)
    with pytest.raises(UsageError, match="include is a setting of files"):
        vitrail.predict(model, pixels, include=["*.png"], **HOW)


@pytest.mark.parametrize("empty", [[], [[]], np.zeros((0, 8, 8, 3), np.uint8)], ids=["list", "lists", "array"])
def test_no_images(empty: Any, model: Path, files: list[Path]) -> None:
    for verb in (
        vitrail.predict,
        vitrail.embed,
        partial(vitrail.search, like=files[0]),
        partial(vitrail.evaluate, labels=[]),
    ):
        with pytest.raises(UsageError, match="there are no images: the list or array is empty"):
            verb(model, empty, **HOW)
    with pytest.raises(UsageError, match="inspect takes paths of images"):
        vitrail.inspect(model, empty)


def test_pictures_with_labels_are_evaluated_as_their_folders(model: Path, files: list[Path], tmp_path: Path) -> None:
    names = ["a", "b", "b", "a"]
    for file, name in zip(files, names, strict=True):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file.name).write_bytes(file.read_bytes())
    expected = vitrail.evaluate(model, tmp_path, **HOW).results
    pictures = [Image.open(file) for file in files]
    given: tuple[tuple[Any, Any], ...] = (
        (pictures, names),
        (files, [0, 1, 1, 0]),
        ([pictures[:2], pictures[2], files[3]], torch.tensor([0, 1, 1, 0])),
    )
    for images, labels in given:
        evaluated = vitrail.evaluate(model, images, labels=labels, **HOW)
        found = evaluated.results
        assert f"top1={round(found.top1, 4)}, images=4" in repr(evaluated)
        assert found.top1 == expected.top1 and found.confusion.tolist() == expected.confusion.tolist()


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({}, UsageError, "need a label each"),
        ({"labels": ["a"]}, DataError, "2 images and 1 labels"),
        ({"labels": ["a", "c"]}, DataError, "not among the 2 known classes: 'c'"),
        ({"labels": ["a", ""]}, DataError, "not among the 2 known classes: ''"),
        ({"labels": [0, 2]}, DataError, "label 2, but there are only 2"),
        ({"labels": ["a", "b"], "split": "test"}, UsageError, "split is a setting of files"),
    ],
)
def test_labels_that_do_not_fit_the_images(model: Path, more: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        vitrail.evaluate(model, np.zeros((2, 20, 24, 3), np.uint8), **more, **HOW)
