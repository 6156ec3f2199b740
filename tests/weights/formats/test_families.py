"""What a network of each family is used for once it is loaded: gradients, maps, rollout, export, training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_peers
import pytest
import timm_peers
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vitrail.errors import WeightsError
from vitrail.exports.network import trace
from vitrail.inspection.rollout import rollout
from vitrail.model.record import attention_maps
from vitrail.model.vit import ViT
from vitrail.weights.flax.vit import BIG_VISION
from vitrail.weights.load import load
from vitrail.weights.store import load_model, save_model

HF = (
    "clip",
    "clip-classes",
    "siglip",
    "siglip2",
    "msn",
    "ijepa",
    "data2vec-bare",
    "internvl",
    "internvl-6b",
    "aimv2",
    "aimv2-native",
)
TIMM = ("CLIP, quick GELU", "InternViT", "rpn", "relpos", "EVA-02, E", "BEiT v2", "PE", "AIMv2", "QK norm")
TRACED = ("clip", "siglip2", "rpn", "PE", "aimv2", "QK norm", "internvl-6b", "aimv2-native")
"""Families that have all parts which the others have: tracing takes seconds."""


def loaded(folder: Path, family: str) -> tuple[ViT, nn.Module]:
    """The same network here and in its library."""
    if family in HF:
        theirs = hf_peers.saved(folder, family)
        theirs.set_attn_implementation("eager")
    else:
        theirs = timm_peers.peer(family)
        timm_peers.hub(theirs, folder)
    model = load(folder)
    assert isinstance(model, ViT)
    return model, theirs


def their_output(theirs: nn.Module, images: Tensor, family: str) -> Tensor:
    return hf_peers._output(theirs, images) if family in HF else theirs(images)


@pytest.mark.parametrize("family", [*HF, *TIMM])
def test_gradients_are_those_of_the_library(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """`--junitxml` writes the errors, which docs/cookbook/weights.md shows."""
    model, theirs = loaded(tmp_path, family)
    kernels = [one for one in theirs.parameters() if tuple(one.shape[1:]) == model.stem.weight.shape[1:]]
    kernels = kernels or [one for name, one in theirs.named_parameters() if name.endswith("patch_embedding.weight")]
    images = torch.randn(2, 3, *model.config.image_size, generator=torch.Generator().manual_seed(1))
    found = []
    for network, kernel in ((model, model.stem.weight), (theirs, kernels[0])):
        batch = images.clone().requires_grad_()
        output = model(batch) if network is model else their_output(theirs, batch, family)
        weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
        found.append((output.detach(), *torch.autograd.grad((output * weights).sum(), [batch, kernel])))
    (ours_output, ours_images, ours_kernel), (output_, images_, kernel_) = found
    record_property("output", f"{hf_peers.error(ours_output, output_):.1e}")
    record_property("gradient", f"{hf_peers.error(ours_images, images_):.1e}")
    assert hf_peers.error(ours_output, output_) < 1e-5
    assert hf_peers.error(ours_images, images_) < 1e-5
    if kernel_.shape != ours_kernel.shape:  # a dense layer, [row, column, channel]
        ours_kernel = ours_kernel.permute(0, 2, 3, 1).flatten(1)
    assert hf_peers.error(ours_kernel, kernel_) < 1e-5


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.export] if name in TRACED else []) for name in (*HF, *TIMM)],
)
def test_it_is_inspected_exported_saved_and_trained(family: str, tmp_path: Path) -> None:
    model, _ = loaded(tmp_path / "theirs", family)
    (height, width), generator = model.config.image_size, torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8, generator=generator)
    maps = attention_maps(model, images)
    assert [one.layer for one in maps] == list(range(model.config.depth))
    assert all(torch.allclose(one.maps.sum(-1), torch.ones(())) for one in maps)
    shares = rollout(model, images)
    assert shares.shape == (2, *model.config.grid) and 0 < shares.sum() <= 2 + 1e-5
    with torch.no_grad():
        expected = model(images)
        if family in TRACED:
            program = trace(model, (height, width), "logits" if model.config.classes else "features", torch.float32)
            assert hf_peers.error(program.module()(images), expected) < 1e-5
        save_model(tmp_path / "ours", model, model.card)
        assert torch.equal(load_model(tmp_path / "ours")(images), expected)
    losses = _two_steps(model.train(), images)
    assert losses[1] < losses[0]


def _two_steps(model: ViT, images: Tensor) -> list[float]:
    """The loss of a new classifier before a step, and after it."""
    model.reset_head(3)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(2):
        loss = cross_entropy(model(images), torch.tensor([0, 2]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def test_pixels_of_whole_repositories_are_those_of_their_processor(tmp_path: Path) -> None:
    """Without preprocessor_config.json: the constants of the family."""
    expected: dict[str, tuple[str, str, float]] = {
        "clip": ("small", "bicubic", 0.48145466),
        "siglip": ("squash", "bicubic", 0.5),
        "siglip2": ("native", "bilinear", 0.5),
        "msn": ("squash", "bilinear", 0.485),
        "ijepa": ("squash", "bilinear", 0.485),
    }
    for name, (resize, interpolation, mean) in expected.items():
        hf_peers.saved(tmp_path / name, name)
        card: Any = load(tmp_path / name).card
        found = (card.preprocess.resize, card.preprocess.interpolation, card.config.mean[0])
        assert found == (resize, interpolation, mean), name


def test_the_tower_of_a_whole_aimv2_is_read(tmp_path: Path) -> None:
    theirs = hf_peers.build("Aimv2Model", **hf_peers.PAIR, projection_dim=20)
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert hf_peers.error(model(images), theirs.vision_model(images).pooler_output) < 1e-5
    assert "visual_projection.weight" in model.load_report.unused


def test_sines_of_another_kind_are_refused_and_a_table_that_is_not_there(tmp_path: Path) -> None:
    hf_peers.saved(tmp_path / "a", "aimv2-native")
    model = load(tmp_path / "a")
    with pytest.raises(WeightsError, match=r"no place for sines of kind 'mae' as positions \(valid: moco\)"):
        BIG_VISION.write(model, model.card, tmp_path / "a.npz")
    file = tmp_path / "a" / "config.json"
    file.write_text(file.read_text().replace('"is_native": true', '"is_native": false'))
    with pytest.raises(
        WeightsError, match=r"is_native of config.json is False, and the file has no table of positions"
    ):
        load(tmp_path / "a")


def test_internvit_whose_norms_are_of_several_kinds_is_refused(tmp_path: Path) -> None:
    for number, changes in enumerate((dict(norm_type="layer_norm"), dict(layer_norm_eps=1e-5))):
        hf_peers.saved(tmp_path / str(number), "internvl-6b", **changes)
        with pytest.raises(
            WeightsError, match="RMSNorms of queries and keys with epsilon 1e-06 beside norms of another"
        ):
            load(tmp_path / str(number))
    hf_peers.saved(tmp_path / "last", "internvl-6b", use_mean_pooling=False)
    with pytest.raises(WeightsError, match="a LayerNorm after blocks with RMSNorm"):
        load(tmp_path / "last")


def test_a_network_that_only_its_config_names_is_refused_by_that_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "crossvit_tiny_240"}')
    save_file({"blocks.0.blocks.0.0.norm1.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"a network of type 'crossvit_tiny_240'.*not those of a plain"):
        load(tmp_path)
