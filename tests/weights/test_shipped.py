"""The weights that vitrail ships."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.errors import WeightsError
from vitrail.recipes.finetune_by_data import WEIGHTS
from vitrail.weights.load import SHIPPED, local_path, read_card
from vitrail.weights.verify import verify

NAMES = [f"vitrail/{folder.name}" for folder in sorted(SHIPPED.iterdir())]


def test_the_default_of_finetune_is_shipped() -> None:
    assert WEIGHTS in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_they_load_without_a_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refused)
    model = vitrail.load(name)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert sum(file.stat().st_size for file in local_path(name).iterdir()) <= 12e6


@pytest.mark.parametrize("name", NAMES)
def test_the_card_says_what_they_are(name: str) -> None:
    card = read_card(name)
    assert card.licence and card.provenance["command"].startswith("python -m benchmarks.pretrain train")
    assert len(set(card.class_names)) == card.config.classes
    found = verify(name)
    assert found.compared and found.passed


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vitrail" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError, match="holds no weights"):
        vitrail.load("vitrail/tiny")
