"""A contact sheet: small pictures with captions in one PNG file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from vitrail.data.images.pixels import picture
from vitrail.data.item import IndexedSource
from vitrail.errors import DecodeError, UsageError
from vitrail.files import replacing

SIDE = 112
"""Side in pixels of the square that a picture is fitted into."""
MOST = 60
"""Maximum number of frames."""
WIDTH = 8
"""Number of pictures in a row."""
_MARGIN, _LINE, _SIZE = 8, 14, 11
_INK, _FAINT, _PAPER = (20, 20, 20), (215, 215, 215), (255, 255, 255)


class Frame(NamedTuple):
    """Pictures that belong together, and the lines below them."""

    pictures: Sequence[tuple[IndexedSource, int]]
    """Source and index of each picture; an empty place is drawn for an unreadable one."""
    lines: Sequence[str]


def write_contact_sheet(file: Path, title: str, frames: Iterable[Frame]) -> None:
    """Draw at most `MOST` frames. Raises UsageError if the file cannot be written."""
    shown = list(islice(frames, MOST))
    beside = max((len(frame.pictures) for frame in shown), default=1)
    columns = WIDTH // beside
    lines = max((len(frame.lines) for frame in shown), default=0)
    wide, high = beside * SIDE + _MARGIN, SIDE + lines * _LINE + _MARGIN
    top = _MARGIN + 2 * _LINE
    sheet = Image.new("RGB", (columns * wide + _MARGIN, top + -(-len(shown) // columns) * high), _PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_SIZE)
    draw.text((_MARGIN, _MARGIN), _fitted(title, font, sheet.width - 2 * _MARGIN), _INK, font)
    for number, frame in enumerate(shown):
        left, upper = _MARGIN + number % columns * wide, top + number // columns * high
        for place, (source, index) in enumerate(frame.pictures):
            sheet.paste(_picture(source, index), (left + place * SIDE, upper))
        for row, line in enumerate(frame.lines):
            draw.text((left, upper + SIDE + row * _LINE), _fitted(line, font, wide - _MARGIN), _INK, font)
    with replacing(file, UsageError) as temporary:
        sheet.save(temporary, "PNG")


def _picture(source: IndexedSource, index: int) -> Image.Image:
    """Return one picture on a square."""
    square = Image.new("RGB", (SIDE - 2, SIDE - 2), _FAINT)
    try:
        stored = source[index].image
        image = Image.fromarray(picture(stored, short_side=2 * SIDE))
    except DecodeError:
        return square
    factor = min(square.width / image.width, square.height / image.height)
    way = Image.Resampling.NEAREST if factor > 2 else Image.Resampling.BILINEAR
    small = image.resize([max(1, round(factor * side)) for side in image.size], way)
    square.paste(small, ((square.width - small.width) // 2, (square.height - small.height) // 2))
    return square


def _fitted(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Return the end of a text, which is the part that tells file names apart, in at most `width` pixels."""
    text = text.encode("utf-8", "replace").decode().replace("\n", " ")
    if font.getlength(text) <= width:
        return text
    while text and font.getlength("..." + text) > width:
        text = text[1:]
    return "..." + text
