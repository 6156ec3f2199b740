"""Counted parameters and MACs against closed forms, the real modules and published numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import closed_form
import pytest
import torch
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

from vitrail.costs.count import learned_values, macs, training_flops
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.variants import NAMES, ResNetConfig, ViTConfig, variant
from vitrail.model.vit import ViT

TINY = dict(width=16, depth=2, heads=2, mlp_dim=24, patch=4, image_size=(8, 12), classes=3)


def counted(config, image_size=None, train: bool = False) -> tuple[int, int]:
    """(parameters, FLOPs of one image) of the real network, computing real numbers."""
    model = build(config).double()
    images = torch.zeros(1, config.channels, *(image_size or config.image_size), dtype=torch.float64)
    counter = FlopCounterMode(display=False)
    with attention_path("explicit"), counter:
        output = every_token(model, images)
        if train:
            output.sum().backward()
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops()


def every_token(model, images):
    """The forward pass as Eq. 1-4 write it: `model(images)` spares the last layer the tokens that nobody reads."""
    if not isinstance(model, ViT):
        return model(images)
    tokens = model.encode(model.embed(images), model.grid(images))
    return model.classify(model.summary(tokens))


@pytest.mark.full_size
@pytest.mark.parametrize("name", NAMES)
def test_every_name(name):
    config = variant(name)
    assert (learned_values(config), macs(config)) == (closed_form.parameters(config), closed_form.macs(config))


def prefixes() -> list[ViTConfig]:
    """Tokens in front of the grid and their positions, what is read of them, and the gated MLP."""
    configs = [
        ViTConfig.of(**TINY, class_token=True, pool=pool, positions=positions, registers=2, register_positions=True)
        for pool, positions in itertools.product(("cls", "gap", "map", "cls+gap"), ("1d", "2d"))
    ]
    configs += [
        ViTConfig.of(**TINY, positions="relative_bias", place=place, pool=pool)
        for place, pool in itertools.product(("input", "shared"), ("cls", "gap"))
    ]
    configs.append(ViTConfig.of(**TINY, distilled=True, final_norm="pooled"))
    configs.append(ViTConfig.of(**TINY, distilled=True, cls_position=False, registers=1))
    configs.append(ViTConfig.of(**TINY, pool="cls+gap", pre_logits=8))
    configs.append(ViTConfig.of(**TINY, pool="map", mlp="swiglu", final_norm="pooled"))
    configs.append(ViTConfig.of(**{**TINY, "classes": 0}, distilled=True))
    return configs


def options() -> list:
    configs = [
        ViTConfig.of(**TINY, positions=positions, place=place, pool=pool, registers=registers)
        for positions, place, pool, registers in pairwise(
            *(("none", "1d", "2d", "relative", "sincos"), ("input", "every", "shared"), ("cls", "gap", "map"), (0, 3)),
            valid=lambda positions, place, pool, registers: positions not in ("none", "sincos") or place != "every",
        )
    ]
    configs.append(ViTConfig.of(**TINY, layer_scale=1e-4, pre_logits=8, cls_position=False))
    configs.append(ViTConfig.of(**{**TINY, "classes": 0, "channels": 5}))
    configs.append(ViTConfig.of(**TINY, block="parallel", branches=3, layer_scale=1e-4, positions="relative"))
    configs += prefixes()
    for positions, pool in itertools.product(("1d", "relative"), ("gap", "map")):
        configs.append(ViTConfig.of(**TINY, block="axial", pool=pool, positions=positions))
    stems = pairwise(("levit", "early", "hmlp"), ("batch", "layer"), (2, 16))
    for stem, norm, patch in stems:
        size = (2 * patch, 3 * patch)
        configs.append(ViTConfig.of(**{**TINY, "patch": patch, "image_size": size}, stem=stem, stem_norm=norm))
    for patch in (7, 12, 14):
        configs.append(ViTConfig.of(**{**TINY, "patch": patch, "image_size": 2 * patch}, stem="hmlp"))
    for units in ((), (1,), (2, 1), (1, 2, 1), (1, 1, 1, 2)):
        configs.append(ViTConfig.of(**{**TINY, "patch": 32, "image_size": (64, 96)}, stem="resnet", stem_units=units))
    for axial, size in itertools.product((False, True), ((64, 64), (64, 96), (70, 45))):
        configs.append(ResNetConfig(units=(2, 1, 2), width=32, image_size=size, classes=3, axial=axial))
    configs.append(ResNetConfig(units=(1, 1), width=16, image_size=33, classes=0, channels=1))
    return configs


@pytest.mark.parametrize("config", options(), ids=lambda config: "")
def test_every_option(config):
    assert (learned_values(config), macs(config)) == (closed_form.parameters(config), closed_form.macs(config))


@pytest.mark.parametrize("config", options()[::5], ids=lambda config: "")
def test_another_image_size(config):
    """More to compute, no more to learn."""
    patch = getattr(config, "patch", 16)
    size = (4 * patch, 5 * patch)
    learned, flops = counted(config, size)
    assert flops == 2 * macs(config, size) == 2 * closed_form.macs(config, size)
    assert learned == learned_values(config)


def test_one_number_is_a_square():
    config = variant("B/16")
    assert macs(config, 384) == macs(config, (384, 384)) > macs(config)


@pytest.mark.full_size
@pytest.mark.parametrize("name", ["S/32", "S18x2/16"])
def test_a_training_step_is_three_forward_passes(name):
    """All but the gradient with respect to the image, which nobody asks for."""
    config = variant(name)
    patches = config.grid[0] * config.grid[1] * config.channels * config.patch**2 * config.width
    assert counted(config, train=True)[1] == training_flops(config) - 2 * patches


GMACS = {
    "B/32": 4.408,
    "B/16": 17.563,
    "L/32": 15.377,
    "L/16": 61.554,
    "H/14": 167.294,
    "R50x1": 4.087,
    "R50+B/16": 21.53,
}


@pytest.mark.parametrize(("name", "expected"), GMACS.items())
def test_published_macs(name, expected):
    digits = len(str(expected).split(".")[1])
    assert round(macs(variant(name, classes=0)) / 1e9, digits) == expected  # counted without a classifier


# paper, Table 6: pre-training compute in exaFLOPs, on the 303 million images of JFT
EXAFLOPS = {("B/32", 7): 55, ("B/16", 7): 224, ("L/32", 7): 196, ("L/16", 7): 783, ("H/14", 14): 4262}
HYBRID_EXAFLOPS = {("R50+L/32", 7): 246, ("R50+B/16", 7): 274}


@pytest.mark.parametrize(("run", "expected"), [*EXAFLOPS.items(), *HYBRID_EXAFLOPS.items()])
def test_the_papers_pre_training_compute(run, expected):
    name, epochs = run
    ours = training_flops(variant(name)) * 303e6 * epochs / 1e18
    assert ours == pytest.approx(expected, rel=0.025)


def test_parallel_branches_cost_what_depth_costs():
    """Follow-up, section 3: S18x2 has the parameters and FLOPs of S36."""
    wide, deep = variant("S18x2/16"), variant("S36x1/16")
    assert (learned_values(wide), macs(wide)) == (learned_values(deep), macs(deep))


def test_published_parameter_counts():
    assert learned_values(variant("B/16")) == 86_567_656
    assert learned_values(variant("L/16")) == 304_326_632
    assert learned_values(variant("H/14")) == 632_045_800


@pytest.mark.parametrize("count", [learned_values, macs], ids=["parameters", "MACs"])
def test_the_follow_ups_complexity_claims(count: Callable[[ViTConfig | ResNetConfig], int]) -> None:
    """Section 3.1, without stem and classifier: proportional to depth, quadratic in width at a fixed number of tokens.

    Attention maps (linear in the width), biases and norms (linear, too) make the quadratic part a little less than 4.
    """

    def blocks(name: str) -> int:
        one, two = (count(variant(f"{name}{depth}x1/16", classes=0)) for depth in (1, 2))
        return two - one  # a block: all else cancels

    deep, shallow = (count(variant(f"S{depth}x1/16", classes=0)) for depth in (36, 12))
    assert deep - shallow == 24 * blocks("S")
    assert blocks("B") / blocks("S") == pytest.approx(4, rel=0.05)
