"""`verify`: the card's reference vector, and the library that the weights come from, layer by layer."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax_arrays
import hf_peers
import pytest
import timm_peers
import torch
from flax_checks import save as save_npz
from torch import nn
from torchvision.models import VisionTransformer

from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.weights import verify as verify_module
from vitrail.weights.load import load
from vitrail.weights.save import save
from vitrail.weights.store import save_model
from vitrail.weights.verify import verify

TINY = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=3)


def made(config: ViTConfig = TINY) -> Any:
    torch.manual_seed(0)
    model = build(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def in_timm(folder: Path) -> tuple[Path, str]:
    return timm_peers.hub(timm_peers.peer("registers"), folder / "m"), "timm"


def in_timm_alone(folder: Path) -> tuple[Path, str]:
    """A bare file, which timm itself has no way of opening: it needs to be told the sizes."""
    path = folder / "m.pth"
    wide = dict(embed_dim=128, num_heads=2)
    torch.save(timm_peers.peer("plain", **wide).state_dict(), path)
    return path, "timm"


def in_transformers(folder: Path) -> tuple[Path, str]:
    hf_peers.saved(folder / "m", "beit")
    return folder / "m", "transformers"


def towers_in_transformers(folder: Path) -> tuple[Path, str]:
    hf_peers.saved(folder / "m", "clip-pair")
    return folder / "m", "transformers"


def patches_in_transformers(folder: Path) -> tuple[Path, str]:
    hf_peers.saved(folder / "m", "siglip2")
    return folder / "m", "transformers"


def masked_in_transformers(folder: Path) -> tuple[Path, str]:
    hf_peers.saved(folder / "m", "mae", mask_ratio=0.75)
    return folder / "m", "transformers"


def in_torchvision(folder: Path) -> tuple[Path, str]:
    torch.manual_seed(0)
    network = VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=128, mlp_dim=64)
    nn.init.normal_(network.heads.head.weight)
    torch.save(network.state_dict(), folder / "m.pth")
    return folder / "m.pth", "torchvision"


LIBRARIES = [in_timm, in_timm_alone, in_transformers, masked_in_transformers, in_torchvision]
LIBRARIES += [towers_in_transformers, patches_in_transformers]


@pytest.mark.parametrize("make", LIBRARIES)
def test_every_layer_is_compared_with_the_library_of_the_file(tmp_path: Path, make: Any) -> None:
    path, library = make(tmp_path)
    found = verify(path)
    assert found.library is not None and found.library.startswith(f"{library} ")
    blocks = [name for name in found.layers if name.startswith("block ")]
    model: Any = load(path)
    assert blocks == [f"block {index}" for index in range(model.config.depth)]
    assert ("logits" in found.layers) == bool(model.config.classes)
    assert 0 <= found.worst < 1e-5
    assert found.passed and found.reference is None


@pytest.mark.full_size
def test_the_stages_of_a_resnet_are_compared_with_timms(tmp_path: Path) -> None:
    small = save_npz(tmp_path / "small.npz", flax_arrays.bit(units=(1, 1), width=32))
    assert "BiT's repository is code" in " ".join(verify(small).notes)
    path = save_npz(tmp_path / "bit.npz", flax_arrays.bit(units=(3, 4, 6, 3), width=64))
    save(load(path), tmp_path / "m.safetensors", "timm")
    found = verify(tmp_path / "m.safetensors")
    assert list(found.layers) == ["block 0", "block 1", "block 2", "block 3", "logits"]
    assert found.worst < 3e-5 and found.passed  # largest value by largest value, after fifty layers


@pytest.mark.full_size
@pytest.mark.parametrize("make", [in_timm, in_transformers, in_torchvision])
def test_weights_that_were_converted_remember_their_library(tmp_path: Path, make: Any) -> None:
    path, library = make(tmp_path)
    save(load(path), tmp_path / "ours")
    found = verify(tmp_path / "ours")
    assert found.format == "vitrail"
    assert found.library is not None and found.library.startswith(library)
    assert found.reference is not None and set(found.reference) == {"features", "logits"}
    assert found.worst < 1e-5 and found.passed


def test_the_layer_that_differs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = in_timm(tmp_path)

    def damaged(source: Path) -> Any:
        model: Any = load(source)
        with torch.no_grad():
            model.blocks[1].mlps[0].mlp.fc2.bias.add_(0.5)
        return model

    monkeypatch.setattr(verify_module, "load", damaged)
    found = verify(path)
    assert found.layers["block 0"] < 1e-5 < 1e-3 < found.layers["block 1"]
    assert not found.passed


def test_the_reference_vector_is_compared(tmp_path: Path) -> None:
    model = made()
    save(model, tmp_path / "m")
    found = verify(tmp_path / "m")
    assert found.reference is not None and max(found.reference.values()) < 1e-6
    assert found.passed and found.library is None
    card = load(tmp_path / "m").card
    with torch.no_grad():
        model.norm.weight[3] += 0.1
    save_model(tmp_path / "m", model, card)  # other weights under the old card
    found = verify(tmp_path / "m")
    assert found.reference is not None and found.reference["features"] > 1e-3
    assert found.compared and not found.passed


def test_where_there_is_nothing_to_compare_with_that_is_said(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "vit.npz", flax_arrays.google())
    found = verify(path)
    assert (found.reference, found.library, found.layers) == (None, None, {})
    assert not found.compared and not found.passed
    notes = " ".join(found.notes)
    assert "no reference vector" in notes and "Google's vision_transformer is code for JAX" in notes


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = in_timm(tmp_path)

    def gone(name: str) -> Any:
        if name == "timm":
            raise ImportError(name)
        return real(name)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", gone)
    found = verify(path)
    assert found.library is None and "pip install timm" in " ".join(found.notes)


def test_a_library_that_fails_is_a_note_and_not_the_end(tmp_path: Path) -> None:
    path, _ = in_timm(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["architecture"] = "vit_no_such_thing"
    (path / "config.json").write_text(json.dumps(config))
    found = verify(path)
    assert found.library is None and "timm cannot run" in " ".join(found.notes)


@pytest.mark.parametrize(
    ("kept", "said"),
    [({"image": "integers-1"}, "damaged"), ({"image": "integers-1", "outputs": {"logits": 3}}, "damaged")],
)
def test_a_damaged_reference_is_an_error(tmp_path: Path, kept: dict[str, Any], said: str) -> None:
    model = made()
    save(model, tmp_path / "m")
    save_model(tmp_path / "m", model, replace(load(tmp_path / "m").card, reference=kept))
    with pytest.raises(WeightsError, match=said):
        verify(tmp_path / "m")


def test_a_reference_of_another_image_is_not_compared(tmp_path: Path) -> None:
    model = made()
    save(model, tmp_path / "m")
    save_model(tmp_path / "m", model, replace(load(tmp_path / "m").card, reference={"image": "photo-2"}))
    found = verify(tmp_path / "m")
    assert found.reference is None and "another image, 'photo-2'" in " ".join(found.notes)
