"""transformers' EoMT in small, with random weights that matter, and vitrail's network with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from hf_peers import DINO, randomise
from torch import nn
from transformers import EomtConfig, EomtForUniversalSegmentation

from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.hf.eomt import Eomt

SIZES = dict(DINO, num_hidden_layers=3, num_register_tokens=2, num_labels=4, layerscale_value=0.5)
QUERIED = dict(num_queries=5, num_blocks=2, num_upscale_blocks=1)


def eomt(**changes: Any) -> nn.Module:
    """EoMT with 5 queries in the last 2 of 3 blocks, for 4 classes."""
    torch.manual_seed(0)
    names = dict(hidden_dropout_prob="hidden_dropout_prob", attention_probs_dropout_prob="attention_dropout")
    values = {names.get(name, name): value for name, value in (SIZES | QUERIED | changes).items()}
    return randomise(EomtForUniversalSegmentation(EomtConfig(**values)))


def ours(peer: Any) -> ViT:
    """The network with the weights of a small EoMT, by the table of names."""
    of = peer.config
    config = ViTConfig.of(
        width=32, depth=3, heads=2, mlp_dim=64, patch=8, image_size=(32, 32), classes=of.num_labels, registers=2,
        cls_position=False, layer_scale=0.5, segmentation="queries", queries=of.num_queries, query_blocks=of.num_blocks,
    )  # fmt: skip
    model, theirs, state = ViT(config), peer.state_dict(), {}
    names = model.state_dict()
    for entry in Eomt("").conversions(names, config):
        state[entry.ours] = entry.read(*(theirs.pop(name) for name in entry.theirs)).reshape(names[entry.ours].shape)
    assert set(theirs) == {"attn_mask_probs", "criterion.empty_weight"}
    model.load_state_dict(state)
    return model.eval()
