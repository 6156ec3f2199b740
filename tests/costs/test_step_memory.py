"""The formula of a step's memory, by hand and against the tensors that are alive in real steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from like_a_gpu import like_a_gpu
from test_memory import fused

from vitrail.costs.count import LiveTensors, activation_bytes, learned_values
from vitrail.costs.memory import StepMemory, recomputed, step_memory
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.variants import ViTConfig, variant
from vitrail.torch_private import FakeTensorMode

SMALL: dict[str, Any] = dict(width=64, depth=6, heads=2, mlp_dim=256, patch=8, image_size=(32, 32), classes=10)


def test_both_peaks_by_hand() -> None:
    held = StepMemory(state=100, gradients=50, beside=20, image=10)
    assert [held.bytes(images) for images in (1, 3, 4)] == [150, 150, 160]
    assert [held.largest(memory) for memory in (149, 150, 160, 169)] == [0, 3, 4, 4]
    assert all(held.bytes(held.largest(memory)) <= memory for memory in range(150, 300))
    assert all(held.bytes(held.largest(memory) + 1) > memory for memory in range(150, 300))


def test_the_state_by_hand() -> None:
    """A weight has 4 bytes, its gradient 4, its two moments 8; its average 4, its copy in bfloat16 2."""
    plain = step_memory(100, 7.0)
    assert (plain.state, plain.gradients, plain.beside) == (1200, 400, 400)
    assert step_memory(100, 7.0, blocks=4).beside == 100
    assert step_memory(100, 7.0, blocks=4, accumulates=True).beside == 400
    assert step_memory(100, 7.0, blocks=4, precision="bf16").beside == 300
    averaged = step_memory(100, 7.0, trainable=10, stored=30)
    assert (averaged.state, averaged.gradients) == (400 + 120, 40)
    cut = step_memory(100, 7.0, blocks=10, shards=4)  # two blocks of weights and the gradients of one are gathered
    assert (cut.state, cut.gradients, cut.beside) == (300, 100, 40 + 80)


def alive(config: ViTConfig, images: int, precision: str, monkeypatch: pytest.MonkeyPatch, recompute: bool) -> int:
    """The peak of a forward and a backward pass with an accelerator's layers, without an optimiser."""
    like_a_gpu(monkeypatch)
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
    monkeypatch.setattr("vitrail.model.vit.init_weights", lambda *_: None)  # asks for values
    with FakeTensorMode():  # memory is counted, and nothing computed: not every processor is fast at bfloat16
        model: Any = build(config).train()
        for block in model.blocks:
            block.recompute = recompute
        pixels = torch.zeros(images, 3, *config.image_size, dtype=torch.uint8)
        with LiveTensors(list(model.parameters())) as live, attention_path("fused"):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = model(pixels)
            F.cross_entropy(logits.float(), torch.zeros(images, dtype=torch.int64)).backward()
    return live.peak


def expected(config: ViTConfig, images: int, precision: Any, recompute: bool = False) -> int:
    image = float(activation_bytes(config, precision=precision))
    if recompute:
        image = recomputed(image, config.depth)
    held = step_memory(learned_values(config), image, stored=0, blocks=config.depth, precision=precision)
    return held.bytes(images)


@pytest.mark.parametrize("images", [1, 32])
def test_a_small_network(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one image the update is the peak, with 32 the forward pass."""
    config = ViTConfig.of(**SMALL)
    found = alive(config, images, "bf16", monkeypatch, recompute=False)
    assert expected(config, images, "bf16") == pytest.approx(found, rel=0.03)


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("name", "images", "error"), [("S/16", 2, 0.02), ("S/16", 8, 0.01), ("B/16", 2, 0.02), ("B/16", 4, 0.01)]
)
def test_networks_of_the_paper(name: str, images: int, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = alive(variant(name), images, "bf16", monkeypatch, recompute=False)
    assert expected(variant(name), images, "bf16") == pytest.approx(found, rel=error)


@pytest.mark.nightly("test_networks_of_the_paper, of smaller networks")
@pytest.mark.parametrize("images", [2, 4])
def test_a_large_network(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = alive(variant("L/16"), images, "bf16", monkeypatch, recompute=False)
    assert expected(variant("L/16"), images, "bf16") == pytest.approx(found, rel=0.01)


@pytest.mark.full_size
def test_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = variant("S/16")
    more, fewer = (alive(config, images, "bf16", monkeypatch, recompute=True) for images in (6, 2))
    each = recomputed(activation_bytes(config), config.depth)
    assert each == pytest.approx((more - fewer) / 4, rel=0.15) and each >= (more - fewer) / 4
