"""BiT against timm's, and AxialResNet against Axial-DeepLab's equation written out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import timm
import torch
from timm.layers import StdConv2d as TimmStdConv2d
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.axial import AxisAttention, RowColumnAttention
from vitrail.model.resnet import ResNet
from vitrail.model.variants import BIT_UNITS, ResNetConfig, variant

BIT_NAMES = ["R50x1", "R50x2", "R50x3", "R101x1", "R101x3", "R152x1", "R152x2", "R152x4", "R200x3"]
REGISTERED = {"R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4"}

TINY = ResNetConfig(units=(1, 2, 1), width=32, image_size=(64, 64), classes=5)


@torch.no_grad()
def randomise(module: nn.Module, kernel_scale: float = 1.0) -> nn.Module:
    """Give every parameter a value of its own, so that a swapped or unused one shows."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in module.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim >= 2:
            tensor.copy_(noise * kernel_scale / math.sqrt(tensor[0].numel()))
        else:
            tensor.copy_(1 + 0.3 * noise if name.endswith("weight") else 0.3 * noise)
    return module


def timm_bit(units: tuple[int, ...], width: float, classes: int) -> ResNetV2:
    conv = partial(TimmStdConv2d, eps=1e-8)
    channels = tuple(256 * 2**stage for stage in range(len(units)))
    return ResNetV2(units, channels, classes, width_factor=width, stem_type="fixed", conv_layer=conv)


