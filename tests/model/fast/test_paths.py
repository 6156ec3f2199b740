"""Both paths of fast attention, the rule that chooses one, and the CPU's layers under them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.fast.attention import attend, uses_explicit
from vitrail.model.layers import LayerNorm, dense, dense_after_gelu
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
    model = build(ViTConfig.of(**TINY))
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
