"""The settings of rotary positions. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.errors import UsageError
from vitrail.ranges import Finite, Positive, Settings


@dataclass(frozen=True)
class Rotary(Settings, section="rotary"):
    """How queries and keys of the grid's tokens are rotated by their place; tokens in front of the grid are not.

    | model | settings |
    |---|---|
    | EVA-02 | `Rotary(reference=(16, 16))` |
    | DINOv3 | `Rotary(base=100, coordinates="centred", pairs="halves")` |
    | RoPE-ViT (timm's `vit_*_rope_224`) | `Rotary(base=100, first="column")` |
    | RoPE-ViT, mixed | `Rotary(frequencies="mixed", base=10, first="column")` |
    | Perception Encoder | `Rotary(reference=(24, 24), offset=1, first="column")` |

    A head of d features has d / 2 pairs of features. Pair i of one coordinate, i < d / 4, is rotated by the angle
    coordinate * base^(-4 i / d). Raises UsageError for values that contradict each other.
    """

    frequencies: Literal["axial", "mixed"] = "axial"
    """axial: half of the pairs are rotated by the row, half by the column. mixed: each pair of each head and layer has
    two learned frequencies, one for the row and one for the column (Heo et al. 2024, "Rotary Position Embedding for
    Vision Transformer")."""
    base: Positive = 10_000.0
    """Base of the frequencies: 10,000 in language models and EVA-02, 100 in DINOv3. Mixed: of the initial ones."""
    coordinates: Literal["index", "centred"] = "index"
    """index: the number of the row and of the column. centred: the centre of a patch, from -1 to 1 over the image,
    times 2 pi (DINOv3)."""
    offset: Finite = 0.0
    """Added to the numbers of rows and columns. It is 1 in the Perception Encoders with a class token."""
    reference: tuple[int, int] | None = None
    """Rows and columns of the grid to which the numbers are scaled, so that images of any size span the same angles
    (EVA-02). None: they are not scaled."""
    first: Literal["row", "column"] = "row"
    """The coordinate that rotates the first half of the pairs."""
    pairs: Literal["neighbours", "halves"] = "neighbours"
    """Features 2 i and 2 i + 1 are a pair, or features i and i + d / 2 (DINOv3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference is not None and not all(type(side) is int and side > 0 for side in self.reference):
            raise UsageError(f"rotary.reference is {self.reference}; valid: rows and columns of a grid")
        if self.reference and self.coordinates == "centred":
            raise UsageError("rotary.reference scales numbers of rows and columns; centred coordinates have no scale")
        if self.frequencies == "mixed" and (self.coordinates, self.offset, self.reference) != ("index", 0.0, None):
            raise UsageError("mixed rotary frequencies go with coordinates 'index', offset 0 and no reference only")

    def __str__(self) -> str:
        said = [f"base {self.base:g}", f"{self.coordinates} coordinates", f"{self.first} first", f"{self.pairs} paired"]
        said += [f"offset {self.offset:g}"] if self.offset else []
        said += [f"for a grid of {self.reference[0]} x {self.reference[1]}"] if self.reference else []
        return f"{self.frequencies} ({', '.join(said)})"
