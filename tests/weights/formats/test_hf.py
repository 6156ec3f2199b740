"""Models saved by transformers, loaded here: the same logits, and the same tokens after every block.

The models of all cases are compared in test_hf_write.py, where they also go back.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_peers import LABELS, SHARED, assert_equal_to, build, error, images_for, peer, saved
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig, flat
from vitrail.weights.load import load
from vitrail.weights.save import save


@pytest.mark.parametrize(
    "name", ["vit", "vit-biasless", "deit-taught", "beit", "beit-shared", "mae", "dinov2-swiglu", "dinov3-gated"]
)
def test_a_bare_state_dict_is_recognised_by_its_names(tmp_path: Path, name: str) -> None:
    theirs = peer(name, hidden_size=128, num_attention_heads=2)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")  # the names modules have in memory
    model = load(tmp_path / "weights.pth")
    assert_equal_to(model, theirs, [(32, 32), (32, 56)])
    assert "2 heads of 64 features" in str(model.load_report)


@pytest.mark.parametrize(
    "name", ["vit-bare", "deit-bare", "beit-bare", "dinov2-bare", "dinov2-registers-bare", "dinov3"]
)
def test_a_file_without_its_config_is_recognised_by_its_names(tmp_path: Path, name: str) -> None:
    theirs = saved(tmp_path / "folder", name, hidden_size=128, num_attention_heads=2)
    (tmp_path / "folder" / "model.safetensors").rename(tmp_path / "alone.safetensors")
    model = load(tmp_path / "alone.safetensors")
    assert_equal_to(model, theirs, [(32, 32)])
    assert any("config.json" in text for text in model.load_report.assumptions)


def test_pytorch_model_bin_is_read(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "vit")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert_equal_to(load(tmp_path), theirs, [(32, 32)])


def test_a_sharded_folder_is_read(tmp_path: Path) -> None:
    theirs = peer("vit")
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_equal_to(load(tmp_path), theirs, [(32, 32)])


@pytest.mark.parametrize("size", [(32, 48), (48, 16)])
def test_a_model_made_for_images_that_are_not_square(tmp_path: Path, size: tuple[int, int]) -> None:
    theirs = saved(tmp_path, "vit", image_size=list(size))
    model = load(tmp_path)
    assert model.config.image_size == size
    images = images_for(theirs, *size)
    with torch.no_grad():
        assert error(model(images), theirs(images).logits) < 1e-5


def test_names_of_classes_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, "vit")
    assert load(tmp_path).card.class_names == list(LABELS.values())
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {str(index): f"LABEL_{index}" for index in LABELS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).card.class_names == []


def test_several_labels_are_a_problem_type(tmp_path: Path) -> None:
    """transformers applies a sigmoid to the logits of such a model; it stores no thresholds."""
    saved(tmp_path / "theirs", "vit")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert not load(tmp_path / "theirs").card.several
    config["problem_type"] = "multi_label_classification"
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    model = load(tmp_path / "theirs")
    assert model.card is not None and model.card.thresholds == [0.5] * len(LABELS)
    save(model, tmp_path / "ours", format="hf")
    assert AutoConfig.from_pretrained(tmp_path / "ours").problem_type == "multi_label_classification"
    model.card = replace(model.card, thresholds=[])
    save(model, tmp_path / "one", format="hf")
    assert AutoConfig.from_pretrained(tmp_path / "one").problem_type is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit", dict(norm_eps=1e-12, gelu="erf", resize_mode="hf", pool="cls", mean=(0.5, 0.5, 0.5))),
        ("vit-tanh", dict(norm_eps=1e-5, gelu="tanh")),
        ("vit-pooler", dict(pre_logits=24, classes=0)),
        ("deit", dict(registers=1, register_positions=True, distilled=False)),
        ("deit-taught", dict(registers=0, distilled=True, mean=(0.485, 0.456, 0.406))),
        ("beit", dict(pool="gap", final_norm="pooled", class_token=True, positions="relative_bias")),
        ("beit-cls", dict(pool="cls", final_norm="tokens")),
        ("beit-unscaled", dict(layer_scale=None)),
        ("beit-shared", dict(place="shared")),
        ("mae", dict(positions="1d", classes=0, pre_logits=None)),
        ("dinov2", dict(pool="cls+gap", resize_mode="hf", norm_eps=1e-6, mlp="gelu", mlp_dim=64)),
        # of 64 features two thirds, up to a multiple of 8
        ("dinov2-swiglu", dict(mlp="swiglu", mlp_dim=48)),
        ("dinov2-registers", dict(registers=3, register_positions=False, resize_mode="timm")),
    ],
)
def test_what_the_config_becomes(tmp_path: Path, name: str, expected: dict[str, Any]) -> None:
    saved(tmp_path, name)
    config = load(tmp_path).config
    assert isinstance(config, ViTConfig)
    assert {field: flat(config)[field] for field in expected} == expected


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("vit-masked", {"vit.embeddings.mask_token", "decoder.0.weight", "decoder.0.bias"}),
        ("deit-masked", {"deit.embeddings.mask_token", "decoder.0.weight", "decoder.0.bias"}),
        ("beit-masked", {"beit.embeddings.mask_token", "lm_head.weight", "lm_head.bias"}),
        ("dinov2", {"dinov2.embeddings.mask_token"}),
        ("vit", set()),
        ("beit", set()),
    ],
)
def test_what_has_no_place_is_told_with_its_reason(tmp_path: Path, name: str, unused: set[str]) -> None:
    saved(tmp_path, name)
    report = load(tmp_path).load_report
    assert set(report.unused) == unused
    assert all(report.unused.values())


def test_the_decoder_of_mae_is_told_as_such(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "mae")
    report = load(tmp_path).load_report
    assert len(report.unused) == sum(name.startswith("decoder.") for name in theirs.state_dict())
    assert "decoder of masked pre-training" in str(report)


def test_a_pooler_beside_a_classifier_is_not_read(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "vit")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"vit.pooler.dense.weight": torch.randn(32, 32), "vit.pooler.dense.bias": torch.randn(32)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path)
    assert_equal_to(model, theirs, [(32, 32)])
    assert set(model.load_report.unused) == {"vit.pooler.dense.weight", "vit.pooler.dense.bias"}


def test_indices_of_relative_positions_are_computed_not_read(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "beit")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "beit.encoder.layer.0.attention.attention.relative_position_bias.relative_position_index"
    tensors[name] = torch.zeros(17, 17, dtype=torch.int64)  # older files have them
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path)
    assert_equal_to(model, theirs, [(32, 32)])
    assert model.load_report.unused == {name: "computed from the grid"}


def test_biases_that_a_config_leaves_out_are_zero(tmp_path: Path) -> None:
    saved(tmp_path, "vit-biasless")
    model = load(tmp_path)
    names = {f"blocks.{layer}.attentions.0.attention.qkv.bias" for layer in range(2)}
    assert set(model.load_report.missing) == names
    assert not any(model.state_dict()[name].any() for name in names)


def test_what_beit_does_not_have_is_told(tmp_path: Path) -> None:
    saved(tmp_path, "beit")
    model = load(tmp_path)
    assert "keys without a bias" in str(model.load_report)
    assert not model.blocks[0].attentions[0].attention.qkv.bias[32:64].any()


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    theirs = peer("vit").half()
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_equal_to(model, theirs.float(), [(32, 32)])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("vit", dict(hidden_act="quick_glu"), r"hidden_act of config.json is 'quick_glu'.*Valid: gelu"),
        ("vit", dict(num_hidden_layers=4), r"num_hidden_layers 4, but the tensors are of 2"),
        ("vit", dict(hidden_size=64), r"hidden_size 64, but the tensors are of 32"),
        ("vit", dict(intermediate_size=64), r"intermediate_size 64, but the tensors are of 48"),
        ("vit", dict(patch_size=4), r"patch_size 4, but the tensors are of 8"),
        ("vit", dict(num_attention_heads=3), r"32 is not divisible by 3 heads"),
        ("vit", dict(num_attention_heads="two"), r"config.json: num_attention_heads is 'two'; valid: a finite number"),
        ("vit", dict(image_size=[32]), r"image_size of config.json is \[32\]"),
        ("vit", dict(image_size=64), r"position_embeddings"),
        ("vit", dict(id2label={"0": "cat"}), r"id2label .* classes 0 to 2"),
        ("vit", dict(model_type="swin"), r"type 'swin' .*Valid: vit, deit"),
        ("vit-bare", dict(pooler_act="relu"), r"pooler with 'relu'"),
        ("vit", dict(model_type="deit"), r"distillation_token"),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    saved(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("vit.layernorm.bias"), r"lacks the tensor 'vit.layernorm.bias'"),
        (lambda tensors: tensors.__setitem__("vit.extra", torch.ones(2)), r"holds the tensor 'vit.extra'"),
        (
            lambda tensors: tensors.__setitem__("vit.encoder.layer.1.output.dense.bias", torch.ones(31)),
            r"vit.encoder.layer.1.output.dense.bias.*31",
        ),
        (
            lambda tensors: tensors.__setitem__("vit.encoder.layer.1.output.dense.bias", torch.full((32,), torch.nan)),
            r"vit.encoder.layer.1.output.dense.bias",
        ),
        (lambda tensors: tensors.__setitem__("classifier.weight", torch.tensor(1.0)), r"classifier.weight"),
    ],
)
def test_a_broken_tensor_is_refused_by_its_name(tmp_path: Path, change: Any, message: str) -> None:
    saved(tmp_path, "vit")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


def test_positions_of_two_kinds_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "beit-shared", use_absolute_position_embeddings=True)
    with pytest.raises(WeightsError, match=r"two kinds of positions, 'beit.embeddings.position_embeddings'"):
        load(tmp_path)


def test_a_beit_saved_without_its_last_norm_is_refused(tmp_path: Path) -> None:
    model = build("BeitModel", **SHARED)
    model.pooler = None
    model.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="without its last LayerNorm"):
        load(tmp_path)


@pytest.mark.nightly("test_a_model_of_transformers_computes_the_same_and_goes_back_as_it_came, of small networks")
@pytest.mark.full_size
@pytest.mark.parametrize(
    ("architecture", "values", "size"),
    [
        ("ViTForImageClassification", dict(hidden_size=96, num_attention_heads=12, intermediate_size=384), 224),
        ("BeitForImageClassification", dict(use_relative_position_bias=True, num_hidden_layers=2), 224),
        (
            "Dinov2ForImageClassification",
            dict(hidden_size=384, num_attention_heads=6, image_size=518, num_hidden_layers=2),
            224,
        ),
    ],
)
def test_the_same_at_full_size(tmp_path: Path, architecture: str, values: dict[str, Any], size: int) -> None:
    import transformers

    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    theirs = cls(cls.config_class(**values))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    theirs.eval().save_pretrained(tmp_path)
    assert_equal_to(load(tmp_path), theirs, [(size, size)])