def from_timm(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in weights.items():
        name = name.replace("stem.conv.", "root.").replace("blocks.", "").replace("downsample.conv.", "shortcut.")
        renamed[name.replace("head.fc.", "head.")] = tensor.flatten(1) if name == "head.fc.weight" else tensor
    return renamed


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(64, 64), (32, 96), (70, 45)])
def test_bit_is_timms(height: int, width: int) -> None:
    """Same weights, same logits, odd sizes included; kernels so large that the two epsilons do not count."""
    theirs = randomise(timm_bit(TINY.units, 0.5, 5), kernel_scale=1e4)
    nn.init.normal_(theirs.head.fc.weight, std=0.1)
    ours = ResNet(TINY)
    ours.load_state_dict(from_timm(theirs.state_dict()))
    for contrast in (1.0, 1e-3):  # at the lower one GroupNorm's epsilon counts
        images = contrast * torch.randn(2, 3, height, width)
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)
        pooled = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        torch.testing.assert_close(ours.features(images), pooled, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_timms_bit_exactly() -> None:
    """Kernels so small that the epsilon counts: timm's, and another GroupNorm's."""
    theirs = randomise(timm_bit(TINY.units, 0.5, 5), kernel_scale=1e-3)
    nn.init.normal_(theirs.head.fc.weight, std=0.1)
    images = torch.randn(2, 3, 64, 64)
    for eps in (1e-5, 1e-2):
        for module in theirs.modules():
            if isinstance(module, nn.GroupNorm):
                module.eps = eps
        ours = ResNet(replace(TINY, std_conv="timm", group_norm_eps=eps))
        ours.load_state_dict(from_timm(theirs.state_dict()))
        expected = theirs(images)
        torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-4)
        official = ResNet(replace(TINY, group_norm_eps=eps))
        official.load_state_dict(ours.state_dict())
        assert (official(images) - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("name", BIT_NAMES)
def test_parameters_are_timms(name: str) -> None:
    depth, width = name[1:].split("x")
    with torch.device("meta"):
        ours = ResNet(variant(name, classes=21843))
        theirs = timm_bit(BIT_UNITS[int(depth)], int(width), 21843)
        assert parameters(ours) == parameters(theirs)
        if name in REGISTERED:
            registered = timm.create_model(f"resnetv2_{depth}x{width}_bit", num_classes=21843)
            assert parameters(ours) == parameters(registered)
    assert ours.state_dict().keys() == from_timm(theirs.state_dict()).keys()


def test_uint8_images_are_normalised_inside() -> None:
    config = ResNetConfig(units=(1,), width=32, classes=3, mean=(0.1, 0.4, 0.5), std=(0.2, 0.3, 0.25))
    model = randomise(ResNet(config))
    images = torch.randint(0, 256, (2, 3, 40, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (config.mean, config.std))
    torch.testing.assert_close(model(images), model((images / 255 - mean) / std), rtol=1e-4, atol=1e-5)
    assert model.to(torch.bfloat16)(images).dtype == torch.bfloat16


@torch.inference_mode()
def test_the_order_of_the_pixels_in_memory_does_not_matter() -> None:
    """With channels innermost, torch's GroupNorm rounds ten times as much on a CPU."""
    model = randomise(ResNet(TINY)).eval()
    for images in (torch.randn(2, 3, 64, 64), torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)):
        assert torch.equal(model(images.contiguous(memory_format=torch.channels_last)), model(images))


@pytest.mark.parametrize("axial", [False, True])
def test_a_new_head_starts_at_zero_and_the_features_stay(axial: bool) -> None:
    config = ResNetConfig(units=(1, 1), width=16, image_size=(32, 32), classes=5, axial=axial)
    model = randomise(ResNet(config))
    images = torch.randn(2, 3, 32, 48)
    before = model.features(images)
    assert before.shape == (2, 128) and model(images).shape == (2, 5)
    model.reset_head(7)
    assert model.config.classes == 7
    assert torch.equal(model(images), torch.zeros(2, 7))
    assert torch.equal(model.features(images), before)
    model.reset_head(0)
    assert model.head is None
    assert torch.equal(model(images), before)


@pytest.mark.parametrize("axial", [False, True])
def test_every_parameter_learns(axial: bool) -> None:
    config = ResNetConfig(units=(1, 2), width=16, image_size=(32, 32), channels=1, classes=5, axial=axial)
    model = randomise(ResNet(config))
    model(torch.randn(2, 1, 32, 32)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("axial", [False, True])
def test_a_fresh_network_lets_every_residual_branch_learn(axial: bool) -> None:
    """The hybrid's zero scale would kill a pre-activation branch: a ReLU of zeros has no gradient."""
    torch.manual_seed(0)
    model = ResNet(ResNetConfig(units=(1, 2), width=16, image_size=(32, 32), classes=0, axial=axial))
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


# AxialResNet


def test_the_axial_config_builds_the_axial_network() -> None:
    with torch.device("meta"):
        axial = ResNet(variant("axial-R50"))
    assert not any(isinstance(m, RowColumnAttention) for m in ResNet(TINY).modules())
    assert not [m for m in axial.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert sum(isinstance(m, RowColumnAttention) for m in axial.modules()) == sum(BIT_UNITS[50])


def test_axial_parameters_are_the_closed_form() -> None:
    """Each 3x3 kernel, 9 w^2, gives way to two of w x 2w, two tables of relative positions and a GroupNorm.

    A table has a query and a key part of w/16 features and a value part of w/8, for 2 * span - 1 distances.
    A stride is taken after attention, so a stage's first block sees the size of the stage before.
    """
    with torch.device("meta"):
        plain, axial = ResNet(variant("R50x1")), ResNet(variant("axial-R50"))
    change = 0
    for stage, units in enumerate(BIT_UNITS[50]):
        width, size = 64 * 2**stage, 56 // 2**stage
        for unit in range(units):
            span = 2 * size if stage and not unit else size
            change += 2 * (2 * width**2 + width // 4 * (2 * span - 1)) + 2 * width - 9 * width**2
    assert parameters(axial) == parameters(plain) + change


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 4, 6])
def test_axis_attention_is_its_equation(length: int) -> None:
    """Axial-DeepLab's Eq. 4, one query and head at a time, on lines shorter than its table, equal, longer."""
    span, heads, half = 4, 8, 2
    layer = randomise(AxisAttention(32, span))
    lines = torch.randn(3, length, 32)
    out = layer(lines)
    for head in range(heads):
        kernel = layer.qkv.weight.view(heads, 4 * half, 32)[head]
        q, k, v = (lines @ kernel.T).split([half, half, 2 * half], dim=-1)
        for i in range(length):
            columns = [span - 1 + max(1 - span, min(span - 1, j - i)) for j in range(length)]
            r_q, r_k, r_v = (table.T for table in layer.relative[:, columns].split([half, half, 2 * half]))
            logits = (q[:, i, None] * (k + r_q)).sum(-1) + (k * r_k).sum(-1)
            weights = (logits / math.sqrt(half)).softmax(-1)
            expected = torch.einsum("nj,njc->nc", weights, v + r_v)
            found = out[:, i, head * 2 * half : (head + 1) * 2 * half]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_row_then_column_attention_sees_the_whole_map_and_its_parts_one_line() -> None:
    torch.manual_seed(0)
    layer = randomise(RowColumnAttention(16, 1, (3, 5)))
    assert layer.row.relative.shape[1] == 2 * 5 - 1 and layer.column.relative.shape[1] == 2 * 3 - 1
    maps = torch.randn(1, 16, 3, 5, requires_grad=True)
    (reach,) = torch.autograd.grad(layer(maps)[0, :, 1, 2].square().sum(), maps)
    assert (reach.abs().sum((0, 1)) > 0).all()
    lines = torch.randn(3, 5, 16, requires_grad=True)
    (reach,) = torch.autograd.grad(layer.row(lines)[1].square().sum(), lines)
    assert [bool(line.any()) for line in reach] == [False, True, False]


def test_axial_networks_take_other_shapes_than_their_own() -> None:
    config = ResNetConfig(units=(1, 1, 1), width=16, image_size=(32, 64), classes=2, axial=True)
    model = randomise(ResNet(config))
    for height, width in [(32, 64), (64, 32), (45, 70)]:
        out = model(torch.randn(1, 3, height, width))
        assert out.shape == (1, 2) and torch.isfinite(out).all()


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(UsageError, match="divisible by 16, not 24"):
        ResNet(ResNetConfig(width=24, axial=True))
