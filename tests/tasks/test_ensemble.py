"""Several networks in the place of one: what `predict` and `evaluate` say is numpy's mean of what each says alone."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from references import draw, once
from torch import nn

import vitrail
from vitrail import cli
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.settings import Bands, Preprocess
from vitrail.data.sources.folder import read_file
from vitrail.errors import UsageError
from vitrail.evaluation.calibration import calibration
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.confidence import Confidence

CLASSES = ["blue", "red"]


def network(folder: Path, seed: int, side: int = 16, *, resize: str = "squash", **card: Any) -> Path:
    """Save a network with random weights whose outputs differ much from image to image."""
    names = card.setdefault("class_names", CLASSES)
    channels = card.pop("channels", 3)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(width=16, depth=1, heads=2, mlp_dim=32, patch=4)
    preprocess = card.pop("preprocess", Preprocess((side, side), resize=resize))  # type: ignore[arg-type]
    sizes |= dict(image_size=(side, side), native=preprocess.resize == "native")
    model: Any = build(ViTConfig(**sizes, classes=len(names), channels=channels))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    model.card = Card(model.config, preprocess=preprocess, **card)
    vitrail.save(model, folder)
    return folder


@pytest.fixture(scope="module")
def photos() -> Path:
    return once("photos-18", lambda place: draw(place / "photos", side=18)) / "photos"


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Networks with another size, preprocessing, order of classes and temperature each."""
    place = tmp_path_factory.mktemp("networks")
    return [
        network(place / "a", 1, confidence=Confidence(temperature=2.0)),
        network(place / "b", 2, side=24, resize="small", class_names=CLASSES[::-1]),
        network(place / "c", 3, confidence=Confidence(temperature=0.5)),
    ]


def run(*argv: object) -> int:
    return cli.main([str(word) for word in argv])


def table(file: Path) -> dict[tuple[str, ...], dict[str, float]]:
    """Place of an image, or of a tile -> class -> probability, from a CSV of predictions."""
    with file.open() as stream:
        rows = list(csv.DictReader(stream))
    place = [name for name in rows[0] if not name.startswith(("class", "probability"))]
    return {
        tuple(row[name] for name in place): {
            row[f"class{number}"]: float(row[f"probability{number}"]) for number in ("", "_2")
        }
        for row in rows
    }


