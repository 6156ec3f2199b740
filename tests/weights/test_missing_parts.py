"""What a model has that the paper's ViT lacks: named in words, with the valid values, and allowed by name."""

from __future__ import annotations

from typing import Any

import pytest

from vitrail.model.variants import ViTConfig
from vitrail.weights import deit, open_clip, torchvision
from vitrail.weights.flax import vit as flax
from vitrail.weights.hf.encoder import EVERY_HAS
from vitrail.weights.hf.format import ENCODERS
from vitrail.weights.parts import WORDS, lacking, without_place
from vitrail.weights.timm import eva
from vitrail.weights.timm import format as timm

SETS = {
    "torchvision": torchvision.HAS,
    "deit": deit.HAS,
    "open_clip": open_clip.HAS,
    "google": f"{flax.HAS} {flax.GOOGLE.has}",
    "big_vision": f"{flax.HAS} {flax.BIG_VISION.has}",
    "timm": timm.HAS,
    "timm, rotary": eva.HAS,
    "hf": EVERY_HAS,
    **{kind: f"{encoder.has} {encoder.needs}" for kind, encoder in ENCODERS.items()},
}


@pytest.mark.parametrize("who", SETS)
def test_a_format_names_parts_that_there_are(who: str) -> None:
    assert {part.partition("=")[0] for part in SETS[who].split()} <= WORDS.keys()


@pytest.mark.parametrize(
    ("changes", "part", "words"),
    [
        (dict(stem="hmlp"), "stem=hmlp", "stem 'hmlp' (valid: linear)"),
        (dict(block="parallel", branches=2), "block=parallel", "parallel blocks (valid: sequential)"),
        (dict(positions="none"), "positions=none", "positions 'none' (valid: 1d)"),
        (dict(place="every"), "place", "positions at place 'every' (valid: input)"),
        (dict(cls_position=False), "cls_position", "a class token without a position"),
        (dict(registers=4), "registers", "4 registers"),
        (dict(distilled=True), "distilled", "a distillation token"),
        (dict(layer_scale=0.1), "layer_scale", "LayerScale"),
        (dict(mlp="swiglu"), "mlp=swiglu", "a swiglu MLP (valid: gelu)"),
        (dict(gelu="tanh"), "gelu=tanh", "GELU of kind 'tanh' (valid: erf)"),
        (dict(norm_eps=1e-5), "norm_eps", "the LayerNorm epsilon 1e-05 (valid: 1e-06)"),
        (dict(attention_norm=True), "inner_norms", "norms inside attention or MLP"),
        (dict(final_norm="pooled"), "pooled_norm", "a norm after the pooling"),
        (dict(final_norm="none"), "unnormed", "features without a last norm"),
        (dict(image_size=(224, 112)), "oblong", "images of 224 x 112 pixels, which are not square"),
    ],
)
def test_a_part_is_refused_in_words_allowed_by_name_and_missed(changes: dict[str, Any], part: str, words: str) -> None:
    config, plain = ViTConfig.of(**changes), ViTConfig()
    assert without_place(config, "") == words
    assert without_place(config, part) == without_place(plain, "") == lacking(config, part) == ""
    assert lacking(plain, part) != ""


def test_all_values_that_a_format_has_are_named() -> None:
    config = ViTConfig.of(pool="probe")
    assert without_place(config, "pool=gap tokenless pool=map") == "pool 'probe' (valid: cls, gap, map)"


def test_settings_of_no_effect_are_no_parts() -> None:
    for changes in (dict(sines="mae"), dict(register_positions=True), dict(mlp="swiglu", gelu="quick")):
        assert without_place(ViTConfig.of(**changes), "mlp=swiglu") == ""
