"""Attention by its formula, normalised queries and keys, subclasses, and looking inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_outputs import block_outputs

from vitrail.device import fast_float32
from vitrail.errors import UsageError
from vitrail.model.attention import Attention
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.low_rank import adapt
from vitrail.model.record import attention_maps, tap_attention
from vitrail.model.variants import ViTConfig

TINY = dict(width=32, depth=3, heads=2, mlp_dim=64, patch=8, image_size=32, classes=5)


def test_fast_float32_stays_float32() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    with fast_float32():
        torch.manual_seed(0)
        a, b = torch.randn(300, 500), torch.randn(500, 200)
        exact = a.double() @ b.double()
        assert ((a @ b - exact).norm() / exact.norm()).item() < 1e-6
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(positions="relative"),
        dict(positions="relative_bias"),
        dict(distilled=True),
        dict(block="parallel", branches=2),
        dict(registers=2),
        dict(block="axial", pool="gap"),
    ],
)  # fmt: skip
def test_taps_give_the_maps_the_network_used(options: dict, path: str) -> None:
    """Independent check: the tapped map, applied to the values by hand, gives the module's own output."""
    torch.manual_seed(0)
    model = build(ViTConfig.of(**(TINY | options))).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    images = torch.randn(2, 3, 32, 32)
    outputs: list[tuple[Attention, torch.Tensor, torch.Tensor]] = []
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    handles = [
        module.register_forward_hook(lambda m, args, out: outputs.append((m, args[0], out))) for module in modules
    ]
    with attention_path(path):
        maps = attention_maps(model, images)
    for handle in handles:
        handle.remove()
    assert len(maps) == len(outputs) == len(modules)
    for tapped, (module, x, out) in zip(maps, outputs, strict=True):
        assert torch.allclose(tapped.maps.sum(-1), torch.ones(()), atol=1e-5)
        values = torch.nn.functional.linear(x, module.qkv.weight, module.qkv.bias)[..., 64:]
        values = values.unflatten(-1, (2, 16)).transpose(1, 2)
        by_map = module.out((tapped.maps @ values).transpose(1, 2).flatten(2))
        by_map = by_map[:, : out.shape[1]]  # the last layer spares what the class token does not need
        assert ((by_map - out).norm() / out.norm()).item() < 1e-5


def test_taps_hand_over_only_what_was_asked_for_and_leave_nothing_behind() -> None:
    model = build(ViTConfig.of(**TINY)).eval()
    images = torch.randn(2, 3, 32, 32)
    full = attention_maps(model, images)
    some = attention_maps(model, images, layers=[-1, 0], heads=[1])
    assert [m.layer for m in some] == [0, 2]
    assert torch.equal(some[1].maps, full[2].maps[:, [1]])
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(UsageError, match="no layer 3"), tap_attention(model, print, layers=[3]):
        pass
    with pytest.raises(UsageError, match="no head 2"), tap_attention(model, print, heads=[2]):
        pass


def test_block_outputs_lead_to_the_logits() -> None:
    model = build(ViTConfig.of(**TINY)).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 32, 32)
    outputs = block_outputs(model, images, layers=[-1])
    assert list(outputs) == [2]
    with torch.no_grad():
        assert torch.allclose(model.head(model.norm(outputs[2])[:, 0]), model(images), atol=1e-6)


@pytest.mark.parametrize("kind", ["head", "width"])
def test_normalised_queries_and_keys_are_those_of_the_formula(kind: str) -> None:
    """Attention, its first tokens, its maps, with a hook and with a low-rank update, against torch's layer_norm."""
    torch.manual_seed(0)
    model = build(ViTConfig.of(**TINY, qk_norm=kind))  # type: ignore[arg-type]
    attention, x = model.blocks[0].attentions[0].attention, torch.randn(2, 17, 32)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.3)
    group = 16 if kind == "head" else 32

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = F.linear(x, attention.qkv.weight, attention.qkv.bias).chunk(3, dim=-1)
        normed = [
            F.layer_norm(part.unflatten(-1, (-1, group)), (group,), norm.weight, norm.bias, 1e-6).flatten(2)
            for part, norm in ((query, attention.qk_norm.query), (key, attention.qk_norm.key))
        ]
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in (*normed, value))
        maps = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        return maps, attention.out((maps @ v).transpose(1, 2).flatten(2))

    maps, output = expected()
    assert torch.allclose(attention.maps(x), maps, atol=1e-6)
    for path in ("fused", "explicit"):
        with attention_path(path):  # type: ignore[arg-type]
            assert torch.allclose(attention(x), output, atol=1e-5)
            assert torch.allclose(attention(x, num_queries=2), output[:, :2], atol=1e-5)
            hook = attention.qkv.register_forward_hook(lambda *_: None)
            assert torch.allclose(attention(x), output, atol=1e-5)
            hook.remove()
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.allclose(attention(x).float(), output, atol=0.05)
    adapt(attention, [attention], rank=2, scale=1.0)
    torch.nn.init.normal_(attention.qkv.lora.up.weight)
    found = attention(x)
    plain = attention.qkv
    attention.qkv = torch.nn.Linear(32, 96)
    attention.qkv.weight.data = plain.weight + plain.lora.up.weight @ plain.lora.down.weight
    attention.qkv.bias.data = plain.bias.data
    assert not torch.allclose(found, output, atol=0.1) and torch.allclose(found, expected()[1], atol=1e-5)


@pytest.mark.parametrize("path", ["fused", "explicit"])
def test_keys_without_bias_of_a_layer_that_is_called_keep_their_type(path: Any) -> None:
    """A hook is reason to call the layer; then the keys' bias is taken away again, in float32 if nobody casts it."""
    torch.manual_seed(0)
    attention, x = Attention(32, 2, key_bias=False), torch.randn(2, 5, 32)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    plain = attention(x)
    attention.qkv.register_forward_hook(lambda *_: None)
    with attention_path(path):
        assert torch.allclose(attention(x), plain, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            output = attention(x)
            assert attention.project(x).dtype == torch.bfloat16
        output.sum().backward()
    assert ((output.float() - plain).norm() / plain.norm()).item() < 0.02
    assert attention.qkv.bias.grad[32:64].abs().max() < 1e-5 < attention.qkv.bias.grad[64:].abs().min()


@pytest.mark.parametrize("num_queries", [None, 2])
def test_a_subclass_that_overrides_only_project_is_heard(num_queries: int | None) -> None:
    class Sharper(Attention):
        def project(self, x: torch.Tensor) -> torch.Tensor:
            return super().project(x) * torch.tensor([3.0, 1.0, 1.0]).repeat_interleave(32)

    torch.manual_seed(0)
    attention, x = Sharper(32, 2), torch.randn(2, 5, 32)
    query, key, value = F.linear(x, attention.qkv.weight, attention.qkv.bias).unflatten(-1, (3, 2, 16)).unbind(2)
    maps = torch.einsum("bqhf,bkhf->bhqk", 3 / 4 * query, key).softmax(-1)
    expected = attention.out(torch.einsum("bhqk,bkhf->bqhf", maps, value).flatten(2))
    assert torch.allclose(attention(x, None, num_queries), expected[:, :num_queries], atol=1e-5)
    assert torch.allclose(attention.maps(x), maps, atol=1e-5)
