"""Activation memory counted on fake tensors against what autograd keeps of real ones, and by hand."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from random_inputs import MANY
from torch import Tensor

from vitrail.costs.count import _activation_bytes, activation_bytes, kept_bytes
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.variants import ResNetConfig, ViTConfig, variant

SMALL: dict[str, Any] = dict(width=32, depth=2, heads=2, mlp_dim=48, patch=16, image_size=(32, 48), classes=10)


def options() -> list[ViTConfig | ResNetConfig]:
    configs: list[ViTConfig | ResNetConfig] = [
        ViTConfig.of(**SMALL, positions=positions, place=place, pool=pool, registers=registers)
        for positions, place, pool, registers in pairwise(
            *(("1d", "2d", "relative", "relative_bias"), ("input", "shared"), ("cls", "gap", "map", "cls+gap"), (0, 4)),
            valid=lambda positions, place, pool, registers: not (positions == "relative_bias" and registers),
        )
    ]
    configs += [
        ViTConfig.of(**SMALL, positions="1d", place="every", class_token=True, pool="gap", final_norm="pooled"),
        ViTConfig.of(**SMALL, layer_scale=1e-4, drop_path=0.1, pre_logits=24),
        ViTConfig.of(**SMALL, mlp="swiglu", pool="map", final_norm="pooled"),
        ViTConfig.of(**SMALL, mlp="swiglu", layer_scale=1e-4),
        ViTConfig.of(**SMALL, distilled=True),
        ViTConfig.of(**{**SMALL, "classes": 0}, pool="gap", positions="none"),
        ViTConfig.of(**SMALL, block="parallel", branches=2, layer_scale=1e-4, drop_path=0.1),
        ViTConfig.of(**SMALL, block="axial", pool="gap"),
        ViTConfig.of(**SMALL, block="axial", pool="map", positions="relative"),
    ]
    shallow = {**SMALL, "depth": 1}
    stems = itertools.product(("levit", "early", "hmlp"), ("batch", "layer"))
    for stem, norm in stems if MANY else (("levit", "batch"), ("early", "layer"), ("hmlp", "batch"), ("hmlp", "layer")):
        configs.append(ViTConfig.of(**shallow, stem=stem, stem_norm=norm))
    for units, patch in (((), 32), ((1, 2, 1), 16), ((1, 1, 1, 1), 32)):
        size = dict(patch=patch, image_size=(32, 64))
        configs.append(ViTConfig.of(**{**shallow, **size}, stem="resnet", stem_units=units))
    for units, axial, size in (((2, 1), False, (32, 64)), ((1, 1), True, (47, 70))):
        configs.append(ResNetConfig(units=units, width=32, image_size=size, classes=10, axial=axial))
    # deep enough to be counted on fewer layers
    configs.append(ViTConfig.of(**{**SMALL, "depth": 8}, layer_scale=1e-4, drop_path=0.1))
    configs.append(ViTConfig.of(**{**SMALL, "depth": 8}, positions="1d", place="every"))
    configs.append(ResNetConfig(units=(1, 6), width=32, image_size=(47, 70), classes=10))
    return configs


def on_this_cpu(config: ViTConfig | ResNetConfig, precision: str) -> float:
    """What a real forward pass on the CPU keeps of an image."""
    torch.manual_seed(0)
    model = build(config).train()
    images = torch.rand(4, config.channels, *config.image_size)

    def forward(number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return model(images[:number].clone())

    return kept_bytes(forward)


def fused(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, scale: float) -> Tensor:
    mask = None if attn_mask is None else attn_mask.detach()
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, attn_mask=mask, scale=scale)[0]


def on_torchs_layers(config: ViTConfig | ResNetConfig, precision: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """The same with torch's own layers and fused attention, which is what an accelerator runs."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)  # torch's own choice on a CPU depends on the mask
    with attention_path("fused"):
        return on_this_cpu(config, precision)


