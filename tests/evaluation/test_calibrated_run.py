"""A run fits the temperature of its best model, and every way out of the program uses it."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logit, softmax

import vitrail
from vitrail.data.item import Subset
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.durations import Steps
from vitrail.errors import UsageError, WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.recipes.small import smoke
from vitrail.reports.page import write_report
from vitrail.server.served_model import ServedModel
from vitrail.weights.card import Card
from vitrail.weights.confidence import THRESHOLDS, Confidence
from vitrail.weights.load import read_card
from vitrail.weights.store import save_model

pytestmark = pytest.mark.train
HOW: dict[str, Any] = dict(device="cpu", precision="float32", engine="torch", workers=0)


def arrays(images: Subset) -> np.ndarray:
    """uint8 [n, 8, 8, 3]"""
    return np.stack([np.asarray(images[i].image) for i in range(len(images))])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> vitrail.Run:
    out = tmp_path_factory.mktemp("runs")
    return replace(smoke(), out=str(out), data=Data(path="digits"), workers=0, device="cpu", precision="float32")


@pytest.fixture(scope="module")
def folder(run: vitrail.Run) -> Path:
    return vitrail.fit(run).folder


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    return vitrail.load(folder)


@pytest.fixture(scope="module")
def held_out(run: vitrail.Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """The validation images as PNGs in two folders, as an array, and their labels."""
    images = open_data(run.data, seed=run.seed).validation
    assert images is not None
    place, pixels = tmp_path_factory.mktemp("validation"), arrays(images)  # type: ignore[arg-type]
    for name in "ab":
        (place / name).mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(place / "ab"[number // 72] / f"{number:03d}.png")
    return place, pixels, np.array(images.labels)


@torch.no_grad()
def outputs(network: Any, pixels: np.ndarray) -> np.ndarray:
    return network(torch.from_numpy(pixels).permute(0, 3, 1, 2)).double().numpy()


@pytest.mark.train
def test_the_temperature_is_fitted_on_the_validation_images(network: Any, folder: Path, held_out: Any) -> None:
    _, pixels, labels = held_out
    logits = outputs(network, pixels)

    def loss(log: float) -> float:
        return float(-log_softmax(logits / np.exp(log), axis=1)[range(len(labels)), labels].mean())

    best = np.exp(minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9}).x)
    found = network.card.confidence
    assert found.temperature == pytest.approx(best, rel=1e-3) and found.images == len(labels)
    sure, wrong = softmax(logits / best, axis=1).max(axis=1), logits.argmax(axis=1) != labels
    for threshold in (0.0, 0.2, 0.31):
        place = THRESHOLDS.index(threshold)
        enough = sure >= threshold
        assert abs(found.named[place] - enough.sum()) <= 1 and abs(found.wrong[place] - (enough & wrong).sum()) <= 1
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (logged,) = (line for line in lines if line["kind"] == "calibration")
    assert logged["ece"] == found.ece and logged["ece_before"] == found.ece_before
    assert read_card(folder / "model" / "last").temperature == found.temperature  # both are of the last step


def test_evaluate_says_both_errors_and_the_loss_of_each(folder: Path, network: Any, run: vitrail.Run) -> None:
    after = vitrail.evaluate(folder, **HOW)  # the test images
    before = vitrail.evaluate(folder, calibrate=False, **HOW)
    assert after.temperature == network.card.temperature and before.temperature == 1
    images = open_data(run.data, seed=run.seed).test
    logits = outputs(network, arrays(images)) / network.card.temperature  # type: ignore[arg-type]
    nll = -log_softmax(logits, axis=1)[range(len(logits)), np.array(images.labels)].mean()  # type: ignore[union-attr]
    assert after.results.nll == pytest.approx(nll, rel=1e-4) and after.results.nll < before.results.nll
    np.testing.assert_array_equal(after.results.top, before.results.top)
    from vitrail.verbs.evaluate import as_json

    assert as_json(after)["ece_before"] == pytest.approx(as_json(before)["ece"], rel=1e-5)
    tested = json.loads((folder / "run.json").read_text())["result"]["test"]
    assert tested["nll"] == pytest.approx(after.results.nll, rel=1e-5)


@pytest.mark.export
def test_every_way_out_uses_it(network: Any, folder: Path, held_out: Any, tmp_path: Path) -> None:
    place, pixels, _ = held_out
    logits = outputs(network, pixels[:6])
    wanted, raw = softmax(logits / network.card.temperature, axis=1), softmax(logits, axis=1)
    files = sorted(place.rglob("*.png"))[:6]
    rows = vitrail.predict(folder, *files, top=1, **HOW).rows
    assert [row.probabilities[0] for row in rows] == pytest.approx(wanted.max(axis=1), abs=1e-5)
    rows = vitrail.predict(folder, *files, top=1, calibrate=False, **HOW).rows
    assert [row.probabilities[0] for row in rows] == pytest.approx(raw.max(axis=1), abs=1e-5)
    served = ServedModel("digits", network, "cpu", "float32", reject=0.3)
    ranked = served.rank([served.prepare(file.read_bytes(), 10**6) for file in files])
    assert [one.shares[0] for one in ranked] == pytest.approx(wanted.max(axis=1), abs=1e-5)  # type: ignore[union-attr]
    assert [served.rejected(one) for one in ranked] == (wanted.max(axis=1) < 0.3).tolist()  # type: ignore[arg-type]
    pytest.importorskip("onnxruntime")
    vitrail.export(folder, out=tmp_path / "program", output="probabilities")
    rows = vitrail.predict(tmp_path / "program", *files, top=1, workers=0).rows
    assert [row.probabilities[0] for row in rows] == pytest.approx(wanted.max(axis=1), abs=1e-4)
    rows = vitrail.predict(tmp_path / "program", *files, top=1, workers=0, calibrate=False).rows
    assert [row.probabilities[0] for row in rows] == pytest.approx(raw.max(axis=1), abs=1e-4)


@pytest.mark.full_size
def test_unsure_images_get_no_class(network: Any, folder: Path, held_out: Any, tmp_path: Path) -> None:
    place, pixels, labels = held_out
    logits = outputs(network, pixels)
    sure, names = softmax(logits / network.card.temperature, axis=1).max(axis=1), network.card.class_names
    cut = float(np.sort(sure)[len(sure) // 2].round(2))
    found = vitrail.predict(folder, place, top=2, reject=cut, **HOW)
    rejected = sure < cut
    assert 0 < rejected.sum() < len(sure) and [row.rejected for row in found.rows] == rejected.tolist()
    assert found.rejection is not None and found.rejection.coverage == pytest.approx(1 - rejected.mean())
    wrong = (logits.argmax(axis=1) != labels)[~rejected].mean()
    assert found.rejection.risk == pytest.approx(wrong)
    # CSV, JSON lines, and the Parquet files of a data set
    for suffix in ("csv", "jsonl"):
        vitrail.predict(folder, place, top=2, reject=cut, out=tmp_path / f"p.{suffix}", **HOW)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    best = [names[k] for k in logits.argmax(axis=1)]
    for row, line, name, no in zip(rows, lines, best, rejected, strict=True):
        assert row["class"] == line["class"] == ("none of these" if no else name)
        assert row["rejected"] == (name if no else "") and line["rejected"] is bool(no)
        assert line["top"][0]["class"] == name
    vitrail.predict(folder, place, reject=cut, out=tmp_path / "all", merge=tmp_path / "all.parquet", **HOW)
    table = pq.read_table(tmp_path / "all.parquet").to_pydict()
    assert table["rejected"] == rejected.tolist()


@pytest.mark.full_size
def test_the_report_shows_it(folder: Path, network: Any) -> None:
    page = write_report(folder).read_text()
    found = network.card.confidence
    assert f"divided by {found.temperature:.4g} (their temperature)" in page
    for error in (found.ece_before, found.ece):
        assert re.search(rf"calibration error[^.]*? {100 * error:.1f}\W%", page)
    assert "What a minimum confidence means" in page and page.count("after temperature scaling") == 1


@pytest.mark.train
def test_it_can_be_switched_off_and_is_absent_then(run: vitrail.Run, caplog: pytest.LogCaptureFixture) -> None:
    folder = vitrail.fit(replace(run, calibrate=False, duration=Steps(2))).folder
    assert read_card(folder).confidence is None and "confidence" not in read_card(folder).to_dict()
    image = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(image, "PNG")
    (folder / "black.png").write_bytes(image.getvalue())
    (row,) = vitrail.predict(folder, folder / "black.png", reject=0.99, **HOW).rows
    assert row.rejected and "does not say how often it is right" in caplog.text


def test_thresholds_of_labels_follow_the_temperature(tmp_path: Path) -> None:
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=16, patch=4, image_size=(8, 8), classes=3)
    card = Card(config, list("abc"), thresholds=[0.2, 0.5, 0.0])
    scaled = card.with_confidence(Confidence(temperature=2.0, images=9))
    # the logit of each threshold is halved
    assert scaled.thresholds[:2] == pytest.approx([1 / (1 + np.exp(-logit(0.2) / 2)), 0.5])
    assert scaled.thresholds[2] == 0.0
    assert scaled.with_confidence(None).thresholds == pytest.approx(card.thresholds)
    save_model(tmp_path, build(config), scaled)
    assert read_card(tmp_path) == scaled
    with pytest.raises(UsageError, match="each label has its own threshold"):
        vitrail.predict(tmp_path, tmp_path, reject=0.5, **HOW)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0}, "temperature is 0.0; it must be from 0.001 to 1000"),
        ({"temperature": "hot"}, "temperature"),
        ({"named": [1, 2], "wrong": [0, 0]}, "named and wrong have 2 and 2 counts, not 101"),
        ({"images": 1, "named": [1] * 101, "wrong": [2] * 101}, "each count must be at most the next"),
        ({"degrees": 1}, "unknown setting"),
        ([], "expected settings by name"),
    ],
)
def test_a_card_with_another_confidence_is_refused(wrong: Any, message: str) -> None:
    values = Card(ViTConfig(classes=3)).to_dict()
    with pytest.raises(WeightsError, match=message):
        Card.from_dict({**values, "confidence": wrong})
