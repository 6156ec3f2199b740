"""Writing figures: one style for all, in vector or pixel formats, with the numbers behind them in files.

The colours of Okabe and Ito and the colour map cividis can be told apart with every kind of colour blindness. Cividis
rises in brightness, so it also works in black and white.
"""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, Self

import matplotlib
import numpy as np
from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.text import Text

from vitrail.data.spreadsheet import SafeWriter
from vitrail.files import replacing
from vitrail.words import as_text

P = ParamSpec("P")
FigureFormat = Literal["png", "svg", "pdf"]
FORMATS: tuple[FigureFormat, ...] = ("png", "svg", "pdf")
MARKERS = ("o", "^", "s", "D", "v", "P", "X")
"""Colours and markers together distinguish 49 classes."""
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
    "pdf.fonttype": 42,  # text stays text, as journals require
    "svg.fonttype": "none",
    "svg.hashsalt": "vitrail",  # the same numbers give the same bytes
    "savefig.dpi": 200,
}
_NO_DATE: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True)
class Page:
    """One result of an inspection: its files, and what to look for in them."""

    what: str
    files: list[Path]
    see: tuple[str, str]
    """Two sentences: what the figure shows, and what to look for."""


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorate a drawing function: it uses the common style and ignores the user's matplotlib settings."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(STYLE)
            return draw(*args, **kwargs)

    return drawn


class Folder:
    """The folder for figures and numbers; `raw` is SafeWriter's. Writing raises WriteError if it fails.

    As a context, it removes the new files if an error leaves it, so that no half of a result remains.
    """

    def __init__(self, path: Path, formats: Sequence[FigureFormat] = ("png",), *, raw: bool = False) -> None:
        self.path, self.formats, self._raw = path, formats, raw
        self._new: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        if kind is not None and self._new:
            for file in self._new:
                file.unlink(missing_ok=True)
            with suppress(OSError):  # it holds other files
                self.path.rmdir()

    def figure(self, name: str, figure: Figure) -> list[Path]:
        """Write a figure in every format."""
        for text in figure.findobj(Text):
            text.set_text(as_text(text.get_text()))  # matplotlib cannot draw names of files that are not UTF-8
        for format in self.formats:
            with self._new_file(f"{name}.{format}") as file, matplotlib.rc_context(STYLE), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name with characters that the font lacks
                figure.savefig(file, format=format, metadata=_NO_DATE[format])
        return [self.path / f"{name}.{format}" for format in self.formats]

    def arrays(self, name: str, **arrays: Any) -> Path:
        """Write NAME.npz. Names are arrays of text."""
        with self._new_file(f"{name}.npz") as file, open(file, "wb") as stream:  # savez adds .npz to a name
            np.savez_compressed(stream, **arrays)
        return self.path / f"{name}.npz"

    def table(self, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
        """Write NAME.csv."""
        text: dict[str, Any] = {"newline": "", "encoding": "utf-8", "errors": "backslashreplace"}
        with self._new_file(f"{name}.csv") as file, open(file, "w", **text) as stream:
            writer = SafeWriter(stream, raw=self._raw)
            writer.writerow(header)
            writer.writerows(rows)
        return self.path / f"{name}.csv"

    @contextmanager
    def _new_file(self, name: str) -> Iterator[Path]:
        """Context with a file to write, which then takes its place in the folder."""
        path = self.path / name
        if not os.path.lexists(path):
            self._new.append(path)
        with replacing(path) as temporary:
            yield temporary


def short_name(name: str, most: int = 26) -> str:
    """Return the end of a path, short enough for the title of a picture."""
    name = name.rstrip("/").rpartition("/")[2]
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most - most // 2) :]}"


def wrap_text(text: str, inches: float) -> str:
    """Return the text in lines that fit a width in inches."""
    return "\n".join(line for part in text.split("\n") for line in textwrap.wrap(part, max(int(11 * inches), 12)))


def with_title(figure: Figure, title: str) -> Figure:
    """Return the figure, now with a title that fits its width."""
    figure.suptitle(wrap_text(title, figure.get_figwidth()))
    return figure


def mosaic(tiles: np.ndarray, gap: int, fill: float = np.nan) -> np.ndarray:
    """Return tiles [rows, columns, height, width, ...] as one picture with `gap` > 0 pixels of `fill` between them."""
    border = [(0, 0), (0, 0), (0, gap), (0, gap), *[(0, 0)] * (tiles.ndim - 4)]
    framed = np.pad(tiles.astype(np.float32), border, constant_values=fill)
    return rearrange(framed, "r c h w ... -> (r h) (c w) ...")[:-gap, :-gap]


def picture_panels(figure: Figure, rows: int, columns: int) -> np.ndarray:
    """Return panels [rows, columns] without axes; the pictures of a row are aligned at their top."""
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
        axes.set_anchor("N")
    return panels  # type: ignore[no-any-return]


def show(axes: Axes, picture: np.ndarray, title: str, **weight: Any) -> None:
    """Draw a picture with a small title at its left edge."""
    axes.imshow(picture)
    axes.set_title(title, fontsize=6.5, loc="left", **weight)


def colour_scale(
    figure: Figure, panels: np.ndarray, ends: tuple[str, str], label: str, cmap: str | None = None
) -> None:
    """Draw a horizontal colour scale below the panels, with texts for its ends."""
    look: dict[str, Any] = dict(orientation="horizontal", shrink=0.35, aspect=30, pad=0.02, panchor=False)
    bar = figure.colorbar(ScalarMappable(cmap=cmap), ax=panels, **look)
    bar.set_ticks([0, 1], labels=ends)
    bar.set_label(wrap_text(label, figure.get_figwidth()), labelpad=2)
