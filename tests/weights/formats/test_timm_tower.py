"""OpenCLIP's image towers of timm, loaded here and written back: the same embeddings, gradients and tensors."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from open_clip import timm_model
from open_clip.model import CustomTextCLIP
from safetensors.torch import load_file, save_file
from timm.models import register_model
from timm_peers import error, randomised
from torch import Tensor, nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.exports.network import trace
from vitrail.model.record import attention_maps
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.archive import Archive
from vitrail.weights.load import describe, load
from vitrail.weights.save import save

TEXTS = dict(context_length=8, vocab_size=50, width=16, heads=2, layers=1)
SMALL: dict[str, Any] = dict(embed_dim=64, depth=2, num_heads=1, mlp_ratio=2, img_size=32, patch_size=8)
PREPROCESS = dict(mean=[0.5, 0.4, 0.3], std=[0.2, 0.25, 0.3], interpolation="bicubic", resize_mode="squash")


@register_model
def vit_tiny_patch8_siglip_32(pretrained: bool = False, **changes: Any) -> nn.Module:
    """A network of timm's that only these tests have: OpenCLIP knows architectures by their names."""
    return timm.create_model("vit_base_patch16_siglip_224", **(SMALL | dict(num_classes=0) | changes))


@register_model
def vit_tiny_patch8_clip_32(pretrained: bool = False, **changes: Any) -> nn.Module:
    """The same with a class token, and norms before the first block."""
    return timm.create_model("vit_base_patch16_clip_224", **(SMALL | changes))


@register_model
def vit_pe_core_tiny_patch8_32(pretrained: bool = False, **changes: Any) -> nn.Module:
    """The same with rotary positions."""
    return timm.create_model("vit_pe_core_tiny_patch16_384", **(SMALL | changes))


@register_model
def eva02_tiny_patch8_clip_32(pretrained: bool = False, **changes: Any) -> nn.Module:
    """EVA02-CLIP B and L: rotary positions, norms inside attention and MLP."""
    return timm.create_model("eva02_base_patch16_clip_224", **(SMALL | changes))


@register_model
def eva_giant_tiny_patch8_32(pretrained: bool = False, **changes: Any) -> nn.Module:
    """EVA01-CLIP g: learned positions, keys without a bias."""
    return timm.create_model("eva_giant_patch14_224", **(SMALL | changes))


@register_model
def eva02_enormous_tiny_patch8_clip_32(pretrained: bool = False, **changes: Any) -> nn.Module:
    """EVA02-CLIP E: the same with norms behind attention and MLP, and always 16 heads."""
    return timm.create_model("eva02_enormous_patch14_clip_224", **(SMALL | dict(num_heads=16) | changes))


@register_model
def vit_relpos_tiny_patch8_cls_32(pretrained: bool = False, **changes: Any) -> nn.Module:
    """Relative positions from MLPs."""
    return timm.create_model("vit_relpos_medium_patch16_cls_224", **(SMALL | changes))


TOWERS: dict[str, dict[str, Any]] = {
    "SigLIP": dict(timm_model_name="vit_tiny_patch8_siglip_32", timm_pool="map", timm_proj="none"),
    "linear": dict(timm_model_name="vit_tiny_patch8_clip_32", timm_pool="token", timm_proj="linear"),
    "linear, with a bias": dict(timm_model_name="vit_tiny_patch8_clip_32", timm_pool="avg", timm_proj_bias=True),
    "rotary": dict(timm_model_name="vit_pe_core_tiny_patch8_32", timm_pool="map", timm_proj=None),
    "EVA-01": dict(timm_model_name="eva_giant_tiny_patch8_32", timm_pool="token", timm_proj=None),
    "EVA-02": dict(timm_model_name="eva02_tiny_patch8_clip_32", timm_pool="token", timm_proj=None),
    "EVA-02, E": dict(timm_model_name="eva02_enormous_tiny_patch8_clip_32", timm_pool="token", timm_proj=None),
    "EVA-02, without a projection": dict(
        timm_model_name="eva02_tiny_patch8_clip_32", timm_pool="token", timm_proj="none"
    ),
}
RELPOS: dict[str, Any] = dict(timm_model_name="vit_relpos_tiny_patch8_cls_32", timm_pool="", timm_proj="linear")


