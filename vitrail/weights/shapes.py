"""What the shapes in a file tell about a model; a file may claim anything, so each is checked first."""

from __future__ import annotations

import math

from vitrail.errors import WeightsError
from vitrail.model.variants import SIZES
from vitrail.weights.archive import Archive


def shape_of(archive: Archive, name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor that must be there. Raises WeightsError naming it."""
    shape = archive.shape(name)
    if len(shape) != dimensions or 0 in shape:
        raise WeightsError(f"{archive.path} has {name!r} in shape {shape}; it should have {dimensions} dimensions")
    return shape


def rows(archive: Archive, name: str) -> int:
    """Rows of a matrix, 0 where the archive does not have it."""
    return shape_of(archive, name, 2)[0] if name in archive else 0


def stem_sizes(archive: Archive, name: str) -> tuple[int, int, int]:
    """Width, channels and patch of a linear stem's kernel. Raises WeightsError for patches that are not square."""
    width, channels, height, patch = shape_of(archive, name, 4)
    if height != patch:
        raise WeightsError(f"{archive.path} has patches of {height} x {patch} pixels ({name!r}); here they are square")
    return width, channels, patch


def square_side(archive: Archive, name: str, cells: int) -> int:
    """Side of a square grid of so many cells, which `name` has. Raises WeightsError where there is none."""
    side = math.isqrt(max(cells, 0))
    if cells < 1 or side * side != cells:
        raise WeightsError(
            f"{archive.path} has a table for {cells} patches ({name!r}), which is no square grid, and says nowhere "
            "which other grid it is"
        )
    return side


def usual_heads(archive: Archive, width: int) -> tuple[int, str]:
    """The number of heads that published models of a width have, and the sentence that says so.

    No tensor's shape depends on it. Raises WeightsError for a width that no such number fits.
    """
    named = {size[0]: size[2] for size in SIZES.values()}
    if width in named:
        return named[width], f"{named[width]} heads, as published models of width {width} have"
    if width % 64:
        raise WeightsError(
            f"{archive.path} does not say how many heads its {width} features are split into, and 64 features a "
            "head, the usual number, do not fit: give a folder with the model's config.json"
        )
    return width // 64, f"{width // 64} heads of 64 features"
