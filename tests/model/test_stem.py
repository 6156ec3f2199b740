"""The stems against timm's, the papers' numbers and written-out arithmetic; no talk between patches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import StdConv2dSame
from timm.models.levit import Stem16
from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.errors import UsageError
from vitrail.model.stdconv import StdConv2d
from vitrail.model.stem import build_stem, hmlp_stages
from vitrail.model.variants import HYBRIDS, ViTConfig, variant

STEMS = [
    ("linear", "batch"),
    *((stem, norm) for stem in ("linear+norm", "linear+norm+gelu") for norm in ("batch", "layer")),
    ("linear+gelu", "batch"),
    *((stem, norm) for stem in ("levit", "early", "hmlp") for norm in ("batch", "layer")),
    ("resnet", "batch"),
]


def tiny(stem: str, patch: int = 16, **values: object) -> ViTConfig:
    base = ViTConfig(width=32, depth=1, heads=2, mlp_dim=64, patch=patch, image_size=(patch * 2, patch * 2))
    return base.changed(stem=stem, **values)


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0, kernel_scale: float = 1.0) -> nn.Module:
    """Give every parameter and running statistic a value of its own, so that a swapped one shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("running_var"):
            tensor.copy_(noise.abs() + 0.5)
        elif tensor.ndim >= 2:
            tensor.copy_(noise * kernel_scale / math.sqrt(tensor[0].numel()))
        else:
            tensor.copy_(1 + 0.3 * noise if name.endswith("weight") else 0.3 * noise)
    return module


# shapes


@pytest.mark.parametrize(("stem", "norm"), STEMS)
@pytest.mark.parametrize(("rows", "columns", "channels"), [(1, 1, 3), (2, 3, 3), (3, 2, 1), (1, 2, 5)])
def test_one_cell_per_patch_whatever_the_shape(stem: str, norm: str, rows: int, columns: int, channels: int) -> None:
    config = tiny(stem, channels=channels, stem_norm=norm, stem_units=(1, 1, 1) if stem == "resnet" else ())
    module = randomise(build_stem(config)).eval()
    out = module(torch.randn(2, channels, rows * 16, columns * 16))
    assert out.shape == (2, 32, rows, columns)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("stem", "norm"), STEMS)
def test_every_parameter_learns(stem: str, norm: str) -> None:
    config = tiny(stem, stem_norm=norm, stem_units=(1, 1, 2) if stem == "resnet" else ())
    module = randomise(build_stem(config)).eval()  # a batch norm in training cancels the bias in front of it
    out = module(torch.randn(2, 3, 32, 48))
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("stem", ["levit", "early"])
@pytest.mark.parametrize("patch", [2, 4, 8, 32])
def test_convolutional_stems_halve_the_image_until_the_patch(stem: str, patch: int) -> None:
    module = build_stem(tiny(stem, patch))
    assert module(torch.randn(2, 3, patch * 2, patch * 3)).shape == (2, 32, 2, 3)
    strided = [m for m in module.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    assert 2 ** len(strided) == patch and all(m.kernel_size == (3, 3) for m in strided)


# refusals


@pytest.mark.parametrize("stem", ["levit", "early"])
@pytest.mark.parametrize("patch", [1, 6, 14, 24])
def test_convolutional_stems_refuse_a_patch_they_cannot_halve_to(stem: str, patch: int) -> None:
    with pytest.raises(UsageError, match=f"power of 2.*not {patch}"):
        build_stem(tiny(stem, patch))


def test_a_width_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UsageError, match="divisible by 8; it is 36"):
        build_stem(tiny("levit", width=36))
    with pytest.raises(UsageError, match="divisible by 4; the width is 34"):
        build_stem(tiny("hmlp", width=34))


def test_a_hybrid_refuses_a_patch_its_resnet_does_not_make() -> None:
    with pytest.raises(UsageError, match="multiple of 32 px, not 16"):
        build_stem(tiny("resnet", stem_units=(1, 1, 1, 1)))
    with pytest.raises(UsageError, match="multiple of 16 px, not 8"):
        build_stem(tiny("resnet", 8, stem_units=(1, 1, 1)))


# convolutional stems against other implementations


