"""`torch.jit.trace`, `torch.export` and ONNX's older exporter with height and width left open: equal to eager mode."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import vitrail
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig

SMALL: dict[str, Any] = dict(width=32, heads=2, depth=1, mlp_dim=32, image_size=16, classes=3)
BIT = ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(32, 32))
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "1d": ("Ti/4", dict(pool="map")),
    "1d, timm": ("Ti/4", dict(resize_mode="timm", stem="early")),
    "every layer": ("Ti/4", dict(place="every", registers=2, depth=2)),
    "2d": ("Ti/4", dict(positions="2d", block="parallel", branches=2)),
    "sincos": ("Ti/4", dict(positions="sincos")),
    "relative": ("Ti/4", dict(positions="relative")),
    "relative_bias": ("Ti/4", dict(positions="relative_bias")),
    "relative_bias, timm": ("Ti/4", dict(positions="relative_bias", resize_mode="timm", pool="gap", class_token=True)),
    "relative_bias, hf": ("Ti/4", dict(positions="relative_bias", resize_mode="hf", place="shared", depth=2)),
    "axial": ("axial-Ti/4", {}),
    "hybrid": ("R+Ti/16", dict(image_size=64)),
    "BiT": ("R50x1", {}),
}


def network(kind: str) -> tuple[Any, int, list[tuple[int, int]]]:
    """Return a network with random weights, its patch, and sizes of images: the configured one first."""
    name, changes = KINDS[kind]
    torch.manual_seed(0)
    model: Any = build(BIT).eval() if kind == "BiT" else vitrail.create(name, **SMALL | changes).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    side, patch = model.config.image_size[0], getattr(model.config, "patch", 16)
    steps = ((0, 0), (2, 1), (1, 0), (0, 3), (side // patch, side // patch))
    return model, patch, [(side + rows * patch, side + columns * patch) for rows, columns in steps]


def images(count: int, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    if dtype == torch.uint8:
        return torch.randint(0, 256, (count, 3, *size), generator=generator, dtype=dtype)
    return torch.randn(count, 3, *size, generator=generator)


def check(
    model: nn.Module, graph: Callable[[Tensor], Tensor], sizes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    for size in sizes:
        batch = images(3, size, dtype)
        expected = model(batch)
        assert (graph(batch) - expected).abs().max() <= 1e-5 * expected.abs().max(), size
    assert not torch.equal(model(images(1, sizes[0], dtype)), model(images(1, sizes[1], dtype)))


@pytest.mark.export
@pytest.mark.parametrize("start", [0, 1], ids=["from its own size", "from another size"])
@pytest.mark.parametrize("kind", KINDS)
def test_jit_trace(kind: str, start: int) -> None:
    model, _, sizes = network(kind)
    dtype = torch.float32 if start else torch.uint8
    traced = torch.jit.trace(model, images(2, sizes[start], dtype), check_trace=False)
    check(model, traced, sizes, dtype)


BY_NIGHT = pytest.mark.nightly("test_jit_trace of the same kind, and test_export of another way to resample")


@pytest.mark.export
@pytest.mark.parametrize(
    ("kind", "start"),
    [
        *((kind, 0) for kind in ("2d", "relative", "axial", "BiT")),
        *((kind, 1) for kind in ("1d, timm", "relative_bias, timm")),
        *(pytest.param(kind, 0, marks=BY_NIGHT) for kind in KINDS if kind not in ("2d", "relative", "axial", "BiT")),
        pytest.param("BiT", 1, marks=BY_NIGHT),
    ],
)
def test_export(kind: str, start: int) -> None:
    """From the network's own size, to which a branch would fix it; from another size each way to resample once."""
    model, patch, sizes = network(kind)
    dtype = torch.float32 if start else torch.uint8
    shapes = {0: Dim("batch", min=1), 2: patch * Dim("rows", min=1, max=64), 3: patch * Dim("columns", min=1, max=64)}
    program = export(model, (images(2, sizes[start], dtype),), dynamic_shapes=(shapes,))
    check(model, program.module(), sizes, dtype)


@pytest.mark.export
@pytest.mark.parametrize("kind", ["1d", "relative", "axial", "hybrid", "BiT"])
def test_the_older_onnx_exporter(kind: str) -> None:
    model, _, sizes = network(kind)
    session = exported(model, images(2, sizes[0], torch.uint8), {0: "batch", 2: "height", 3: "width"})
    check(model, lambda batch: ran(session, batch), sizes, torch.uint8)


@pytest.mark.export
@pytest.mark.parametrize("kind", ["1d, timm", "relative_bias, timm"])
def test_the_older_onnx_exporter_keeps_the_size_where_it_cannot_resample(kind: str) -> None:
    model, _, sizes = network(kind)
    batch = images(3, sizes[0], torch.float32)
    found, expected = ran(exported(model, batch[:2], {0: "batch"}), batch), model(batch)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def exported(model: nn.Module, batch: Tensor, axes: dict[int, str]) -> Any:
    """Return an ONNX Runtime session of the network, made by torch's older exporter with these axes left open."""
    stream = io.BytesIO()
    torch.onnx.export(model, (batch,), stream, dynamo=False, input_names=["images"], dynamic_axes={"images": axes})
    return onnxruntime.InferenceSession(stream.getvalue())


def ran(session: Any, batch: Tensor) -> Tensor:
    return torch.from_numpy(session.run(None, {"images": batch.numpy()})[0])
