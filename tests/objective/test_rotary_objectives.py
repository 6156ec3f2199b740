"""Objectives that mask patches learn with rotary positions: the tokens that are left keep their places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dino_cases import make
from masked_cases import batch, vit
from test_beit import tokenizer

from vitrail.model.variants import Rotary
from vitrail.objective.beit import BEiTObjective
from vitrail.objective.mae import MAEObjective
from vitrail.objective.masked_patch import MaskedPatchObjective
from vitrail.objective.settings import MAE, BEiT, MaskedPatch

DINOV3: dict[str, Any] = dict(
    positions="none", rotary=Rotary(base=100.0, coordinates="centred", pairs="halves"), registers=1, key_bias=False
)


@pytest.mark.full_size
def test_two_steps_of_every_objective_without_labels_lower_its_loss() -> None:
    makers = {
        "mae": lambda: MAEObjective(vit(**DINOV3), MAE(decoder_width=16, decoder_depth=1, decoder_heads=2), seed=0),
        "masked-patch": lambda: MaskedPatchObjective(vit(**DINOV3), MaskedPatch(), seed=3),
        "beit": lambda: BEiTObjective(vit(**DINOV3), BEiT(smallest_block=2), seed=3, tokenizer=tokenizer()),
        "dino": lambda: make(**DINOV3),
    }
    for name, maker in makers.items():
        torch.manual_seed(0)
        objective, losses = maker(), []
        optimiser = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], lr=1e-3, weight_decay=0)
        bias = objective.model.blocks[0].attentions[0].attention.qkv.bias
        keys = slice(len(bias) // 3, 2 * len(bias) // 3)
        before = bias[keys].clone()
        for _ in range(3):
            loss, count, _ = objective(batch(), step=0)
            losses.append(float(loss.detach()) / float(count))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        assert losses[2] < losses[0], (name, losses)
        assert torch.equal(bias[keys], before), name  # keys have no bias that could learn