def test_levit_stem_is_timms() -> None:
    ours, theirs = build_stem(tiny("levit")), Stem16(3, 32, act_layer=nn.Hardswish)
    randomise(theirs)
    theirs.eval(), ours.eval()
    names = list(ours.state_dict())
    assert len(names) == len(theirs.state_dict())
    ours.load_state_dict(dict(zip(names, theirs.state_dict().values(), strict=True)))
    images = torch.randn(2, 3, 64, 32)
    torch.testing.assert_close(ours(images), theirs(images))


def test_early_stem_has_the_size_its_paper_gives() -> None:
    """ViT_C-1GF: widths 24, 48, 96, 192, then 1x1 (Xiao et al., section 4); a bias only in the 1x1."""
    module = build_stem(tiny("early", width=192))
    kernels = 9 * (3 * 24 + 24 * 48 + 48 * 96 + 96 * 192)
    norms = 2 * (24 + 48 + 96 + 192)
    assert sum(p.numel() for p in module.parameters()) == kernels + norms + 192 * 192 + 192


@torch.no_grad()
def test_early_stem_is_its_definition() -> None:
    module = randomise(build_stem(tiny("early", 4, stem_norm="layer"))).eval()
    weights = list(module.parameters())
    images = torch.randn(1, 3, 8, 12)
    maps = images
    for kernel, scale, bias in (weights[0:3], weights[3:6]):
        maps = nn.functional.conv2d(maps, kernel, stride=2, padding=1)
        mean, variance = maps.mean(1, keepdim=True), maps.var(1, correction=0, keepdim=True)
        maps = (maps - mean) / (variance + 1e-6).sqrt()
        maps = (maps * scale[None, :, None, None] + bias[None, :, None, None]).clamp(min=0)
    expected = torch.einsum("bchw,dc->bdhw", maps, weights[6][:, :, 0, 0]) + weights[7][None, :, None, None]
    torch.testing.assert_close(module(images), expected)


# hMLP


@given(st.integers(1, 200))
def test_hmlp_stages_make_the_patch_in_the_documented_order(patch: int) -> None:
    stages = hmlp_stages(patch)
    assert math.prod(stages) == patch
    rest = stages[1:] if stages[0] == 4 else stages
    assert all(n == 1 or all(n % d for d in range(2, n)) for n in rest)
    assert list(rest) == sorted(rest, reverse=True)


def test_hmlp_stages_are_the_papers() -> None:
    assert hmlp_stages(16) == (4, 2, 2)  # appendix C
    assert hmlp_stages(32) == (4, 2, 2, 2)
    assert hmlp_stages(14) == (7, 2)
    assert hmlp_stages(4) == (2, 2)


@given(
    stem=st.sampled_from(["hmlp", "linear+norm", "linear+gelu", "linear+norm+gelu"]),
    patch=st.sampled_from([2, 4, 6, 7, 8, 12, 14, 16, 20, 32]),
    norm=st.sampled_from(["batch", "layer"]),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    data=st.data(),
)
def test_hmlp_patches_do_not_communicate(
    stem: str, patch: int, norm: str, rows: int, columns: int, data: st.DataObject
) -> None:
    """Changing one patch changes its own token and no other, to the bit. So do the variations of the linear stem."""
    module = randomise(build_stem(tiny(stem, patch, stem_norm=norm, width=16)))
    module.train(norm == "layer")  # LayerNorm shares nothing even in training; BatchNorm its batch's statistics
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    images = torch.randn(1, 3, rows * patch, columns * patch)
    changed = images.clone()
    changed[..., row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] += torch.randn(3, patch, patch)
    with torch.no_grad():
        different = (module(images) != module(changed)).any(1)[0]
    expected = torch.zeros(rows, columns, dtype=torch.bool)
    expected[row, column] = True
    assert torch.equal(different, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("stem", "after"),
    [
        ("linear+norm", [nn.BatchNorm2d(32)]),
        ("linear+gelu", [nn.GELU()]),
        ("linear+norm+gelu", [nn.BatchNorm2d(32), nn.GELU()]),
    ],
)
def test_the_variations_of_the_linear_stem_are_timms_patch_embedding_and_torchs_layers(
    stem: str, after: list[nn.Module]
) -> None:
    """Table 7 of the follow-up: a norm, a non-linearity, or both."""
    module = randomise(build_stem(tiny(stem))).eval()
    theirs = nn.Sequential(timm.layers.PatchEmbed(32, 16, 3, 32, flatten=False, output_fmt="NCHW").proj, *after).eval()
    theirs.load_state_dict({name.removeprefix("proj."): tensor for name, tensor in module.state_dict().items()})
    images = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(module(images), theirs(images))


