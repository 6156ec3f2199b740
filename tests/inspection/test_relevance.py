from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_rollout import probe_attention
from tiny_models import KINDS, identity, maps_alive, tiny
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.inspection.relevance import relevance
from vitrail.model.block import AxialBlock
from vitrail.model.compute import attention_path
from vitrail.model.vit import ViT


def norm(layer: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, layer.eps)


def allowed(axis: str | None, rows: int, columns: int, tokens: int) -> Tensor:
    """Which tokens attend to which: all, or those of the same row or column."""
    places = torch.arange(tokens)
    if axis is None:
        return torch.ones(tokens, tokens, dtype=torch.bool)
    line = places // columns if axis == "row" else places % columns
    return line[:, None] == line


def plain(model: ViT, images: Tensor) -> tuple[Tensor, list[list[Tensor]], Tensor]:
    """The network written out with maps as they stand in the paper: logits, maps of each layer, encoded tokens."""
    grid, heads = model.grid(images), model.config.heads
    x, layers, places = model.embed(images), [], torch.arange(grid[0] * grid[1])
    for block in model.blocks:
        parts = [("row", block.row), ("column", block.column)] if isinstance(block, AxialBlock) else [(None, block)]
        for axis, part in parts:
            maps, added = [], []
            for branch in part.attentions:
                attention = branch.attention
                q, k, v = F.linear(norm(branch.norm, x), attention.qkv.weight, attention.qkv.bias).chunk(3, dim=-1)
                q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
                q = q * q.shape[-1] ** -0.5
                if rotation := part.bias(places, grid).rotation():
                    q, k = (rotation.turn(t.transpose(1, 2)).transpose(1, 2) for t in (q, k))
                logits = q @ k.transpose(2, 3)
                if axis is None and (bias := part.bias(places, grid)(q)) is not None:
                    logits = logits + bias
                logits = logits.masked_fill(~allowed(axis, *grid, x.shape[1]), -torch.inf)
                maps.append(logits.softmax(-1))
                mixed = (maps[-1] @ v).transpose(1, 2).flatten(2)
                mixed = mixed if attention.norm is None else norm(attention.norm, mixed)
                added.append(F.linear(mixed, attention.out.weight, attention.out.bias))
            layers.append(maps)
            x = x + sum(added)
            added = []
            for branch in part.mlps:
                hidden = F.gelu(F.linear(norm(branch.norm, x), branch.mlp.fc1.weight, branch.mlp.fc1.bias))
                added.append(F.linear(hidden, branch.mlp.fc2.weight, branch.mlp.fc2.bias))
            x = x + sum(added)
    if model.config.origin.final_norm == "tokens":
        x = norm(model.norm, x)
    return model.classify(model.summary(x)), layers, x


def reference(model: ViT, images: Tensor, target: int) -> Tensor:
    """R <- R + A_bar R over whole matrices, from the first layer to the last."""
    logits, layers, encoded = plain(model, images)
    torch.testing.assert_close(logits, model(images), rtol=1e-3, atol=1e-3)  # it is the same network
    flat = [maps for layer in layers for maps in layer]
    of_maps = iter(torch.autograd.grad(logits[:, target].sum(), flat))
    joint = torch.eye(encoded.shape[1]).expand(len(images), -1, -1)
    for layer in layers:
        bars = [(next(of_maps) * maps).clamp(min=0).mean(dim=1) for maps in layer]
        joint = joint + sum(bar @ joint for bar in bars)
    prefix, pool = model.config.prefix, model.config.pool
    mixed = joint - torch.eye(encoded.shape[1])  # what attention brought
    cls = mixed[:, : 1 + model.config.origin.distilled].mean(dim=1)
    grid = mixed[:, prefix:].mean(dim=1)
    row = {"cls": cls, "gap": grid, "cls+gap": (cls + grid) / 2}.get(pool)
    if row is None:
        first = 0 if model.config.origin.pool_prefix else prefix
        row = (probe_bar(model, encoded, target)[:, None] @ joint[:, first:])[:, 0]
    return row[:, prefix:].reshape(len(images), *model.grid(images))


