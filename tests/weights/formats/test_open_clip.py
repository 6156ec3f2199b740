"""OpenCLIP's own networks, loaded here and written back: the same image embeddings, at other sizes too."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from hf_peers import error, randomise
from open_clip.model import CLIP, resize_pos_embed
from safetensors.torch import load_file, save_file
from tiny_networks import fresh, tiny
from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import flat
from vitrail.weights.load import load
from vitrail.weights.save import save

VISION = dict(image_size=32, layers=2, width=48, head_width=24, mlp_ratio=2.0, patch_size=8)
TEXTS = dict(context_length=8, vocab_size=50, width=16, heads=2, layers=1)
PREPROCESS = dict(mean=[0.5, 0.4, 0.3], std=[0.2, 0.25, 0.3], interpolation="bicubic", resize_mode="squash")


def written(folder: Path, **vision: Any) -> CLIP:
    """A tiny CLIP of OpenCLIP's, also in a folder as on the hub."""
    quick = bool(vision.pop("quick_gelu", False))
    model: dict[str, Any] = dict(embed_dim=20, quick_gelu=quick, vision_cfg=VISION | vision, text_cfg=TEXTS)
    torch.manual_seed(0)
    theirs = randomise(CLIP(**model))
    folder.mkdir()
    save_file(theirs.state_dict(), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(dict(model_cfg=model, preprocess_cfg=PREPROCESS)))
    assert isinstance(theirs, CLIP)
    return theirs


def images(side: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(2))


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("vision", "field", "value"),
    [
        (dict(quick_gelu=True), "gelu", "quick"),
        (dict(act_kwargs=dict(approximate="tanh")), "gelu", "tanh"),
        (dict(ls_init_value=0.5, norm_kwargs=dict(eps=1e-3)), "layer_scale", 0.5),
        (dict(no_ln_pre=True), "pre_norm", False),
    ],
)
@torch.no_grad()
def test_a_folder_computes_what_open_clip_does_and_goes_back(
    tmp_path: Path, vision: dict[str, Any], field: str, value: object
) -> None:
    theirs = written(tmp_path / "theirs", **vision)
    model = load(tmp_path / "theirs")
    assert flat(model.config)[field] == value
    assert error(model(images()), theirs.encode_image(images())) < 1e-5
    assert model.card.preprocess == Preprocess((32, 32), "squash", interpolation="bicubic")
    assert model.config.mean == (0.5, 0.4, 0.3)
    save(model, tmp_path / "ours", format="open_clip")
    tower = load_file(tmp_path / "ours" / "open_clip_model.safetensors")
    assert theirs.load_state_dict(tower, strict=False).unexpected_keys == []
    assert tower.keys() == {name for name in theirs.state_dict() if name.startswith("visual.")}
    again = load(tmp_path / "ours")
    assert again.config == model.config and again.card.preprocess == model.card.preprocess
    assert torch.equal(again(images()), model(images()))
    padded = Preprocess((32, 32), "pad", interpolation="bicubic", fill=(7, 7, 7))
    model.card = replace(model.card, preprocess=padded)
    save(model, tmp_path / "padded", format="open_clip")
    assert load(tmp_path / "padded").card.preprocess == padded
    for fill, colour in (((0, 0, 0), 0), (None, 128)):  # black is OpenCLIP's own; without a colour vitrail paints grey
        model.card = replace(model.card, preprocess=replace(padded, fill=fill))
        save(model, tmp_path / f"filled-{colour}", format="open_clip")
        assert load(tmp_path / f"filled-{colour}").card.preprocess.fill == (colour,) * 3
    texts = json.loads((tmp_path / "ours" / "open_clip_config.json").read_text())["model_cfg"]["text_cfg"]
    assert texts == TEXTS


@torch.no_grad()
def test_another_size_is_resampled_as_open_clip_does(tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs")
    state = deepcopy(theirs.state_dict())
    larger = CLIP(embed_dim=20, vision_cfg=VISION | dict(image_size=48), text_cfg=TEXTS)  # type: ignore[arg-type]
    resize_pos_embed(state, larger)
    larger.load_state_dict(state)
    model = load(tmp_path / "theirs", image_size=48)
    assert error(model(images(48)), larger.eval().encode_image(images(48))) < 1e-5


def test_openais_own_files_have_quick_gelu_and_others_must_say(tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs", quick_gelu=True, width=128, head_width=64)
    state = theirs.state_dict()
    torch.save(state, tmp_path / "laion.pt")
    with pytest.raises(WeightsError, match=r"quick_gelu, as OpenAI's weights.*open_clip_config\.json"):
        load(tmp_path / "laion.pt")
    sizes = {name: torch.tensor(8) for name in ("input_resolution", "context_length", "vocab_size")}
    torch.save(state | sizes, tmp_path / "openai.pt")
    model = load(tmp_path / "openai.pt")
    with torch.no_grad():
        assert error(model(images()), theirs.encode_image(images())) < 1e-5
    assert "the tower for texts" in str(model.load_report) and "2 heads of 64" in str(model.load_report)


def test_preprocessing_without_a_word_is_that_of_openais_clip(tmp_path: Path) -> None:
    written(tmp_path / "theirs")
    file = tmp_path / "theirs" / "open_clip_config.json"
    file.write_text(json.dumps(dict(model_cfg=json.loads(file.read_text())["model_cfg"])))
    model = load(tmp_path / "theirs")
    assert model.card.preprocess == Preprocess((32, 32), "small", 1.0, "bicubic")
    assert (model.config.mean, model.config.std) == (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)


def test_what_open_clip_has_and_vitrail_has_not_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "theirs", pool_type="avg")
    with pytest.raises(WeightsError, match="pool_type is 'avg' in vision_cfg"):
        load(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(classes=0), "no projection of the class token"),
        (dict(pool="gap"), "pool 'gap'"),
        (dict(positions="2d"), "positions '2d'"),
        ({}, "its last layer has a bias"),
    ],
)
def test_what_open_clip_cannot_express_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    model: nn.Module = fresh(tiny(**changes))
    with pytest.raises(WeightsError, match=reason):
        save(model, tmp_path / "ours", format="open_clip")