@pytest.mark.parametrize("stem", ["levit", "early"])
def test_convolutional_stems_do_communicate(stem: str) -> None:
    """The contrast the follow-up draws, and the proof that the test above can fail."""
    module = randomise(build_stem(tiny(stem))).eval()
    images = torch.randn(1, 3, 32, 32)
    changed = images.clone()
    changed[..., :16, :16] += 1
    assert (module(images) != module(changed))[0, :, 1, 1].any()


@torch.no_grad()
def test_hmlp_is_an_mlp_on_patches_of_patches() -> None:
    """The same numbers as matrix products on one patch alone, cut by hand: 2x2 pixels, 2x2 of those."""
    module = randomise(build_stem(tiny("hmlp", 4, stem_norm="layer"))).eval()
    images = torch.randn(1, 3, 4, 8)
    patch = images[0, :, :, 4:]
    parameters = [p.detach() for p in module.parameters()]
    hidden = torch.empty(8, 2, 2)
    for i in range(2):
        for j in range(2):
            pixels = patch[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].reshape(-1)
            hidden[:, i, j] = gelu(layer_norm(parameters[0].flatten(1) @ pixels + parameters[1], *parameters[2:4]))
    expected = layer_norm(parameters[4].flatten(1) @ hidden.reshape(-1) + parameters[5], *parameters[6:8])
    torch.testing.assert_close(module(images)[0, :, 0, 1], expected)


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return (x - x.mean()) / (x.var(correction=0) + 1e-6).sqrt() * scale + bias


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def test_hmlp_has_the_layers_and_names_of_its_authors_code() -> None:
    """Appendix C, and so the released weights: convolutions at 0, 3, 6 of `proj`, norms at 1, 4, 7."""
    state = build_stem(variant("S/16", stem="hmlp")).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert shapes["proj.0.weight"] == (96, 3, 4, 4) and shapes["proj.0.bias"] == (96,)
    assert shapes["proj.3.weight"] == (96, 96, 2, 2) and shapes["proj.3.bias"] == (96,)
    assert shapes["proj.6.weight"] == (384, 96, 2, 2) and shapes["proj.6.bias"] == (384,)
    norms = {f"proj.{i}.{name}" for i in (1, 4, 7) for name in ("weight", "bias", "running_mean", "running_var")}
    rest = shapes.keys() - norms - {f"proj.{i}.num_batches_tracked" for i in (1, 4, 7)}
    assert norms <= shapes.keys() and len(rest) == 6


