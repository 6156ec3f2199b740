"""What learning costs by objective, against torch's own counter on the objectives themselves, and by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitrail.costs.count import macs, training_flops
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.objective.beit import BEiTObjective
from vitrail.objective.dino import DINOObjective
from vitrail.objective.dinov2 import DINOv2Objective
from vitrail.objective.mae import MAEObjective
from vitrail.objective.masked_patch import MaskedPatchObjective
from vitrail.objective.settings import DINO, MAE, BEiT, DINOv2, MaskedPatch, Supervised, Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer, TokenizerObjective
from vitrail.training.flops import ForwardMacs, forward_macs

NETWORK = ViTConfig(width=16, depth=2, heads=2, mlp_dim=24, patch=4, image_size=(16, 24), classes=0)
TOKENIZER = Tokenizer(codes=12, width=6, depth=1, features=5)
CROPS = DINO(outputs=32, hidden=12, bottleneck=8, local_crops=3, global_size=0.75, local_size=0.5)


def counted(objective, size, monkeypatch: pytest.MonkeyPatch) -> int:
    """FLOPs of one image's forward passes, without what makes its crops and what compares their answers."""
    images = torch.zeros(1, 3, *size, dtype=torch.uint8)
    batch = SimpleNamespace(images=images, labels=torch.zeros(1, dtype=torch.long), index=torch.zeros(1).long())
    prepared, compared = objective.prepare(batch, step=0), 0
    if isinstance(objective, DINOObjective):
        crops = tuple(crops.double() for crops in objective.crops(prepared))
        monkeypatch.setattr(objective, "crops", lambda prepared: crops)
        compared = 2 * 2 * (2 + CROPS.local_crops) * CROPS.outputs
    if isinstance(objective, DINOv2Objective):  # similarities of all patches with each other
        compared += 2 * 4 * (crops[0].shape[-1] * crops[0].shape[-2] // 16) ** 2 * NETWORK.width
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # torch's counter does not know fused kernels
    objective.double()
    if isinstance(objective, BEiTObjective):
        objective.tokenizer.double()
    counter = FlopCounterMode(display=False)
    with attention_path("explicit"), counter:
        objective.loss(prepared)
    return counter.get_total_flops() - compared


@cache
def objectives() -> dict[str, tuple]:
    """Name -> an objective, its settings, its network's; made once, which takes longer than a pass."""
    found = {}
    for target in ("colour", "small", "pixels"):
        settings = MaskedPatch(target=target, corrupt=0.4)
        found[f"masked-patch, {target}"] = (MaskedPatchObjective(build(NETWORK), settings, 0), settings, NETWORK)
    for name, network in {
        "mae": replace(NETWORK, positions="sincos", registers=2),
        "mae, relative bias": replace(NETWORK, positions="relative_bias", place="shared"),
        "mae, relative": replace(NETWORK, positions="relative"),
        "mae, hmlp": replace(NETWORK, stem="hmlp", stem_norm="layer", pool="gap"),
    }.items():
        settings = MAE(ratio=0.7, decoder_width=8, decoder_depth=3, decoder_heads=2)
        found[name] = (MAEObjective(build(network), settings, 0), settings, network)
    settings = BEiT(ratio=0.4, smallest_block=2)
    found["beit"] = (BEiTObjective(build(NETWORK), settings, 0, ImageTokenizer(TOKENIZER, 4)), settings, NETWORK)
    found["tokenizer"] = (TokenizerObjective(ImageTokenizer(TOKENIZER, 4)), TOKENIZER, NETWORK)
    resnet = ResNetConfig(units=(1, 1), width=32, image_size=(16, 24), classes=0)
    every = NETWORK.changed(class_token=False, pool="gap")  # for a class token the last layer is spared the others
    found["dino"] = (DINOObjective(build(every), CROPS, 0), CROPS, every)
    patches = DINOv2(
        outputs=32, hidden=12, bottleneck=8, local_crops=3, global_size=0.75, local_size=0.5, gram_weight=1
    )
    found["dinov2"] = (DINOv2Objective(build(NETWORK), patches, 0), patches, NETWORK)  # which needs all tokens
    found["dino, resnet"] = (DINOObjective(build(resnet), CROPS, 0), CROPS, resnet)
    return found


@pytest.mark.full_size
@pytest.mark.parametrize("size", [(16, 24), (8, 12)], ids=["whole", "small"])
@pytest.mark.parametrize("name", objectives())
def test_passes_are_what_the_objective_does(name: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    objective, settings, network = objectives()[name]
    found = forward_macs(settings, network, size, tokenizer=TOKENIZER)
    assert 2 * (found.trained + found.frozen) == counted(objective, size, monkeypatch)


def test_what_answers_is_the_tokenizer_and_the_teacher() -> None:
    by_labels = forward_macs(Supervised(), NETWORK)
    assert by_labels == ForwardMacs(macs(NETWORK)) and by_labels.flops == training_flops(NETWORK)
    alone = forward_macs(replace(CROPS, local_crops=0), NETWORK)
    assert alone.trained == alone.frozen and alone.flops == 2 * (3 + 1) * alone.trained
    compared = forward_macs(TOKENIZER, NETWORK).frozen
    assert compared == 24 * 5 * 12 < forward_macs(BEiT(), NETWORK, tokenizer=TOKENIZER).frozen
    assert ForwardMacs(5, 7).flops == 2 * (3 * 5 + 7)


@pytest.mark.full_size
def test_the_published_saving_of_a_masked_autoencoder() -> None:
    """He et al. 2022, table 1 and section 4: a light decoder has 9 % of the FLOPs per token of L's encoder; and with
    three patches in four hidden its pre-training takes less than half of one whose encoder sees them all."""
    large = replace(variant("L/16", image_size=224), classes=0, positions="sincos")
    whole, light = (forward_macs(MAE(ratio=ratio), large).trained for ratio in (1 / 196, 0.75))
    encoder = macs(large)
    assert 0.05 < (whole - encoder) / encoder < 0.12
    assert 2.5 < whole / light < 3.5


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        forward_macs(BEiT(), NETWORK)
    with pytest.raises(ValueError, match="Vision Transformer"):
        forward_macs(MAE(), ResNetConfig(units=(1, 1), width=32, image_size=(16, 24)))
