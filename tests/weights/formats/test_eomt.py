"""transformers' EoMT, saved there and loaded here: the same classes of the same pixels, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eomt_peer import QUERIED, eomt
from hf_peers import DINO3, LABELS, images_for, randomise
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import EomtDinov3Config, EomtDinov3ForUniversalSegmentation

from vitrail.errors import WeightsError
from vitrail.weights.hf.format import FORMAT
from vitrail.weights.load import load

NAMED = dict(id2label={**LABELS, 3: "sky"}, label2id={"cat": 0, "dog": 1, "<b>": 2, "sky": 3})


def dinov3(**changes: Any) -> nn.Module:
    values = {name: value for name, value in (DINO3 | QUERIED | NAMED | changes).items() if "dropout" not in name}
    torch.manual_seed(0)
    return randomise(EomtDinov3ForUniversalSegmentation(EomtDinov3Config(**values)))


def saved(folder: Path, kind: str) -> nn.Module:
    """An EoMT that has learned: without masked attention."""
    kinds = {
        "dinov2": lambda: eomt(**NAMED),
        "dinov2-swiglu": lambda: eomt(**NAMED, use_swiglu_ffn=True),
        "dinov3": dinov3,
        "dinov3-base": lambda: dinov3(rope_parameters=dict(rope_type="default", rope_theta=50.0)),
    }
    model: Any = kinds[kind]()
    model.attn_mask_probs.zero_()
    model.save_pretrained(folder)
    return model


def scores(model: nn.Module, images: Tensor) -> Tensor:
    """The scores of transformers' semantic inference, before it enlarges them."""
    with torch.no_grad():
        out = model(images)
    return torch.einsum(
        "bqc,bqhw->bchw", out.class_queries_logits.softmax(-1)[..., :-1], out.masks_queries_logits.sigmoid()
    )


@pytest.mark.parametrize("kind", ["dinov2", "dinov2-swiglu", "dinov3", "dinov3-base"])
def test_eomt_computes_the_same_and_goes_back_as_it_came(tmp_path: Path, kind: str) -> None:
    theirs = saved(tmp_path / "theirs", kind)
    model = load(tmp_path / "theirs")
    assert model.card.class_names == ["cat", "dog", "<b>", "sky"] and model.card.task == "segmentation"
    images = images_for(theirs, 32, 32)
    expected = scores(theirs, images)
    with torch.no_grad():
        assert (model(images).exp() - expected).norm() < 1e-5 * expected.norm()
    FORMAT.write(model, model.card, tmp_path / "ours")
    before, after = (load_file(tmp_path / whose / "model.safetensors") for whose in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    back = type(theirs).from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(scores(back, images), expected)


def test_a_file_without_its_config_is_recognised(tmp_path: Path) -> None:
    theirs = eomt(hidden_size=128)
    theirs.attn_mask_probs.zero_()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    images = images_for(theirs, 32, 32)
    with torch.no_grad():
        assert (load(tmp_path / "model.safetensors")(images).exp() - scores(theirs, images)).abs().max() < 1e-4


def test_other_names_of_gated_mlps(tmp_path: Path) -> None:
    """transformers 4 joined gate and value, and its files are the published ones."""
    theirs = saved(tmp_path, "dinov2-swiglu")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".gate_proj." in name]:
        pair = tensors.pop(name), tensors.pop(name.replace("gate_proj", "up_proj"))
        tensors[name.replace("gate_proj", "weights_in")] = torch.cat(pair)
        down = name.replace("gate_proj", "down_proj")
        tensors[name.replace("gate_proj", "weights_out")] = tensors.pop(down)
    save_file(tensors, tmp_path / "model.safetensors")
    images = images_for(theirs, 32, 32)
    with torch.no_grad():
        assert (load(tmp_path)(images).exp() - scores(theirs, images)).abs().max() < 1e-4


def test_masked_attention_in_predictions_is_refused(tmp_path: Path) -> None:
    eomt().save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r"attn_mask_probs is not 0"):
        load(tmp_path)


def test_another_activation_is_refused(tmp_path: Path) -> None:
    """It would be that of the masks' MLP, too."""
    theirs: Any = eomt(hidden_act="gelu_new")
    theirs.attn_mask_probs.zero_()
    theirs.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r"hidden_act of config.json is 'gelu_new'; valid for EoMT: gelu"):
        load(tmp_path)


def test_the_published_processor(tmp_path: Path) -> None:
    """Those for semantic segmentation cut images into pieces of 512 pixels; here the whole image is resized."""
    saved(tmp_path, "dinov2")
    values = dict(
        image_processor_type="EomtImageProcessor", do_resize=True, size=dict(shortest_edge=32, longest_edge=None),
        do_split_image=True, resample=2, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    model = load(tmp_path)
    assert (model.card.preprocess.resize, model.card.preprocess.image_size) == ("squash", (32, 32))
    assert any("cuts them into pieces" in note for note in model.load_report.assumptions)
