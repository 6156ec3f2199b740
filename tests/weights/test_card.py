from __future__ import annotations

import json
import math
from typing import Any

import pytest

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import NAMES, ViTConfig, variant
from vitrail.weights.card import Card

TINY = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_card_of_every_variant_survives_json(name: str) -> None:
    card = Card(
        variant(name, classes=3),
        ["a", "b", "<script>"],
        Preprocess(image_size=(64, 32), resize="squash", interpolation="bicubic"),
        source="somewhere",
        licence="Apache-2.0",
        metrics={"top1": 0.5},
        provenance={"run": {"seed": 3}},
        reference={"input": "gradient", "logits": [0.5, -1.0, 2.0]},
    )
    assert Card.from_dict(json.loads(json.dumps(card.to_dict()))) == card


def test_numbers_that_are_not_finite_become_null() -> None:
    card = Card(TINY, metrics={"loss": math.nan, "all": [math.inf, 1.0]})
    assert card.to_dict()["metrics"] == {"loss": None, "all": [None, 1.0]}
    json.dumps(card.to_dict(), allow_nan=False)


def test_class_names_match_the_classifier() -> None:
    with pytest.raises(WeightsError, match="3 class names for a model with 2 classes"):
        Card(TINY, ["a", "b", "c"])


def _changed(**changes: object) -> dict[str, object]:
    return {**Card(TINY, ["a", "b"]).to_dict(), **changes}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "not a vitrail model card"),
        (_changed(version=99), "version 99"),
        (_changed(kind="cnn"), "'cnn'; valid kinds: vit, resnet"),
        (_changed(licnce="MIT"), "'licnce'.* Did you mean 'licence'"),
        (_changed(config={"widht": 8}), "'widht' in config.* Did you mean 'width'"),
        (_changed(config={"width": 10, "heads": 3}), "width 10 is not divisible by 3 heads"),
        (_changed(config={"width": None}), "wrong type in config"),
        ([1], "not a vitrail model card"),
        (_changed(kind=[1]), r"\[1\]; valid kinds"),
        (_changed(config={"depth": "12"}), "config: depth: expected a whole number, got '12'"),
        (_changed(config={"stem": "conv"}), "config: stem: expected one of linear, levit"),
        (_changed(config={"pool": ["cls"]}), "config: pool: expected one of"),
        (_changed(config={"heads": 0}), "wrong type in config"),
        (_changed(config={"mean": []}), "wrong type in config"),
        (_changed(config={"image_size": [224, 224, 3]}), "config"),
        (_changed(preprocess={"crop": "all"}), "preprocess: crop: expected a number, got 'all'"),
        (_changed(config=[1]), "config of the model card should be a mapping, not list"),
        (_changed(class_names=["a"]), "1 class names for a model with 2 classes"),
    ],
)
def test_a_wrong_card_is_refused_by_the_name_of_its_entry(values: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        Card.from_dict(values)
