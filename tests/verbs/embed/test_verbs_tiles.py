"""`predict --tiles` and `embed --tiles` give what the same verbs give for each crop by hand."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.settings import Preprocess
from vitrail.errors import DataError, UsageError
from vitrail.inspection.figures import class_maps
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.tasks import predict as predicting
from vitrail.verbs.predict import Predictions
from vitrail.weights.card import Card
from vitrail.weights.load import load
from vitrail.weights.store import save_model

NAMES = ("field", "=water", "town")
TILE, OVERLAP = 24, 5
EXACT: dict[str, Any] = dict(precision="float32", workers=0, device="cpu")


def saved(folder: Path, **card: Any) -> Path:
    torch.manual_seed(6)  # tiles of the scan get two classes
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=16, image_size=(16, 16), patch=8, classes=3)
    model = ViT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_model(folder, model, replace(Card(config, list(NAMES), Preprocess((16, 16), resize="squash")), **card))
    return folder


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("network") / "model")


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    """A scan of 100 x 70 pixels."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (7, 10, 3), dtype=np.uint8)).resize((100, 70))
    (tmp_path / "scans").mkdir()
    tifffile.imwrite(tmp_path / "scans" / "scan.tif", np.asarray(coarse), photometric="rgb", tile=(16, 16))
    return tmp_path / "scans" / "scan.tif"


def by_hand(scan: Path, folder: Path) -> tuple[list[tuple[int, ...]], list[Path]]:
    """Boxes as a person would draw them, and a file with each crop."""
    folder.mkdir()
    boxes = [(x, y, TILE, TILE) for y in (0, 19, 38, 46) for x in (0, 19, 38, 57, 76)]
    with Image.open(scan) as image:
        for number, (x, y, width, height) in enumerate(boxes):
            image.crop((x, y, x + width, y + height)).save(folder / f"{number:02}.png")
    return boxes, sorted(folder.iterdir())


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.full_size
@pytest.mark.parametrize("suffix", [".tif", ".png"])
def test_tiles_are_predicted_and_embedded_as_crops_are(network: Path, scan: Path, tmp_path: Path, suffix: str) -> None:
    boxes, crops = by_hand(scan, tmp_path / "crops")
    image = scan.with_suffix(suffix)
    if suffix != ".tif":
        Image.open(scan).save(image)
    options: dict[str, Any] = dict(tiles=TILE, overlap=OVERLAP, **EXACT)
    found = vitrail.predict(network, image, batch_size=7, **options)
    expected = vitrail.predict(network, *crops, **EXACT)
    assert isinstance(found, Predictions) and isinstance(expected, Predictions)
    assert [row.box for row in found.rows] == boxes and {row.path for row in found.rows} == {str(image)}
    assert [row.classes for row in found.rows] == [row.classes for row in expected.rows]
    assert len({row.classes[0] for row in found.rows}) > 1
    probabilities = [[row.probabilities for row in one.rows] for one in (found, expected)]
    np.testing.assert_allclose(*probabilities, rtol=1e-5)
    vitrail.embed(network, image, out=tmp_path / "tiles.npz", **options)
    vitrail.embed(network, *crops, out=tmp_path / "crops.npz", **EXACT)
    with np.load(tmp_path / "tiles.npz") as tiles, np.load(tmp_path / "crops.npz") as whole:
        np.testing.assert_allclose(tiles["features"], whole["features"], rtol=1e-5, atol=1e-6)
        assert tiles["boxes"].tolist() == [list(box) for box in boxes]
        assert tiles["ids"][1] == f"{image}#xywh=19,0,24,24"
    nearest = vitrail.search(network, features=tmp_path / "tiles.npz", like=(crops[7],), top=1, **EXACT)
    assert nearest.matches[0].image == f"{image}#xywh=38,19,24,24"


def test_a_tile_of_the_networks_size_is_not_cropped(scan: Path, tmp_path: Path) -> None:
    folder = saved(tmp_path / "cropping", preprocess=Preprocess((16, 16), crop=0.5))
    found = vitrail.predict(folder, scan, tiles=16, **EXACT)
    assert isinstance(found, Predictions)
    pixels = np.asarray(Image.open(scan))[:16, 16:32]
    model = load(folder)
    images = model.card.transform().normalise(torch.from_numpy(pixels.copy()).permute(2, 0, 1))[None]
    with torch.no_grad():
        best = model(images).softmax(1).max().item()
    assert found.rows[1].probabilities[0] == pytest.approx(best, rel=1e-4)


