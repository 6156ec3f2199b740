"""Branches computed as one compute what they compute one by one (`Block.forward`, written out in test_vit.py)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.model.attention import attention_path
from vitrail.model.build import build
from vitrail.model.record import attention_maps
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.model.wide import WideBlock, compute_together

TINY = dict(
    width=32, depth=2, heads=2, mlp_dim=48, patch=8, image_size=32, classes=5, block="parallel", branches=2
)  # fmt: skip


def pair(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[ViT, ViT]:
    """The same network twice, branch by branch and together; no parameter is a special value."""
    torch.manual_seed(0)
    apart = build(ViTConfig(**(TINY | options)))
    assert isinstance(apart, ViT)
    for parameter in apart.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    together = copy.deepcopy(apart)
    compute_together(together)
    return apart.to(dtype), together.to(dtype)


def gradients(model: ViT, images: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Logits, and the gradient of every parameter."""
    torch.manual_seed(1)  # stochastic depth
    logits = model(images)
    logits.square().sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(branches=3, pool="gap"),
        dict(layer_scale=0.5, gelu="tanh"),
        dict(mlp="swiglu", pool="map"),
        dict(drop_path=0.5, drop_path_shape="constant"),
        dict(drop_path=0.5, mlp="swiglu", layer_scale=0.5),
        dict(dropout=0.3),
        dict(positions="relative"),
        dict(positions="relative_bias", pool="gap", class_token=True, branches=3),
        dict(registers=2, distilled=True, place="every"),
    ],
    ids=str,
)
def test_equal_to_the_branches_one_by_one_gradients_included(options: dict[str, Any], path: Any) -> None:
    apart, together = pair(**options)
    images = torch.randn(3, 3, 32, 40, dtype=torch.float64)
    with attention_path(path):
        (expected, wanted), (logits, found) = gradients(apart, images), gradients(together, images)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    for name, gradient in wanted.items():
        assert gradient is not None
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10 * float(gradient.abs().max()) + 1e-13)
    assert together.state_dict().keys() == apart.state_dict().keys()


@pytest.mark.parametrize("autocast", [False, True])
def test_equal_in_the_precisions_of_training(autocast: bool) -> None:
    apart, together = pair(torch.float32, drop_path=0.5, layer_scale=0.5)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (_, wanted), (_, found) = gradients(apart, images), gradients(together, images)
    largest = 0.05 if autocast else 1e-4
    whole = torch.cat([gradient.flatten() for gradient in wanted.values() if gradient is not None])
    other = torch.cat([gradient.flatten() for gradient in found.values() if gradient is not None])
    assert torch.linalg.vector_norm(other - whole) < largest * torch.linalg.vector_norm(whole)


def test_with_part_of_the_tokens_as_masked_training_has_them() -> None:
    for positions in ("1d", "relative", "relative_bias"):
        apart, together = pair(positions=positions)
        tokens = apart.embed(torch.randn(2, 3, 32, 32, dtype=torch.float64))
        keep = torch.tensor([[0, 5, 6], [1, 2, 15]])
        torch.testing.assert_close(together.encode(tokens, keep=keep), apart.encode(tokens, keep=keep))


@pytest.mark.parametrize("learning", ["attention", "mlp", "norm"])
def test_parts_that_do_not_learn_get_no_gradient(learning: str) -> None:
    models = pair(layer_scale=0.5)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(f".{learning}." in name)
    (_, wanted), (_, found) = (gradients(model, images) for model in models)
    assert 0 < sum(gradient is not None for gradient in wanted.values()) < len(wanted)
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None
        else:
            torch.testing.assert_close(found[name], gradient)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return function(*args, **(kwargs or {}))


def test_three_branches_take_the_matrix_products_of_one() -> None:
    def count(model: nn.Module) -> int:
        with torch.no_grad(), Products() as products, attention_path("explicit"):
            model(torch.randn(2, 3, 32, 32, dtype=torch.float64))
        return products.count

    apart, together = pair(branches=3, pool="gap")
    single, _ = pair(branches=1, block="sequential", pool="gap")
    assert count(together) == count(single) < count(apart)


def test_looking_inside_sees_each_branch() -> None:
    apart, together = pair(positions="relative")
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    wanted, found = attention_maps(apart, images), attention_maps(together, images)
    assert [(one.layer, one.branch) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other.maps, one.maps)


def test_a_copy_computes_with_its_own_weights() -> None:
    _, together = pair()
    other = copy.deepcopy(together)
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    before = together(images)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(images).eq(0).all() and torch.equal(together(images), before) and before.abs().max() > 0


def test_blocks_are_replaced_not_patched() -> None:
    apart, together = pair()
    compute_together(together)  # a second call changes nothing
    assert [type(block) for block in together.blocks] == [WideBlock, WideBlock]
    assert not any("forward" in vars(module) for module in together.modules())
    assert [name for name, _ in together.named_modules()] == [name for name, _ in apart.named_modules()]
