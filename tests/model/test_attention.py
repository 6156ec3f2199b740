"""Both ways of computing attention, the CPU layers under them, and looking inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_outputs import block_outputs
from hypothesis import given
from hypothesis import strategies as st

from vitrail.device import fast_float32
from vitrail.errors import UsageError
from vitrail.model.attention import Attention
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.fast.attention import attend, uses_explicit
from vitrail.model.layers import LayerNorm, dense, dense_after_gelu
from vitrail.model.low_rank import adapt
from vitrail.model.record import attention_maps, tap_attention
from vitrail.model.variants import ViTConfig

TINY = dict(width=32, depth=3, heads=2, mlp_dim=64, patch=8, image_size=32, classes=5)


def by_hand(qkv: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Appendix A, Eq. 5-8, one head of one image at a time, in float64."""
    batch, tokens, _, heads, features = qkv.shape
    out = torch.empty(batch, tokens, heads, features, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            q, k, v = qkv[b, :, :, h].double().unbind(1)
            logits = q @ k.T + (0 if bias is None else bias[b % len(bias), h].double())
            weights = logits.exp() / logits.exp().sum(1, keepdim=True)
            out[b, :, h] = weights @ v
    return out.flatten(2)


@given(
    batch=st.integers(1, 3), tokens=st.integers(1, 9), heads=st.integers(1, 3), features=st.sampled_from([1, 4, 16]),
    biases=st.sampled_from(["none", "one", "one each"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_fused_and_explicit_agree_with_the_formula_and_each_other(
    batch: int, tokens: int, heads: int, features: int, biases: str, seed: int
) -> None:
    torch.manual_seed(seed)
    qkv = torch.randn(batch, tokens, 3, heads, features)
    sizes = {"none": 0, "one": 1, "one each": batch}
    bias = torch.randn(sizes[biases], heads, tokens, tokens) if sizes[biases] else None
    weight = torch.randn(batch, tokens, heads * features)
    results = []
    for path in ("fused", "explicit"):
        inputs = [tensor.clone().requires_grad_() for tensor in (qkv, bias) if tensor is not None]
        with attention_path(path):
            out = attend(*inputs)
        assert torch.allclose(out.double(), by_hand(qkv, bias), atol=1e-5)
        (out * weight).sum().backward()
        results.append([out.detach(), *(value.grad for value in inputs)])
    for fused, explicit in zip(*results, strict=True):
        assert torch.allclose(fused, explicit, atol=2e-5)


def test_explicit_backward_against_finite_differences() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 4, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    with attention_path("explicit"):
        assert torch.autograd.gradcheck(attend, (qkv, bias))
        assert torch.autograd.gradcheck(attend, (qkv, bias[:1].detach().requires_grad_()))
        assert torch.autograd.gradcheck(attend, (qkv,))


def test_bfloat16_stays_close_to_float32_on_both_paths() -> None:
    torch.manual_seed(0)
    model = build(ViTConfig(**TINY))
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(4, 3, 32, 32)
    exact = model(images)
    for path in ("fused", "explicit"):
        with attention_path(path), torch.autocast("cpu", dtype=torch.bfloat16):
            assert ((model(images).float() - exact).norm() / exact.norm()).item() < 0.02


def test_the_rule_prefers_fused_on_a_gpu_and_for_long_sequences() -> None:
    elsewhere, here = torch.empty(1, device="meta"), torch.empty(1)
    assert not uses_explicit(197, elsewhere)
    assert not uses_explicit(5000, here)
    with attention_path("explicit"):
        assert uses_explicit(5000, elsewhere)
    with attention_path("fused"):
        assert not uses_explicit(10, here)


@pytest.mark.parametrize(("amx", "dtype", "trained", "expected"), [
    (False, torch.float32, False, True),
    (False, torch.bfloat16, True, True),
    (True, torch.bfloat16, True, True),
    (True, torch.bfloat16, False, False),
    (True, torch.float32, True, False),
])  # fmt: skip
def test_the_rule_with_amx_is_explicit_for_training_in_bfloat16_only(
    monkeypatch: pytest.MonkeyPatch, amx: bool, dtype: torch.dtype, trained: bool, expected: bool
) -> None:
    monkeypatch.setattr("vitrail.model.fast.attention._HAS_AMX", amx)
    like = torch.empty(1, dtype=dtype, requires_grad=trained)
    assert uses_explicit(197, like) is expected
    with torch.no_grad():
        assert uses_explicit(197, like) is (not amx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "gelu", "norm"])
def test_cpu_layers_equal_torch_forward_and_backward(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = LayerNorm(24) if kind == "norm" else torch.nn.Linear(24, 40)
    theirs = torch.nn.LayerNorm(24) if kind == "norm" else torch.nn.Linear(24, 40)
    torch.nn.init.normal_(ours.weight)
    torch.nn.init.normal_(ours.bias)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 24)
    weight = torch.randn(3, 5, 24 if kind == "norm" else 40)
    results = []
    for layer in (ours, theirs):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            if layer is ours and kind == "linear":
                out = dense(layer, inputs)
            elif layer is ours and kind == "gelu":
                out = dense_after_gelu(layer, inputs)
            else:
                out = layer(torch.nn.functional.gelu(inputs) if kind == "gelu" else inputs)
        (out.float() * weight).sum().backward()
        results.append([out.float(), inputs.grad, layer.weight.grad, layer.bias.grad])
        assert layer.weight.grad.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(*results, strict=True):
        assert ((a - b).norm() / b.norm()).item() < tolerance


def test_frozen_weights_get_no_gradient_and_pass_it_on() -> None:
    layer = torch.nn.Linear(8, 8)
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    x = torch.randn(2, 8, requires_grad=True)
    dense(layer, x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(2, 8), atol=1e-5)


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
    model = build(ViTConfig(**(TINY | options))).eval()
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
    model = build(ViTConfig(**TINY)).eval()
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
    model = build(ViTConfig(**TINY)).eval()
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
    model = build(ViTConfig(**TINY, qk_norm=kind))  # type: ignore[arg-type]
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
