"""A stem of one's own: `vitrail train digits --vit.stem overlapping_stem:Overlapping --vit.stem.overlap 1`."""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from vitrail import OwnPart
from vitrail.ranges import Range


@dataclass(frozen=True)
class Overlapping(OwnPart):
    """Patches that overlap: one convolution whose kernel is larger than its stride (as in PVTv2)."""

    overlap: Annotated[int, Range(0, 64)] = 2
    """Pixels by which a patch reaches into each of its neighbours."""

    def build(self, config):
        """Return the stem of a network: images -> features on the grid of tokens."""
        kernel = config.patch + 2 * self.overlap
        return nn.Conv2d(config.channels, config.width, kernel, config.patch, padding=self.overlap)
