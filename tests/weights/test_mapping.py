from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.weights.mapping import (
    Conversion,
    conv_kernel,
    dense,
    joined,
    reshaped,
    same,
    same_pair,
    scale_bias,
    turned,
)


def _values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


ENTRIES: list[tuple[Conversion, list[tuple[int, ...]]]] = [
    (same("a", "b"), [(3, 4)]),
    (turned("a", "b"), [(3, 4)]),
    (conv_kernel("a", "b"), [(2, 3, 4, 5)]),
    (reshaped("a", "b", (1, 1, 6)), [(1, 1, 6)]),
    (joined("a", ("q", "k", "v")), [(4, 3)] * 3),
    (joined("a", ("q", "k", "v"), dim=1), [(4, 3)] * 3),
]


@pytest.mark.parametrize(("entry", "shapes"), ENTRIES, ids=lambda value: getattr(value, "ours", None))
def test_writing_undoes_reading(entry: Conversion, shapes: list[tuple[int, ...]]) -> None:
    theirs = [_values(*shape) + index for index, shape in enumerate(shapes)]
    back = entry.write(entry.read(*theirs))
    assert len(back) == len(entry.theirs) == len(theirs)
    for found, tensor in zip(back, theirs, strict=True):
        assert torch.equal(found, tensor)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in back}
    assert len(addresses) == len(back)  # safetensors refuses tensors that share memory


def test_a_flax_dense_layer_computes_the_same_as_ours() -> None:
    kernel, bias, x = _values(3, 5), _values(5), _values(7, 3)
    weight, offset = dense("layer", "Dense_0")
    assert (weight.ours, weight.theirs) == ("layer.weight", ("Dense_0/kernel",))
    assert (offset.ours, offset.theirs) == ("layer.bias", ("Dense_0/bias",))
    expected = x.numpy() @ kernel.numpy() + bias.numpy()
    np.testing.assert_allclose(F.linear(x, weight.read(kernel), offset.read(bias)), expected, atol=1e-12)


def test_a_flax_convolution_computes_the_same_as_ours() -> None:
    kernel, images = _values(2, 3, 4, 5), _values(1, 4, 6, 7)  # height, width, in, out; batch, in, height, width
    expected = np.zeros((5, 5, 5))
    for out, row, column in np.ndindex(5, 5, 5):
        window = images.numpy()[0, :, row : row + 2, column : column + 3]
        expected[out, row, column] = sum(
            window[c, y, x] * kernel[y, x, c, out].item() for c, y, x in np.ndindex(4, 2, 3)
        )
    np.testing.assert_allclose(F.conv2d(images, conv_kernel("a", "b").read(kernel))[0], expected, atol=1e-12)


def test_joined_parts_keep_their_order() -> None:
    parts = [torch.full((2, 1), float(value)) for value in (1, 2, 3)]
    assert joined("qkv", ("q", "k", "v")).read(*parts).flatten().tolist() == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("conversions", "names"),
    [
        (same_pair("norm", "encoder.ln"), {"norm.weight": "encoder.ln.weight", "norm.bias": "encoder.ln.bias"}),
        (scale_bias("norm", "LN_0"), {"norm.weight": "LN_0/scale", "norm.bias": "LN_0/bias"}),
        (scale_bias("n", "gn", ("gamma", "beta")), {"n.weight": "gn/gamma", "n.bias": "gn/beta"}),
    ],
)
def test_pairs_are_named_as_their_libraries_name_them(conversions: list[Conversion], names: dict[str, Any]) -> None:
    assert {entry.ours: entry.theirs[0] for entry in conversions} == names
