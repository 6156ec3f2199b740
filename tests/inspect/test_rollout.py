from __future__ import annotations

import numpy as np
import pytest
import torch

from vitrail.errors import UsageError
from vitrail.inspect.rollout import rollout
from vitrail.model.build import build
from vitrail.model.config import ResNetConfig, ViTConfig
from vitrail.model.taps import attention_maps
from vitrail.model.vit import ViT


def tiny(**changes: object) -> ViT:
    torch.manual_seed(0)
    values: dict[str, object] = dict(width=16, depth=3, heads=2, mlp_dim=32, patch=4, image_size=(12, 16), classes=3)
    model = ViT(ViTConfig(**{**values, **changes}))  # type: ignore[arg-type]
    for parameter in model.parameters():  # far from uniform maps
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def reference(layers: list[np.ndarray]) -> np.ndarray:
    """vision_transformer's colab, in numpy: [layers][batch, heads, T, T] -> [batch, T, T]."""
    joint = None
    for maps in layers:
        averaged = maps.mean(axis=1) + np.eye(maps.shape[-1])
        averaged = averaged / averaged.sum(axis=-1)[..., None]
        joint = averaged if joint is None else np.matmul(averaged, joint)
    assert joint is not None
    return joint


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"registers": 2},
        {"pool": "gap"},
        {"pool": "map", "registers": 1},
        {"positions": "relative"},
        {"positions": "relative_bias"},
        {"distilled": True, "registers": 1},
        {"pool": "cls+gap"},
        {"pool": "gap", "class_token": True},
        {"block": "parallel", "branches": 2},
    ],
    ids=str,
)
def test_rollout_is_the_product_of_the_averaged_maps(changes: dict[str, object]) -> None:
    model = tiny(**changes)
    images = torch.randn(2, 3, 12, 16)
    found = attention_maps(model, images)
    layers = []
    for layer in range(3):  # branches side by side act as more heads
        layers.append(np.concatenate([m.maps.numpy() for m in found if m.layer == layer], axis=1))
    joint, prefix = reference(layers), model.config.prefix
    tokens, grid = joint[:, : 1 + model.config.distilled].mean(axis=1), joint[:, prefix:].mean(axis=1)
    row = {"cls": tokens, "cls+gap": (tokens + grid) / 2}.get(model.config.pool, grid)
    expected = row[:, prefix:].reshape(2, 3, 4)
    np.testing.assert_allclose(rollout(model, images).numpy(), expected, rtol=1e-4, atol=1e-7)
    assert len(np.unique(expected.round(6))) > 4  # the comparison means something


def test_shares_sum_to_one_without_other_tokens() -> None:
    shares = rollout(tiny(pool="gap"), torch.randn(2, 3, 12, 16))
    assert (shares >= 0).all()
    torch.testing.assert_close(shares.sum((1, 2)), torch.ones(2))


def test_one_row_of_an_axial_model_is_ordinary_attention_along_it() -> None:
    model = tiny(block="axial", pool="gap", image_size=(12, 4))
    images = torch.randn(2, 3, 12, 4)  # one column: row attention sees one token, columns see all
    layers = [m.maps.numpy() for m in attention_maps(model, images) if m.axis == "column"]
    expected = reference(layers).mean(axis=1).reshape(2, 3, 1)
    np.testing.assert_allclose(rollout(model, images).numpy(), expected, rtol=1e-4)


def test_axial_attention_stays_in_its_row_until_a_column_passes_it_on() -> None:
    model = tiny(block="axial", pool="gap", depth=1)
    shares = rollout(model, torch.randn(2, 3, 12, 16))
    torch.testing.assert_close(shares.sum((1, 2)), torch.ones(2))
    assert shares.shape == (2, 3, 4)


def test_other_resolutions_and_the_mode_of_the_model_are_kept() -> None:
    model = tiny().train()
    assert rollout(model, torch.randint(0, 256, (1, 3, 20, 8), dtype=torch.uint8)).shape == (1, 5, 2)
    assert model.training


def test_a_network_without_attention_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a Vision Transformer"):
        rollout(build(ResNetConfig(units=(1,), width=8, classes=2)), torch.zeros(1, 3, 32, 32))  # type: ignore[arg-type]
