"""`vitrail inspect`: from the command line to figures and the numbers behind them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import vitrail
from vitrail import cli
from vitrail.config import to_yaml
from vitrail.data.settings import Data, Preprocess
from vitrail.errors import DataError, UsageError
from vitrail.inspection import network_pages
from vitrail.inspection.positions import position_tiles
from vitrail.inspection.rollout import rollout
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.training.run import Run
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

TINY: dict[str, Any] = dict(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=3)
ALL = ["filters", "positions", "distance", "rollout", "relevance", "maps", "patches", "neighbours", "map"]


def saved(folder: Path, config: ViTConfig | ResNetConfig, names: tuple[str, ...] = ("blue", "green", "red")) -> Path:
    torch.manual_seed(0)
    model = build(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    preprocess = Preprocess(image_size=config.image_size, crop=0.8)
    save_model(folder, model, Card(config, list(names), preprocess))
    return folder


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("networks")
    saved(folder / "plain", ViTConfig.of(**TINY))
    saved(folder / "axial", ViTConfig.of(**{**TINY, "block": "axial", "pool": "gap", "positions": "sincos"}))
    saved(folder / "bag", ViTConfig.of(**{**TINY, "positions": "none", "classes": 0}), names=())
    saved(folder / "resnet", ResNetConfig(units=(1,), width=8, classes=3, image_size=(16, 16)))
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for number, name in enumerate(("blue", "green", "red")):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(5):
            pixels = rng.integers(0, 80, (20 + 3 * i, 24, 3), dtype=np.uint8)
            pixels[..., 2 - number] += 150
            Image.fromarray(pixels).save(folder / "photos" / name / f"{i}.png")
    return folder / "photos"


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.full_size
def test_everything_about_one_network(networks: Path, photos: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8nothing")
    some = [photos / "red" / "4.png", photos / "blue" / "0.png", broken]
    before = sorted((path, path.stat().st_mtime_ns) for path in photos.rglob("*"))
    result = vitrail.inspect(networks / "plain", *some, data=photos, out=tmp_path / "out")
    assert [page.what for page in result.pages] == ALL and not result.skipped
    assert list(result.unreadable) == [str(broken)]
    for page in result.pages:
        assert all(path.stat().st_size > 100 for path in page.files) and all(page.see)
        figures = [path for path in page.files if path.suffix == ".png"]
        assert figures and all(np.ptp(np.asarray(Image.open(path).convert("L"))) > 100 for path in figures)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in photos.rglob("*"))

    model = vitrail.load(networks / "plain")
    out = tmp_path / "out"
    np.testing.assert_array_equal(np.load(out / "positions.npz")["similarity"], position_tiles(model).values)
    written = np.load(out / "rollout.npz")
    assert written["image"].tolist() == [str(path) for path in some[:2]] and written["map"].shape == (2, 4, 4)
    # 32 x 24 pixels: the short side becomes 20 and 16 remain, so 4 of 20 are cut across and 11 of 27 down
    np.testing.assert_allclose(written["seen"][0], [5 * 32 / 27, 2 * 24 / 20, 16 * 32 / 27, 16 * 24 / 20])
    assert [row["class"] for row in rows(out / "relevance-classes.csv")] == _answers(model, some[:2])
    distances = rows(out / "distance.csv")
    assert len(distances) == 2 * 2 and all(0 < float(row["mean_px"]) < 17 for row in distances)
    near = rows(out / "neighbours.csv")
    assert near[0]["cosine"] == "1" and near[0]["neighbour"].endswith("red/4.png")  # it is among the data
    assert len(near) == 12 and len(rows(out / "map.csv")) == 15
    assert np.load(out / "maps.npz")["map"].shape == (2, 1, 2, 4, 4)
    assert np.load(out / "patches.npz")["map"].shape == (2, 3, 4, 4)


def _answers(model: Any, paths: list[Path]) -> list[str]:
    return [row.classes[0] for row in _predictions(model, paths)]


def _predictions(model: Any, paths: list[Path]) -> list[Any]:
    from vitrail.tasks.predict import predict_files

    return list(predict_files(model, paths, precision="float32"))


@pytest.mark.full_size
def test_the_command_line_says_what_to_see(
    networks: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = str(photos / "red" / "[01].png")
    argv = ["inspect", str(networks / "axial"), pattern, "--out", str(tmp_path / "out"), "--head", "1"]
    assert cli.main([*argv, "--what", "rollout,maps", "--format", "svg", "pdf", "--layer", "0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("axial: written to ")
    assert "rollout: rollout.svg, rollout.pdf, rollout.npz" in printed
    place = printed.index("maps: maps.svg, maps.pdf, maps.npz")
    assert "Where head 1 of layer 0 looks." in printed[place + 1] and printed[place + 2].startswith("  ")
    assert "<svg" in (tmp_path / "out" / "rollout.svg").read_text()
    assert (tmp_path / "out" / "maps.pdf").read_bytes().startswith(b"%PDF")
    assert np.load(tmp_path / "out" / "maps.npz")["map"].shape == (2, 2, 1, 4, 4)  # along rows, then columns

    assert cli.main([*argv, "--what", "relevance", "--class", "green", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["networks"] == ["axial"] and value["pages"][0]["what"] == "relevance"
    assert {row["class"] for row in rows(tmp_path / "out" / "relevance-classes.csv")} == {"green"}


def test_without_images_what_needs_none(networks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = vitrail.inspect(networks / "plain", out=tmp_path)
    assert [page.what for page in result.pages] == ["filters", "positions"]
    assert cli.main(["inspect", str(networks / "resnet"), "--out", str(tmp_path)]) == 0
    assert "no positions: position similarity needs a Vision Transformer, not a ResNet" in capsys.readouterr().out


@pytest.mark.full_size
def test_runs_side_by_side(networks: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    three = [networks / name for name in ("plain", "bag", "axial")]
    result = vitrail.inspect(*three, data=photos, out=tmp_path)
    assert [page.what for page in result.pages] == ["filters", "positions", "distance"]
    assert result.networks == ["plain", "bag", "axial"]
    assert "bag: this model has no position embeddings" in caplog.text
    written = np.load(tmp_path / "positions.npz")
    assert written["networks"].tolist() == ["plain", "axial"]
    assert {row["network"] for row in rows(tmp_path / "distance.csv")} == {"plain", "bag", "axial"}
    with pytest.raises(UsageError, match="--what rollout takes one network"):
        vitrail.inspect(*three, what=("rollout",), out=tmp_path)
    with pytest.raises(UsageError, match="given twice"):
        vitrail.inspect(three[0], three[0], out=tmp_path)


@pytest.mark.full_size
def test_at_another_resolution_and_many_pictures(
    networks: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_pages, "ON_A_PAGE", 3)
    result = vitrail.inspect(networks / "plain", photos / "blue", what=("rollout",), image_size=32, out=tmp_path)
    (page,) = result.pages
    assert [path.name for path in page.files] == ["rollout-1.png", "rollout-2.png", "rollout.npz"]
    shares = np.load(tmp_path / "rollout.npz")["map"]
    assert shares.shape == (5, 8, 8)
    model = vitrail.load(networks / "plain", image_size=32)
    picture = np.asarray(Image.open(photos / "blue" / "0.png"))
    from vitrail.data.images.ops import eval_transform

    seen = eval_transform(model.card.preprocess)(picture, np.random.default_rng(0))
    expected = rollout(model, torch.from_numpy(seen).permute(2, 0, 1)[None])
    np.testing.assert_allclose(shares[0], expected[0].numpy(), rtol=1e-4)


def test_of_a_folder_of_images_some_are_drawn(
    networks: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = sorted(str(path) for path in (photos / "blue").iterdir())
    vitrail.inspect(networks / "plain", photos / "blue", what=("rollout",), pictures=2, out=tmp_path)
    drawn = np.load(tmp_path / "rollout.npz")["image"].tolist()
    assert len(drawn) == 2 and set(drawn) <= set(given)
    assert "2 of the 5 images are drawn, evenly spaced; --pictures draws more" in caplog.text
    with pytest.raises(UsageError, match="pictures"):
        vitrail.inspect(networks / "plain", photos, pictures=0, out=tmp_path)


@pytest.mark.train
def test_a_run_knows_its_own_images(tmp_path: Path) -> None:
    run = vitrail.train(
        "digits", recipe="digits", out=str(tmp_path), model="Ti/4", image_size=8, batch_size=16, duration="1 step",
        vit=dict(width=16, depth=1, heads=2, mlp_dim=32),
    )  # fmt: skip
    result = vitrail.inspect(run.folder, what=("distance",), count=5, out=tmp_path / "out")
    assert "5 images" in result.pages[0].see[0]


@pytest.mark.full_size
def test_a_table_is_read_as_the_run_read_it(photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    lines = [f"{photos / kind / '0.png'},{kind}" for kind in ("blue", "green", "red")]
    table.write_text("\n".join(["path,species", *lines]))
    saved(tmp_path / "run" / "model" / "best", ViTConfig.of(**TINY))
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(Run(data=Data(str(table), label_column="species"))))
    vitrail.inspect(tmp_path / "run", data=table, what=("neighbours",), out=tmp_path / "out")
    assert {row["class"] for row in rows(tmp_path / "out" / "neighbours.csv")} == {"blue", "green", "red"}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("plain", {"what": ("rolout",)}, "Did you mean 'rollout'"),
        ("plain", {"format": ("jpg",)}, "Valid: png, svg, pdf"),
        ("plain", {"what": ("rollout",)}, "no images are given"),
        ("plain", {"what": ("map",)}, "--data DIR"),
        ("plain", {"what": ("positions",), "layer": 7}, "no layer 7: this model has 2"),
        ("plain", {"count": 0}, "count is 0; it must be at least 1"),
        ("bag", {"what": ("positions",)}, "bag of patches"),
        ("resnet", {"what": ("positions",)}, "not a ResNet"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said(
    name: str, settings: dict[str, Any], message: str, networks: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        vitrail.inspect(networks / name, out=tmp_path / "out", **settings)


def test_classes_by_name_or_number(networks: Path, photos: Path, tmp_path: Path) -> None:
    image = photos / "red" / "0.png"
    for wanted, message in (("gren", "Did you mean 'green'"), ("3", "no class 3")):
        with pytest.raises(UsageError, match=message):
            vitrail.inspect(networks / "plain", image, what=("relevance",), class_name=wanted, out=tmp_path)
    with pytest.raises(UsageError, match="no classifier"):
        vitrail.inspect(networks / "bag", image, what=("relevance",), out=tmp_path)
    vitrail.inspect(networks / "plain", image, what=("relevance",), class_name="2", out=tmp_path)
    assert rows(tmp_path / "relevance-classes.csv") == [{"image": str(image), "class": "red"}]


@pytest.mark.full_size
def test_no_readable_image_is_an_error(networks: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    for name in ("bad.png", "missing.png"):  # the weights are drawn first, and nothing of it remains
        with pytest.raises(DataError, match=r"no image to look into|nothing to predict"):
            vitrail.inspect(networks / "plain", tmp_path / name, out=tmp_path / "pages")
        assert not (tmp_path / "pages").exists()
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "filters.png").write_bytes(b"of an earlier call")
    with pytest.raises(DataError, match="no image to look into"):
        vitrail.inspect(networks / "plain", tmp_path / "bad.png", out=tmp_path / "pages")
    assert [file.name for file in (tmp_path / "pages").iterdir()] == ["filters.png"]
    with pytest.raises(UsageError, match="cannot write"):
        vitrail.inspect(networks / "plain", what=("filters",), out=tmp_path / "bad.png" / "x")


@pytest.mark.full_size
def test_a_network_for_images_of_any_shape_has_a_grid_for_each_picture(tmp_path: Path) -> None:
    model = build(ViTConfig.of(**TINY, native=True))
    save_model(
        tmp_path / "any", model, Card(model.config, ["a", "b", "c"], Preprocess((16, 16), resize="native", patch=4))
    )
    for name, size in (("a", (32, 32)), ("b", (64, 16)), ("c", (16, 64))):  # 16 patches each
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    photos, what = [tmp_path / f"{name}.png" for name in "abc"], ("rollout", "relevance", "maps", "patches")
    vitrail.inspect(tmp_path / "any", *photos, what=what, out=tmp_path / "out")
    for name in what:
        written = np.load(tmp_path / "out" / f"{name}.npz")
        assert written["grid"].tolist() == [[4, 4], [2, 8], [8, 2]]
        for each, (rows, columns) in zip(written["map"], written["grid"], strict=True):
            assert each.shape[-2:] == (8, 8) and np.isfinite(each).sum() == each[..., :rows, :columns].size


@pytest.mark.full_size
def test_real_photographs_upright_and_of_any_shape(networks: Path, shared_data: Path, tmp_path: Path) -> None:
    awkward = shared_data / "awkward-images"
    turned, inks = awkward / "Landscape_7.jpg", awkward / "Channel_digital_image_CMYK_color.jpg"
    photograph = shared_data / "imagenet-samples" / "n01440764_tench.JPEG"
    result = vitrail.inspect(networks / "plain", photograph, turned, inks, what=("rollout",), out=tmp_path)
    assert not result.unreadable
    parts = np.load(tmp_path / "rollout.npz")["seen"]
    for path, (top, left, height, width) in zip((photograph, turned, inks), parts, strict=True):
        with Image.open(path) as image:  # read by Pillow, turned as the EXIF tag says
            full = ImageOps.exif_transpose(image).size
        short = min(full)
        assert (height, width) == pytest.approx((0.8 * short, 0.8 * short), rel=0.03)  # square pixels stay square
        middle = (left + width / 2, top + height / 2)
        assert middle == pytest.approx((full[0] / 2, full[1] / 2), abs=short / 16)


def test_names_that_are_not_utf8(networks: Path, tmp_path: Path) -> None:
    """matplotlib draws names of files above the pictures."""
    photo = tmp_path / os.fsdecode(b"caf\xe9.png")
    Image.new("RGB", (16, 16), "red").save(photo)
    vitrail.inspect(networks / "plain", photo, what=("rollout",), out=tmp_path / "out")
    assert list((tmp_path / "out").glob("*.png"))
