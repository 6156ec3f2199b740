"""Files of timm without config.json: right, or refused with the name of what they may be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm_peers import assert_equal_in_double, images, randomised

from vitrail.errors import WeightsError
from vitrail.weights.load import load


def bare(name: str, folder: Path, **arguments: object) -> tuple[torch.nn.Module, Path]:
    """A network of timm with few blocks and values of its own, and its state dict as a file."""
    model = timm.create_model(name, pretrained=False, **arguments)
    randomised(model)
    save_file(model.state_dict(), folder / "model.safetensors")
    return model.eval(), folder / "model.safetensors"


@pytest.mark.full_size
@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch32_siglip_256",
        "vit_base_patch32_siglip_gap_256",
        "vit_base_patch16_siglip_256",
        "vit_giantopt_patch16_siglip_gap_256",
        "beitv2_base_patch16_224",
        "vit_betwixt_patch16_reg4_gap_256",
    ],
)
def test_what_the_tensors_tell_is_right(name: str, tmp_path: Path) -> None:
    """GELU and number of heads, of networks that differ in nothing else from others of their width."""
    theirs, file = bare(name, tmp_path, depth=1, num_classes=3)
    ours = load(file)
    assert_equal_in_double(ours, theirs, images(ours)[:1])


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_base_patch16_rpn_224", "gap and rpn networks"),
        ("vit_medium_patch16_gap_240", "gap and rpn networks"),
        ("vit_base_patch16_gap_224", "12 or 16 heads"),
        ("vit_base_patch16_siglip_gap_224", "12 or 16 heads"),
        ("vit_srelpos_small_patch16_224", "relpos networks"),
        ("eva02_tiny_patch14_224", "EVA-02"),
        ("eva02_small_patch14_224", "EVA-02"),
        ("eva02_enormous_patch14_clip_224", "EVA-02"),
        ("test_vit3", "how many heads"),
    ],
)
def test_what_the_tensors_do_not_tell_is_refused(name: str, message: str, tmp_path: Path) -> None:
    _, file = bare(name, tmp_path, depth=1)
    with pytest.raises(WeightsError, match=message) as caught:
        load(file)
    assert "config.json" in str(caught.value)


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("cait_xxs24_224", "CaiT"),
        ("hiera_tiny_224", "Hiera"),
        ("swin_tiny_patch4_window7_224", "Swin Transformer"),
        ("swinv2_tiny_window8_256", "Swin Transformer"),
        ("focalnet_tiny_srf", "not in a known format"),
        ("hiera_small_abswin_256", "Hiera"),
        ("xcit_nano_12_p16_224", "XCiT"),
        ("pit_ti_224", "PiT"),
        ("levit_128s", "LeViT"),
        ("tiny_vit_5m_224", "TinyViT"),
        ("convnext_atto", "ConvNeXt"),
        ("convnextv2_atto", "ConvNeXt"),
        ("pvt_v2_b0", "PVT"),
        ("edgenext_xx_small", "not in a known format"),
        ("convit_tiny", "ConViT"),
        ("mixer_s32_224", "MLP-Mixer"),
        ("naflexvit_base_patch16_gap", "NaFlexViT"),
        ("naflexvit_base_patch16_parfac_gap", "NaFlexViT"),
        ("samvit_base_patch16_224", "SAM"),
        ("vit_intern300m_patch14_448", "InternViT"),
    ],
)
def test_a_network_of_another_family_is_refused_by_its_name(name: str, family: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False)
    shapes = {key: torch.zeros(value.shape) for key, value in model.state_dict().items() if not skipped(key)}
    save_file(shapes, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=family) as caught:
        load(tmp_path / "model.safetensors")
    assert re.search("not support|config.json|not in a known", str(caught.value))


def skipped(name: str) -> bool:
    """All blocks but the first: they take memory and tell nothing new."""
    parts = name.split(".")
    return parts[0] == "blocks" and parts[1] != "0"