def flops(module: nn.Module, images: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        module(images)
    return counter.get_total_flops()


def test_hmlp_costs_less_than_one_percent_more_than_linear() -> None:
    """Follow-up, section 5: 17.73 GFLOPs (multiply-adds) for B/16 with hMLP, under 1 % more than linear."""
    with torch.device("meta"):
        images = torch.empty(1, 3, 224, 224)
        hmlp = flops(build_stem(variant("B/16", stem="hmlp")), images)
        whole = flops(timm.create_model("vit_base_patch16_224"), images)
    linear = 2 * 196 * 768 * 768
    assert 0 < (hmlp - linear) / whole < 0.01
    assert (whole + hmlp - linear) / 2e9 == pytest.approx(17.73, rel=2e-3)  # the paper counts norms as well


# hybrid


def timm_hybrid(units: tuple[int, ...]) -> nn.Module:
    conv = partial(StdConv2dSame, eps=1e-8)
    if not units:
        return create_resnetv2_stem(3, stem_type="same", preact=False, conv_layer=conv)
    return ResNetV2(units, num_classes=0, global_pool="", preact=False, stem_type="same", conv_layer=conv)


@torch.no_grad()
@pytest.mark.parametrize(
    ("units", "patch"), [((), 32), ((), 4), ((2,), 4), ((1, 2), 8), ((1, 1, 2), 16), ((2, 1, 1, 1), 64)]
)
def test_hybrid_is_timms(units: tuple[int, ...], patch: int) -> None:
    """Same weights, same maps.

    timm adds 1e-8 to a kernel's variance where the official code adds 1e-5 to its deviation; with kernels so
    large neither counts, so what is left to differ is the architecture. Its GroupNorm gets flax's epsilon.
    """
    ours = build_stem(tiny("resnet", patch, stem_units=units, image_size=(patch, patch)))
    theirs = randomise(timm_hybrid(units), kernel_scale=1e4)
    for module in theirs.modules():
        if isinstance(module, nn.GroupNorm):
            module.eps = 1e-6
    ours.load_state_dict(from_timm(theirs.state_dict(), bool(units)), strict=False)
    for contrast in (1.0, 1e-3):  # at the lower one GroupNorm's epsilon counts
        images = contrast * torch.randn(2, 3, 64, 128)
        torch.testing.assert_close(ours(images), ours.proj(theirs(images)), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kernel_scale", [1e-4, 1.0])
def test_timms_hybrid_exactly(kernel_scale: float) -> None:
    """With timm's own epsilons, in kernels so small that they count: the same maps, and SAME padding still."""
    config = tiny("resnet", 8, stem_units=(1, 2), image_size=(8, 8), std_conv="timm", group_norm_eps=1e-5)
    ours, theirs = build_stem(config), randomise(timm_hybrid((1, 2)), kernel_scale=kernel_scale)
    ours.load_state_dict(from_timm(theirs.state_dict(), True), strict=False)
    official = build_stem(replace(config, std_conv="hybrid", group_norm_eps=1e-6))
    official.load_state_dict(ours.state_dict())
    images = 1e-3 * torch.randn(2, 3, 64, 128)
    expected = ours.proj(theirs(images))
    torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-5)
    assert (official(images) - expected).norm() > 1e-3 * expected.norm()


def from_timm(weights: dict[str, Tensor], staged: bool) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in weights.items():
        name = name.replace("stem.", "root.").replace("blocks.", "").replace("downsample.", "shortcut.")
        renamed[name if staged else f"root.{name}"] = tensor
    return renamed


def test_timms_names_reach_every_weight_of_the_hybrid() -> None:
    """The comparison above loads without strictness, for the projection alone."""
    for units in [(), (1, 1, 2)]:
        ours = build_stem(tiny("resnet", 32, stem_units=units)).state_dict()
        assert set(from_timm(timm_hybrid(units).state_dict(), bool(units))) == set(ours) - {
            "proj.weight",
            "proj.bias",
        }


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("R+Ti/16", "vit_tiny_r_s16_p8_224"),
        ("R26+S/32", "vit_small_r26_s32_224"),
        ("R50+B/16", "vit_base_r50_s16_224"),
        ("R50+L/32", "vit_large_r50_s32_224"),
    ],
)
def test_hybrid_parameters_and_grid_are_timms(name: str, theirs: str) -> None:
    with torch.device("meta"):
        stem = build_stem(variant(name))
        grid = stem(torch.empty(1, 3, 224, 224)).shape[-2:]
        reference = timm.create_model(theirs, depth=1, weight_init="skip").patch_embed
    assert sum(p.numel() for p in stem.parameters()) == sum(p.numel() for p in reference.parameters())
    assert grid == reference.grid_size


@pytest.mark.full_size
def test_moving_stage_4_into_stage_3_gives_four_times_the_tokens() -> None:
    """Section 4.1: option (ii) keeps the total number of layers."""
    one, two = (build_stem(variant(f"R50+B/{patch}")).to("meta") for patch in (32, 16))
    images = torch.empty(1, 3, 224, 224, device="meta")
    assert two(images)[0, 0].numel() == 4 * one(images)[0, 0].numel()
    assert sum(HYBRIDS["R50", 32]) == sum(HYBRIDS["R50", 16])


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("form", ["hybrid", "bit", "timm"])
def test_kernels_are_standardised_as_each_family_does(form: str, scale: float) -> None:
    """Against numpy in float64; with kernels of 1e-6 the place of the epsilon decides the result."""
    conv = StdConv2d(5, 4, 3, form=form)
    nn.init.normal_(conv.weight, mean=2 * scale, std=scale)
    kernel = conv.weight.detach().double().numpy()
    mean, deviation = kernel.mean((1, 2, 3), keepdims=True), kernel.std((1, 2, 3), keepdims=True)
    added = {"bit": 1e-10, "timm": 1e-8}
    divisor = deviation + 1e-5 if form == "hybrid" else (deviation**2 + added[form]) ** 0.5
    expected = torch.from_numpy((kernel - mean) / divisor).float()
    torch.testing.assert_close(conv.standardised(), expected, rtol=1e-4, atol=1e-5)
