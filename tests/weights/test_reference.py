from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.reference import (
    STORED,
    TOLERANCE,
    differences,
    fixed_images,
    fixed_pixels,
    outputs,
    reference,
    relative_error,
)


def made(**changes: Any) -> Any:
    values = dict(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(8, 12), classes=3)
    torch.manual_seed(0)
    model = build(ViTConfig.of(**{**values, **changes}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def test_the_fixed_image_is_its_formula() -> None:
    """The same formula in Python's own integers, pixel by pixel."""
    height, width, channels = 5, 7, 3
    found = fixed_pixels(height, width, channels)
    assert (found.shape, found.dtype) == ((5, 7, 3), np.uint8)
    for y in range(height):
        for x in range(width):
            for c in range(channels):
                places = (y * 73856093) ^ (x * 19349663) ^ ((c + 1) * 83492791)
                ramp = (y * 160 // height + x * 64 // width + 24 * c) % 256
                assert found[y, x, c] == (ramp + places // 64 % 61) % 256


def test_it_is_normalised_as_the_config_says() -> None:
    config = ViTConfig(image_size=(32, 48), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))
    found = fixed_images(config)
    assert (tuple(found.shape), found.dtype) == ((1, 3, 32, 48), torch.float32)
    pixels = fixed_pixels(32, 48)
    for channel, (mean, std) in enumerate(zip(config.mean, config.std, strict=True)):
        expected = (pixels[..., channel] / 255.0 - mean) / std
        np.testing.assert_array_equal(found[0, channel].numpy(), expected.astype(np.float32))


def test_outputs_are_the_models_own_and_leave_it_as_it_was() -> None:
    model = made(dropout=0.5).train()
    found = outputs(model)
    assert model.training
    model.eval()
    with torch.inference_mode():
        assert torch.equal(found["logits"], model(fixed_images(model.config))[0])
        assert torch.equal(found["features"], model.features(fixed_images(model.config))[0])


def test_half_precision_is_computed_in_float32() -> None:
    model = made()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())  # the values fit, so nothing but the arithmetic differs
    half = copy.deepcopy(model).bfloat16()
    assert torch.equal(outputs(half)["logits"], outputs(model)["logits"])
    assert next(half.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("classes", [0, 3, STORED + 45])
def test_a_reference_survives_json_and_fits_its_own_model(classes: int) -> None:
    model = made(classes=classes)
    kept = json.loads(json.dumps(reference(model)))
    assert kept["image_size"] == [8, 12]
    assert set(kept["outputs"]) == ({"features", "logits"} if classes else {"features"})
    if classes:
        values = kept["outputs"]["logits"]
        assert values["count"] == classes and len(values["values"]) == min(classes, STORED)
        assert values["norm"] == pytest.approx(float(outputs(model)["logits"].norm()), rel=1e-6)
    assert max(differences(outputs(model), kept).values()) < 1e-6


@pytest.mark.parametrize("name", ["blocks.1.mlps.0.mlp.fc2.weight", "norm.bias", "head.bias", "stem.weight"])
def test_changed_weights_are_noticed(name: str) -> None:
    model = made(classes=STORED + 45)
    kept = reference(model)
    with torch.no_grad():
        model.state_dict()[name].mul_(1.5)
    assert differences(outputs(model), kept)["logits"] > TOLERANCE


def test_another_number_of_outputs_is_no_match() -> None:
    kept = reference(made(classes=3))
    assert differences(outputs(made(classes=4)), kept)["logits"] == float("inf")
    assert differences(outputs(made(classes=0)), kept)["logits"] == float("inf")


def test_resnets_have_one_too() -> None:
    config = ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(32, 40))
    torch.manual_seed(0)
    model = build(config).eval()
    assert set(reference(model)["outputs"]) == {"features", "logits"}


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1.0], [0.0, 0.0], float("inf")),
        ([1.0], [1.0, 2.0], float("inf")),
    ],
)
def test_relative_error(found: list[float], expected: list[float], error: float) -> None:
    assert relative_error(torch.tensor(found), torch.tensor(expected)) == error
