from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm
import torch
from tiny_models import KINDS, identity, maps_alive, tiny, uniform

from vitrail.errors import UsageError
from vitrail.inspection.rollout import rollout
from vitrail.model.attention import Attention
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.record import attention_maps
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.model.vit import ViT


def reference(layers: list[np.ndarray]) -> np.ndarray:
    """vision_transformer's colab, in numpy: [layers][batch, heads, T, T] -> [batch, T, T]."""
    joint = None
    for maps in layers:
        averaged = maps.mean(axis=1) + np.eye(maps.shape[-1])
        averaged = averaged / averaged.sum(axis=-1)[..., None]
        joint = averaged if joint is None else np.matmul(averaged, joint)
    assert joint is not None
    return joint


def probe_attention(model: ViT, images: torch.Tensor) -> np.ndarray:
    """MAP's attention by hand, mean over heads: [batch, patches]."""
    pool, heads = model.pool, model.config.origin.pool_heads or model.config.heads
    first = 0 if model.config.origin.pool_prefix else model.config.prefix
    tokens = model.encode(model.embed(images), model.grid(images))[:, first:].detach().numpy()
    width = tokens.shape[2] // heads
    query = (pool.probe[0, 0] @ pool.query.weight.T + pool.query.bias).detach().numpy()
    keys = tokens @ pool.key_value.weight.detach().numpy().T + pool.key_value.bias.detach().numpy()
    shares = np.zeros(tokens.shape[:2])
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        logits = keys[:, :, part] @ query[part] / np.sqrt(width)
        exponent = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares += exponent / exponent.sum(axis=1, keepdims=True) / heads
    return shares


@pytest.mark.parametrize("changes", [kind for kind in KINDS if not {"stem", "block"} & kind.keys()], ids=str)
def test_rollout_is_the_product_of_the_averaged_maps(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    images = torch.randn(2, 3, 12, 16)
    layers = [found.maps.numpy() for found in attention_maps(model, images)]
    joint, prefix, pool = reference(layers), model.config.prefix, model.config.pool
    row = joint[:, : 1 + model.config.origin.distilled].mean(axis=1)
    if pool == "map":
        row = np.einsum(
            "bq,bqk->bk", probe_attention(model, images), joint[:, 0 if model.config.origin.pool_prefix else prefix :]
        )
    elif pool != "cls":
        grid = joint[:, prefix:].mean(axis=1)
        row = (row + grid) / 2 if pool == "cls+gap" else grid
    expected = row[:, prefix:].reshape(2, 3, 4)
    np.testing.assert_allclose(rollout(model, images).numpy(), expected, rtol=1e-4, atol=1e-7)
    assert len(np.unique(expected.round(6))) > 4  # the comparison means something


def test_branches_side_by_side_act_as_more_heads() -> None:
    model = tiny(block="parallel", branches=2)
    images = torch.randn(2, 3, 12, 16)
    found = attention_maps(model, images)
    layers = [np.concatenate([m.maps.numpy() for m in found if m.layer == layer], axis=1) for layer in range(3)]
    expected = reference(layers)[:, 0, 1:].reshape(2, 3, 4)
    np.testing.assert_allclose(rollout(model, images).numpy(), expected, rtol=1e-4)


def test_two_layers_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(depth=2, heads=1, image_size=(4, 8))
    first = torch.tensor([[0.5, 0.25, 0.25], [0, 1, 0], [0, 0.5, 0.5]])
    second = torch.tensor([[0.2, 0.4, 0.4], [0.3, 0.3, 0.4], [1, 0, 0]])
    maps = iter((first, second))
    monkeypatch.setattr(Attention, "maps", lambda *_: next(maps)[None, None])
    # the class token's row of the second layer is (0.6, 0.2, 0.2) with the residual; the first layer's rows are
    # (0.75, 0.125, 0.125), (0, 1, 0) and (0, 0.25, 0.75)
    expected = [[[0.6 * 0.125 + 0.2 * 1 + 0.2 * 0.25, 0.6 * 0.125 + 0.2 * 0 + 0.2 * 0.75]]]
    torch.testing.assert_close(rollout(model, torch.randn(1, 3, 4, 8)), torch.tensor(expected))


def test_uniform_attention_mixes_a_token_with_the_mean() -> None:
    # each layer is (1 + U) / 2 with U U = U, so n layers are U but for 2^-n of the identity
    shares = rollout(uniform(tiny()), torch.randn(1, 3, 12, 16))
    torch.testing.assert_close(shares, torch.full((1, 3, 4), (1 - 0.5**3) / 13))


def test_attention_to_oneself_stays_with_oneself() -> None:
    shares = rollout(identity(), torch.randn(2, 3, 12, 16))
    torch.testing.assert_close(shares, torch.full((2, 3, 4), 1 / 12))  # the mean over tokens that keep their own


def test_rollout_of_timms_attention() -> None:
    peer = timm.models.VisionTransformer(
        img_size=(12, 16), patch_size=4, embed_dim=16, depth=3, num_heads=2, mlp_ratio=2, num_classes=3
    ).eval()
    ours = ViT(ViTConfig(width=16, depth=3, heads=2, mlp_dim=32, patch=4, image_size=(12, 16), classes=3)).eval()
    torch.manual_seed(1)
    for parameter in peer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    names = {"cls": "cls_token", "stem.": "patch_embed.proj.", "positions.embedding": "pos_embed", "blocks.": "blocks."}
    inside = {"attentions.0.norm": "norm1", "attentions.0.attention.qkv": "attn.qkv"}
    inside |= {"attentions.0.attention.out": "attn.proj", "mlps.0.norm": "norm2", "mlps.0.mlp": "mlp"}

    def theirs(name: str) -> str:
        for mine, other in (*names.items(), *inside.items()):
            name = name.replace(mine, other)
        return name

    state = peer.state_dict()
    ours.load_state_dict({name: state[theirs(name)] for name in ours.state_dict()})
    layers: list[np.ndarray] = []
    for block in peer.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, inputs, out: layers.append(out.detach().numpy()))
    images = torch.randn(2, 3, 12, 16)
    with torch.no_grad():
        torch.testing.assert_close(peer(images), ours(images), rtol=1e-4, atol=1e-4)
    expected = reference(layers)[:, 0, 1:].reshape(2, 3, 4)
    np.testing.assert_allclose(rollout(ours, images).numpy(), expected, rtol=1e-4)


