"""Table 6 of the paper: the pre-training compute of its 18 runs, as vitrail counts it and as published.

exaFLOPs = 2 x MACs of the forward pass at 224 px x 3 (forward and backward) x epochs x 303 million images of JFT. The
classifier is not counted, because the paper does not state its width: JFT's 18,291 classes would add 0.01 % to H/14 and
0.9 % to R50x1.
"""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.costs.count import training_flops
from vitrail.costs.published import published
from vitrail.model.variants import variant
from vitrail.words import one_line

JFT_IMAGES = 303e6
"""Images of JFT-300M; the paper's compute follows from this number."""


@one_line
@dataclass(frozen=True)
class Table6Row:
    """One run of the table."""

    name: str
    """The network's name in the table."""
    variant: str
    """The network's name for `vitrail.model.variants.variant`."""
    epochs: int
    published: float
    """exaFLOPs."""

    @property
    def exaflops(self) -> float:
        """Compute as counted here."""
        return training_flops(variant(self.variant, classes=0)) * self.epochs * JFT_IMAGES / 1e18

    @property
    def difference(self) -> float:
        """Relative difference between the counted and the published compute."""
        return self.exaflops / self.published - 1


def _variant(name: str) -> str:
    """Return this package's name of a network in the table: "R50x1+ViT-B/32" becomes "R50+B/32"."""
    return name.replace("R50x1+", "R50+").replace("ViT-", "").replace("ResNet", "R")


ROWS: tuple[Table6Row, ...] = tuple(
    Table6Row(name, _variant(name), epochs, exaflops)
    for name, epochs, *_, exaflops in published("table6_scaling")["rows"]
)
