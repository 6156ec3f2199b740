"""Updates of low rank: before the first step they change nothing, and they are those of peft on the same weights."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.low_rank import Adapted, adapt, merged, separated, updated
from vitrail.model.variants import ViTConfig

SIDE = 16
TINY: dict[str, Any] = dict(width=24, depth=2, heads=3, mlp_dim=32, patch=4, image_size=(SIDE, SIDE), classes=3)
KINDS: dict[str, ViTConfig] = {
    "plain": ViTConfig.of(**TINY),
    "parallel": ViTConfig.of(**TINY, block="parallel", branches=2),
    "axial": ViTConfig.of(**TINY, block="axial", pool="gap", positions="relative"),
    "beit": ViTConfig.of(**TINY, positions="relative_bias", pool="gap", key_bias=False, layer_scale=0.1),
    "map": ViTConfig.of(**TINY, pool="map"),
    "swiglu": ViTConfig.of(**TINY, mlp="swiglu", registers=2),
}
LAYERS = {"plain": 8, "parallel": 16, "axial": 16, "beit": 8, "map": 13, "swiglu": 8}
RANK, ALPHA = 4, 8.0


def network(config: ViTConfig) -> Any:
    torch.manual_seed(0)
    model: Any = build(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.0 if parameter.ndim > 1 else 0.5, std=0.2)
    return model


def with_updates(model: Any) -> Any:
    """The network with an update on every dense layer of its blocks and its pooling, frozen but for the factors."""
    adapted = copy.deepcopy(model)
    adapt(adapted, [adapted.blocks, adapted.pool], RANK, ALPHA / RANK)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(".lora." in name)
    return adapted


def pixels() -> Tensor:
    return torch.randint(0, 256, (3, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_before_the_first_step_outputs_are_the_base_s_to_the_bit(kind: str, bf16: bool) -> None:
    model = network(KINDS[kind])
    adapted = with_updates(model)
    layers = [layer for layer in adapted.modules() if isinstance(layer, Adapted)]
    assert len(layers) == LAYERS[kind]
    for layer in layers:  # A is not zero, and within Kaiming's bound 1 / sqrt(inputs); B is zero
        assert not layer.lora.up.weight.any()
        assert 0.5 < layer.lora.down.weight.abs().max() * math.sqrt(layer.in_features) <= 1
    # which kernel computes an attention, and so how it rounds, depends on whether a gradient is needed
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for mode in (True, False):
            assert torch.equal(adapted.train(mode)(pixels()), model.train(mode)(pixels()))


@pytest.mark.parametrize("kind", KINDS)
def test_two_paths_are_the_merged_network(kind: str) -> None:
    """In float64, against a plain network whose weights are W + scale B A by a matrix product."""
    adapted = with_updates(network(KINDS[kind]))
    for name, parameter in adapted.named_parameters():
        if ".lora." in name:
            nn.init.normal_(parameter, std=0.2)
    plain = network(KINDS[kind])
    state = {name: value for name, value in adapted.state_dict().items() if ".lora." not in name}
    for name, layer in adapted.named_modules():
        if isinstance(layer, Adapted):
            update = ALPHA / RANK * layer.lora.up.weight.double() @ layer.lora.down.weight.double()
            state[f"{name}.weight"] = layer.weight.double() + update
    plain.load_state_dict(state)
    plain = plain.double()
    plain.load_state_dict(state)  # after the cast, so that nothing is rounded to float32
    expected = plain(pixels())
    assert (expected - network(KINDS[kind]).double()(pixels())).abs().max() > 0.1
    torch.testing.assert_close(adapted.double()(pixels()), expected, rtol=1e-9, atol=1e-9)
    # as they are stored: the same values to the rounding of float32
    tensors, factors = separated(adapted.float())
    for name, value in updated({**tensors, **factors}, factors).items():
        torch.testing.assert_close(value.double(), state[name].double(), rtol=1e-6, atol=1e-7, msg=name)


def test_merging_has_the_same_bits_in_any_order_of_rows_and_on_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, down, up = (torch.randn(*shape, generator=generator) for shape in ((300, 200), (16, 200), (300, 16)))
    whole = merged(weight, down, up)
    assert torch.equal(torch.cat([merged(weight[i : i + 1], down, up[i : i + 1]) for i in range(300)]), whole)
    assert not torch.equal(weight + up @ down, whole)  # a product in float32 rounds otherwise
    torch.testing.assert_close(whole.double(), weight.double() + up.double() @ down.double(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["plain", "parallel", "swiglu"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_outputs_gradients_and_steps_are_those_of_peft(kind: str, optimizer: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; pip install 'vitrail[test]'")
    ours, base = with_updates(network(KINDS[kind])), network(KINDS[kind])
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["qkv", "out", "fc1", "fc2"])
    theirs = peft.get_peft_model(base, config)
    mine = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    sides = {"lora_A.default": "lora.down", "lora_B.default": "lora.up"}
    peers: dict[str, nn.Parameter] = {}
    for name, parameter in theirs.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        if parameter.requires_grad:
            short = name.removeprefix("base_model.model.")
            for old, new in sides.items():
                short = short.replace(old, new)
            peers[short] = parameter
            with torch.no_grad():
                parameter.copy_(mine[short])
    assert peers.keys() == mine.keys()
    labels, rate = torch.arange(3), 0.05
    optimizers = [optimizer(side.values(), lr=rate) for side in (mine, peers)]
    for _ in range(4):
        logits = [model(pixels()) for model in (ours, theirs)]
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
        for output in logits:
            nn.functional.cross_entropy(output, labels).backward()
        for name, parameter in mine.items():
            expected = peers[name].grad
            assert expected is not None and parameter.grad is not None
            scale = max(expected.abs().max().item(), 1e-3)
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-5 * scale, msg=name)
        with torch.no_grad():  # so that AdamW's division does not enlarge rounding where a gradient is 0
            for name, parameter in mine.items():
                peers[name].grad.copy_(parameter.grad)  # type: ignore[union-attr]
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert all(parameter.any() for name, parameter in mine.items() if name.endswith("up.weight"))
    tensors, factors = separated(ours)
    whole = theirs.merge_and_unload().state_dict()
    for name, value in updated({**tensors, **factors}, factors).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_rank_that_is_not_low_is_refused() -> None:
    model = network(KINDS["plain"])
    with pytest.raises(UsageError, match="lora_rank is 25, and the smallest adapted layer has 24"):
        adapt(model, [model.blocks], 25, 1.0)
    assert not any(isinstance(layer, Adapted) for layer in model.modules())
