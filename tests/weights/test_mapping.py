from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.weights.mapping import (
    Conversion,
    Rule,
    apply_table,
    conv_kernel,
    dense_rows,
    joined,
    reshaped,
    scale_bias,
    stacked,
    turned,
    within,
)


def _values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def row(right: str | Rule) -> Conversion:
    """The conversion of a table of one row."""
    (entry,) = apply_table(["a"], {"a": right})
    return entry


ENTRIES: list[tuple[Conversion, list[tuple[int, ...]]]] = [
    (row("b"), [(3, 4)]),
    (row(turned("b")), [(3, 4)]),
    (row(conv_kernel("b")), [(2, 3, 4, 5)]),
    (row(reshaped("b", (1, 1, 6))), [(1, 1, 6)]),
    (row(joined("q", "k", "v")), [(4, 3)] * 3),
    (row(joined("q", "k", "v", dim=1)), [(4, 3)] * 3),
]


@pytest.mark.parametrize(("entry", "shapes"), ENTRIES, ids=lambda value: getattr(value, "ours", None))
def test_writing_undoes_reading(entry: Conversion, shapes: list[tuple[int, ...]]) -> None:
    theirs = [_values(*shape) + index for index, shape in enumerate(shapes)]
    back = entry.written(entry.read(*theirs))
    assert len(back) == len(entry.theirs) == len(theirs)
    for found, tensor in zip(back, theirs, strict=True):
        assert torch.equal(found, tensor)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in back}
    assert len(addresses) == len(back)  # safetensors refuses tensors that share memory


def test_a_flax_dense_layer_computes_the_same_as_ours() -> None:
    kernel, bias, x = _values(3, 5), _values(5), _values(7, 3)
    weight, offset = apply_table(["layer.weight", "layer.bias"], dense_rows("layer", "Dense_0"))
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
    np.testing.assert_allclose(F.conv2d(images, conv_kernel("b").read(kernel))[0], expected, atol=1e-12)


def test_joined_parts_keep_their_order() -> None:
    parts = [torch.full((2, 1), float(value)) for value in (1, 2, 3)]
    assert joined("q", "k", "v").read(*parts).flatten().tolist() == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ({"norm.{part}": "encoder.ln.{part}"}, {"norm.weight": "encoder.ln.weight", "norm.bias": "encoder.ln.bias"}),
        (scale_bias("norm", "LN_0"), {"norm.weight": "LN_0/scale", "norm.bias": "LN_0/bias"}),
        (scale_bias("n", "gn", ("gamma", "beta")), {"n.weight": "gn/gamma", "n.bias": "gn/beta"}),
    ],
)
def test_pairs_are_named_as_their_libraries_name_them(table: Any, names: dict[str, str]) -> None:
    assert {entry.ours: entry.theirs[0] for entry in apply_table(names, table)} == names


def test_a_table_is_applied_to_the_tensors_that_a_model_has() -> None:
    table = {
        "cls": "{prefix}token",
        **within("blocks.{layer}.", "{prefix}layers.{layer}.", {"norm.{part}": "ln.{part}", "qkv": joined("q", "k")}),
        "bias": stacked("{prefix}layers.{layer}.table"),
        "head.{part}": "classifier.{part}",
    }
    names = ["bias", "blocks.0.norm.weight", "blocks.1.norm.weight", "blocks.1.qkv", "blocks.1.other", "cls"]
    assert {entry.ours: entry.theirs for entry in apply_table(names, table, prefix="vit.")} == {
        "bias": ("vit.layers.0.table", "vit.layers.1.table"),
        "blocks.0.norm.weight": ("vit.layers.0.ln.weight",),
        "blocks.1.norm.weight": ("vit.layers.1.ln.weight",),
        "blocks.1.qkv": ("vit.layers.1.q", "vit.layers.1.k"),
        "cls": ("vit.token",),
    }
    counted = apply_table(
        ["stages.0.1.conv2"], {"stages.{stage}.{unit}.conv{number}": "b{stage}/u{unit:02}/{number}"}, 1
    )
    assert counted[0].theirs == ("b1/u02/2",)
