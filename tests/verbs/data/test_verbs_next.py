"""`vitrail data next`: a list and a sheet of images to label, which leave the images as they are."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail import cli
from vitrail.config import to_yaml
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.settings import Data, Preprocess
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.training.run import Run
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=8, image_size=(16, 16), classes=2)


def picture(file: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((16, 16), Image.Resampling.NEAREST).save(file)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flat folder of 14 images and a broken one; a table labels the first four; a run that was trained on these."""
    root = tmp_path_factory.mktemp("next")
    (root / "photos").mkdir()
    for number in range(14):
        picture(root / f"photos/{number:02}.png", number)
    (root / "photos/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n, and nothing")
    rows = [f"photos/{number:02}.png,{'ab'[number % 2]}" for number in range(4)]
    (root / "labels.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    torch.manual_seed(0)
    model = ViT(CONFIG)
    torch.nn.init.normal_(model.head.weight)
    card = Card(CONFIG, ["a", "b"], Preprocess((16, 16), resize="squash"))
    save_model(root / "run/model/best", model, card)
    (root / "run/config.yaml").write_text(to_yaml(Run(data=Data(str(root / "labels.csv"), holdout=0.0))))
    save_model(root / "numbers", model, replace(card, scale=TargetScale((0.0, 0.0), (1.0, 1.0))))
    return root


def test_a_list_and_a_sheet_of_images_without_a_label(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in (place / "photos").iterdir()}
    words = ["data", "next", str(place / "photos"), "--from", str(place / "run"), "--count", "5", "--device", "cpu"]
    files = ["--out", str(tmp_path / "next.csv"), "--sheet", str(tmp_path / "next.png")]
    assert cli.main([*words, *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["labelled"]) == (10, 4)
    assert [one["image"] for one in found["unreadable"]] == ["broken.png"]
    names = [one["id"] for one in found["choices"]]
    assert len(set(names)) == 5
    assert not set(names) & {f"{number:02}.png" for number in range(4)}  # these have a label already
    assert [row["id"] for row in csv.DictReader((tmp_path / "next.csv").read_text().splitlines())] == names
    assert Image.open(tmp_path / "next.png").width > 500
    assert {file: file.read_bytes() for file in (place / "photos").iterdir()} == before

    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"] == found["choices"]
    assert cli.main([*words, "--by", "uncertainty", "--json"]) == 0
    unsure = [one["uncertainty"] for one in json.loads(capsys.readouterr().out)["choices"]]
    assert unsure == sorted(unsure, reverse=True)
    assert max(one["uncertainty"] for one in found["choices"]) <= unsure[0]


def test_what_cannot_be_chosen(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = str(place / "photos")
    (tmp_path / "labelled").mkdir()
    (tmp_path / "labelled/00.png").symlink_to(place / "photos/00.png")
    wrong = {
        "--from RUN": [photos],
        "predicts numbers": [photos, "--from", str(place / "numbers")],
        "lies within the data set": [photos, "--from", str(place / "run"), "--out", f"{photos}/next.csv"],
        "there is nothing left to label": [str(tmp_path / "labelled"), "--from", str(place / "run")],
    }
    for said, words in wrong.items():
        assert cli.main(["data", "next", *words, "--device", "cpu"]) != 0
        assert said in capsys.readouterr().err
    assert sorted(file.name for file in (place / "photos").iterdir())[-1] == "broken.png"
