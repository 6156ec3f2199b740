"""Which tokens the classifier reads, as shares that sum to 1: the row of an attention map that reaches the output.

| pool | what is read |
|---|---|
| class token | that token; in a distilled model the mean of it and the distillation token |
| GAP | every token of the grid alike |
| class token and GAP | half of each |
| MAP | the grid's tokens by the probe's attention, averaged over its heads: it is one more layer, of one query |

Registers, and a class token that the pool does not look at, are read by nobody.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.model.head import MAPHead
from vitrail.model.posemb import Grid
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT


def need_vit(model: object, what: str) -> None:
    """Raise UsageError, saying that `what` needs a ViT, for any other network."""
    if not isinstance(model, ViT):
        raise UsageError(f"{what} needs a Vision Transformer, not a {type(model).__name__}")


def average_reading(config: ViTConfig, grid: Grid) -> Tensor:
    """Shares [tokens] in float32 where the network alone decides them; for MAP, those of an average."""
    row = torch.zeros(config.prefix + grid[0] * grid[1])
    if config.pool == "cls":
        row[: 1 + config.distilled] = 1 / (1 + config.distilled)
        return row
    row[config.prefix :] = 1 / (grid[0] * grid[1])
    if config.pool == "cls+gap":
        row /= 2
        row[0] = 0.5
    return row


def reading(model: ViT, encoded: Tensor, grid: Grid) -> Tensor:
    """Shares of all tokens in what the pool reads of these images, [batch, prefix + rows * columns] in float32.

    encoded [batch, tokens, width] is what `model.encode` gives; of a class token alone, as many as are read do.
    """
    row = average_reading(model.config, grid).to(encoded.device).expand(len(encoded), -1)
    if isinstance(model.pool, MAPHead):
        row = row.clone()
        maps, _ = model.pool.weigh(encoded[:, model.config.prefix :])
        row[:, model.config.prefix :] = maps.float().mean(dim=1)[:, 0]
    return row
