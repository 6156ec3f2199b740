"""What timm's config.json says, what is assumed without it, and what is refused, in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from timm_peers import PLAIN, TINY, assert_equal, bit, hub, images, peer, randomised, rebuilt

from vitrail.data.images.ops import eval_transform
from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import BIT_UNITS, ResNetConfig, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.formats import FORMATS, recognise
from vitrail.weights.load import load
from vitrail.weights.timm.bit import bit_architecture
from vitrail.weights.timm.format import FORMAT

NAMES = ["cat", "dog", "ant", "bee", "owl"]
OURS = dict(width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=(32, 32), classes=5)


def archive(model: torch.nn.Module | dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Archive:
    """An archive in memory."""
    state = model if isinstance(model, dict) else model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return Archive(Path("made.safetensors"), "safetensors", shapes, state.__getitem__, config=config or {})


def config_of(**changes: Any) -> dict[str, Any]:
    """A config.json as timm writes it for the tiny plain ViT."""
    pretrained = dict(
        input_size=[3, 32, 32], crop_pct=0.95, interpolation="bilinear", crop_mode="center",
        mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6], license="cc-by-nc-4.0",
    )  # fmt: skip
    base = dict(architecture=PLAIN, num_classes=5, model_args=dict(num_heads=2), pretrained_cfg=pretrained)
    return {**base, **changes}


def test_preprocessing_names_and_licence(tmp_path: Path) -> None:
    found = FORMAT.find(archive(peer("plain"), config_of(label_names=NAMES)))
    card = found.card
    assert card.preprocess == Preprocess((32, 32), crop=0.95, interpolation="bilinear")
    assert (card.config.mean, card.config.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert card.class_names == NAMES and card.licence == "cc-by-nc-4.0"
    # config_of has no global_pool, as some folders have not
    assert found.assumptions == [
        "features are those of the class token, as the name 'norm' suggests; the file does not say how they are pooled"
    ]


@pytest.mark.parametrize(
    ("side", "crop"), [(224, 0.9), (224, 0.875), (240, 0.9), (256, 0.9), (288, 0.965), (384, 0.95), (384, 1.0)]
)
@pytest.mark.parametrize("shape", [(300, 300), (600, 300), (128, 256)])
@pytest.mark.parametrize(("mode", "resize"), [("center", "small"), ("squash", "squash-crop")])
def test_an_image_is_prepared_as_in_timm(
    side: int, crop: float, shape: tuple[int, int], mode: str, resize: Any
) -> None:
    values: dict[str, Any] = dict(input_size=(3, side, side), crop_pct=crop, interpolation="bicubic", crop_mode=mode)
    prepare = create_transform(**values, mean=(0.0,) * 3, std=(1.0,) * 3)
    card = Card(ViTConfig(mean=0, std=1), preprocess=Preprocess((side, side), resize, crop, "bicubic"))
    noise = np.random.default_rng(0).integers(0, 256, (shape[1], shape[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    wrong = ((card.transform()(image) - prepare(image)).abs() > 2.01 / 255).float().mean()
    # values are clipped between the two passes of a resize, whose order counts if one side grows and the other shrinks
    assert wrong <= (0 if mode == "center" else 0.02)


def test_older_exports_are_one_flat_mapping() -> None:
    flat = config_of()["pretrained_cfg"] | dict(architecture=PLAIN, labels=NAMES, global_pool="token")
    theirs = peer("plain", embed_dim=128)
    card = FORMAT.find(archive(theirs, flat)).card
    assert card.class_names == NAMES and card.config.std == (0.4, 0.5, 0.6)
    assert card.config.heads == 2  # 128 / 64: not said


def test_names_that_do_not_fit_are_left_out_and_reported() -> None:
    found = FORMAT.find(archive(peer("plain"), config_of(label_names=NAMES[:3], global_pool="token")))
    assert found.card.class_names == []
    assert found.assumptions == ["no class names: config.json has 3, which do not fit 5 classes"]
    numbered = {str(index): name for index, name in enumerate(NAMES)}
    assert FORMAT.find(archive(peer("plain"), config_of(label_names=numbered))).card.class_names == NAMES


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (dict(crop_mode="squash", crop_pct=1.0), dict(resize="squash")),
        (dict(crop_mode="squash"), dict(resize="squash-crop", crop=0.95)),
        (dict(crop_mode="border", crop_pct=1.0), dict(resize="pad", fill=(26, 51, 76))),
        (dict(crop_pct=None, interpolation=None), dict(crop=0.875, interpolation="bicubic")),
    ],
)
def test_other_preprocessing(entries: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(global_pool="token")
    config["pretrained_cfg"] |= entries
    found = FORMAT.find(archive(peer("plain"), config))
    values = dict(image_size=(32, 32), interpolation="bilinear") | expected
    assert found.card.preprocess == Preprocess(**values)
    assert not found.assumptions


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (dict(crop_mode="border"), r"crop_pct is 0.95 with crop_mode 'border'"),
        (dict(crop_mode="tiles"), r"crop_mode is 'tiles'.*Valid: .*'squash'"),
        (dict(interpolation="nearest"), r"interpolation is 'nearest'.*Valid: 'bilinear', 'bicubic'"),
        (dict(crop_pct=1.5), r"crop_pct is 1.5"),
    ],
)
def test_preprocessing_that_vitrail_does_not_have_is_refused(entries: dict[str, Any], told: str) -> None:
    config = config_of(global_pool="token")
    config["pretrained_cfg"] |= entries
    with pytest.raises(WeightsError, match=told):
        FORMAT.find(archive(peer("plain"), config))


def test_what_is_written_is_what_timm_resolves(tmp_path: Path) -> None:
    config = ViTConfig.of(**OURS, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    preprocess = Preprocess((32, 32), crop=0.8, interpolation="bilinear")
    FORMAT.write(build(config), Card(config, NAMES, preprocess, licence="mit"), tmp_path / "a")
    theirs = rebuilt(tmp_path / "a")
    data = resolve_data_config(model=theirs)
    assert (data["input_size"], data["crop_pct"], data["interpolation"]) == ((3, 32, 32), 0.8, "bilinear")
    assert (tuple(data["mean"]), tuple(data["std"]), data["crop_mode"]) == (config.mean, config.std, "center")
    assert list(theirs.pretrained_cfg["label_names"]) == NAMES and theirs.pretrained_cfg["license"] == "mit"
    card = load(tmp_path / "a").card
    assert (card.preprocess, card.class_names, card.licence) == (preprocess, NAMES, "mit")
    squash = Preprocess((32, 32), resize="squash", interpolation="bicubic")
    FORMAT.write(build(config), Card(config, preprocess=squash), tmp_path / "b")
    transform = create_transform(**resolve_data_config(model=rebuilt(tmp_path / "b")))
    assert transform.transforms[0].size == (32, 32)  # both sides: the aspect ratio is not kept
    assert load(tmp_path / "b").card.preprocess == squash
    pad = Preprocess((32, 32), resize="pad", interpolation="bicubic", fill=(26, 51, 76))
    FORMAT.write(build(config), Card(config, preprocess=pad), tmp_path / "c")
    data = resolve_data_config(model=rebuilt(tmp_path / "c"))
    picture = np.random.default_rng(0).integers(0, 256, (37, 53, 3), np.uint8)
    seen = create_transform(**data, normalize=False)(Image.fromarray(picture)).permute(1, 2, 0)
    assert abs(np.asarray(seen).astype(int) - eval_transform(pad)(picture, None)).max() <= 2
    assert load(tmp_path / "c").card.preprocess == pad


def test_an_image_size_that_is_no_whole_number_of_patches(tmp_path: Path) -> None:
    theirs = peer("attention pooling", img_size=35)  # timm leaves the last 3 pixels out
    ours = load(hub(theirs, tmp_path))
    assert ours.config.image_size == (32, 32)
    assert any("35 x 35 is not a whole number of patches" in note for note in ours.load_report.assumptions)
    batch = images(ours, (35, 35))
    with torch.no_grad():
        torch.testing.assert_close(ours(batch[:, :, :32, :32]), theirs(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "width", "heads", "gelu"),
    [
        ("vit_base_patch16_gap_224", 768, 16, "erf"),
        ("vit_so400m_patch14_siglip_224", 1152, 16, "erf"),
        ("vit_so400m_patch16_siglip_256", 1152, 16, "tanh"),
        ("vit_giant_patch14_dinov2", 1536, 24, "erf"),
        ("vit_huge_patch14_224", 1280, 16, "erf"),
        ("", 1152, 16, "erf"),
        ("", 192, 3, "erf"),
    ],
)
def test_heads_and_gelu_by_architecture(architecture: str, width: int, heads: int, gelu: str) -> None:
    state = peer("plain", embed_dim=width, num_heads=2, depth=1).state_dict()
    config = config_of(architecture=architecture, model_args={}) if architecture else {}
    found = FORMAT.find(archive(state, config))
    assert (found.card.config.heads, found.card.config.origin.gelu) == (heads, gelu)
    assert any(f"{heads} heads" in note for note in found.assumptions) == (not architecture)


def test_leftovers_of_pre_training_are_named() -> None:
    theirs = peer("BEiT, one table", embed_dim=128)
    extra = {"mask_token": torch.zeros(1, 1, 128), "rel_pos_bias.relative_position_index": torch.zeros(17, 17)}
    mae = {"decoder_embed.weight": torch.zeros(8, 128), "decoder_blocks.0.norm1.weight": torch.zeros(8)}
    found = FORMAT.find(archive(theirs.state_dict() | extra | mae))
    assert found.unused.keys() == extra.keys() | mae.keys()
    assert found.unused["decoder_embed.weight"] == "the decoder of MAE's pre-training"


@pytest.mark.parametrize(
    ("architecture", "arguments", "message"),
    [
        (PLAIN, dict(qk_norm=True, attn_layer="diff"), r"is part of differential attention"),
        (PLAIN, dict(scale_attn_norm=True), r"'blocks.0.attn.norm.bias' is part of a norm inside"),
        ("vit_base_patch16_xp_224", dict(pre_norm=False, qk_norm=False), r"attention and MLP share"),
        (PLAIN, dict(act_layer="relu"), r"act_layer of config.json is 'relu'"),
        (PLAIN, dict(norm_layer="rmsnorm"), r"norm_layer of config.json is 'rmsnorm'"),
        (PLAIN, dict(global_pool="max"), r"global_pool of config.json is 'max'"),
        (PLAIN, dict(reg_tokens=1, global_pool="avg", pool_include_prefix=True), r"pool_include_prefix"),
        ("beit_base_patch16_224", dict(use_abs_pos_emb=True), r"two kinds of positions, 'pos_embed' and 'blocks.0"),
        ("beit_base_patch16_224", dict(use_shared_rel_pos_bias=True), r"two kinds of positions"),
        ("beit_base_patch16_224", dict(swiglu_mlp=True), r"'blocks.0.mlp.fc1_g.bias' is part of an MLP whose gate"),
        ("vit_base_mci_224", dict(img_size=64), r"'patch_embed.backbone.*is part of a "),
    ],
)
def test_networks_vitrail_has_not_are_refused(
    architecture: str, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = {k: v for k, v in TINY.items() if architecture != "vit_base_mci_224" or k not in ("patch_size", "embed_dim")}
    theirs = timm.create_model(architecture, **(base | arguments))
    with pytest.raises(WeightsError, match=message):
        load(hub(theirs, tmp_path))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("vit_small_patch16_lingbot", "rotary positions of another kind"),
        ("test_vit3", "pooling over registers"),
    ],
)
def test_what_only_the_architecture_says_is_refused(architecture: str, message: str) -> None:
    with pytest.raises(WeightsError, match=f"'{architecture}' has {message}"):
        FORMAT.find(archive(peer("no positions"), config_of(architecture=architecture)))


def test_resnets_that_are_not_bits_are_refused() -> None:
    for name in ("resnetv2_50", "resnetv2_18"):
        with torch.device("meta"):
            state = timm.create_model(name).state_dict()
        with pytest.raises(WeightsError, match=r"running_mean' is part of a BatchNorm"):
            FORMAT.find(archive(state))
    state = {name: tensor for name, tensor in bit().state_dict().items() if "conv3" not in name}
    with pytest.raises(WeightsError, match=r"lacks 'stages.0.blocks.0.conv3.weight'"):
        FORMAT.find(archive(state))


def _without(*names: str) -> Any:
    return lambda state: [state.pop(name) for name in names]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("blocks.1.norm1.bias"), r"lacks the tensor 'blocks.1.norm1.bias'"),
        (_without("pos_embed"), r"lacks the tensor 'pos_embed'.*rotary"),
        (_without("patch_embed.proj.weight"), r"lacks the tensor 'patch_embed.proj.weight'"),
        (lambda s: s.update(pos_embed=s["pos_embed"][:, :-2].clone()), r"'pos_embed' has 15 positions, which fit no"),
        (lambda s: s.update({"blocks.3.norm1.bias": torch.zeros(128)}), r"has 'blocks.3' but no 'blocks.2'"),
        (lambda s: s.update({"norm.weight": torch.zeros(127)}), r"'norm.weight' of shape \(127,\)"),
        (lambda s: s.update({"extra": torch.zeros(3)}), r"'extra' of shape \(3,\), which does not belong"),
        (lambda s: s.update({"fc_norm.weight": torch.zeros(128)}), r"both 'norm.weight' and 'fc_norm.weight'"),
        (lambda s: s.update(pos_embed=torch.zeros(128)), r"'pos_embed' in shape \(128,\)"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_the_name_of_the_tensor(change: Any, message: str, tmp_path: Path) -> None:
    state = dict(peer("plain", embed_dim=128).state_dict())
    change(state)
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match=message):
        load(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(pretrained_cfg=[1]), "'pretrained_cfg' of config.json should be a mapping"),
        (dict(model_args="x"), "'model_args' of config.json should be a mapping"),
        (dict(model_args=dict(num_heads="two")), r"model_args\['num_heads'\] of config.json is 'two'"),
        (dict(model_args=dict(num_heads=5)), "not divisible by 5 heads"),
        (dict(model_args=dict(num_heads=2, img_size="big")), "image size of config.json is 'big'"),
        (dict(pretrained_cfg=dict(mean="grey")), "config.json: mean is 'grey'; valid: a finite number"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_file(peer("plain").state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_of(**changes)))
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


HYBRID = dict(stem="resnet", patch=32, image_size=(64, 64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(positions="2d"), "positions '2d'"),
        (dict(positions="relative"), "positions 'relative'"),
        (dict(place="every"), "at place 'every'"),
        (dict(stem="hmlp"), "stem 'hmlp'"),
        (dict(block="axial", pool="gap"), "axial"),
        (dict(pool="cls+gap"), r"pool 'cls\+gap'"),
        (dict(norm_eps=1e-12), "epsilon 1e-12, timm's 1e-06"),
        (dict(pre_logits=8), "pre-logits"),
        (dict(block="parallel", branches=3), "3 branches"),
        (dict(mlp="swiglu", pool="map"), "after gated MLPs"),
        (dict(distilled=True, cls_position=False), "distillation token"),
        (dict(distilled=True, registers=2), "distillation token"),
        (dict(distilled=True, mlp="swiglu"), "a distillation token together with gated MLPs"),
        (dict(positions="relative_bias", gelu="tanh"), "BEiT and of timm's relpos networks"),
        (HYBRID, "standardises kernels as 'hybrid'"),
        (HYBRID | dict(std_conv="timm"), "GroupNorm epsilon 1e-06"),
        (
            HYBRID | dict(std_conv="timm", group_norm_eps=1e-5, stem_units=(1, 1, 1, 1)),
            r"no hybrid with ResNet stages \(1, 1, 1, 1\)",
        ),
    ],
)
def test_what_timm_cannot_express_is_refused_with_the_reason(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = ViTConfig.of(**(OURS | changes))
    with pytest.raises(WeightsError, match=message):
        FORMAT.write(build(config), Card(config), tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(gelu="tanh"), "gelu 'erf', not 'tanh'. Save to a folder"),
        (dict(pool="gap", class_token=True), "pool 'cls', not 'gap'"),
        (dict(heads=4), "heads 2, not 4"),
        (dict(image_size=(32, 40)), "'pos_embed' has 21 positions, which fit no square grid"),
        (dict(image_size=(32, 48)), r"image_size \(40, 40\), not \(32, 48\)"),
        (dict(positions="none"), "rotary"),
    ],
)
def test_what_a_bare_file_cannot_say_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = ViTConfig.of(**(OURS | dict(width=128) | changes))
    model = build(config)
    randomised(model)
    with pytest.raises(WeightsError, match=message):
        FORMAT.write(model, Card(config), tmp_path / "a.safetensors")
    FORMAT.write(model, Card(config), tmp_path / "a")  # a folder can
    assert load(tmp_path / "a").config.origin.gelu == config.origin.gelu
    assert_equal(model, rebuilt(tmp_path / "a"), images(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(axial=True), "axial"),
        (dict(std_conv="hybrid"), "standardised as 'hybrid'"),
        (dict(group_norm_eps=1e-6), "epsilon 1e-06"),
        ({}, r"no BiT of units \(1, 1\)"),
    ],
)
def test_resnets_timm_has_not_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = ResNetConfig(units=(1, 1), width=32, image_size=(32, 32), classes=5, **changes)
    with pytest.raises(WeightsError, match=message):
        FORMAT.write(build(config), Card(config), tmp_path / "a")


def test_paths_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    model = build(ViTConfig.of(**OURS))
    (tmp_path / "a.pth").mkdir()
    (tmp_path / "b").write_text("")
    for name, message in (("a.pth", "is a folder; this format is a single"), ("b", "is a file, but this format")):
        with pytest.raises(WeightsError, match=message):
            FORMAT.write(model, Card(model.config), tmp_path / name)


def test_a_broken_model_never_replaces_a_good_one(tmp_path: Path) -> None:
    good, bad = build(ViTConfig.of(**OURS)), build(ViTConfig.of(**OURS))
    FORMAT.write(good, Card(good.config), tmp_path)
    with torch.no_grad():
        bad.norm.weight[3] = float("nan")
    with pytest.raises(WeightsError, match=r"1 of 32 values of 'norm.weight' are NaN"):
        FORMAT.write(bad, Card(bad.config), tmp_path)
    assert torch.equal(load(tmp_path).norm.weight, good.norm.weight)


@pytest.mark.parametrize("kind", ["plain", "distilled", "DeiT-III", "parallel", "gated", "BEiT", "BEiT, absolute"])
def test_only_this_format_answers(kind: str) -> None:
    assert recognise(archive(peer(kind))).name == "timm"


def test_other_libraries_files_are_not_timms() -> None:
    theirs = peer("DeiT-III").state_dict()
    names = {name: name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2") for name in theirs}
    deit = archive({names[name]: tensor for name, tensor in theirs.items()})
    assert [one.name for one in FORMATS if one.recognises(deit)] == ["deit"]
    other = archive({"layers.0.blocks.0.attn.qkv.weight": torch.zeros(3, 1), "patch_embed.proj.weight": torch.zeros(1)})
    assert not FORMAT.recognises(other)


def test_published_bits_are_named() -> None:
    for depth, width in ((50, 1), (101, 3), (152, 2)):
        config = ResNetConfig(units=BIT_UNITS[depth], width=64 * width, std_conv="timm")
        assert bit_architecture(config) == f"resnetv2_{depth}x{width}_bit"