def probe_bar(model: ViT, encoded: Tensor, target: int) -> Tensor:
    """A_bar of MAP's probe, its maps a variable of their own."""
    pool, heads = model.pool, model.config.origin.pool_heads or model.config.heads
    tokens = encoded.detach()[:, 0 if model.config.origin.pool_prefix else model.config.prefix :]
    query = F.linear(pool.probe, pool.query.weight, pool.query.bias).unflatten(-1, (heads, -1)).transpose(1, 2)
    key, value = F.linear(tokens, pool.key_value.weight, pool.key_value.bias).chunk(2, dim=-1)
    key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (key, value))
    maps = (query @ key.transpose(2, 3) * key.shape[-1] ** -0.5).softmax(-1)
    pooled = F.linear((maps @ value).flatten(1), pool.out.weight, pool.out.bias)
    pooled = pooled + pool.mlp(norm(pool.norm, pooled))
    (of_maps,) = torch.autograd.grad(model.classify(model.pre_logits(pooled))[:, target].sum(), maps)
    return (of_maps * maps).clamp(min=0).mean(dim=1)[:, 0].detach()


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_relevance_is_that_of_plain_autograd(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    images = torch.randn(2, 3, 12, 16)
    largest = 0.0
    for target in range(3):
        found = relevance(model, images, target)
        expected = reference(model, images, target).detach()
        assert found.classes.tolist() == [target, target]
        torch.testing.assert_close(found.shares, expected, rtol=2e-3, atol=1e-5 * float(expected.max()))
        largest = max(largest, float(expected.max()))
    assert largest > 1e-3  # the comparison means something


def test_without_a_class_it_is_the_one_the_image_is_taken_for() -> None:
    model, images = tiny(), torch.randn(6, 3, 12, 16)
    with torch.no_grad():
        model.head.bias -= model(images).mean(dim=0)  # so that each class is the best of some
    best = model(images).argmax(dim=1)
    found = relevance(model, images)
    assert (found.classes == best).all() and len(set(best.tolist())) > 1
    for number, target in enumerate(best.tolist()):
        alone = relevance(model, images[number : number + 1], target)
        torch.testing.assert_close(found.shares[number], alone.shares[0], rtol=1e-3, atol=1e-6)


def test_it_tells_classes_apart_as_rollout_does_not() -> None:
    model, images = tiny(), torch.randn(1, 3, 12, 16)
    first, second = (relevance(model, images, target).shares for target in (0, 1))
    assert not torch.allclose(first, second, rtol=0.1)


def test_under_attention_to_oneself_a_patch_explains_itself_alone() -> None:
    # no token sees another and the logit is linear in their mean, so what one patch shows is no matter of others
    model, images = identity(), torch.randn(1, 3, 12, 16)
    before = relevance(model, images, 1).shares
    images[:, :, 4:8, 8:12] = torch.randn(3, 4, 4)
    changed = (relevance(model, images, 1).shares - before).abs() > 1e-5 * before.max()
    assert changed.nonzero().tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("changes", [{}, {"positions": "relative"}, {"block": "parallel", "branches": 2}], ids=str)
def test_both_paths_give_the_same_and_one_layers_maps_are_held(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = tiny(**changes), torch.randn(2, 3, 12, 16)
    with maps_alive(monkeypatch) as alive:
        with attention_path("explicit"):
            explicit = relevance(model, images, 1).shares
        with attention_path("fused"):
            fused = relevance(model, images, 1).shares
    torch.testing.assert_close(explicit, fused, rtol=1e-3, atol=1e-5)
    assert len(alive) >= 6 and max(alive) == 0


def test_weights_and_mode_are_left_as_they_were() -> None:
    model = tiny(dropout=0.5, drop_path=0.5).train()
    model.head.weight.requires_grad_(False)
    with torch.inference_mode():
        first = relevance(model, torch.randint(0, 256, (1, 3, 20, 8), dtype=torch.uint8)).shares
    assert first.shape == (1, 5, 2)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    wanted = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert wanted == {"head.weight"}


def test_what_has_no_classes_is_refused() -> None:
    with pytest.raises(UsageError, match="no classifier"):
        relevance(tiny(classes=0), torch.zeros(1, 3, 12, 16))
    with pytest.raises(UsageError, match="no class 3: this model has 3, numbered 0 to 2"):
        relevance(tiny(), torch.zeros(1, 3, 12, 16), 3)


def test_the_reference_reads_the_probe_as_rollouts_reference_does() -> None:
    model, images = tiny(pool="map"), torch.randn(2, 3, 12, 16)
    with torch.no_grad():
        maps, _ = model.pool.weigh(model.encode(model.embed(images), model.grid(images)))
    torch.testing.assert_close(maps.mean(1)[:, 0], torch.from_numpy(probe_attention(model, images)).float())
