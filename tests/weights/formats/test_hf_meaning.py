"""What the outputs of a network of transformers mean: numbers, one label, several, or one of several classes.

The expected values are those of transformers' own pipeline for the same photograph.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline

import vitrail
from vitrail.cli import main
from vitrail.errors import WeightsError
from vitrail.exports.network import compute
from vitrail.weights.save import save

CONFIG = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=32)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def theirs(folder: Path, **config: Any) -> Path:
    """Write a network with random weights and its processor, as transformers does."""
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**{**CONFIG, "patch_size": 8, **config})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def answers(folder: Path, photo: Path, top: int) -> dict[str, float]:
    """Return what transformers' pipeline says about a photograph: label -> value."""
    found = pipeline("image-classification", model=str(folder), device="cpu")(Image.open(photo), top_k=top)
    return {row["label"]: row["score"] for row in found}


def ours(folder: Path, photo: Path) -> list[float]:
    model: Any = vitrail.load(folder)
    pixels = model.card.transform()(Image.open(photo))
    return compute(model, pixels[None], "probabilities", model.card)[0].tolist()


@pytest.mark.parametrize(
    "config",
    [
        dict(num_labels=1, problem_type="regression"),
        dict(num_labels=3, problem_type="regression"),
        dict(num_labels=1),
        dict(num_labels=1, problem_type="multi_label_classification"),
        dict(num_labels=3, problem_type="multi_label_classification"),
        dict(num_labels=3),
        dict(num_labels=3, problem_type="single_label_classification"),
    ],
)
def test_the_outputs_are_those_of_the_pipeline(tmp_path: Path, photo: Path, config: dict[str, Any]) -> None:
    folder = theirs(tmp_path / "model", **config)
    expected = answers(folder, photo, config["num_labels"])
    names = [f"LABEL_{index}" for index in range(config["num_labels"])]
    assert ours(folder, photo) == pytest.approx([expected[name] for name in names], abs=2e-3)
    save(vitrail.load(folder), tmp_path / "back", "hf")
    back = json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))
    assert answers(tmp_path / "back", photo, 3) == pytest.approx(expected, abs=1e-5), back.get("problem_type")


def test_predict_names_a_number_and_not_a_class(
    tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = theirs(tmp_path / "age", num_labels=1, problem_type="regression", id2label={0: "age"})
    assert main(["predict", str(folder), str(photo), "--json"]) == 0
    (image,) = json.loads(capsys.readouterr().out)["images"]
    assert image["numbers"]["age"] == pytest.approx(answers(folder, photo, 1)["age"], rel=0.02)  # bfloat16 at most


def test_what_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = theirs(tmp_path / "model", num_labels=3)
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**values, "problem_type": "regresion"}), encoding="utf-8")
    with pytest.raises(WeightsError, match=r"problem_type of config.json is 'regresion'.*regression"):
        vitrail.load(folder)
    file.write_text(json.dumps({**values, "hidden_act": "mish"}), encoding="utf-8")
    with pytest.raises(WeightsError, match=r"hidden_act of config.json is 'mish'"):
        vitrail.load(folder)


def test_code_of_the_models_own_is_named(tmp_path: Path) -> None:
    folder = theirs(tmp_path / "model", num_labels=3)
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**values, "auto_map": {"AutoModel": "own.Own"}}), encoding="utf-8")
    assert "auto_map" in str(vitrail.load(folder).load_report)  # type: ignore[union-attr]


def test_one_output_of_vitrails_own_is_a_sigmoid(tmp_path: Path) -> None:
    model: Any = vitrail.create("Ti/16", width=64, depth=1, heads=1, mlp_dim=64, image_size=32, classes=1)
    nn.init.normal_(model.head.weight)
    save(model, tmp_path / "one")
    loaded: Any = vitrail.load(tmp_path / "one")
    images = torch.randn(4, 3, 32, 32)
    found = compute(loaded, images, "probabilities", loaded.card)
    assert torch.allclose(found, loaded(images).sigmoid()) and not torch.allclose(found, torch.ones(4, 1))


@pytest.mark.full_size
@pytest.mark.parametrize("zero", [True, False])
def test_a_classifier_of_zeros_is_named(
    tmp_path: Path, photo: Path, caplog: pytest.LogCaptureFixture, zero: bool
) -> None:
    model: Any = vitrail.create("Ti/16", width=64, depth=1, heads=1, mlp_dim=64, image_size=32, classes=3)
    if not zero:
        nn.init.normal_(model.head.weight)
    save(model, tmp_path / "new")
    with caplog.at_level(logging.WARNING, "vitrail"):
        vitrail.predict(tmp_path / "new", photo)
        vitrail.export(tmp_path / "new", to="program", out=tmp_path / "out")
    assert caplog.text.count("never trained") == (2 if zero else 0)


@pytest.mark.parametrize(("name", "told"), [("ViTModel", False), ("MyNetwork", True)])
def test_a_class_that_transformers_does_not_have_is_noted(tmp_path: Path, name: str, told: bool) -> None:
    config = theirs(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [name]}))
    notes = vitrail.load(tmp_path).load_report.assumptions
    assert any("its class 'MyNetwork' is not one of transformers'" in note for note in notes) == told