def written(folder: Path, **vision: Any) -> CustomTextCLIP:
    """A tiny CLIP with this tower, also in a folder as on the hub."""
    model: dict[str, Any] = dict(embed_dim=64, vision_cfg=dict(image_size=32) | vision, text_cfg=TEXTS)
    theirs = CustomTextCLIP(**model)
    randomised(theirs)
    folder.mkdir()
    save_file(theirs.state_dict(), folder / "open_clip_model.safetensors")
    config = dict(model_cfg=model | dict(custom_text=True), preprocess_cfg=PREPROCESS)
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return theirs


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.full_size
@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_computes_what_open_clip_does_and_goes_back(name: str, tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs", **TOWERS[name])
    model = load(tmp_path / "theirs")
    assert isinstance(model, ViT)
    found = []
    dtype = torch.float64 if name == "EVA-02, E" else torch.float32  # norms behind attention amplify rounding
    for encode in (copy.deepcopy(model).to(dtype), copy.deepcopy(theirs).to(dtype).encode_image):
        batch = images().to(dtype).requires_grad_()
        output = encode(batch)
        found.append((output.detach(), *torch.autograd.grad((output * torch.linspace(-1, 1, 64)).sum(), batch)))
    assert error(found[0][0], found[1][0]) < 1e-5 and error(found[0][1], found[1][1]) < 1e-5
    assert model.card.preprocess == Preprocess((32, 32), "squash", interpolation="bicubic")
    assert model.config.mean == (0.5, 0.4, 0.3)
    assert "the tower for texts" in str(model.load_report)
    save(model, tmp_path / "ours", format="open_clip")
    state = theirs.state_dict()
    tower = load_file(tmp_path / "ours" / "open_clip_model.safetensors")
    assert tower.keys() == {one for one in state if one.startswith("visual.")}
    assert all(torch.equal(tensor, state[one]) for one, tensor in tower.items())
    texts = [json.loads((tmp_path / at / "open_clip_config.json").read_text()) for at in ("theirs", "ours")]
    assert texts[0] == texts[1]
    assert load(tmp_path / "ours").config == model.config


@pytest.mark.full_size
def test_a_tower_is_looked_into_exported_and_resized(tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs", **TOWERS["SigLIP"])
    model = load(tmp_path / "theirs")
    assert isinstance(model, ViT)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert [one.maps.shape for one in attention_maps(model, pixels)] == [(2, 1, 16, 16)] * 2
    with torch.no_grad():
        program = trace(model, (32, 32), "features", torch.float32).module()
        assert error(program(pixels), model(pixels)) < 1e-5
        theirs.visual.trunk.set_input_size(img_size=(48, 40))
        other = torch.randn(2, 3, 48, 40)
        assert error(load(tmp_path / "theirs", image_size=(48, 40))(other), theirs.encode_image(other)) < 1e-5


CONFIGS = Path(open_clip.__file__).parent / "model_configs"
OTHERS = re.compile(r"convnext|vitamin|fastvit|swin|_mci_")
"""Towers of OpenCLIP's configs that are no plain Vision Transformers."""


@pytest.mark.full_size
def test_the_towers_of_open_clips_configs_are_what_timm_builds() -> None:
    """At full size but for the depth: heads, GELU, norms, pooling and the names of all tensors."""
    found = 0
    for file in sorted(CONFIGS.glob("*.json")):
        model = json.loads(file.read_text())
        vision = model["vision_cfg"]
        if "timm_model_name" not in vision or OTHERS.search(vision["timm_model_name"]):
            continue
        found += 1
        with torch.device("meta"):
            theirs = tower_of(model)
        shapes = {f"visual.{name}": tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
        archive = Archive(file, "safetensors", shapes, torch.empty, config=dict(model_cfg=model))
        origin, tower = describe(archive)  # which also finds a name without a place
        config, trunk = tower.card.config, theirs.trunk
        assert origin.name == "open_clip" and isinstance(config, ViTConfig) and not tower.unused, file
        block = trunk.blocks[0]
        assert (config.heads, config.origin.norm_eps) == (block.attn.num_heads, block.norm1.eps), file
        assert config.origin.norm_after == (type(block).__name__ in ("EvaBlockPostNorm", "ResPostRelPosBlock")), file
        assert config.pool == {"token": "cls", "avg": "gap", "map": "map"}[trunk.global_pool], file
        size = tuple(side // config.patch * config.patch for side in trunk.patch_embed.img_size)
        assert config.image_size == size and config.prefix == trunk.num_prefix_tokens, file
        assert (config.classes or config.width) == model["embed_dim"], file
        if config.origin.mlp == "gelu":
            assert config.origin.gelu == {"GELU": "erf", "GELUTanh": "tanh"}[type(block.mlp.act).__name__], file
        assert (config.origin.rotary is None) == (getattr(trunk, "rope", None) is None), file
    assert found >= 20


def tower_of(model: dict[str, Any]) -> nn.Module:
    """OpenCLIP's tower of a config, two blocks deep."""
    vision, build = model["vision_cfg"], timm.create_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm_model.timm, "create_model", lambda name, **changes: build(name, depth=2, **changes))
        return timm_model.TimmModel(
            vision["timm_model_name"],
            model["embed_dim"],
            vision.get("image_size", 224),
            vision.get("timm_pool", "avg"),
            vision.get("timm_proj", "linear"),
            vision.get("timm_proj_bias", False),
        )


def test_relative_positions_of_a_tower_are_computed_for_the_size_of_its_images(tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs", **RELPOS)
    with torch.no_grad():
        assert error(load(tmp_path / "theirs")(images()), theirs.encode_image(images())) < 1e-5
        theirs.visual.trunk.set_input_size(img_size=(48, 40))
        model, other = load(tmp_path / "theirs", image_size=(48, 40)), torch.randn(2, 3, 48, 40)
        assert error(model(other), theirs.encode_image(other)) < 1e-5
    with pytest.raises(WeightsError, match="with MLPs that compute relative positions"):
        save(load(tmp_path / "theirs"), tmp_path / "ours", format="open_clip")


@pytest.mark.parametrize("projection", ["mlp", "linear", None])
def test_a_tower_is_loaded_without_its_projection(projection: str | None, tmp_path: Path) -> None:
    """If a user writes "none" in its place: the features in front of it."""
    theirs = written(tmp_path / "theirs", **(TOWERS["EVA-02"] | dict(timm_proj=projection)))
    file = tmp_path / "theirs" / "open_clip_config.json"
    config = json.loads(file.read_text())
    config["model_cfg"]["vision_cfg"]["timm_proj"] = "none"
    file.write_text(json.dumps(config))
    model = load(tmp_path / "theirs")
    assert model.config.classes == 0 and "the projection, because timm_proj is 'none'" in str(model.load_report)
    trunk = theirs.visual.trunk
    with torch.no_grad():
        assert error(model(images()), trunk.forward_head(trunk.forward_features(images()), pre_logits=True)) < 1e-5
    save(model, tmp_path / "ours", format="open_clip")
    tower, state = load_file(tmp_path / "ours" / "open_clip_model.safetensors"), theirs.state_dict()
    assert tower and all(torch.equal(tensor, state[one]) for one, tensor in tower.items())


def test_what_is_not_known_or_has_no_place_is_refused(tmp_path: Path) -> None:
    for number, (changes, message) in enumerate(
        (
            (dict(timm_proj="mlp"), r"timm_proj is 'mlp'.* cannot hold an MLP.*Valid: 'linear', 'none'.*by 'none'"),
            (dict(timm_pool=""), "timm_pool is '' in vision_cfg"),
        )
    ):
        written(tmp_path / str(number), **(TOWERS["linear"] | changes))
        with pytest.raises(WeightsError, match=message):
            load(tmp_path / str(number))
    theirs = written(tmp_path / "theirs", **TOWERS["linear"])
    save_file(theirs.state_dict(), tmp_path / "alone.safetensors")
    with pytest.raises(WeightsError, match=r"nothing names its architecture. Add open_clip_config\.json"):
        load(tmp_path / "alone.safetensors")
    for changes, message in ((dict(image_size=48), "images 48 x 48 pixels"), (dict(classes=3), "outputs 3")):
        with pytest.raises(WeightsError, match=message):
            save(load(tmp_path / "theirs", **changes), tmp_path / "ours", format="open_clip")
    model = load(tmp_path / "theirs")
    nn.init.ones_(model.head.bias)
    with pytest.raises(WeightsError, match="its last layer has a bias"):
        save(model, tmp_path / "ours", format="open_clip")
