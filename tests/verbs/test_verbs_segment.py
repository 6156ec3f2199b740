"""`vitrail probe segment`: shapes on noise, from files to scores, a picture and JSON; and what is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
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
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig, variant
from vitrail.weights.card import Card
from vitrail.weights.save import save

SETTINGS: dict[str, Any] = dict(workers=0, steps=30, precision="float32", batch_size=4)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random network, whose card crops images: the probe must not."""
    torch.manual_seed(0)
    config = ViTConfig(width=32, depth=2, heads=2, mlp_dim=32, patch=8, image_size=(32, 32), classes=0, pool="gap")
    model: Any = build(config)
    model.card = Card(config, [], Preprocess((32, 32), resize="small", crop=0.5))
    folder = tmp_path_factory.mktemp("network") / "m"
    save(model, folder)
    return folder


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 40 x 56 pixels, dark on one side and bright on the other: the class is the brightness."""
    root = tmp_path_factory.mktemp("halves")
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 5)):
        for number in range(count):
            mask = np.zeros((40, 56), np.uint8)
            mask[:, : int(rng.integers(2, 6)) * 8] = 4
            pixels = rng.integers(0, 60, (40, 56, 3)) + 190 * (mask == 4)[..., None]
            mask[0] = 255
            for kind, array in (("images", pixels.astype(np.uint8)), ("masks", mask)):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(root / kind / split / f"{number}.png")
    (root / "images/train/broken.png").write_bytes(b"no picture")
    Image.new("L", (56, 40)).save(root / "masks/train/broken.png")
    return root


@pytest.mark.train
def test_brightness_is_segmented_and_written(
    network: Path, halves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    before = sorted(path for path in halves.rglob("*"))
    words = ["probe", "segment", network, halves, "--steps", 300, "--workers", 0, "--layers", -2, -1, "--out", out]
    assert cli.main([str(word) for word in [*words, "--json"]]) in (0, None)
    found = json.loads(capsys.readouterr().out)
    assert found["miou"] > 0.85 and found["pixel_accuracy"] > 0.9 and set(found["iou"]) == {"0", "4"}
    assert (found["layers"], found["width"], found["grid"]) == ([0, 1], 64, [4, 4])
    assert (found["train_images"], found["validation_images"], len(found["unreadable"])) == (16, 5, 1)
    assert np.sum(found["confusion"]) == 5 * 39 * 56  # all pixels of the masks at their own size, but the ignored row
    assert json.loads((out / "result.json").read_text()) == found
    with (out / "classes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["value"] for row in rows] == ["0", "4"]
    assert [float(row["iou"]) for row in rows] == pytest.approx(list(found["iou"].values()), abs=1e-4)
    assert sorted(path.name for path in out.iterdir()) == ["classes.csv", "predictions.png", "result.json"]
    with Image.open(out / "predictions.png") as picture:
        assert picture.width > 1000
    assert sorted(path for path in halves.rglob("*")) == before
    assert cli.main([str(word) for word in words]) in (0, None)  # the same files are replaced
    assert "mean IoU" in capsys.readouterr().out


@pytest.mark.train
def test_a_tenth_is_held_out_of_images_without_splits(network: Path, halves: Path, tmp_path: Path) -> None:
    for kind in ("images", "masks"):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / kind).symlink_to(halves / kind / "val")
    found = vitrail.probe.segment(network, tmp_path / "d", **SETTINGS)
    assert "20% held out" in found.subject and found.results.train_images == 4 and found.results.validation_images == 1
    again = vitrail.probe.segment(network, tmp_path / "d", **SETTINGS)
    assert (again.results.scores.confusion == found.results.scores.confusion).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layers": (2,)}, UsageError, "there is no layer 2"),
        ({"ignore": (256,)}, UsageError, "ignore is"),
        ({"steps": 0}, UsageError, "steps is 0; it must be at least 1"),
        ({"ignore": (4, 255)}, DataError, "hold 1 class"),
    ],
)
def test_settings_that_cannot_work(
    network: Path, halves: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        vitrail.probe.segment(network, halves, out=tmp_path / "out", **{**SETTINGS, **change})
    assert not (tmp_path / "out").exists()


def test_images_without_masks_have_no_pixels_to_measure(network: Path, halves: Path, tmp_path: Path) -> None:
    for label in "ab":
        (tmp_path / "classes" / label).mkdir(parents=True)
        (tmp_path / "classes" / label / "1.png").symlink_to(halves / "images" / "val" / "1.png")
    with pytest.raises(DataError, match=r"holds no images with masks. Expected are images/NAME.jpg and masks/NAME.png"):
        vitrail.probe.segment(network, tmp_path / "classes", **SETTINGS)
    for folder, kind in (("pictures", "images"), ("masks", "masks")):
        (tmp_path / "scenes" / folder).mkdir(parents=True)
        for file in (halves / kind / "val").iterdir():
            (tmp_path / "scenes" / folder / file.name).symlink_to(file)
    with pytest.raises(DataError, match=r"To learn from the masks, call the folders images/ and masks/"):
        vitrail.probe.segment(network, tmp_path / "scenes", **SETTINGS)


def test_nothing_is_written_among_other_files(network: Path, halves: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lies within the data set"):
        vitrail.probe.segment(network, halves, out=halves / "out", **SETTINGS)
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match=r"holds other files \(mine.txt\)"):
        vitrail.probe.segment(network, halves, out=tmp_path, **SETTINGS)


@pytest.mark.full_size
def test_layers_of_different_grids_are_refused(halves: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = replace(variant("R50x1", image_size=(64, 64), classes=0), units=(1, 1, 1, 1))
    model: Any = build(config)
    model.card = Card(config, [], Preprocess((64, 64)))
    save(model, tmp_path / "m")
    with pytest.raises(UsageError, match=r"have different grids \(2 x 2, 4 x 4\). Choose --layers of one grid"):
        vitrail.probe.segment(tmp_path / "m", halves, layers=(-2, -1), **SETTINGS)
