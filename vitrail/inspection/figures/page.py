"""How a figure is written: one look for all, vector or pixels, and the numbers behind it beside it.

Colours are those of Okabe and Ito and the map cividis, which stay apart under every kind of colour blindness;
cividis rises in brightness, so it survives a black-and-white printer too.
"""

from __future__ import annotations

import csv
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from vitrail.errors import UsageError

P = ParamSpec("P")
Format = Literal["png", "svg", "pdf"]
FORMATS: tuple[Format, ...] = ("png", "svg", "pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "^", "s", "D", "v", "P", "X")
"""Together they tell 49 classes apart."""
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.parse_math": False,  # a class named "$x$" is a name
    "image.cmap": "cividis",
    "pdf.fonttype": 42,  # text stays text, as journals ask
    "svg.fonttype": "none",
    "svg.hashsalt": "vitrail",  # the same numbers give the same bytes
    "savefig.dpi": 200,
}
_NO_DATE: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True)
class Page:
    """One thing that was looked at: its files, and what to see in them."""

    what: str
    files: list[Path]
    see: tuple[str, str]
    """Two lines: what the figure shows, and what to look for."""


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator: draw in the look of all figures, whatever the user's own settings are."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(STYLE)
            return draw(*args, **kwargs)

    return drawn


class Folder:
    """Where figures and numbers go. Raises UsageError where that cannot be written."""

    def __init__(self, path: Path, formats: Sequence[Format] = ("png",)) -> None:
        self.path, self.formats = path, formats

    def figure(self, name: str, figure: Figure) -> list[Path]:
        """Write a figure in every format."""

        def save(path: Path) -> None:
            with matplotlib.rc_context(STYLE), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name in a script the font lacks
                figure.savefig(path, metadata=_NO_DATE[path.suffix[1:]])

        return [self._write(f"{name}.{format}", save) for format in self.formats]

    def arrays(self, name: str, **arrays: Any) -> Path:
        """Write NAME.npz; names of images and the like are arrays of text."""
        return self._write(f"{name}.npz", lambda path: np.savez_compressed(path, **arrays))

    def table(self, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
        """Write NAME.csv."""

        def save(path: Path) -> None:
            with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(header)
                writer.writerows(rows)

        return self._write(f"{name}.csv", save)

    def _write(self, name: str, save: Callable[[Path], None]) -> Path:
        path = self.path / name
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            save(path)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
        return path


def short(name: str, most: int = 26) -> str:
    """A name that fits over a picture: the end of a path."""
    name = name.rstrip("/").rpartition("/")[2]
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most - most // 2) :]}"


def wrapped(text: str, inches: float) -> str:
    """The text in lines that fit a figure or panel so wide."""
    return "\n".join(line for part in text.split("\n") for line in textwrap.wrap(part, max(int(11 * inches), 12)))


def mosaic(tiles: np.ndarray, gap: int, fill: float = np.nan) -> np.ndarray:
    """Put tiles [rows, columns, height, width, ...] side by side with `gap` pixels of `fill` between them."""
    rows, columns, height, width = tiles.shape[:4]
    shape = rows * (height + gap) - gap, columns * (width + gap) - gap, *tiles.shape[4:]
    canvas = np.full(shape, fill, dtype=np.float32)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (height + gap), column * (width + gap)
            canvas[top : top + height, left : left + width] = tiles[row, column]
    return canvas
