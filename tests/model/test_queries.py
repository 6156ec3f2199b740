"""Queries in the last blocks of a ViT, against transformers' EoMT with the same random weights."""

from __future__ import annotations

import pytest
import torch
from eomt_peer import eomt, ours
from torch import Tensor, nn
from transformers import EomtImageProcessorPil

from vitrail.errors import UsageError
from vitrail.model.build import freeze
from vitrail.model.compute import attention_path
from vitrail.model.posemb import AtLayer, Queried, build_positions
from vitrail.model.queries import QueryOutputs
from vitrail.model.variants import Rotary, ViTConfig
from vitrail.model.vit import ViT

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MASKED = torch.ones(3, 2, 5, dtype=torch.bool)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize("share", [0.0, 1.0])
@torch.no_grad()
def test_transformers_eomt(share: float, path: str) -> None:
    """The classes and masks after the last block, with masked attention in all of the last blocks and in none."""
    peer = eomt()
    model = ours(peer)
    peer.attn_mask_probs.fill_(share)
    expected = peer(IMAGES)
    with attention_path(path):  # type: ignore[arg-type]
        answers = model.head.ask(model, IMAGES, MASKED if share else None)
    assert len(answers) == (3 if share else 1)
    assert error(answers[-1].classes, expected.class_queries_logits) < 1e-5
    assert error(answers[-1].masks, expected.masks_queries_logits) < 1e-5


@torch.no_grad()
def test_only_masked_queries_are_masked() -> None:
    """A masked query changes in the first of the last blocks, and no other token does."""
    model = ours(eomt())
    one = torch.zeros_like(MASKED)
    one[:, 0, 3] = True
    free, masked = (model.head.ask(model, IMAGES, where)[1].classes for where in (torch.zeros_like(MASKED), one))
    changed = (free - masked).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False, False, False, True, False]
    assert torch.equal(model.head.ask(model, IMAGES)[0].masks, model.head.ask(model, IMAGES, 0 * MASKED > 0)[-1].masks)


@torch.no_grad()
def test_scores_are_those_of_transformers() -> None:
    """The best class of each cell is that of transformers' map."""
    peer = eomt()
    expected = peer(IMAGES)
    found = QueryOutputs(expected.class_queries_logits, expected.masks_queries_logits).logits()
    size = (found.shape[-2], found.shape[-1])
    edges = dict(shortest_edge=size[0], longest_edge=size[1])
    maps = EomtImageProcessorPil().post_process_semantic_segmentation(expected, [size] * 3, edges)
    assert torch.equal(found.argmax(1), torch.stack(maps))


@torch.no_grad()
@pytest.mark.parametrize("portable", [False, True])
def test_frozen_blocks(portable: bool) -> None:
    """Inference copies of the blocks compute the same, with and without masks."""
    model = ours(eomt())
    frozen = freeze(model, portable=portable)
    for masked in (None, MASKED):
        found, expected = frozen.head.ask(frozen, IMAGES, masked), model.head.ask(model, IMAGES, masked)  # type: ignore[arg-type]
        assert error(found[-1].masks, expected[-1].masks) < 1e-5
    assert error(frozen.features(IMAGES), model.features(IMAGES)) < 1e-5


@pytest.mark.parametrize(
    "changes", [dict(positions="relative"), dict(positions="relative_bias"), dict(rotary=Rotary())]
)
@torch.no_grad()
def test_positions_in_attention(changes: dict) -> None:
    """The grid's tokens have their biases and rotations as without queries; queries have neither."""
    torch.manual_seed(0)
    config = ViTConfig.of(width=16, depth=2, heads=2, mlp_dim=16, patch=8, image_size=(16, 24), **changes)
    positions = build_positions(config)
    for parameter in positions.parameters():
        nn.init.normal_(parameter)
    query, places, grid = torch.randn(2, 2, 7 + 3, 8), torch.arange(6), (2, 3)
    hidden = torch.rand(2, 3, 6) > 0.5
    plain, queried = (AtLayer(positions, 1, places, where) for where in (grid, Queried(grid, 3, hidden)))
    added, alone = queried(query), plain(query[:, :, :-3])
    assert added is not None
    assert torch.equal(added[:, :, :7, :7], torch.zeros(2, 2, 7, 7) if alone is None else alone.expand(2, -1, -1, -1))
    assert not added[:, :, :7, 7:].any() and not added[:, :, 7:, [0, 7, 8, 9]].any()
    assert torch.equal(added[:, 0, 7:, 1:7] < -100, hidden)
    if (rotation := queried.rotation()) is not None:
        turned = rotation.turn(query.transpose(1, 2))
        before = plain.rotation().turn(query[:, :, :-3].transpose(1, 2))  # type: ignore[union-attr]
        assert torch.equal(turned, torch.cat([before, query[:, :, -3:].transpose(1, 2)], dim=1))


@torch.no_grad()
def test_positions_at_every_layer_and_other_sizes() -> None:
    """Where attention adds nothing, each token is computed on its own: patches with positions, queries without."""
    sizes = dict(width=16, depth=2, heads=2, mlp_dim=16, patch=8, image_size=(16, 16), classes=3)
    model = ViT(ViTConfig.of(**sizes, place="every", segmentation="queries", queries=4, query_blocks=1))  # type: ignore[arg-type]
    for block in model.blocks:
        nn.init.zeros_(block.attentions[0].attention.out.weight)  # type: ignore[union-attr, index, arg-type]
    images = torch.randn(2, 3, 24, 16)
    patches, alone = model.encode(model.embed(images), (3, 2)), model.head.tokens
    alone = model.norm(alone + model.blocks[1].mlps[0](alone))  # type: ignore[index, operator]
    expected = model.head._answers(torch.cat([patches, alone.expand(2, -1, -1)], dim=1), (3, 2))
    (found,) = model.head.ask(model, images)
    assert found.masks.shape == (2, 4, 6, 4)
    assert error(found.classes, expected.classes) < 1e-5 and error(found.masks, expected.masks) < 1e-5


def test_networks_without_a_place_for_queries() -> None:
    sizes = dict(
        width=16, depth=2, heads=2, mlp_dim=16, patch=8, image_size=(16, 16), classes=3, segmentation="queries"
    )
    with pytest.raises(UsageError, match=r"axial blocks .* do not have"):
        ViTConfig.of(**sizes, block="axial", pool="gap")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"queries is 0; valid: 1 to 10,000"):
        ViTConfig.of(**sizes, queries=0)  # type: ignore[arg-type]


@torch.no_grad()
def test_reset_head_keeps_the_kind() -> None:
    """Other classes have other queries, and no class has none."""
    model = ours(eomt())
    model.reset_head(2)
    assert ask_classes(model) == 3 and model(IMAGES).shape[1] == 2
    model.reset_head(0)
    assert model.head is None and model.config.segmentation == ""


def ask_classes(model: ViT) -> int:
    return model.head.ask(model, IMAGES)[0].classes.shape[-1]  # type: ignore[union-attr, operator]
