"""Table 6 of the paper: the pre-training compute of its 18 runs, ours beside what is published.

The convention: exaFLOPs = 2 x MACs of the forward pass at 224 px x 3 (forward and backward) x epochs x 303 million
images of JFT, without the classifier, whose width the paper does not say (JFT's 18,291 classes would add 0.01 % to
H/14 and 0.9 % to R50x1).
"""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.costs.flops import training_flops
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


ROWS: tuple[Row, ...] = (
    Row("ViT-B/32", "B/32", 7, 55),
    Row("ViT-B/16", "B/16", 7, 224),
    Row("ViT-L/32", "L/32", 7, 196),
    Row("ViT-L/16", "L/16", 7, 783),
    Row("ViT-L/16", "L/16", 14, 1567),
    Row("ViT-H/14", "H/14", 14, 4262),
    Row("ResNet50x1", "R50x1", 7, 50),
    Row("ResNet50x2", "R50x2", 7, 199),
    Row("ResNet101x1", "R101x1", 7, 96),
    Row("ResNet152x1", "R152x1", 7, 141),
    Row("ResNet152x2", "R152x2", 7, 563),
    Row("ResNet152x2", "R152x2", 14, 1126),
    Row("ResNet200x3", "R200x3", 14, 3306),
    Row("R50x1+ViT-B/32", "R50+B/32", 7, 106),
    Row("R50x1+ViT-B/16", "R50+B/16", 7, 274),
    Row("R50x1+ViT-L/32", "R50+L/32", 7, 246),
    Row("R50x1+ViT-L/16", "R50+L/16", 7, 859),
    Row("R50x1+ViT-L/16", "R50+L/16", 14, 1668),
)