@pytest.mark.full_size
def test_a_folder_gets_a_table_and_maps(network: Path, scan: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Images of several formats, one smaller than a tile, one that is no image."""
    Image.open(scan).resize((30, 20)).save(scan.with_name("small.png"))
    scan.with_name("text.jpg").write_text("no image")
    scan.with_name("notes.txt").write_text("no image either")
    drawn = []
    draw = class_maps.draw_classes
    monkeypatch.setattr(class_maps, "draw_classes", lambda *values: drawn.append(values) or draw(*values))
    out = tmp_path / "out"
    found = vitrail.predict(network, scan.parent, tiles=TILE, out=out, top=2, reject=0.5, **EXACT)
    assert isinstance(found, Predictions)
    assert sorted(path.name for path in out.iterdir()) == [
        "scan.map.png", "small.map.png", "tiles.csv", "tiles.csv.errors.csv",
    ]  # fmt: skip
    table = rows(out / "tiles.csv")
    assert list(table[0]) == [
        "path", "x", "y", "width", "height", "class", "probability", "class_2", "probability_2", "rejected",
    ]  # fmt: skip
    assert [row["path"] for row in table] == [str(scan)] * 15 + [str(scan.with_name("small.png"))] * 2
    assert [(row["x"], row["width"], row["height"]) for row in table[-2:]] == [("0", "24", "20"), ("6", "24", "20")]
    assert rows(out / "tiles.csv.errors.csv")[0]["reason"] == "not-an-image"
    assert found.summary.startswith("17 tiles predicted; 1 tile or file could not be read (1 not-an-image)")
    _, picture, size, _, tiles = drawn[0]
    np.testing.assert_array_equal(picture, np.asarray(Image.open(scan)))
    assert size == (70, 100)
    names = [name or "none of these" for name in tiles.values()]
    assert names == [row["class"].removeprefix("'") for row in table[:15]]
    with pytest.raises(UsageError, match=r"holds other files \(mine.txt\)"):
        (out / "mine.txt").touch()
        vitrail.predict(network, scan, tiles=TILE, out=out)
    with pytest.raises(DataError, match="lies within the data set"):
        vitrail.predict(network, scan.parent, tiles=TILE, out=scan.parent / "out")


def test_colours_fill_the_cells_of_their_tiles() -> None:
    from vitrail.data.images.tiles import Tiling

    cells = class_maps._cells(Tiling(4, 4, 2), (6, 9), (12, 18))
    filled = np.zeros((12, 18), int)
    for cell in cells.values():
        filled[cell] += 1
    assert (filled == 1).all() and len(cells) == 2 * 4
    assert cells[next(iter(cells))] == (slice(0, 6), slice(0, 6))  # up to the middle of the overlap, 3 of 6 rows


@pytest.mark.full_size
def test_labels_and_numbers_of_tiles(scan: Path, tmp_path: Path) -> None:
    several = saved(tmp_path / "several", thresholds=[0.0, 1.0, 1.0])
    vitrail.predict(several, scan, tiles=40, out=tmp_path / "labels", **EXACT)
    table = rows(tmp_path / "labels" / "tiles.csv")
    assert list(table[0])[4:] == ["height", "labels", "probabilities"] and {row["labels"] for row in table} == {"field"}
    numbers = saved(tmp_path / "numbers", scale=TargetScale((0.0,) * 3, (1.0,) * 3))
    out = tmp_path / "out"
    found = vitrail.predict(numbers, scan, tiles=40, out=out, **EXACT)
    assert isinstance(found, Predictions)
    assert found.maps == [f"{out}/scan.map-{number}.png" for number in (1, 2, 3)]
    whole = vitrail.predict(numbers, scan, tiles=40, **EXACT)
    assert isinstance(whole, Predictions)
    assert [float(row["town"]) for row in rows(out / "tiles.csv")] == [row.numbers["town"] for row in whole.rows]  # type: ignore[index]


def test_an_interrupted_call_goes_on(network: Path, scan: Path, tmp_path: Path, monkeypatch: Any) -> None:
    options: dict[str, Any] = dict(tiles=TILE, batch_size=4, **EXACT)
    vitrail.predict(network, scan.parent, out=tmp_path / "whole.jsonl", **options)
    asked: list[int] = []

    def counted(*values: Any, stop: int, **keywords: Any) -> Iterator[Any]:
        for row in islice(original(*values, **keywords), stop):
            asked.append(1)
            yield row
        if stop < 100:
            raise KeyboardInterrupt

    original = predicting.predict_files
    for stop in (6, 100):
        monkeypatch.setattr(predicting, "predict_files", lambda *a, stop=stop, **k: counted(*a, stop=stop, **k))
        try:
            vitrail.predict(network, scan.parent, out=tmp_path / "again.jsonl", **options)
        except KeyboardInterrupt:
            assert stop == 6
    assert len(asked) == 15
    whole, again = ((tmp_path / f"{name}.jsonl").read_text() for name in ("whole", "again"))
    assert whole == again
    first = json.loads(whole.splitlines()[0])
    assert list(first) == ["path", "x", "y", "width", "height", "class", "probability", "top"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--tiles", "0"], "tiles is 0; it must be from 1 to 4,096"),
        (["--tiles", "24", "--overlap", "24"], "overlap is 24; it must be below 24, the side of a tile"),
        (["--overlap", "3"], "--overlap 3 is the overlap of tiles: give --tiles SIDE, too"),
        (["--tiles", "24", "--merge", "a.parquet"], "--merge is not valid with --tiles"),
    ],
)
def test_flags_that_are_not_valid(
    network: Path, scan: Path, tmp_path: Path, capsys: Any, flags: list[str], message: str
) -> None:
    for verb, out in (("predict", "out"), ("embed", "out.npz")):
        assert cli.main([verb, str(network), str(scan), *flags, "--out", str(tmp_path / out)]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.npz").exists()


def test_embedding_needs_a_file_and_a_readable_tile(network: Path, scan: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.npz"):
        vitrail.embed(network, scan, tiles=TILE, out=tmp_path / "folder")
    broken = scan.with_name("broken.png")
    broken.write_bytes(b"")
    with pytest.raises(DataError, match="no tile could be read"):
        vitrail.embed(network, broken, tiles=TILE, out=tmp_path / "f.npz", **EXACT)
    assert not (tmp_path / "f.npz").exists()
    written = vitrail.embed(
        network, scan, broken, tiles=TILE, tokens=True, layers=(0,), out=tmp_path / "f.npz", **EXACT
    )
    assert written.tokens["tokens_0"] == (15, 2, 2, 16)
    assert [name for name, _ in written.unreadable] == [str(broken)]
