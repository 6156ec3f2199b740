"""timm's registry as a whole, and one network of each architecture at full size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models._input import _get_global_pool
from timm_peers import assert_equal, assert_equal_in_double, images, rebuilt
from torch import nn

from vitrail.errors import WeightsError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected
from vitrail.weights.load import describe, load
from vitrail.weights.timm.format import FORMAT

MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "beit", "resnetv2")
REFUSED = re.compile(
    r"_xp_|_d(wee|little)_|_d?pwee_|beit3|_mci_|_resnet(26|50)d"
    r"|^resnetv2_(?!\d+x\d_bit)|test_vit[34]|_pe_|gemma"
)
"""Architectures with something vitrail's ViT and BiT have not, by what their names say."""


def made(name: str) -> nn.Module:
    """The architecture without memory, two blocks deep where that can be asked for."""
    depth: dict[str, Any] = {} if name.startswith("resnetv2") else dict(depth=2)
    with torch.device("meta"):
        return timm.create_model(name, **depth)


def as_on_the_hub(model: nn.Module) -> Archive:
    """Names, shapes and config.json as timm publishes them: without arguments, which the architecture implies."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    pretrained = {name: value for name, value in model.pretrained_cfg.items() if name != "architecture"}
    config = dict(architecture=model.pretrained_cfg["architecture"], pretrained_cfg=pretrained)
    config |= dict(global_pool=_get_global_pool(model))
    return Archive(Path("hub"), "safetensors", shapes, lambda name: torch.empty(0), config=config)


def assert_agrees(config: ViTConfig, model: nn.Module) -> None:
    """What names and shapes do not show is as in timm's network."""
    block = model.blocks[0]
    attention = block.attns[0].attn if hasattr(block, "attns") else block.attn
    mlp = block.ffns[0].mlp if hasattr(block, "ffns") else block.mlp
    norm = block.attns[0].norm if hasattr(block, "attns") else block.norm1
    assert config.origin.norm == ("rms" if type(norm).__name__ == "RmsNorm" else "layer")
    assert config.heads == attention.num_heads
    assert config.origin.norm_eps == norm.eps
    kind = {"GELU": "erf", "GELUTanh": "tanh", "QuickGELU": "quick", "SiLU": "gated"}[type(mlp.act).__name__]
    assert (config.origin.gelu if config.origin.mlp == "gelu" else "gated") == kind
    assert config.pool == {"token": "cls", "avg": "gap", "map": "map"}[model.global_pool]
    assert config.image_size == tuple(n // config.patch * config.patch for n in model.patch_embed.img_size)
    assert config.prefix == model.num_prefix_tokens


def registered() -> list[str]:
    return [name for name in timm.list_models(module=MODULES) if not name.startswith("naflex")]


@pytest.mark.parametrize(
    ("names", "least"),
    [
        pytest.param(r"siglip_(256|512)$|_gap_224|so400m_patch16_siglip_256|test_vit|r26_s32_224", 10, id="odd ones"),
        pytest.param("", 120, id="all", marks=[pytest.mark.full_size, pytest.mark.nightly("the odd ones")]),
    ],
)
def test_architectures_of_timms_are_read_or_refused(names: str, least: int) -> None:
    read = 0
    for name in filter(re.compile(names).search, registered()):
        model = made(name)
        archive = as_on_the_hub(model)
        try:
            origin, found = describe(archive)  # which also finds a name without a place, or a second format
        except WeightsError as error:
            assert REFUSED.search(name), f"{name}: {error}"
            continue
        assert origin is FORMAT and not REFUSED.search(name), name
        read += 1
        assert not found.unused, name
        config = found.card.config
        ours = expected(config, archive.path)
        added = sum(ours[entry].numel() for entry in found.zeros)  # biases that the file has not
        added += sum(ours[e.ours].numel() // 3 for e in found.conversions if e.theirs[-1].endswith("v_bias"))
        theirs = sum(parameter.numel() for parameter in model.parameters())
        assert sum(tensor.numel() for tensor in ours.values()) == theirs + added, name
        if isinstance(config, ViTConfig):
            assert_agrees(config, model)
    assert read >= least


FULL: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": dict(depth=2),
    "deit3_small_patch16_224": dict(depth=2),
    "beit_base_patch16_224": dict(depth=2),
    "vit_base_r50_s16_384": dict(depth=2),
    "resnetv2_50x1_bit": {},
}
"""Architecture -> arguments: Transformers are as wide as they really are; one of timm_peers is as deep."""


@pytest.mark.nightly("tests/weights/formats/test_timm.py: the same comparison of small networks")
@pytest.mark.full_size
@pytest.mark.parametrize("name", FULL)
def test_at_full_size(name: str, tmp_path: Path) -> None:
    theirs = timm.create_model(name, **FULL[name])
    with torch.no_grad():
        for tensor in theirs.parameters():  # around what training starts from; heads and scales start at zero or so
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * 0.02)
    theirs.eval()
    save_file(theirs.state_dict(), tmp_path / "a.safetensors")
    ours = load(tmp_path / "a.safetensors")
    size = (64, 64) if isinstance(ours.config, ResNetConfig) else None
    same = assert_equal_in_double if size else assert_equal
    same(ours, theirs, images(ours, size)[:1])
    FORMAT.write(ours, ours.card, tmp_path / "b")
    same(ours, rebuilt(tmp_path / "b"), images(ours, size)[:1])
    found, state = load_file(tmp_path / "b" / "model.safetensors"), theirs.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)
