from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from gathered import failures

from vitrail.data.settings import Bands, Preprocess
from vitrail.errors import UsageError, WeightsError
from vitrail.model.variants import NAMES, Rotary, ViTConfig, flat, variant
from vitrail.weights.card import Card

TINY = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=2)


def test_a_card_of_every_variant_survives_json() -> None:
    assert failures(NAMES, survives_json) == []


def survives_json(name: str) -> None:
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


EVA = Rotary(reference=(16, 16))
ORIGIN: dict[str, Any] = dict(norm_eps=1e-5, gelu="quick", key_bias=False, rotary=EVA, mlp="swiglu")


def test_fields_of_the_origin_stand_beside_the_others_in_a_card() -> None:
    card = Card(ViTConfig.of(width=64, heads=2, **ORIGIN))
    written = card.to_dict()["config"]
    later = {"segmentation", "queries", "query_blocks"}  # left out, so that earlier versions read the card
    assert "origin" not in written and written.keys() == flat(card.config).keys() - later
    assert (written["width"], written["norm_eps"], written["gelu"]) == (64, 1e-5, "quick")
    assert Card.from_dict(json.loads(json.dumps(card.to_dict()))) == card
    nested = {name: value for name, value in written.items() if name not in ORIGIN}
    nested["origin"] = {name: written[name] for name in ORIGIN}
    assert Card.from_dict({**card.to_dict(), "config": nested}) == card
    with pytest.raises(WeightsError, match=r"config: norm_eps is 2\.0; valid: 0 to 1"):
        Card.from_dict({**card.to_dict(), "config": {**written, "norm_eps": 2}})
    with pytest.raises(WeightsError, match=r"config: gelu: .*'linear'"):
        Card.from_dict({**card.to_dict(), "config": {**written, "gelu": "linear"}})


def test_numbers_that_are_not_finite_become_null() -> None:
    card = Card(TINY, metrics={"loss": math.nan, "all": [math.inf, 1.0]})
    assert card.to_dict()["metrics"] == {"loss": None, "all": [None, 1.0]}
    json.dumps(card.to_dict(), allow_nan=False)


def test_thresholds_say_that_several_labels_are_predicted() -> None:
    """A card without them is as before, so that earlier versions read it."""
    assert "thresholds" not in Card(TINY).to_dict() and not Card(TINY).several
    card = Card(TINY, thresholds=[0.25, 0.5])
    assert card.several and Card.from_dict(json.loads(json.dumps(card.to_dict()))) == card
    with pytest.raises(WeightsError, match="1 thresholds for a model with 2 classes"):
        Card(TINY, thresholds=[0.5])
    for wrong in (1.5, None, True, "0.5"):
        with pytest.raises(WeightsError, match="thresholds: expected a number from 0 to 1 for class 1"):
            Card.from_dict({**card.to_dict(), "thresholds": [0.5, wrong]})


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
        (_changed(licnce="MIT"), "unknown entry 'licnce'. Did you mean 'licence'"),
        (_changed(config={"widht": 8}), "config: widht: unknown setting. Did you mean 'width'"),
        (_changed(config={"width": 10, "heads": 3}), "width 10 is not divisible by 3 heads"),
        (_changed(config={"width": None}), "config: width: expected a whole number, got None"),
        ([1], "not a vitrail model card"),
        (_changed(kind=[1]), r"\[1\]; valid kinds"),
        (_changed(config={"depth": "12"}), "config: depth: expected a whole number, got '12'"),
        (_changed(config={"stem": "conv"}), "config: stem: expected one of linear, linear"),
        (_changed(config={"pool": ["cls"]}), "config: pool: expected one of"),
        (_changed(config={"heads": 0}), "config: heads is 0; valid: 1 to 4,096"),
        (_changed(config={"mean": []}), "config: mean has 0 values for 3 channels"),
        (
            _changed(config={"image_size": [224, 224, 3]}),
            r"image_size: expected \[a whole number, a whole",
        ),
        (_changed(config={"channels": 10**9}), "channels is 1000000000; valid: 1 to 1,024"),
        (_changed(config={"width": -8}), "width is -8; valid: 1 to 65,536"),
        (_changed(config={"heads": -2}), "heads is -2; valid: 1 to 4,096"),
        (_changed(config={"depth": 10**12}), "depth is 1000000000000; valid: 1 to 1,000"),
        (_changed(config={"norm_eps": math.nan}), "norm_eps is nan; valid: 0 to 1"),
        (_changed(config={"std": [0.0]}), "std is 0.0; valid: 1e-06 to 1e\\+06"),
        (_changed(config={"image_size": [10**5, 10**5]}), "image_size is 100000; valid: 1 to 4,096"),
        (
            _changed(config={"image_size": [4096, 4096], "patch": 4}),
            "4096 pixels have 1,048,576 patches of 4 x 4",
        ),
        (_changed(config={"image_size": 224}), "image_size"),
        (
            _changed(preprocess={"image_size": [10**5, 10**5]}),
            r"preprocess: image_size is \(100000, 100000\); it must",
        ),
        (_changed(preprocess={"image_size": [4096, 4096]}), "images of 4096 x 4096 pixels have 1,048,576 patches"),
        (_changed(preprocess={"crop": math.nan}), "preprocess: crop is nan"),
        (_changed(preprocess=None), "preprocess: expected settings by name"),
        (_changed(class_names=None), "class_names: expected a list of names, got None"),
        (_changed(class_names=["a", 3]), "class_names: expected text for class 1, got 3"),
        (_changed(source=3), "source: expected text, got 3"),
        (_changed(metrics=[1]), r"metrics: expected an object, got \[1\]"),
        (_changed(provenance=None), "provenance: expected an object, got None"),
        (_changed(reference="x" * 10**6), "reference: expected an object, got 'xxx"),
        (_changed(preprocess={"crop": "all"}), "preprocess: crop: expected a number, got 'all'"),
        (_changed(config=[1]), r"config: expected settings by name .*, got \[1\]"),
        (_changed(class_names=["a"]), "1 class names for a model with 2 classes"),
    ],
)
def test_a_wrong_card_is_refused_by_the_name_of_its_entry(values: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        Card.from_dict(values)


def test_an_error_about_a_large_value_is_short() -> None:
    size = 10**5
    named = (dict(class_names="x" * size), dict(class_names=[["x"] * size] * 2), dict(config={"mean": [0] * size}))
    for changes in named:
        with pytest.raises(WeightsError) as error:
            Card.from_dict(_changed(**changes))
        assert len(str(error.value)) < 1000


def test_statistics_of_bands_are_those_of_the_channels() -> None:
    bands = Bands("16", (1.0, 2.0), (1.0, 1.0), (0.0, 0.0), (9.0, 9.0))
    with pytest.raises(WeightsError, match=r"a card with statistics of 2 bands for a model of 3 channels"):
        Card(ViTConfig(), preprocess=Preprocess(bands=bands))
    with pytest.raises(UsageError, match=r"std has 1 values for 2 bands"):
        Card(ViTConfig(channels=2), preprocess=Preprocess(bands=replace(bands, std=(1.0,))))
    card = Card(ViTConfig(channels=2), preprocess=Preprocess(bands=bands))
    assert Card.from_dict(card.to_dict()) == card and card.input_type == "float32"
    values = card.to_dict()
    values["preprocess"]["bands"]["high"] = [1.0]
    with pytest.raises(WeightsError, match=r"high has 1 values for 2 bands"):
        Card.from_dict(values)
