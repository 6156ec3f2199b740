from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from block_outputs import block_outputs
from sklearn.decomposition import PCA
from tiny_models import KINDS, maps_alive, tiny

from vitrail.errors import UsageError
from vitrail.inspection.components import component_maps, patch_components
from vitrail.inspection.maps import head_maps
from vitrail.model.compute import attention_path
from vitrail.model.record import attention_maps


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_maps_are_the_rows_of_what_is_read(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = tiny(**changes), torch.randn(2, 3, 12, 16)
    prefix, pool = model.config.prefix, model.config.pool
    with maps_alive(monkeypatch) as alive, attention_path("fused"):
        found = head_maps(model, images, layer=1)
    assert max(alive) == 0
    reference = attention_maps(model, images, [1])
    assert [(one.layer, one.branch, one.axis) for one in found] == [(m.layer, m.branch, m.axis) for m in reference]
    for one, raw in zip(found, reference, strict=True):
        maps = raw.maps.numpy()
        if one.axis:
            expected = np.zeros((2, 2, 3, 4))
            lines = 3 if one.axis == "row" else 4
            for line in range(lines):
                mean = maps.reshape(2, lines, *maps.shape[1:])[:, line].mean(axis=2) / lines
                if one.axis == "row":
                    expected[:, :, line] = mean
                else:
                    expected[:, :, :, line] = mean
        else:
            cls = maps[:, :, : 1 + model.config.origin.distilled].mean(axis=2)
            grid = maps[:, :, prefix:].mean(axis=2)
            row = {"cls": cls, "cls+gap": (cls + grid) / 2}.get(pool, grid)
            expected = row[:, :, prefix:].reshape(2, 2, 3, 4)
        np.testing.assert_allclose(one.shares.numpy(), expected, rtol=1e-4, atol=1e-7)


def test_one_head_of_one_layer() -> None:
    model, images = tiny(), torch.randn(1, 3, 20, 8)  # at another resolution
    (all_heads,) = head_maps(model, images)
    (one,) = head_maps(model, images, layer=2, head=-1)
    torch.testing.assert_close(one.shares, all_heads.shares[:, 1:])
    assert one.shares.shape == (1, 1, 5, 2)
    with pytest.raises(UsageError, match="no layer 3"):
        head_maps(model, images, layer=3)
    with pytest.raises(UsageError, match="no head 2"):
        head_maps(model, images, head=2)


@pytest.mark.parametrize("layer", [None, 1])
def test_components_of_patch_tokens_are_those_of_scikit_learn(layer: int | None) -> None:
    model = tiny(registers=1)
    images = torch.randn(6, 3, 12, 16)
    with torch.no_grad():
        whole = model.encode(model.embed(images)) if layer is None else block_outputs(model, images, [layer])[layer]
    tokens = whole[:, 2:].double().numpy()
    found = patch_components(model, images.split(4), layer=layer)
    expected = PCA(3, svd_solver="full").fit(tokens.reshape(-1, 16))
    signs = np.sign((found.directions * expected.components_).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found.directions, signs * expected.components_, atol=1e-4)
    np.testing.assert_allclose(found.explained, expected.explained_variance_ratio_, rtol=1e-4)
    assert found.tokens == 72
    along = signs[:, 0] * expected.transform(tokens.reshape(-1, 16))
    maps = component_maps(model, images, found)
    np.testing.assert_allclose(maps, along.reshape(6, 12, 3).transpose(0, 2, 1).reshape(6, 3, 3, 4), atol=1e-3)
    with pytest.raises(UsageError, match="there are none"):
        patch_components(model, [])
