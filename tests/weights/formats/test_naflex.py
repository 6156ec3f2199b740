"""Networks for images of any shape, timm's NaFlexViT and SigLIP 2 NaFlex: a batch of strips is what their own makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hf_peers import saved, tower_of
from safetensors.torch import save_file
from torch import Tensor, nn

import vitrail
from vitrail.data.images.ops import eval_transform, shown_transform
from vitrail.errors import WeightsError
from vitrail.model.vit import ViT
from vitrail.weights.load import load

RANDOM = np.random.default_rng(0)
IMAGES = [
    RANDOM.integers(0, 256, (*shape, 3), dtype=np.uint8)
    for shape in ((100, 100), (100, 30), (33, 200), (300, 50), (64, 48))
]


def ours(model: ViT) -> Tensor:
    prepare = eval_transform(model.card.preprocess)
    with torch.no_grad():
        return model(torch.from_numpy(np.stack([prepare(image, RANDOM) for image in IMAGES])).permute(0, 3, 1, 2))


def as_patches(model: ViT) -> tuple[Tensor, Tensor, Tensor]:
    """The images as their libraries take them: values of patches [row, column, channel], rows and columns, and masks.

    They are filled up to the same number of patches.
    """
    card, patch = model.card, model.config.patch
    values, places, filled = [], [], []
    most = model.config.grid[0] * model.config.grid[1]
    for image in IMAGES:
        seen = torch.from_numpy(np.ascontiguousarray(shown_transform(card.preprocess)(image, RANDOM)))
        normal = model.normalise(seen.permute(2, 0, 1)[None])[0]
        channels, height, width = normal.shape
        cells = normal.reshape(channels, height // patch, patch, width // patch, patch).permute(1, 3, 2, 4, 0)
        rows, columns = cells.shape[:2]
        empty = most - rows * columns
        values.append(nn.functional.pad(cells.reshape(rows * columns, -1), (0, 0, 0, empty)))
        where = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        places.append(nn.functional.pad(where, (0, 0, 0, empty)))
        filled.append(torch.arange(most) < rows * columns)
    return torch.stack(values), torch.stack(places), torch.stack(filled)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


def naflexvit(architecture: str, folder: Path) -> nn.Module:
    """A small NaFlexViT of timm with random weights, whose folder on the hub is `folder`."""
    arguments = dict(embed_dim=32, depth=2, num_heads=2, num_classes=5)
    torch.manual_seed(0)
    peer: Any = timm.create_model(architecture, **arguments).eval()
    for parameter in peer.parameters():
        nn.init.normal_(parameter, std=0.1)
    save_file(peer.state_dict(), folder / "model.safetensors")
    known = {name: value for name, value in peer.pretrained_cfg.items() if isinstance(value, str | float | int | tuple)}
    about = dict(
        architecture=architecture,
        model_args=arguments,
        num_classes=5,
        global_pool=peer.global_pool,
        pretrained_cfg=known,
    )
    (folder / "config.json").write_text(json.dumps(about))
    return peer


@pytest.mark.parametrize(
    "architecture",
    [
        *("naflexvit_base_patch16_gap", "naflexvit_base_patch16_map", "naflexvit_base_patch16_siglip"),
        *("naflexvit_so150m2_patch16_reg1_gap", "naflexvit_so150m2_patch16_reg1_map"),
    ],
)
def test_naflexvit_computes_what_timm_computes(architecture: str, tmp_path: Path) -> None:
    peer = naflexvit(architecture, tmp_path)
    model = vitrail.load(tmp_path)
    values, places, filled = as_patches(model)
    with torch.no_grad():
        expected = peer(values, patch_coord=places, patch_valid=filled)
    assert error(ours(model), expected) < 1e-5


def test_siglip_2_naflex_computes_what_transformers_computes(tmp_path: Path) -> None:
    peer = saved(tmp_path, "siglip2")
    patch = tower_of(peer).patch_size
    processor = dict(image_processor_type="Siglip2ImageProcessor", max_num_patches=16, patch_size=patch)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    model = load(tmp_path)
    assert model.card.preprocess.resize == "native" and model.config.native
    values, _, filled = as_patches(model)
    grids = torch.tensor(
        [
            [side // patch for side in shown_transform(model.card.preprocess)(image, RANDOM).shape[:2]]
            for image in IMAGES
        ]
    )
    with torch.no_grad():
        expected = peer(values, pixel_attention_mask=filled.long(), spatial_shapes=grids).pooler_output
    assert error(ours(model), expected) < 1e-5
    vitrail.save(model, tmp_path / "again", "hf")
    again = load(tmp_path / "again")
    assert torch.equal(ours(again), ours(model)) and again.card.preprocess == model.card.preprocess


def test_formats_that_cannot_say_it_are_refused(tmp_path: Path) -> None:
    naflexvit("naflexvit_base_patch16_gap", tmp_path)
    model = vitrail.load(tmp_path)
    with pytest.raises(WeightsError, match="format 'timm' cannot say that images keep their shapes"):
        vitrail.save(model, tmp_path / "timm", "timm")
    with pytest.raises(WeightsError, match=r"only SigLIP 2 NaFlex keeps the shapes|cannot express this model"):
        vitrail.save(model, tmp_path / "hf", "hf")
    vitrail.save(model, tmp_path / "own")
    assert torch.equal(ours(load(tmp_path / "own")), ours(model))
    (tmp_path / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"NaFlexViTs, which differ in GELU and positions. Add a config.json"):
        vitrail.load(tmp_path / "model.safetensors")
