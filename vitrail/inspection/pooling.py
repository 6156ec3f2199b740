"""Pooling weights: the share of every token in the classifier's input. They sum to 1.

| pool | weights |
|---|---|
| class token | 1 for the class token; in a distilled model half for it and half for the distillation token |
| GAP | the same for every token of the grid |
| class token and GAP | half for the class token, half for the grid |
| MAP | the attention of the probe to its tokens, averaged over heads: the probe is one more layer with one query |

Registers have weight 0, and so does a class token that the pool does not use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.model.head import MAPHead
from vitrail.model.posemb import Grid
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT


def average_pooling_weights(config: ViTConfig, grid: Grid) -> Tensor:
    """Return pooling weights [tokens] in float32, the same for all images; for MAP, those of an average pool."""
    row = torch.zeros(config.prefix + grid[0] * grid[1])
    if config.pool == "cls":
        row[: 1 + config.origin.distilled] = 1 / (1 + config.origin.distilled)
        return row
    row[config.prefix :] = 1 / (grid[0] * grid[1])
    if config.pool == "cls+gap":
        row /= 2
        row[0] = 0.5
    return row


def pooling_weights(model: ViT, encoded: Tensor, grid: Grid) -> Tensor:
    """Return the pooling weights for each image, [batch, prefix + rows * columns] in float32.

    encoded [batch, tokens, width] is the output of `model.encode`; only the tokens that the pool uses are needed.
    """
    row = average_pooling_weights(model.config, grid).to(encoded.device).expand(len(encoded), -1)
    if isinstance(model.pool, MAPHead):
        row = row.clone()
        first = model.pool.first(model.config.prefix)
        maps, _ = model.pool.weigh(encoded[:, first:])
        row[:, first:] = maps.float().mean(dim=1)[:, 0]
    return row
