from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from tiny_models import tiny

from vitrail.errors import UsageError
from vitrail.inspection.components import first_kernels, principal_filters
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig


@pytest.mark.parametrize(
    ("changes", "layer", "shape"),
    [
        ({"width": 64, "patch": 4}, "stem", (28, 4, 4, 3)),
        ({"width": 64, "channels": 1}, "stem", (16, 4, 4, 1)),  # a patch has no more than 16 values
        ({"width": 16}, "stem", (15, 4, 4, 3)),  # 16 filters less their mean
        ({"stem": "levit", "width": 64}, "stem.proj.0", (27, 3, 3, 3)),
        ({"stem": "hmlp", "width": 64}, "stem.proj.0", (12, 2, 2, 3)),
    ],
    ids=str,
)
def test_components_are_those_of_scikit_learn(changes: dict[str, Any], layer: str, shape: tuple[int, ...]) -> None:
    model = tiny(depth=1, **changes)
    found = principal_filters(model)
    assert (found.layer, found.components.shape) == (layer, shape)
    name, kernels = first_kernels(model)
    rows = kernels.detach().permute(0, 2, 3, 1).flatten(1).double().numpy()
    expected = PCA(shape[0], svd_solver="full").fit(rows)
    ours = found.components.reshape(shape[0], -1)
    signs = np.sign((ours * expected.components_).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(ours, signs * expected.components_, atol=1e-5)
    np.testing.assert_allclose(found.explained, expected.explained_variance_ratio_, rtol=1e-6)
    assert (ours.max(axis=1) >= -ours.min(axis=1)).all()  # the sign does not depend on the machine
    assert found.filters == len(rows) and name == layer


def test_what_is_applied_is_shown_where_kernels_are_standardised() -> None:
    hybrid = tiny(stem="resnet", stem_units=())
    resnet = build(ResNetConfig(units=(1,), width=8, classes=2))
    for model, name in ((hybrid, "stem.root.conv"), (resnet, "root")):
        layer, kernels = first_kernels(model)
        assert layer == name and kernels.shape[1:] == (3, 7, 7)
        torch.testing.assert_close(kernels.mean((1, 2, 3)), torch.zeros(len(kernels)), atol=1e-5, rtol=0)
        torch.testing.assert_close(kernels.var((1, 2, 3), correction=0), torch.ones(len(kernels)), atol=1e-2, rtol=0)
        assert "first convolution" in principal_filters(model).about
    assert principal_filters(tiny()).about == "patch embedding, 16 filters of 4x4x3"


def test_a_network_without_pixels_has_no_filters() -> None:
    with pytest.raises(UsageError, match="no layer of filters"):
        first_kernels(torch.nn.Linear(2, 2))
