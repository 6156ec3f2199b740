"""Activation memory by formula against what autograd was seen to keep, on every kind of network and arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from vitrail.costs.count import count
from vitrail.costs.kept import Arithmetic
from vitrail.costs.live import kept_bytes
from vitrail.costs.memory import activation_bytes, largest_batch
from vitrail.model.attention import attention_path
from vitrail.model.build import build
from vitrail.model.variants import NAMES, ResNetConfig, ViTConfig, variant

SMALL: dict[str, Any] = dict(width=192, depth=3, heads=3, mlp_dim=768, patch=16, image_size=(160, 224), classes=10)
FLOAT32 = Arithmetic("float32")
CLOSE = 1e-3


def options() -> list[ViTConfig | ResNetConfig]:
    configs: list[ViTConfig | ResNetConfig] = [
        ViTConfig(**SMALL, positions=positions, place=place, pool=pool, registers=registers)
        for positions, place, pool, registers in itertools.product(
            ("1d", "2d", "relative", "relative_bias"), ("input", "shared"), ("cls", "gap", "map", "cls+gap"), (0, 4)
        )
        if not (positions == "relative_bias" and registers)
    ]
    configs += [
        ViTConfig(**SMALL, positions="1d", place="every", class_token=True, pool="gap", final_norm="pooled"),
        ViTConfig(**SMALL, layer_scale=1e-4, drop_path=0.1, pre_logits=64),
        ViTConfig(**SMALL, dropout=0.1, drop_path=0.1, drop_path_shape="constant"),
        ViTConfig(**SMALL, mlp="swiglu", dropout=0.1, pool="map", final_norm="pooled"),
        ViTConfig(**SMALL, mlp="swiglu", layer_scale=1e-4),
        ViTConfig(**SMALL, distilled=True),
        ViTConfig(**{**SMALL, "classes": 0}, pool="gap", positions="none"),
        ViTConfig(**SMALL, block="parallel", branches=2, layer_scale=1e-4, drop_path=0.1),
        ViTConfig(**SMALL, block="axial", pool="gap"),
        ViTConfig(**SMALL, block="axial", pool="map", positions="relative"),
    ]
    for stem, norm in itertools.product(("levit", "early", "hmlp"), ("batch", "layer")):
        configs.append(ViTConfig(**SMALL, stem=stem, stem_norm=norm))
    for units, patch in (((), 32), ((2, 2, 4), 16), ((1, 2, 1, 1), 32)):
        configs.append(ViTConfig(**{**SMALL, "patch": patch}, stem="resnet", stem_units=units))
    for axial, size in itertools.product((False, True), ((160, 224), (97, 130))):
        configs.append(ResNetConfig(units=(2, 1, 2, 1), width=64, image_size=size, classes=10, axial=axial))
    return configs


OFTEN = ("Ti/16", "B/16", "R26+S/32", "R50x1", "S18x2/16", "axial-B/32")


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in OFTEN)]
)
def test_every_name(name: str) -> None:
    config = variant(name)
    assert activation_bytes(config, arithmetic=FLOAT32) == pytest.approx(count(config).activation_bytes, rel=CLOSE)


@pytest.mark.parametrize("config", options(), ids=lambda config: "")
def test_every_option(config: ViTConfig | ResNetConfig) -> None:
    assert activation_bytes(config, arithmetic=FLOAT32) == pytest.approx(count(config).activation_bytes, rel=CLOSE)


@pytest.mark.parametrize("name", ["B/16", "R50+B/16", "R50x1", "axial-B/16"])
@pytest.mark.parametrize("factor", [1, 3])
def test_any_resolution(name: str, factor: int) -> None:
    config = variant(name)
    size = (factor * config.image_size[0] // 2, config.image_size[1])
    seen = count(config, size).activation_bytes
    assert activation_bytes(config, size, FLOAT32) == pytest.approx(seen, rel=CLOSE)


def on_this_cpu(config: ViTConfig | ResNetConfig, precision: str) -> float:
    """What a real forward pass on the CPU keeps of an image."""
    torch.manual_seed(0)
    model = build(config).train()
    images = torch.rand(4, config.channels, *config.image_size)

    def forward(number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return model(images[:number].clone())

    return kept_bytes(forward)


CPU = [
    variant("Ti/16", depth=2),
    variant("Ti/16", depth=2, pool="gap", layer_scale=1e-4, drop_path=0.1),
    variant("Ti/16", depth=2, positions="relative", pool="gap", image_size=128),
    variant("Ti/16", depth=2, pool="map", mlp="swiglu", registers=2),
    variant("Ti/16", depth=2, dropout=0.1),
    variant("Ti/16", depth=2, stem="hmlp", block="parallel", branches=2),
    variant("R26+S/32", depth=2, image_size=64),
    variant("R50x1", units=(1, 1, 1, 1), image_size=64),
]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("config", CPU, ids=lambda config: "")
def test_on_a_cpu(config: ViTConfig | ResNetConfig, precision: Any) -> None:
    with attention_path("explicit"):
        seen = on_this_cpu(config, precision)
    assert activation_bytes(config, arithmetic=Arithmetic(precision, cpu=True)) == pytest.approx(seen, rel=CLOSE)


@pytest.mark.parametrize(
    "config",
    [
        variant("Ti/16", depth=2),
        variant("Ti/16", depth=2, pool="gap", layer_scale=1e-4),
        variant("Ti/16", depth=2, mlp="swiglu"),
        variant("Ti/16", depth=2, block="parallel", branches=2),
    ],
    ids=lambda config: "",
)
def test_bf16_on_an_accelerator(config: ViTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own layers under autocast, which is what an accelerator runs, here run by the CPU."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with attention_path("fused"):
        seen = on_this_cpu(config, "bf16")
    assert activation_bytes(config) == pytest.approx(seen, rel=CLOSE)


def test_a_block_by_hand() -> None:
    """One more layer of B/16 keeps, of 197 tokens: 2 inputs and 2 outputs of norms, q, k, v, the heads' outputs,
    and the MLP's hidden features before and after the GELU; mean and deviation of each norm; a sum per head."""
    tokens, width, heads = 197, 768, 12
    values = tokens * width * (4 + 4 + 8)
    numbers = tokens * (2 * 2 + heads)
    deep, shallow = (activation_bytes(variant("B/16", depth=depth), arithmetic=FLOAT32) for depth in (12, 11))
    assert deep - shallow == 4 * (values + numbers)
    # in bf16 the inputs of the norms and the numbers stay float32
    deep, shallow = (activation_bytes(variant("B/16", depth=depth)) for depth in (12, 11))
    assert deep - shallow == 2 * tokens * width * 14 + 4 * tokens * width * 2 + 4 * numbers


def test_memory_grows_with_tokens_and_with_precision() -> None:
    config = variant("B/16")
    assert activation_bytes(config, 448) > 3.9 * activation_bytes(config)
    assert activation_bytes(config, arithmetic=FLOAT32) > 1.5 * activation_bytes(config)


def test_largest_batch() -> None:
    assert largest_batch(10, 100, 160 + 350) == 3
    assert largest_batch(10, 100, 160) == 0
    assert largest_batch(10, 100, 0) == 0
