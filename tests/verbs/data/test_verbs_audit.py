"""`vitrail data audit`, and training without the images that it lists."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail import cli
from vitrail.data.settings import Data, Preprocess
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=8, image_size=(16, 16), classes=2)
WRONG = "blue/r3.png"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "model"
    torch.manual_seed(0)
    save_model(folder, ViT(CONFIG), Card(CONFIG, ["a", "b"], Preprocess((16, 16), resize="squash")))
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Red and blue pictures: one in the wrong class, one that lies in both, and a broken file."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for number in range(24):
        name, tint = (("red", (200, 40, 40)), ("blue", (40, 40, 200)))[number % 2]
        blots = Image.fromarray(random.integers(0, 50, (6, 6, 3), dtype=np.uint8)).resize((48, 48))
        picture = Image.fromarray((np.asarray(blots) + np.array(tint)).astype(np.uint8))
        for kind in ("red", "blue"):
            (root / kind).mkdir(exist_ok=True)
        picture.save(root / name / f"{name[0]}{number}.png")
        if number == 4:
            picture.resize((40, 40)).save(root / "blue" / "copy.png")
        if number == 3:
            (root / name / "b3.png").unlink()
            Image.fromarray(np.asarray(picture)[:, :, ::-1].copy()).save(root / WRONG)
    (root / "red" / "broken.png").write_bytes(b"no picture")
    return root


def contents(root: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


@pytest.mark.full_size
def test_the_list_of_an_audit_is_what_training_leaves_out(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(photos)
    listed, sheet = tmp_path / "doubts.csv", tmp_path / "doubts.png"
    words = ["data", "audit", photos, "--from", model, "--out", listed, "--sheet", sheet, "--device", "cpu"]
    assert cli.main([*map(str, words), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert contents(photos) == before
    found = {(doubt["reason"], doubt["id"]): doubt for doubt in result["doubts"]}
    assert found["label", WRONG]["suggested"] == "red" and found["label", WRONG]["like"].startswith("red/")
    copies = [doubt for doubt in result["doubts"] if doubt["reason"] == "copy"]
    assert [{doubt["id"], doubt["like"]} for doubt in copies] == [{"blue/copy.png", "red/r4.png"}]
    assert result["unreadable"] == [{"image": "red/broken.png", "reason": "not-an-image"}] and result["images"] == 25
    with open(listed, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [doubt["id"] for doubt in result["doubts"]]
    with Image.open(sheet) as drawn:
        assert drawn.format == "PNG"
    every = open_data(Data(path=str(photos), holdout=0.0)).train
    left = open_data(Data(path=str(photos), holdout=0.0, exclude=str(listed))).train
    gone = {every.id(i) for i in range(len(every))} - {left.id(i) for i in range(len(left))}
    assert gone == {row["id"] for row in rows} and WRONG in gone
    assert cli.main(list(map(str, words))) == 0
    assert "probe's accuracy" in " ".join(capsys.readouterr().out.split())


def exclusion(folder: Path, *lines: str) -> str:
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return str(folder / "list.csv")


def test_a_list_of_excluded_images_that_is_not_one(photos: Path, tmp_path: Path) -> None:
    def opened(file: str) -> list[str]:
        return open_data(Data(path=str(photos), holdout=0.0, exclude=file)).report.warnings

    with pytest.raises(DataError, match="cannot be read"):
        opened(str(tmp_path / "nowhere.csv"))
    with pytest.raises(DataError, match="has no column 'split'"):
        opened(exclusion(tmp_path, "image,id", f",{WRONG}"))
    with pytest.raises(DataError, match=r"row 2: the data have no split 'train'"):
        opened(exclusion(tmp_path, "split,id", f"train,{WRONG}"))
    every = [f",{path.relative_to(photos).as_posix()}" for path in photos.rglob("*.png")]
    with pytest.raises(DataError, match="excludes all 26 images of the data"):
        opened(exclusion(tmp_path, "split,id", *every))
    assert any("1 of its images are not in" in line for line in opened(exclusion(tmp_path, "split,id", ",a/none.png")))


def test_what_cannot_be_audited(model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def code(*words: object) -> tuple[int, str]:
        done = cli.main(["data", "audit", *map(str, words), "--from", str(model), "--device", "cpu"])
        return done, " ".join(capsys.readouterr().err.split())

    done, said = code(photos, "--out", photos / "list.csv")
    assert done == 1 and "nothing is written" in said
    done, said = code(photos, "--sheet", tmp_path / "sheet.jpg")
    assert done == 2 and "must end in .png" in said
    done, said = code(photos, "--split", "val")
    assert done == 2 and "no split 'val'" in said
    for kind in ("red", "blue"):
        (tmp_path / "few" / kind).mkdir(parents=True)
        Image.new("RGB", (20, 20), kind).save(tmp_path / "few" / kind / "one.png")
    (tmp_path / "table.csv").write_text("path,x,y\nfew/red/one.png,1.5,a|b\nfew/blue/one.png,2.5,b\n")
    for answers, kind in ((("x",), "are numbers"), (("x", "y"), "have several answers")):
        done, said = code(tmp_path / "table.csv", "--data.answers", *answers)
        assert done == 1 and "data audit needs one" in said and kind in said
    done, said = code(tmp_path / "few")
    assert done == 1 and "two classes must have two images" in said
