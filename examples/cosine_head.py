"""A classifier of one's own: `vitrail train digits --vit.head cosine_head:Cosine --vit.head.scale 16`."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from vitrail import OwnPart
from vitrail.ranges import Positive


class CosineHead(nn.Linear):
    """Logits are scaled cosines between the features and a vector of each class (Gidaris and Komodakis 2018)."""

    scale = 1.0

    def forward(self, features):
        """[batch, features] -> [batch, classes]"""
        return self.scale * F.linear(F.normalize(features, dim=-1), F.normalize(self.weight, dim=-1))


@dataclass(frozen=True)
class Cosine(OwnPart):
    """A cosine classifier."""

    scale: Positive = 16.0
    """Factor of the cosines."""

    def build(self, config):
        """Return the classifier of a network."""
        head = CosineHead(config.head_width, config.classes, bias=False)
        head.scale = self.scale
        return head
