"""Positions of one's own: `vitrail train digits --vit.positions alibi:Alibi --vit.positions.slope 0.5`."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vitrail import OwnPart, Positions
from vitrail.ranges import Positive


class Distances(Positions):
    """Attention with linear biases (Press et al. 2022) in two dimensions: a farther patch has a lower logit."""

    slope = 1.0

    def logits(self, layer, query, places, grid):
        """Return the values to add to the logits [batch or 1, heads, queries, tokens]; places are raster numbers."""
        where = torch.stack([places // grid[1], places % grid[1]], dim=-1).float()
        slopes = self.slope * 0.5 ** torch.arange(query.shape[1], device=query.device)
        bias = -torch.cdist(where, where).unsqueeze(-3) * slopes[:, None, None]
        front = self.config.prefix
        whole = F.pad(bias, (front, 0, front, 0))[..., : query.shape[2], :].to(query.dtype)
        return whole if whole.dim() == 4 else whole[None]


@dataclass(frozen=True)
class Alibi(OwnPart):
    """Biases by distance, without parameters."""

    slope: Positive = 0.5
    """Decrease of a logit for each patch of distance, in the first head; each further head has half of it."""

    def build(self, config):
        """Return the positions of a network."""
        positions = Distances(config)
        positions.slope = self.slope
        return positions
