"""Sequential blocks, parallel branches, and back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_inputs import MANY
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from torch import Tensor

from vitrail.costs.count import learned_values, macs
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.regroup import regroup, regrouped
from vitrail.model.variants import ViTConfig, variant
from vitrail.model.vit import ViT

TINY = dict(width=16, depth=6, heads=2, mlp_dim=32, patch=8, image_size=16, classes=5)


def made(**options: Any) -> ViT:
    torch.manual_seed(0)
    model = build(ViTConfig.of(**(TINY | options)))
    assert isinstance(model, ViT)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    return model.eval()


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


OPTIONS: list[dict[str, Any]] = [
    dict(),
    dict(layer_scale=0.3, pool="gap", stem="hmlp"),
    dict(positions="relative", place="shared"),
    dict(mlp="swiglu", registers=2),
]
BRANCHES = (2, 3, 6)
ALL = itertools.product(OPTIONS, BRANCHES)
BY_TURNS = [*zip(OPTIONS, itertools.cycle(BRANCHES)), (OPTIONS[0], 3), (OPTIONS[0], 6)]


@pytest.mark.parametrize(("options", "branches"), ALL if MANY else BY_TURNS)
def test_there_and_back_is_the_same_network_to_the_bit(branches: int, options: dict[str, Any]) -> None:
    model = made(**options)
    parallel = regroup(model, branches)
    assert (parallel.config.depth, parallel.config.branches) == (6 // branches, branches)
    assert sum(p.numel() for p in parallel.parameters()) == sum(p.numel() for p in model.parameters())
    for between in (parallel, regroup(parallel, 6 // branches)):
        back = regroup(between, 1)
        assert back.config == model.config
        assert back.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(back(images()), model(images()))


def test_a_layer_is_the_sum_of_its_blocks_on_one_input() -> None:
    """Section 3.2: x' = x + mhsa_1(x) + mhsa_2(x), x'' = x' + ffn_1(x') + ffn_2(x')."""
    model = made()
    parallel = regroup(model, 2)
    x, places = torch.randn(2, 5, 16), torch.arange(4)
    for layer, block in enumerate(parallel.blocks):
        first, second = model.blocks[2 * layer], model.blocks[2 * layer + 1]
        middle = x + first.attentions[0](x) + second.attentions[0](x)
        expected = middle + first.mlps[0](middle) + second.mlps[0](middle)
        torch.testing.assert_close(block(x, places, (2, 2)), expected)


@torch.no_grad()
def test_row_and_side_by_side_agree_exactly_where_nothing_comes_between() -> None:
    def silence(*kinds: tuple[int, str]) -> ViT:
        """A network in which, of each pair of blocks, these branches add nothing."""
        model = made()
        for index, kind in kinds:
            for block in model.blocks[index::2]:
                for name, parameter in getattr(block, kind)[0].named_parameters():
                    if name.startswith(("attention.out", "mlp.fc2")):
                        parameter.zero_()
        return model

    def error(model: ViT) -> float:
        logits = model(images())
        return float((regroup(model, 2)(images()) - logits).norm() / logits.norm())

    assert error(silence((1, "attentions"), (1, "mlps"))) < 1e-6  # one block of each pair is left
    assert error(silence((0, "attentions"), (0, "mlps"))) < 1e-6
    assert error(silence((0, "mlps"), (1, "attentions"))) < 1e-6  # the first attention, then the second MLP
    assert error(silence((0, "mlps"))) > 1e-3  # the second attention saw what the first one added
    assert error(silence((0, "attentions"), (1, "mlps"))) > 1e-3
    assert error(made()) > 1e-3


def test_equal_to_timms_parallel_blocks_made_of_the_same_sequential_ones() -> None:
    model = made()
    parallel = regroup(model, 2)
    peer = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=3, num_heads=2, mlp_ratio=2, num_classes=5,
        block_fn=ParallelThingsBlock,
    ).eval()  # fmt: skip
    state = {"cls_token": model.cls, "pos_embed": model.positions.embedding}
    state |= {f"patch_embed.proj.{end}": getattr(model.stem, end) for end in ("weight", "bias")}
    for part in ("norm", "head"):
        state |= {f"{part}.{end}": getattr(model.get_submodule(part), end) for end in ("weight", "bias")}
    for index, block in enumerate(model.blocks):  # numbered in a row
        at, branch = divmod(index, 2)
        for end in ("weight", "bias"):
            attention, mlp = f"blocks.{at}.attns.{branch}", f"blocks.{at}.ffns.{branch}"
            state[f"{attention}.norm.{end}"] = getattr(block.attentions[0].norm, end)
            state[f"{attention}.attn.qkv.{end}"] = getattr(block.attentions[0].attention.qkv, end)
            state[f"{attention}.attn.proj.{end}"] = getattr(block.attentions[0].attention.out, end)
            state[f"{mlp}.norm.{end}"] = getattr(block.mlps[0].norm, end)
            for layer in ("fc1", "fc2"):
                state[f"{mlp}.mlp.{layer}.{end}"] = getattr(getattr(block.mlps[0].mlp, layer), end)
    peer.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(parallel(images()), peer(images()), rtol=1e-4, atol=1e-5)


@pytest.mark.full_size
def test_the_follow_ups_networks_are_each_others_blocks() -> None:
    for row, branches, parallel in (("S36x1", 2, "S18x2"), ("S36x1", 4, "S9x4"), ("S30x2", 3, "S20x3")):
        found = regrouped(variant(f"{row}/16"), branches)
        assert found == variant(f"{parallel}/16")
        assert (learned_values(found), macs(found)) == (
            learned_values(variant(f"{row}/16")),
            macs(variant(f"{row}/16")),
        )


def test_what_learns_where_and_how_it_was_is_kept() -> None:
    model = made().double().train()
    for parameter in model.blocks[3].parameters():
        parameter.requires_grad_(False)
    parallel = regroup(model, 3)
    assert parallel.training and parallel.norm.weight.dtype == torch.float64
    frozen = {name for name, parameter in parallel.named_parameters() if not parameter.requires_grad}
    assert frozen and all(name.startswith(("blocks.1.attentions.0.", "blocks.1.mlps.0.")) for name in frozen)
    parallel.norm.weight.data.zero_()  # a copy
    assert model.norm.weight.abs().max() > 0


def test_what_cannot_be_regrouped_is_refused() -> None:
    config = ViTConfig.of(**TINY)
    with pytest.raises(UsageError, match="6 blocks cannot be grouped into layers of 4 branches; valid: 1, 2, 3, 6"):
        regrouped(config, 4)
    with pytest.raises(UsageError, match="axial"):
        regrouped(replace(config, block="axial", pool="gap"), 2)
    for positions, place in (("relative", "input"), ("1d", "every"), ("relative_bias", "input")):
        with pytest.raises(UsageError, match="a table for each of 6 layers"):
            regrouped(replace(config, positions=positions, place=place), 2)
    with pytest.raises(UsageError, match="ResNet"):
        regrouped(variant("R50x1"), 2)  # type: ignore[arg-type]