@pytest.mark.parametrize("flags", [(), ("--tiles", "9"), ("--no-calibrate",)], ids=["images", "tiles", "uncalibrated"])
def test_probabilities_are_the_mean_of_those_in_the_files(
    networks: list[Path], photos: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    any_shape = network(tmp_path / "any", 4, preprocess=Preprocess((16, 16), resize="native", patch=4))
    members = [*networks, any_shape]
    for number, one in enumerate(members):
        assert run("predict", one, photos, "--out", tmp_path / f"{number}.csv", *flags) == 0
    assert run("predict", *members, photos, "--out", tmp_path / "mean.csv", *flags) == 0
    alone = [table(tmp_path / f"{number}.csv") for number in range(len(members))]
    found = table(tmp_path / "mean.csv")
    assert found.keys() == alone[0].keys() and len(found) >= 4
    for place, shares in found.items():
        for name in CLASSES:
            assert shares[name] == pytest.approx(np.mean([one[place][name] for one in alone]), abs=2e-6)
    assert np.ptp([one[place]["red"] for one in alone]) > 0.01, "the networks must differ for this to say anything"


def test_a_folder_of_results_and_python_have_the_same_mean(networks: list[Path], photos: Path, tmp_path: Path) -> None:
    assert run("predict", *networks, photos, "--out", tmp_path / "shards") == 0
    rows = [row for file in (tmp_path / "shards").glob("*.parquet") for row in parquet.read_table(file).to_pylist()]
    stored = {row["id"]: dict(zip(row["classes"], row["probabilities"], strict=True)) for row in rows}
    held: Any = vitrail.predict(networks, photos)
    assert len(held.rows) == len(stored) > 0
    for row in held.rows:
        name = Path(row.path).relative_to(photos).as_posix()
        assert dict(zip(row.classes, row.probabilities, strict=True)) == pytest.approx(stored[name], abs=1e-6)


@pytest.mark.parametrize("tta", [None, "flip"])
def test_evaluate_measures_the_mean_and_each_alone(networks: list[Path], photos: Path, tta: Any) -> None:
    alone = [vitrail.evaluate(one, photos, tta=tta) for one in networks]
    together = vitrail.evaluate(networks, photos, tta=tta)
    shares = []
    for one in alone:  # columns in the order of the first network
        order = [one.results.class_names.index(name) for name in CLASSES]
        rows = np.zeros_like(one.results.probability)  # type: ignore[attr-defined]
        np.put_along_axis(rows, one.results.top, one.results.probability, axis=1)  # type: ignore[attr-defined]
        shares.append(rows[:, order])
    mean, label = np.mean(shares, axis=0), together.results.label  # type: ignore[attr-defined]
    true = mean[np.arange(len(label)), label]
    assert together.results.loss == pytest.approx(-np.log(true), rel=1e-4)  # type: ignore[attr-defined]
    assert together.results.top1 == np.mean(mean.argmax(axis=1) == label)  # type: ignore[attr-defined]
    assert together.temperature == 1
    for one, (name, found) in zip(alone, together.networks.items(), strict=True):
        assert name == Path(one.model).name
        assert found.loss == pytest.approx(one.results.loss, rel=1e-4)  # type: ignore[attr-defined]


def test_what_evaluate_prints(networks: list[Path], photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("evaluate", *networks, photos) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"the mean of a, b and c on {photos}: top-1")
    found: Any = vitrail.evaluate(networks, photos)
    ece = calibration(found.results).ece
    assert f"their mean\t{found.results.in_words()}\t{ece:.2%}" in text
    assert run("evaluate", *networks, photos, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [*printed["networks"]] == ["a", "b", "c"] and printed["ece"] == pytest.approx(ece)
    assert printed["networks"]["b"]["top1"] == found.networks["b"].top1


@pytest.mark.parametrize("tta", [None, "flip"])
def test_each_image_is_read_once(networks: list[Path], photos: Path, monkeypatch: pytest.MonkeyPatch, tta: Any) -> None:
    read = Counter[str]()

    def counted(path: Any) -> bytes:
        read[os.fsdecode(path)] += 1
        return read_file(path)

    monkeypatch.setattr("vitrail.data.sources.folder.read_file", counted)
    found = vitrail.evaluate(networks, photos, tta=tta, workers=0)
    assert set(read.values()) == {1} and len(read) == found.results.count


def test_labels_have_the_mean_of_sigmoids_and_of_thresholds(photos: Path, tmp_path: Path) -> None:
    both = [
        network(tmp_path / "a", 1, thresholds=[0.2, 0.6], confidence=Confidence(temperature=2.0)),
        network(tmp_path / "b", 2, side=24, class_names=CLASSES[::-1], thresholds=[0.9, 0.4]),
    ]
    alone: list[Any] = [vitrail.predict(one, photos) for one in both]
    together: Any = vitrail.predict(both, photos)
    thresholds = {"blue": (0.2 + 0.4) / 2, "red": (0.6 + 0.9) / 2}
    for found, *each in zip(together.rows, *(one.rows for one in alone), strict=True):
        shares = [dict(zip(row.classes, row.probabilities, strict=True)) for row in each]
        mean = {name: np.mean([share[name] for share in shares]) for name in CLASSES}
        assert dict(zip(found.classes, found.probabilities, strict=True)) == pytest.approx(mean, abs=1e-5)
        assert {name for name, _ in found.labels} == {name for name in CLASSES if mean[name] >= thresholds[name]}


def test_numbers_have_their_mean_whatever_the_scales(photos: Path, tmp_path: Path) -> None:
    both = [
        network(tmp_path / "a", 1, class_names=["age", "size"], scale=TargetScale((2000.0, 3.0), (1.5, 2.0))),
        network(tmp_path / "b", 2, class_names=["size", "age"], scale=TargetScale((5.0, 1990.0), (0.5, 20.0))),
    ]
    alone: list[Any] = [vitrail.predict(one, photos) for one in both]
    together: Any = vitrail.predict(both, photos)
    for found, *each in zip(together.rows, *(one.rows for one in alone), strict=True):
        for name in ("age", "size"):
            assert found.numbers[name] == pytest.approx(np.mean([row.numbers[name] for row in each]), rel=1e-6)


BANDS = Bands(mean=(1.0, 2.0), std=(1.0, 1.0), low=(0.0, 0.0), high=(9.0, 9.0), display=(1, 2, 2), bits="8")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"class_names": ["blue", "green"]}, "a does not know 'green', and b does not know 'red'"),
        ({"class_names": ["blue", "red", "rose"]}, "a does not know 'rose'. Networks"),
        ({"thresholds": [0.5, 0.5]}, "a predicts one class, and b predicts several labels"),
        ({"channels": 2, "preprocess": Preprocess((16, 16), bands=BANDS)}, "images of other channels"),
    ],
)
def test_networks_that_differ_are_refused(photos: Path, tmp_path: Path, other: dict[str, Any], said: str) -> None:
    both = [network(tmp_path / "a", 1), network(tmp_path / "b", 2, **other)]
    for verb in (vitrail.predict, vitrail.evaluate):
        with pytest.raises(UsageError, match=said):
            verb(both, photos)  # type: ignore[operator]


def test_networks_stand_before_the_images(
    networks: list[Path], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("predict", networks[0], photos, networks[1]) == 2
    assert f"{networks[1]} is a network, but it stands after {photos}" in capsys.readouterr().err
    assert run("predict", *networks) == 2
    assert "no images are given" in capsys.readouterr().err
    assert run("predict", networks[0], networks[0], photos) == 2
    assert "is given twice" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the list is empty"):
        vitrail.predict([], photos)


def test_one_network_in_a_list_is_that_network(networks: list[Path], photos: Path) -> None:
    one: Any = vitrail.evaluate(networks[:1], photos)
    assert one.temperature == 2 and not one.networks and one.model == str(networks[0])