def test_shares_sum_to_one_without_other_tokens() -> None:
    for changes in ({"pool": "gap"}, {"pool": "map"}, {"pool": "gap", "block": "axial"}):
        shares = rollout(tiny(**changes), torch.randn(2, 3, 12, 16))
        assert (shares >= 0).all()
        torch.testing.assert_close(shares.sum((1, 2)), torch.ones(2))


def test_one_column_of_an_axial_model_is_ordinary_attention_along_it() -> None:
    model = tiny(block="axial", pool="gap", image_size=(12, 4))
    images = torch.randn(2, 3, 12, 4)  # one column: row attention sees one token, columns see all
    layers = [m.maps.numpy() for m in attention_maps(model, images) if m.axis == "column"]
    expected = reference(layers).mean(axis=1).reshape(2, 3, 1)
    np.testing.assert_allclose(rollout(model, images).numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_both_paths_of_attention_give_the_same_and_one_layers_maps_are_held(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = tiny(**changes), torch.randn(2, 3, 12, 16)
    with maps_alive(monkeypatch) as alive:
        with attention_path("explicit"):
            explicit = rollout(model, images)
        with attention_path("fused"):
            fused = rollout(model, images)
    torch.testing.assert_close(explicit, fused, rtol=1e-4, atol=1e-6)
    assert len(alive) >= 6 and max(alive) == 0


def test_other_resolutions_and_the_mode_of_the_model_are_kept() -> None:
    model = tiny().train()
    assert rollout(model, torch.randint(0, 256, (1, 3, 20, 8), dtype=torch.uint8)).shape == (1, 5, 2)
    assert model.training


def test_a_network_without_attention_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a Vision Transformer"):
        rollout(build(ResNetConfig(units=(1,), width=8, classes=2)), torch.zeros(1, 3, 32, 32))  # type: ignore[arg-type]
