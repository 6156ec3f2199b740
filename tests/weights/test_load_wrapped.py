"""Weights as a class of the user's own saves them, under one prefix; and a folder of what would be pushed."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

import vitrail
from vitrail.errors import WeightsError
from vitrail.weights.load import read_card

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def theirs() -> Any:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_base_patch16_224", img_size=32, patch_size=8, embed_dim=128, depth=2, num_heads=2, num_classes=5
    ).eval()


@pytest.mark.parametrize("prefix", ["model.", "net.", "backbone.", "encoder.", "vit.", "timm_model.", "model.net."])
def test_one_prefix_of_all_tensors_is_taken_off(tmp_path: Path, prefix: str) -> None:
    network = theirs()
    file = tmp_path / "weights.pth"
    torch.save({f"{prefix}{name}": tensor for name, tensor in network.state_dict().items()}, file)
    model: Any = vitrail.load(file)
    with torch.no_grad():
        assert torch.allclose(model(IMAGES), network(IMAGES), atol=1e-4)
    assert f"the prefix '{prefix}'" in str(model.load_report)
    assert read_card(file).config == model.config


def test_a_prefix_of_a_part_is_not_taken_off(tmp_path: Path) -> None:
    state = {f"model.{name}": tensor for name, tensor in theirs().state_dict().items()}
    torch.save({**state, "other.weight": torch.zeros(3)}, tmp_path / "weights.pth")
    with pytest.raises(WeightsError, match="not in a known format"):
        vitrail.load(tmp_path / "weights.pth")


def test_push_writes_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vitrail.cli import main

    monkeypatch.chdir(tmp_path)
    vitrail.save(vitrail.create("Ti/16", width=64, depth=1, heads=1, mlp_dim=64, image_size=32, classes=3), "m")
    assert main(["weights", "push", "m", "./folder", "--licence", "mit"]) == 0
    assert sorted(path.name for path in Path("folder").iterdir()) == ["README.md", "card.json", "model.safetensors"]
    assert "wrote folder" in capsys.readouterr().out
    assert vitrail.load("folder").card.licence == "mit"  # type: ignore[union-attr]


def test_two_networks_in_one_file_are_named(tmp_path: Path) -> None:
    state = theirs().state_dict()
    torch.save({"student": state, "teacher": state, "epoch": 3}, tmp_path / "pair.pth")
    with pytest.raises(WeightsError, match=r"holds 2 networks, 'student'.*'teacher'.*torch.save\("):
        vitrail.load(tmp_path / "pair.pth")
    one = torch.load(tmp_path / "pair.pth", weights_only=True)["student"]  # the way out that the message names
    torch.save(one, tmp_path / "one.pth")
    vitrail.load(tmp_path / "one.pth")


def test_a_path_beside_the_tensors_is_skipped(tmp_path: Path) -> None:
    torch.save({"state_dict": theirs().state_dict(), "out": tmp_path, "epoch": 3}, tmp_path / "run.pth")
    assert "not epoch" in str(vitrail.load(tmp_path / "run.pth").load_report)  # type: ignore[union-attr]


def test_scalars_of_numpy_beside_the_tensors_are_skipped(tmp_path: Path) -> None:
    network, file = theirs(), tmp_path / "weights.pth"
    beside = {"epoch": np.int64(3), "best": np.float64(0.8), "done": np.bool_(True), "lr": [np.float32(0.1)] * 3}
    torch.save({**beside, "model": network.state_dict()}, file)
    model: Any = vitrail.load(file)
    with torch.no_grad():
        assert torch.allclose(model(IMAGES), network(IMAGES), atol=1e-4)


@pytest.mark.parametrize("codec", ["utf-32", "hex", "latin1"])
def test_a_codec_that_could_fill_the_memory_is_refused(tmp_path: Path, codec: str) -> None:
    class Encoded:
        def __reduce__(self) -> Any:
            return codecs.encode, ("a" * (8 if codec == "utf-32" else 1000), codec)

    torch.save({"epoch": Encoded(), "model": theirs().state_dict()}, tmp_path / "weights.pth")
    with pytest.raises(WeightsError, match=r"_codecs.encode, which could fill the memory"):
        vitrail.load(tmp_path / "weights.pth")