@pytest.mark.parametrize("config", options(), ids=lambda config: "")
def test_every_option(config: ViTConfig | ResNetConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = on_torchs_layers(config, "float32", monkeypatch)
    assert activation_bytes(config, precision="float32") == round(seen)


@pytest.mark.parametrize("size", [(32, 64), (96, 64)])
@pytest.mark.parametrize("config", [variant("Ti/16", depth=2), variant("R50x1", units=(1, 1))], ids=["vit", "resnet"])
def test_any_resolution(
    config: ViTConfig | ResNetConfig, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = on_torchs_layers(replace(config, image_size=size), "float32", monkeypatch)
    assert activation_bytes(config, size, "float32") == round(seen)


def test_dropout_keeps_a_byte_for_each_value() -> None:
    """An accelerator keeps a mask of one byte per value, and where a mask alone is kept, not its input."""
    plain, dropped = (variant("Ti/16", depth=3, dropout=rate, mlp="swiglu") for rate in (0.0, 0.1))
    tokens, width, hidden = 197, 192, 768
    layers = 2 * (2 * width + hidden)
    masks = tokens * (width + layers) + 2 * width + hidden  # the last layer's tokens that are not read have none
    found = activation_bytes(dropped, precision="float32") - activation_bytes(plain, precision="float32")
    assert found == masks


CPU = [
    variant("Ti/16", depth=2, image_size=64),
    variant("Ti/16", depth=2, pool="gap", layer_scale=1e-4, drop_path=0.1, image_size=64),
    variant("Ti/16", depth=2, positions="relative", pool="gap", image_size=64),
    variant("Ti/16", depth=2, pool="map", mlp="swiglu", registers=2, image_size=64),
    variant("Ti/16", depth=2, dropout=0.1, image_size=64),
    variant("Ti/16", depth=2, stem="hmlp", block="parallel", branches=2, image_size=64),
    variant("R26+S/32", width=64, depth=1, heads=2, mlp_dim=128, stem_units=(1, 1, 1, 1), image_size=64),
    variant("R50x1", units=(1, 1, 1, 1), image_size=64),
]


HOW = list(itertools.product((False, True), ("float32", "bf16")))
"""With AMX or without, and the precision."""
CASES = [(config, *HOW[number % 4]) for number, config in enumerate(CPU)] + [
    (config, *how) for config in CPU[: 1 if not MANY else None] for how in HOW
]


@pytest.mark.parametrize(("config", "amx", "precision"), list(dict.fromkeys(CASES)))
def test_on_a_cpu(config: ViTConfig | ResNetConfig, amx: bool, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX attention is computed in another way."""
    monkeypatch.setattr("vitrail.model.fast.attention._HAS_AMX", amx)
    monkeypatch.setattr("vitrail.costs.count._activation_bytes", _activation_bytes.__wrapped__)  # without its cache
    seen = on_this_cpu(config, precision)
    # torch says that LayerNorm keeps the statistics of bfloat16 in bfloat16, and its kernel for the CPU keeps float32
    exactly = 0.0 if precision == "float32" else 2e-3
    assert activation_bytes(config, precision=precision, place="cpu") == pytest.approx(round(seen), rel=exactly)


@pytest.mark.parametrize(
    "config",
    [
        variant("Ti/16", depth=2, image_size=64),
        variant("Ti/16", depth=2, image_size=64, pool="gap", layer_scale=1e-4),
        variant("Ti/16", depth=2, image_size=64, mlp="swiglu"),
        variant("Ti/16", depth=2, image_size=64, block="parallel", branches=2),
    ],
    ids=lambda config: "",
)
def test_bf16_on_an_accelerator(config: ViTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms keep their inputs in bfloat16, each branch its own; torch's keep those in float32 that branches share.

    And the inputs of the last layer's queries are no copies.
    """
    tokens, last = (16, 16) if config.pool == "gap" else (17, 1)
    inputs = tokens * (2 * config.depth - 1) + last
    less = config.width * (inputs * (4 - 2 * config.branches) + 2 * config.branches * (last == 1))
    found = activation_bytes(config)
    assert found == pytest.approx(on_torchs_layers(config, "bf16", monkeypatch) - less, rel=1e-3)


def test_a_block_by_hand() -> None:
    """One more layer of B/16 keeps, of 197 tokens: 2 inputs and 2 outputs of norms, q, k, v, the heads' outputs,
    and the MLP's hidden features before and after the GELU; mean and deviation of each norm; a sum per head."""
    tokens, width, heads = 197, 768, 12
    values = tokens * width * (4 + 4 + 8)
    numbers = tokens * (2 * 2 + heads)
    deep, shallow = (activation_bytes(variant("B/16", depth=depth), precision="float32") for depth in (12, 11))
    assert deep - shallow == 4 * (values + numbers)
    # in bf16 the numbers stay float32
    deep, shallow = (activation_bytes(variant("B/16", depth=depth)) for depth in (12, 11))
    assert deep - shallow == 2 * values + 4 * numbers


def test_memory_grows_with_tokens_and_with_precision() -> None:
    config = variant("B/16")
    assert activation_bytes(config, 448) > 3.9 * activation_bytes(config)
    assert activation_bytes(config, precision="float32") > 1.5 * activation_bytes(config)


def test_what_is_kept_is_freed_afterwards() -> None:
    """Normalisations keep their own results, which autograd frees only if what is kept is not the result itself."""
    norm = torch.nn.LayerNorm(8)
    held: list[weakref.ref[Tensor]] = []

    def forward(number: int) -> Tensor:
        tokens = torch.ones(number, 8) * norm.weight
        held.append(weakref.ref(tokens))
        return norm(tokens).softmax(-1)

    assert kept_bytes(forward) > 0
    gc.collect()
    assert [one() for one in held] == [None, None]
