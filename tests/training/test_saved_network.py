"""The networks that a run evaluates: each kind is saved in the run folder, and read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from vitrail.model.build import build
from vitrail.model.variants import variant
from vitrail.objective.settings import Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer
from vitrail.training.folder import RunFolder
from vitrail.training.python_objects import ForeignNetwork
from vitrail.training.saved_network import saved_network
from vitrail.weights.card import Card

CONFIG = variant("Ti/4", width=16, depth=1, heads=2, classes=3, image_size=8)
NETWORKS = {
    "ours": lambda: build(CONFIG),
    "foreign": lambda: ForeignNetwork(nn.Sequential(nn.Flatten(), nn.Linear(192, 3))),
    "tokenizer": lambda: ImageTokenizer(Tokenizer(codes=5, width=8, depth=1, features=4), 4),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_each_kind_is_read_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    network, folder, card = NETWORKS[kind](), RunFolder.create(str(tmp_path), "run"), Card(CONFIG, ["a", "b", "c"])
    saved = saved_network(network)
    saved.save(folder.best, card, None)
    with torch.no_grad():
        expected = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        for parameter in network.parameters():
            parameter.zero_()
    best = saved.best(folder, card)
    assert not best.training
    assert best.state_dict().keys() == expected.keys()
    for name, tensor in best.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert saved.has_card == saved.has_features == (kind == "ours")
    assert saved.best_card(folder, card).class_names == ["a", "b", "c"]
