"""BEiT's relative position bias: the rows it uses, and its resampling as each library does it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.ndimage
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import resize_rel_pos_bias_table
from timm.models.beit import RelativePositionBias
from transformers.models.beit.modeling_beit import BeitRelativePositionBias

from vitrail.errors import UsageError
from vitrail.model.posemb import RelativeBias, build_positions
from vitrail.model.resize import resize_bias
from vitrail.model.variants import ViTConfig

TINY = dict(width=32, depth=2, heads=2, mlp_dim=64, patch=8, classes=5, positions="relative_bias")
grids = st.tuples(st.integers(1, 9), st.integers(1, 9))


def positions(grid: tuple[int, int], **options: object) -> RelativeBias:
    torch.manual_seed(0)
    size = (8 * grid[0], 8 * grid[1])
    module = build_positions(ViTConfig.of(**(TINY | dict(image_size=size) | options)))  # type: ignore[arg-type]
    assert isinstance(module, RelativeBias)
    torch.nn.init.normal_(module.bias)
    return module


def whole(module: RelativeBias, grid: tuple[int, int], layer: int = 0) -> torch.Tensor:
    """The bias of all tokens to all tokens, [heads, tokens, tokens]."""
    count = grid[0] * grid[1]
    query = torch.zeros(1, 2, module.config.prefix + count, 16)
    return module.logits(layer, query, torch.arange(count), grid)[0].detach()


@pytest.mark.parametrize("grid", [(3, 4), (4, 3), (1, 5)])
def test_the_row_of_every_pair_by_hand(grid: tuple[int, int]) -> None:
    module = positions(grid)
    (rows, columns), last = grid, (2 * grid[0] - 1) * (2 * grid[1] - 1)
    assert module.bias.shape == (2, last + 3, 2)
    for layer in range(2):
        bias, table = whole(module, grid, layer), module.bias[layer]
        assert torch.equal(bias[:, 0, 0], table[last + 2])
        for q in range(rows * columns):
            assert torch.equal(bias[:, 0, 1 + q], table[last])
            assert torch.equal(bias[:, 1 + q, 0], table[last + 1])
            for k in range(rows * columns):
                down, right = q // columns - k // columns, q % columns - k % columns
                row = (down + rows - 1) * (2 * columns - 1) + right + columns - 1
                assert torch.equal(bias[:, 1 + q, 1 + k], table[row])


def test_the_rows_are_timms() -> None:
    module = positions((3, 5), place="shared")
    theirs = RelativePositionBias((3, 5), 2)
    theirs.load_state_dict({"relative_position_bias_table": module.bias[0].detach()})
    assert len(module.bias) == 1
    assert torch.equal(whole(module, (3, 5), 1), theirs())


def test_without_a_class_token_the_grid_has_the_same_bias() -> None:
    with_token, without = positions((3, 4)), positions((3, 4), pool="gap")
    assert torch.equal(with_token.bias, without.bias)
    assert torch.equal(whole(without, (3, 4)), whole(with_token, (3, 4))[:, 1:, 1:])


def test_some_queries_and_some_tokens_get_their_part_of_it() -> None:
    """What the last layer reads, and what masked pre-training keeps."""
    module = positions((3, 4))
    full = whole(module, (3, 4))
    first = module.logits(0, torch.zeros(2, 2, 1, 16), torch.arange(12), (3, 4))
    assert torch.equal(first, full[None, :, :1])
    keep = torch.tensor([[0, 5, 11], [7, 2, 3]])
    some = module.logits(0, torch.zeros(2, 2, 4, 16), keep, (3, 4))
    for image, kept in enumerate(keep):
        at = torch.cat([torch.zeros(1, dtype=torch.long), 1 + kept])
        assert torch.equal(some[image], full[:, at][:, :, at])


def test_axial_blocks_use_the_offsets_of_their_line() -> None:
    module = positions((3, 4), pool="gap", block="axial")
    full, places = whole(module, (3, 4)), torch.arange(12)
    row = module.logits(0, torch.zeros(3, 2, 4, 16), places[:4], (3, 4))[0]
    column = module.logits(0, torch.zeros(4, 2, 3, 16), places[::4], (3, 4))[0]
    for start in (0, 4, 8):
        assert torch.equal(row, full[:, start : start + 4, start : start + 4])
    for start in range(4):
        assert torch.equal(column, full[:, start::4, start::4])


@given(old=grids, new=grids)
def test_resampling_is_timms(old: tuple[int, int], new: tuple[int, int]) -> None:
    count = [(2 * grid[0] - 1) * (2 * grid[1] - 1) + 3 for grid in (old, new)]
    table = torch.randn(2, count[0], 4, generator=torch.Generator().manual_seed(0))
    theirs = [resize_rel_pos_bias_table(part, new, (count[1], 4), old_window_size=old) for part in table]
    torch.testing.assert_close(resize_bias(table, old, new, "timm"), torch.stack(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("new", [(4, 4), (6, 6), (2, 2), (7, 3), (1, 8)])
def test_resampling_is_that_of_transformers(new: tuple[int, int]) -> None:
    """For a model of square images; it reads the table of others with rows and columns exchanged."""
    module = positions((4, 4), place="shared", resize_mode="hf")
    config = transformers.BeitConfig(hidden_size=32, num_attention_heads=2, image_size=32, patch_size=8)
    theirs = BeitRelativePositionBias(config)
    theirs.load_state_dict({"relative_position_bias_table": module.bias[0].detach()})
    with torch.no_grad():
        torch.testing.assert_close(whole(module, new), theirs(new)[0])


@given(old=st.tuples(st.integers(2, 6), st.integers(2, 6)), new=st.tuples(st.integers(2, 8), st.integers(2, 8)))
def test_resampling_as_the_official_positions_keeps_the_furthest_offsets(
    old: tuple[int, int], new: tuple[int, int]
) -> None:
    span, to = ([2 * side - 1 for side in grid] for grid in (old, new))
    table = torch.randn(1, span[0] * span[1] + 3, 2, generator=torch.Generator().manual_seed(0))
    offsets = table[0, :-3].numpy().reshape(*span, 2)
    expected = scipy.ndimage.zoom(offsets, (to[0] / span[0], to[1] / span[1], 1), order=1)
    ours = resize_bias(table, old, new)
    assert torch.equal(ours[:, -3:], table[:, -3:])
    assert np.abs(ours[0, :-3].numpy().reshape(*to, 2) - expected).max() < 1e-5


def test_a_model_of_its_own_size_is_left_alone_and_an_unknown_way_refused() -> None:
    table = torch.randn(1, 7 * 5 + 3, 2)
    assert resize_bias(table, (4, 3), (4, 3), "timm") is table
    with pytest.raises(UsageError, match="torchvision"):
        resize_bias(table, (4, 3), (4, 4), "bogus")  # type: ignore[arg-type]
