"""The colours of all figures, and how one figure is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Blue, vermilion and so on from the palette of Okabe and Ito, distinct under every kind of colour blindness."""


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure to `path`, in the format of its suffix. It replaces the file once it is complete."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=144, format=path.suffix[1:])
