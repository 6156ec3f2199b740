"""Table 6 of the paper: the pre-training compute of its 18 runs, ours beside what is published.

The convention: exaFLOPs = 2 x MACs of the forward pass at 224 px x 3 (forward and backward) x epochs x 303 million
images of JFT, without the classifier, whose width the paper does not say (JFT's 18,291 classes would add 0.01 % to
H/14 and 0.9 % to R50x1).
"""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.costs.flops import training_flops
from vitrail.costs.published import published
from vitrail.model.variants import variant

JFT_IMAGES = 303e6
"""Of JFT-300M; the paper's compute follows from this number."""


@dataclass(frozen=True)
class Row:
    """One run of the table."""

    name: str
    """As the table writes it."""
    variant: str
    """As `vitrail.model.variants.variant` reads it."""
    epochs: int
    published: float
    """exaFLOPs."""

    @property
    def exaflops(self) -> float:
        """Ours."""
        return training_flops(variant(self.variant, classes=0)) * self.epochs * JFT_IMAGES / 1e18

    @property
    def difference(self) -> float:
        """Ours over the published, minus 1."""
        return self.exaflops / self.published - 1


def _variant(name: str) -> str:
    """The name in this package of a network that the table calls `name`, such as R50+B/32 for R50x1+ViT-B/32."""
    return name.replace("R50x1+", "R50+").replace("ViT-", "").replace("ResNet", "R")


ROWS: tuple[Row, ...] = tuple(
    Row(name, _variant(name), epochs, exaflops) for name, epochs, *_, exaflops in published("table6_scaling")["rows"]
)
