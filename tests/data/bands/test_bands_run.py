"""A run on images of four bands with 16 bits, from the files to the answers of every verb."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from vitrail import evaluate, export, fit, load, predict
from vitrail.config import from_yaml
from vitrail.data.images.ops import eval_transform
from vitrail.data.images.pixels import pixels_of
from vitrail.data.settings import Augment, Bands, Data, Preprocess
from vitrail.data.sources.open import open_data
from vitrail.durations import Epochs
from vitrail.errors import DataError, UsageError
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.server.served_model import ServedModel
from vitrail.training.decide import decide
from vitrail.training.facts import Facts
from vitrail.training.python_objects import trained_network
from vitrail.training.result import Result
from vitrail.training.run import Model, Optim, Run
from vitrail.weights.card import Card
from vitrail.weights.load import read_card

CLASSES = ("clay", "sand", "water")


def fields(folder: Path, count: int, seed: int) -> None:
    """Write fields [8, 8, 4] whose classes differ in one band by less than 256 levels, which 8 bits would not show."""
    rng = np.random.default_rng(seed)
    for place, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            values = rng.normal(8192, 20, (8, 8, 4)) + 150 * (np.arange(4) == place + 1)
            tifffile.imwrite(folder / name / f"{number}.tif", np.moveaxis(values.astype(np.uint16), 2, 0),
                             photometric="minisblack")  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fields")
    fields(root / "train", 40, 0)
    fields(root / "test", 8, 1)
    return root


@pytest.fixture(scope="module")
def run(data: Path) -> Run:
    return Run(
        name="b",
        out=str(data.parent / "runs"),
        data=Data(path=str(data), channels=4, bits="16", display=(4, 3, 2)),
        model="Ti/16",
        vit=Model(width=32, depth=1, heads=2, mlp_dim=64, patch=4),
        optim=Optim(lr=5e-3),
        augment=Augment(crop="center", randaugment=(1, 3.0), color_jitter=0.2, mixup=0.2, cutmix=1.0),
        duration=Epochs(6),
        evaluate_every=Epochs(6),
        batch_size=32,
        workers=0,
        device="cpu",
        precision="float32",
    )


@pytest.fixture(scope="module")
def trained(run: Run) -> Result:
    return fit(run)


@pytest.mark.train
def test_the_run_learns_what_8_bits_would_not_show(trained: Result, data: Path) -> None:
    facts = json.loads((trained.folder / "run.json").read_text())
    assert "4 bands of 16 bits: as data.channels and data.bits say" in str(facts)
    assert "without the operations of RandAugment that change colours, colour jitter" in str(facts)
    recorded = from_yaml(trained.folder / "config.yaml", Run())
    card = read_card(trained.folder)
    bands = card.preprocess.bands
    assert recorded.preprocess is not None and bands is not None and recorded.preprocess.bands == bands
    assert bands.display == (4, 3, 2) and card.config.channels == 4
    assert card.config.mean == pytest.approx([mean / 65535 for mean in bands.mean])
    assert evaluate(trained.folder, data).results.correct.all()


@pytest.mark.train
@pytest.mark.export
def test_every_way_to_ask_the_network_gives_one_answer(trained: Result, data: Path, tmp_path: Path) -> None:
    files = sorted((data / "test").rglob("*.tif"))[::6]
    rows = [row.as_json() for row in predict(trained.folder, *files, precision="float32").rows]
    assert [row["class"] for row in rows] == [file.parent.name for file in files]
    export(trained.folder, out=tmp_path / "onnx")
    about = json.loads((tmp_path / "onnx" / "card.json").read_text())
    assert about["input"]["type"] == "float32" and about["preprocess"]["bands"]["bits"] == "16"
    programs = [row.as_json() for row in predict(tmp_path / "onnx", *files).rows]
    served = ServedModel("b", load(trained.folder), "cpu", "float32")
    served.warm()
    images = [served.prepare(file.read_bytes(), 10**6) for file in files]
    for row, program, image, ranked in zip(rows, programs, images, served.rank(images), strict=True):
        assert program["class"] == row["class"] and abs(program["probability"] - row["probability"]) < 1e-5
        assert abs(served.top(ranked, 1)[0]["probability"] - row["probability"]) < 1e-5  # type: ignore[arg-type]
        assert image.crop().startswith("data:image/png") and image.shown.dtype == np.uint8


@pytest.mark.train
def test_a_file_of_other_bands_is_a_row_and_no_answer(trained: Result, data: Path, tmp_path: Path) -> None:
    good = tifffile.imread(next((data / "test" / "clay").iterdir()))
    files = {"missing": good[:3], "eight": good.astype(np.uint8), "nan": np.full(good.shape, np.nan)}
    for name, values in files.items():
        np.save(tmp_path / f"{name}.npy", values)
    answer = predict(trained.folder, *(tmp_path / f"{name}.npy" for name in files))
    assert [row.reason for row in answer.unreadable] == ["wrong-bands", "wrong-depth", "wrong-depth"]
    assert answer.rows == [] and answer.exit_code == 1


@pytest.mark.train
def test_the_next_run_keeps_the_statistics_of_the_weights(trained: Result, run: Run, data: Path) -> None:
    weights = str(trained.folder)
    train = open_data(run.data).train
    again = replace(run, weights=weights, vit=Model(), data=Data(path=str(data)))
    found = decide(again, Facts.of(again, train, list(CLASSES)))
    assert found.preprocess.bands == read_card(weights).preprocess.bands
    with pytest.raises(DataError, match=r"4 bands of 16 bits are needed .as the weights need"):
        decide(again, Facts.of(again, open_data("digits").train, [str(digit) for digit in range(10)]))


@pytest.mark.train
def test_the_card_keeps_the_statistics(trained: Result) -> None:
    card = read_card(trained.folder)
    assert Card.from_dict(json.loads(json.dumps(card.to_dict()))) == card
    usual = Card(card.config)
    assert "bands" not in usual.to_dict()["preprocess"]  # so that earlier versions read it
    image = pixels_of(card.preprocess.bands).read(np.full((8, 8, 4), 8192, np.uint16))
    prepared = eval_transform(card.preprocess)(image, np.random.default_rng(0))
    model = load(trained.folder)
    with torch.no_grad():
        floats = model(torch.from_numpy(prepared).permute(2, 0, 1)[None])
        scaled = model.normalise(torch.full((1, 4, 8, 8), 255 * 8192 / 65535))  # mean and std of the card's config
        assert torch.allclose(floats, model(scaled), atol=1e-3)


def test_a_network_of_ones_own_gets_the_bands(run: Run, data: Path) -> None:
    preprocess = Preprocess((8, 8), bands=Bands("16", (0.0,) * 4, (1.0,) * 4, (0.0,) * 4, (1.0,) * 4))
    own = nn.Sequential(nn.Flatten(), nn.Linear(4 * 8 * 8, 3))
    bands = torch.randn(2, 4, 8, 8)
    assert torch.equal(trained_network(own, 3, preprocess)(bands), own(bands))
    three = ViT(ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=3))
    with pytest.raises(UsageError, match=r"the model has 3 channels, and the images have 4 bands. Load it with"):
        decide(run, Facts.of(run, open_data(run.data).train, list(CLASSES), model=three))
