"""Positions (Table 8), their resampling, initialisation and names."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.ndimage
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import UsageError
from vitrail.model import posemb
from vitrail.model.posemb import build_positions, sincos_2d
from vitrail.model.resize import resize_kernel, resize_line, resize_positions
from vitrail.model.variants import ViTConfig, variant

TINY = dict(width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=(24, 32), classes=5)


@given(old=st.tuples(st.integers(2, 8), st.integers(2, 8)), new=st.tuples(st.integers(2, 12), st.integers(2, 12)))
def test_official_resize_is_scipy_zoom(old: tuple[int, int], new: tuple[int, int]) -> None:
    table = torch.randn(1, 1 + old[0] * old[1], 3, generator=torch.Generator().manual_seed(0))
    grid = table[0, 1:].numpy().reshape(*old, 3)
    expected = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    ours = resize_positions(table, old, new, "official")
    assert torch.equal(ours[:, :1], table[:, :1])
    assert np.abs(ours[0, 1:].numpy().reshape(*new, 3) - expected).max() < 1e-5


def test_timm_and_torchvision_modes_equal_those_libraries() -> None:
    from torchvision.models.vision_transformer import interpolate_embeddings

    table = torch.randn(1, 17, 6)
    theirs = timm.layers.resample_abs_pos_embed(table, [7, 5], [4, 4])
    assert torch.allclose(resize_positions(table, (4, 4), (7, 5), "timm"), theirs, atol=1e-6)
    state = interpolate_embeddings(56, 8, {"encoder.pos_embedding": table})
    assert torch.allclose(
        resize_positions(table, (4, 4), (7, 7), "torchvision"), state["encoder.pos_embedding"], atol=1e-6
    )
    bicubic = torch.nn.functional.interpolate(
        table[:, 1:].transpose(1, 2).view(1, 6, 4, 4), size=(7, 5), mode="bicubic", align_corners=False
    )
    for mode in ("hf", "deit"):
        ours = resize_positions(table, (4, 4), (7, 5), mode)
        assert torch.allclose(ours[:, 1:], bicubic.flatten(2).transpose(1, 2), atol=1e-6)


def test_resize_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match="official"):
        resize_positions(torch.zeros(1, 5, 2), (2, 2), (3, 3), "bogus")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="too few"):
        resize_positions(torch.zeros(1, 3, 2), (2, 2), (3, 3))


def test_a_larger_patch_gives_the_old_tokens_on_the_enlarged_image() -> None:
    kernel, image = torch.randn(5, 3, 4, 4), torch.randn(1, 3, 4, 4)
    enlarged = torch.nn.functional.interpolate(image, size=(8, 8), mode="bilinear", antialias=True)
    token = (kernel * image).sum((1, 2, 3))
    assert torch.allclose((resize_kernel(kernel, 8) * enlarged).sum((1, 2, 3)), token, atol=1e-4)
    assert torch.equal(resize_kernel(kernel, 4), kernel)


def test_a_line_keeps_its_ends() -> None:
    line = torch.arange(5.0).view(1, 5, 1)
    assert torch.allclose(resize_line(line, 9)[0, :, 0], torch.arange(9.0) / 2)


def test_2d_positions_are_column_then_row() -> None:
    positions = build_positions(ViTConfig.of(**TINY, positions="2d"))
    torch.nn.init.normal_(positions.rows), torch.nn.init.normal_(positions.columns)
    torch.nn.init.normal_(positions.front)
    tokens = positions.tokens(None, (3, 4))[0]
    assert tokens.shape == (13, 32)
    for row in range(3):
        for column in range(4):
            expected = torch.cat([positions.columns[0, column], positions.rows[0, row]])
            assert torch.equal(tokens[1 + row * 4 + column], expected)
    assert torch.equal(tokens[0], positions.front[0, 0])


def test_relative_logits_by_hand() -> None:
    """D.4: the query attends to the embedding of p_q - p_k."""
    positions = build_positions(ViTConfig.of(**TINY, positions="relative"))
    torch.nn.init.normal_(positions.embedding)
    query = torch.randn(2, 2, 13, 16)
    bias = positions.logits(1, query, torch.arange(12), (3, 4))
    assert bias[:, :, 0].eq(0).all() and bias[:, :, :, 0].eq(0).all()  # the class token has no place
    for q in range(12):
        for k in range(12):
            expected = query[:, :, 1 + q] @ positions.embedding[1, q - k + 11]
            assert torch.allclose(bias[:, :, 1 + q, 1 + k], expected, atol=1e-5)


@pytest.mark.parametrize(("place", "copies"), [("input", 1), ("every", 2), ("shared", 1)])
def test_where_positions_are_added(place: str, copies: int) -> None:
    positions = build_positions(ViTConfig.of(**TINY, place=place))
    torch.nn.init.normal_(positions.embedding)
    assert len(positions.embedding) == copies
    added = [layer for layer in (None, 0, 1) if positions.tokens(layer, (3, 4)) is not None]
    assert added == ([None] if place == "input" else [0, 1])
    if place != "input":
        same = torch.equal(positions.tokens(0, (3, 4)), positions.tokens(1, (3, 4)))
        assert same == (place == "shared")


def test_registers_have_no_position() -> None:
    positions = build_positions(ViTConfig.of(**TINY, registers=2))
    torch.nn.init.normal_(positions.embedding)
    tokens = positions.tokens(None, (3, 4))[0]
    assert tokens.shape == (15, 32)
    assert tokens[0].ne(0).all() and tokens[1:3].eq(0).all() and tokens[3:].ne(0).all()


def test_sincos_in_closed_form() -> None:
    """As in big_vision: sin x, cos x, sin y, cos y; frequencies from 1 down to 1/10,000, both ends included."""
    ours = sincos_2d((2, 3), 16)
    steps = 10_000.0 ** -(np.arange(4) / 3)
    for row in range(2):
        for column in range(3):
            expected = [f(p * s) for p in (column, row) for f in (np.sin, np.cos) for s in steps]
            assert np.allclose(ours[row * 3 + column], expected, atol=1e-6)


def test_sincos_tables_of_the_last_few_grids_are_kept() -> None:
    positions = build_positions(ViTConfig.of(**TINY, positions="sincos", pool="gap"))
    with torch.inference_mode():  # evaluation comes first; training takes what it left behind
        first = positions.tokens(None, (3, 4))
    assert positions.tokens(None, (3, 4)) is first and not first.is_inference()
    assert torch.equal(first[0], sincos_2d((3, 4), 32))
    weight = torch.ones(12, 32, requires_grad=True)
    (weight * first).sum().backward()
    for side in range(1, 30):
        assert torch.equal(positions.tokens(None, (side, 2))[0], sincos_2d((side, 2), 32))
    assert posemb.sincos_table.cache_info().currsize <= 8
    assert not positions.state_dict()
    rounded = positions.to(torch.bfloat16).tokens(None, (3, 4))
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, first.bfloat16())


@pytest.mark.parametrize("positions", ["1d", "2d"])
def test_registers_with_positions_follow_the_class_token(positions: str) -> None:
    """And where the class token has none, the registers' rows are still the registers'."""
    for cls_position, distilled in ((True, False), (False, False), (True, True), (False, True)):
        options = dict(registers=2, register_positions=True, cls_position=cls_position, distilled=distilled)
        module = build_positions(ViTConfig.of(**TINY, positions=positions, **options))
        for table in module.parameters():
            torch.nn.init.normal_(table)
        front = module.front[0] if positions == "2d" else module.embedding[0, :-12]
        tokens, before = module.tokens(None, (3, 4))[0], 1 + distilled
        assert len(front) == 2 + cls_position * before and tokens.shape == (before + 2 + 12, 32)
        assert torch.equal(tokens[before : before + 2], front[-2:])
        if cls_position:
            assert torch.equal(tokens[:before], front[:before])
        else:
            assert tokens[:before].eq(0).all()
        assert tokens[before + 2 :].ne(0).all()


def test_names_are_the_papers() -> None:
    table_1 = {"B/16": (768, 12, 12, 3072), "L/32": (1024, 24, 16, 4096), "H/14": (1280, 32, 16, 5120)}
    for name, (width, depth, heads, mlp) in table_1.items():
        config = variant(name)
        assert (config.width, config.depth, config.heads, config.mlp_dim) == (width, depth, heads, mlp)
        assert config.patch == int(name.split("/")[1])
    assert variant("B/8", image_size=64).grid == (8, 8)
    assert variant("R50+B/16").stem_units == (3, 4, 9) and variant("R50+B/32").stem_units == (3, 4, 6, 3)
    half = variant("b/32")  # Figure 4: "the same as ViT-B, with all hidden dimensions halved"
    assert half == variant("S/32") and (half.width, half.mlp_dim, half.depth) == (384, 1536, 12)
    with pytest.raises(UsageError, match="B"):
        variant("b/16")
    assert variant("S18x2/16").branches == 2 and variant("S36x1/16").depth == 36
    assert variant("R152x4").units == (3, 8, 36, 3) and variant("R152x4").width == 256
    for wrong, hint in {"B16": "B/16", "R50xx1": "R50x1", "Q/16": "valid sizes", "R51x1": "R50x1"}.items():
        with pytest.raises(UsageError, match=hint):
            variant(wrong)
    with pytest.raises(UsageError, match="Did you mean 'depth'"):
        variant("B/16", dept=3)
    for wrong_value in (dict(image_size=30), dict(heads=5), dict(block="axial"), dict(branches=2)):
        with pytest.raises(UsageError):
            ViTConfig.of(**(TINY | wrong_value))
