"""What `vitrail.model.fast` computes equals the definitions: outputs and gradients, with and without autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.model.attention import Attention
from vitrail.model.block import MLP
from vitrail.model.build import build
from vitrail.model.compute import attention_path, computed
from vitrail.model.fast import attention as fast_attention
from vitrail.model.fast import first_tokens, layers
from vitrail.model.layers import LayerNorm
from vitrail.model.low_rank import adapt
from vitrail.model.variants import Rotary, ViTConfig

TINY: dict[str, Any] = dict(width=48, depth=2, heads=2, mlp_dim=64, patch=8, image_size=32, classes=5)
EVA = dict(rotary=Rotary(reference=(4, 4)), key_bias=False, mlp="swiglu", mlp_norm=True, attention_norm=True)
OPTIONS: list[dict[str, Any]] = [
    dict(),
    dict(block="parallel", branches=2, layer_scale=0.3),
    dict(registers=2, distilled=True, place="every"),
    EVA,
    dict(rotary=Rotary(base=100, coordinates="centred", pairs="halves"), positions="none", registers=2),
    dict(positions="relative", gelu="tanh"),
    dict(positions="relative_bias", key_bias=False, gelu="quick"),
    dict(qk_norm="head", norm_after=True),
    dict(qk_norm="width", norm="rms", pool="map"),
    dict(stem="resnet", stem_units=(1,), pool="gap"),
    dict(block="axial", pool="gap"),
]
EXACT, ROUNDED, ROUNDED_OFTEN = 2e-5, 6e-2, 0.15
"""Relative differences in float32, and with autocast in bfloat16 of one module and of a network."""


def random(config: ViTConfig) -> nn.Module:
    torch.manual_seed(0)
    model = build(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return model


def results(model: nn.Module, inputs: Tensor, bf16: bool, *arguments: Any) -> list[Tensor]:
    """Output, gradient of the inputs, and gradients of all parameters that have one."""
    model.zero_grad(set_to_none=True)
    inputs = inputs.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model(inputs, *arguments)
    torch.manual_seed(1)
    (output.float() * torch.randn(output.shape)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [output.detach().float(), inputs.grad, *gradients]  # type: ignore[list-item]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Vectors are compared with the largest gradient: that of a bias of the keys, for one, is zero but for rounding."""
    assert len(found) == len(expected)
    largest = max(value.norm() for value in expected[2:])
    for ours, theirs in zip(found, expected, strict=True):
        scale = max(float(theirs.norm()), 0.02 * float(largest))
        assert float((ours - theirs).norm()) <= tolerance * scale


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_networks(options: dict[str, Any], bf16: bool) -> None:
    model, images = random(ViTConfig.of(**(TINY | options))), torch.randn(2, 3, 32, 32)
    with computed("definition"):
        expected = results(model, images, bf16)
    for path in ("fused", "explicit"):
        with attention_path(path):  # type: ignore[arg-type]
            assert_equal(results(model, images, bf16), expected, ROUNDED_OFTEN if bf16 else EXACT)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["plain", "low rank", "hook", "own project"])
@pytest.mark.parametrize("num_queries", [None, 1, 3])
@pytest.mark.parametrize(
    "options", [dict(), dict(key_bias=False, positions="relative_bias"), dict(qk_norm="head"), EVA]
)
def test_attention(options: dict[str, Any], num_queries: int | None, kind: str, bf16: bool) -> None:
    block = random(ViTConfig.of(**(TINY | options))).blocks[0]  # type: ignore[index]
    attention, bias = block.attentions[0].attention, block.bias(torch.arange(16), (4, 4))
    if kind == "low rank":
        adapt(attention, [attention], rank=2, scale=0.7)
        nn.init.normal_(attention.qkv.lora.up.weight, std=0.2)
    if kind == "hook":
        attention.qkv.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    if kind == "own project":

        class Doubled(Attention):
            def project(self, x: Tensor) -> Tensor:
                return 2 * super().project(x)

        attention.__class__ = Doubled
    tokens = torch.randn(2, 17, 48)
    with computed("definition"):
        expected = results(attention, tokens, bf16, bias, num_queries)
    for path in ("fused", "explicit"):
        with attention_path(path):  # type: ignore[arg-type]
            assert_equal(results(attention, tokens, bf16, bias, num_queries), expected, ROUNDED if bf16 else EXACT)


def test_the_definition_calls_nothing_of_the_fast_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("fast")

    for module, names in (
        (layers, ("linear", "layer_norm", "_Linear")),
        (fast_attention, ("attention", "scaled", "attend", "attend_all", "attend_first", "_ExplicitAttention")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    model, images = random(ViTConfig.of(**TINY)), torch.randn(2, 3, 32, 32)
    with computed("definition"):
        for bf16 in (False, True):
            results(model, images, bf16)
        assert first_tokens.num_queries(model) is None
    assert first_tokens.num_queries(model) == 1
    with pytest.raises(AssertionError, match="fast"):
        model(images)


@pytest.mark.parametrize("path", ["fused", "explicit"])
def test_the_last_layer_computes_the_tokens_that_the_head_reads(path: Any) -> None:
    model = random(ViTConfig.of(**TINY, distilled=True)).eval()
    tokens: list[tuple[int, ...]] = []
    images = torch.randn(2, 3, 32, 32)
    with attention_path(path), torch.no_grad():
        everything = model.encode(model.embed(images))  # type: ignore[operator]
        first = model.encode(model.embed(images), num_queries=2)  # type: ignore[operator]
        assert everything.shape == (2, 18, 48) and first.shape == (2, 2, 48)
        torch.testing.assert_close(first, everything[:, :2], rtol=1e-4, atol=1e-5)
        model.norm.register_forward_hook(lambda module, inputs, output: tokens.append(tuple(output.shape)))
        model(images)
    assert tokens == [(2, 18, 48)]  # the hook may see all tokens, so all are computed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_in_the_type_of_the_next_product(dtype: torch.dtype) -> None:
    norm, x = LayerNorm(24), torch.randn(3, 5, 24)
    nn.init.normal_(norm.weight)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        fast = norm(x)
        with computed("definition"):
            definition = norm(x)
    assert fast.dtype == dtype and definition.dtype == torch.float32
    torch.testing.assert_close(fast.float(), definition, rtol=0.0, atol=0.0 if dtype == torch.float32 else 0.05)


def test_an_mlp_follows_its_dropout_not_its_own_mode() -> None:
    """Dropout alone is switched on in prediction to sample from a network."""
    torch.manual_seed(0)
    mlp, x = MLP(16, 32, dropout=0.5).eval(), torch.randn(2, 5, 16)
    exact = mlp(x)
    mlp.dropout.train()
    with computed("definition"):
        torch.manual_seed(1)
        expected = mlp(x)
    torch.manual_seed(1)
    torch.testing.assert_close(mlp(x), expected)
    assert not torch.allclose(expected, exact, atol=0.01)
