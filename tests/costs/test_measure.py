"""Searches and memory lines by hand; a tiny network measured. No test here asserts a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from vitrail.costs import measure
from vitrail.costs.count import LiveTensors, activation_bytes
from vitrail.costs.figure import Curve, draw_speed
from vitrail.costs.measure import (
    Line,
    Mode,
    Point,
    TimedNetwork,
    best,
    fastest,
    matmul_rate,
    memory_line,
    peak_bytes,
    rate,
    sweep,
)
from vitrail.model.variants import ResNetConfig, ViTConfig

CPU = torch.device("cpu")
TINY = ViTConfig(width=64, depth=6, heads=2, mlp_dim=256, patch=8, image_size=(64, 64), classes=5)


def point(batch: int, speed: float) -> Point:
    return Point(batch, speed, speed, speed)


def test_the_sweep_ends_when_two_larger_batches_are_no_faster() -> None:
    speeds = {1: 10.0, 2: 18.0, 4: 30.0, 8: 30.1, 16: 29.0, 32: 99.0}
    points = sweep(lambda batch: point(batch, speeds[batch]), speeds)
    assert [found.batch for found in points] == [1, 2, 4, 8, 16]
    assert best(points).batch == 4  # 8 is faster by less than counts


def test_the_sweep_goes_on_while_larger_batches_are_faster() -> None:
    points = sweep(lambda batch: point(batch, batch), [1, 2, 4, 8])
    assert [found.batch for found in points] == [1, 2, 4, 8]
    assert best(points).batch == 8


def test_images_are_made_on_the_device_and_only_the_best_batch_is_measured_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed = TimedNetwork(TINY, "inference", torch.device("meta"), "float32")
    assert timed.images(3).device.type == "meta"  # nothing is made elsewhere and copied
    asked: list[tuple[int, float]] = []

    def measured(timed: object, batch: int, seconds: float) -> Point:
        asked.append((batch, seconds))
        return point(batch, min(batch, 4))

    monkeypatch.setattr(measure, "rate", measured)
    found = fastest(timed, [1, 2, 4, 8, 16, 32], seconds=1.0)
    assert asked == [(1, 0.25), (2, 0.25), (4, 0.25), (8, 0.25), (16, 0.25), (4, 1.0)]
    assert [one.batch for one in found] == [1, 2, 4, 8, 16]


def test_a_memory_line() -> None:
    line = Line(fixed=100.0, per_image=10.0)
    assert line.bytes(3) == 130
    assert [line.largest(memory) for memory in (0, 109, 110, 139, 140)] == [0, 0, 1, 3, 4]
    floored = Line(fixed=100.0, per_image=10.0, floor=125.0)
    assert [floored.bytes(batch) for batch in (1, 2, 3)] == [125, 125, 130]
    assert [floored.largest(memory) for memory in (124, 125, 130)] == [0, 2, 3]


def test_live_tensors_by_hand() -> None:
    held = torch.zeros(100)
    with LiveTensors([held]) as live:
        a = held + 1  # 400 bytes more
        b = a.view(10, 10)  # the same memory
        b = b * 2  # 400 more; a is still there
        del a
        c = b.double()  # 800 more
        del b
        assert live.alive == 400 + 800
        del c
    assert live.alive == 400
    assert live.peak == 400 + 400 + 400 + 800 - 400
    held += 1


def test_live_tensors_see_the_backward_pass() -> None:
    layer = nn.Linear(10, 20)
    images = torch.ones(5, 10)
    with LiveTensors([*layer.parameters(), images]) as live:
        layer(images).sum().backward()
    gradients = sum(parameter.numel() for parameter in layer.parameters())
    assert live.alive == 4 * (2 * gradients + images.numel())
    assert live.peak >= live.alive


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    "config", [TINY, ResNetConfig(units=(1, 1), width=16, image_size=33, classes=4)], ids=["vit", "resnet"]
)
def test_a_trial(config: ViTConfig | ResNetConfig, mode: Mode, precision: str) -> None:
    timed = TimedNetwork(config, mode, CPU, precision)  # type: ignore[arg-type]
    found = rate(timed, 2, seconds=0.01)
    assert found.batch == 2
    assert 0 < found.low <= found.images_per_second <= found.high
    line = memory_line(timed)
    assert line.per_image > 0
    assert line.bytes(24) == pytest.approx(peak_bytes(timed, 24), rel=0.1)  # six times what was looked at


@pytest.mark.full_size
def test_training_learns_and_inference_does_not() -> None:
    for mode, changes in (("training", True), ("inference", False)):
        timed = TimedNetwork(TINY, mode, CPU, "float32")  # type: ignore[arg-type]
        before = [parameter.detach().clone() for parameter in timed.model.parameters()]
        timed(timed.images(2))
        same = all(torch.equal(a, b) for a, b in zip(before, timed.model.parameters(), strict=True))
        assert same != changes
        assert all(parameter.grad is None for parameter in timed.model.parameters())


def test_the_memory_of_an_image_is_constant_in_depth_and_grows_with_the_width() -> None:
    """The follow-up's section 3.1 says of inference: constant in depth, quadratic in width. Activations are linear."""

    def per_image(**changes: int) -> float:
        timed = TimedNetwork(replace(TINY, **changes), "inference", CPU, "float32")  # type: ignore[arg-type]
        return (peak_bytes(timed, 48) - peak_bytes(timed, 32)) / 16

    assert per_image(depth=2) == per_image(depth=4)  # the last block reads the class token alone
    assert 1.5 < per_image(depth=2, width=128, heads=4, mlp_dim=512) / per_image(depth=2) <= 2


@pytest.mark.full_size
def test_peak_memory_holds_the_activations_and_the_state() -> None:
    timed = TimedNetwork(TINY, "training", CPU, "float32")
    line = memory_line(timed)
    kept = activation_bytes(TINY, precision="float32", place="cpu")
    assert kept < line.per_image < 2 * kept
    parameters = sum(parameter.numel() for parameter in timed.model.parameters())
    assert line.fixed == pytest.approx(12 * parameters, rel=0.15)  # weights and two moments
    assert line.floor > 16 * parameters  # and gradients
    assert TimedNetwork(TINY, "inference", CPU, "float32").packed_bytes() > 3 * parameters


def test_a_matmul_rate_is_a_rate() -> None:
    assert matmul_rate(CPU, "float32", side=64, seconds=0.001) > 0


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    curves = [
        Curve("B/16", "inference", [64, 224], [90.0, 9.0], [1000, 100]),
        Curve("B/16", "training", [64, 224], [30.0, 3.0], [100, 0]),
    ]
    draw_speed(curves, tmp_path / "bench.png", "a machine")
    with Image.open(tmp_path / "bench.png") as picture:
        assert picture.width > 1000
