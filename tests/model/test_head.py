"""What is in front of the grid, what the pool reads of it, and what the classifier sees: every combination."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT

TINY = dict(width=16, depth=2, heads=2, mlp_dim=24, patch=4, image_size=(8, 12), classes=3)
POOLS = ("cls", "gap", "map", "cls+gap")
POSITIONS = ("none", "1d", "2d", "relative", "sincos", "relative_bias")


def randomised(**options: object) -> ViT:
    torch.manual_seed(0)
    model = build(ViTConfig.of(**(TINY | options)))  # type: ignore[arg-type]
    assert isinstance(model, ViT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("pool", POOLS)
def test_every_combination_runs_or_is_refused(pool: str, positions: str) -> None:
    for class_token, registers, register_positions, final_norm in pairwise(
        (None, True, False), (0, 2), (False, True), ("tokens", "pooled")
    ):
        options = dict(
            pool=pool, positions=positions, class_token=class_token, registers=registers,
            register_positions=register_positions, final_norm=final_norm,
        )  # fmt: skip
        reads = pool in ("cls", "cls+gap")
        impossible = (
            (reads and class_token is False)
            or (positions == "relative_bias" and registers > 0)
            or (register_positions and positions not in ("1d", "2d"))
        )
        if impossible:
            with pytest.raises(UsageError):
                ViTConfig.of(**(TINY | options))
            continue
        model = randomised(**options)
        has_token = reads or bool(class_token)
        assert model.config.prefix == has_token + registers
        assert ("cls" in dict(model.named_parameters())) == has_token
        for size in ((8, 12), (16, 8)):
            images = torch.randn(2, 3, *size)
            with torch.no_grad():
                assert model.embed(images).shape == (2, has_token + registers + size[0] * size[1] // 16, 16)
                assert model.features(images).shape == (2, 32 if pool == "cls+gap" else 16)
            model(images).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert not parameter.numel() or parameter.grad.abs().max() > 0, name


def layer_norm(x: Tensor, model: ViT) -> Tensor:
    x = x.double()
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    return x * model.norm.weight.double() + model.norm.bias.double()


@pytest.mark.parametrize("final_norm", ["tokens", "pooled"])
@pytest.mark.parametrize("pool", ["cls", "gap", "cls+gap"])
def test_features_are_the_tokens_that_are_read(pool: str, final_norm: str) -> None:
    """From the last block's output on, written out: the norm comes before the pool, or after it."""
    model = randomised(pool=pool, final_norm=final_norm, class_token=True, registers=2)
    images = torch.randn(2, 3, 8, 12)
    outputs: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        model.encode(model.embed(images))
        features = model.features(images)
    tokens = outputs[0]
    early = (lambda x: layer_norm(x, model)) if final_norm == "tokens" else Tensor.double
    late = (lambda x: layer_norm(x, model)) if final_norm == "pooled" else Tensor.double
    cls, mean = late(early(tokens[:, 0])), late(early(tokens[:, 3:]).mean(1))
    expected = {"cls": [cls], "gap": [mean], "cls+gap": [cls, mean]}[pool]
    torch.testing.assert_close(features, torch.cat(expected, 1).float(), rtol=1e-4, atol=1e-5)


def test_a_token_that_is_not_read_still_matters() -> None:
    """BEiT and MAE keep the class token under average pooling: the others attend to it."""
    model = randomised(pool="gap", class_token=True)
    images = torch.randn(2, 3, 8, 12)
    with torch.no_grad():
        before = model(images)
        model.cls.add_(torch.randn(16))  # type: ignore[union-attr]
        assert (model(images) - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(pre_logits=8),
        dict(pool="map"),
        dict(pool="cls+gap"),
        dict(pool="cls+gap", pre_logits=8, final_norm="pooled"),
        dict(distilled=True, final_norm="pooled"),
        dict(classes=0, distilled=True),
    ],
    ids=str,
)
def test_a_new_head_is_zero_and_sees_the_pooled_features(options: dict) -> None:
    model = randomised(**options)
    images = torch.randn(2, 3, 8, 12)
    with torch.no_grad():
        pooled = build(ViTConfig.of(**(TINY | options | dict(pre_logits=None, classes=0))))
        pooled.load_state_dict(model.state_dict(), strict=False)
        expected = pooled(images)
        model.reset_head(7)
        assert torch.equal(model(images), torch.zeros(2, 7))
        assert torch.equal(model.features(images), expected)
    assert model.config.classes == 7 and model.config.pre_logits is None
    again = build(model.config)
    assert {n: p.shape for n, p in again.state_dict().items()} == {n: p.shape for n, p in model.state_dict().items()}
    model(images).sum().backward()
    heads = [model.head, model.head_dist] if options.get("distilled") else [model.head]
    assert all(head.bias.grad.abs().sum() > 0 for head in heads)  # type: ignore[union-attr]
    model.reset_head(0)
    with torch.no_grad():
        assert torch.equal(model(images), expected)
    assert not [name for name, _ in model.named_parameters() if name.startswith("head")]


def test_a_head_is_reset_where_and_as_what_the_model_is() -> None:
    model = randomised(distilled=True).to(torch.bfloat16).to("meta")
    model.reset_head(4)
    kinds = {(p.dtype, p.device.type, p.requires_grad) for p in model.parameters()}
    assert kinds == {(torch.bfloat16, "meta", True)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(class_token=False), "reads the class token"),
        (dict(pool="cls+gap", class_token=False), "reads the class token"),
        (dict(distilled=True, pool="gap", class_token=True), "use pool 'cls' and no pre_logits"),
        (dict(distilled=True, pre_logits=8), "use pool 'cls' and no pre_logits"),
        (dict(positions="relative_bias", distilled=True), "no distillation token"),
        (dict(positions="relative_bias", pool="gap", registers=1), "0 registers"),
        (dict(positions="sincos", registers=1, register_positions=True), "'1d' or '2d'"),
        (dict(block="axial", pool="gap", class_token=True), "use pool 'gap' or 'map'"),
    ],
    ids=str,
)
def test_contradictions_are_named(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ViTConfig.of(**(TINY | options))
