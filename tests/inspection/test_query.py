from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import KINDS, tiny

from vitrail.errors import UsageError
from vitrail.inspection.maps import patch_attention
from vitrail.model.build import build
from vitrail.model.record import attention_maps
from vitrail.model.variants import ResNetConfig


@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("layer", [0, -1])
def test_it_is_the_patchs_row_of_the_maps(changes: dict[str, Any], layer: int) -> None:
    model, images, (row, column) = tiny(**changes), torch.randn(2, 3, 12, 16), (1, 2)
    prefix = model.config.prefix
    found = patch_attention(model, images, (row, column), layer, head=1)
    reference = attention_maps(model, images, [layer], [1])
    assert len(found) == len(reference)
    for one, raw in zip(found, reference, strict=True):
        maps = raw.maps.numpy()
        expected = np.zeros((2, 1, 3, 4), np.float32)
        for image in range(2):
            if raw.axis == "row":
                expected[image, 0, row] = maps[image * 3 + row, 0, column]
            elif raw.axis == "column":
                expected[image, 0, :, column] = maps[image * 4 + column, 0, row]
            else:
                expected[image, 0] = maps[image, 0, prefix + row * 4 + column, prefix:].reshape(3, 4)
        np.testing.assert_allclose(one.shares.numpy(), expected, rtol=1e-5, atol=1e-7)


def test_what_is_not_there_is_said() -> None:
    images = torch.randn(1, 3, 12, 16)
    for patch, layer, head, message in (
        ((3, 0), 0, None, "no patch 3, 0: the grid has 3 rows and 4 columns"),
        ((0, -1), 0, None, "no patch"),
        ((0, 0), 9, None, "no layer 9"),
        ((0, 0), 0, 5, "no head 5"),
    ):
        with pytest.raises(UsageError, match=message):
            patch_attention(tiny(), images, patch, layer, head)
    resnet: Any = build(ResNetConfig(units=(1,), width=8, classes=3, image_size=(16, 16)))
    with pytest.raises(UsageError, match="not a ResNet"):
        patch_attention(resnet, images, (0, 0))
