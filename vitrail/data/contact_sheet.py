"""A contact sheet: small pictures with captions in one PNG file; or columns of pictures, each group with a title."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
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
ACROSS = 12
"""Maximum number of columns beside each other."""
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


class ColumnGroup(NamedTuple):
    """Neighbouring columns of pictures with a title."""

    title: str
    note: str
    """A line below the title."""
    columns: Sequence[Sequence[np.ndarray]]
    """The pictures of each column, uint8 [H, W, 3], one for each row."""


def write_columns(file: Path, title: str, groups: Sequence[ColumnGroup]) -> None:
    """Draw groups of columns beside each other, in blocks of at most `ACROSS` columns, one below the other.

    All columns have a picture for each row. Raises UsageError if the file cannot be written.
    """
    blocks: list[list[ColumnGroup]] = [[]]
    for group in groups:
        if blocks[-1] and sum(len(one.columns) for one in [*blocks[-1], group]) > ACROSS:
            blocks.append([])
        blocks[-1].append(group)
    rows = len(groups[0].columns[0])
    high, head = rows * SIDE + 2 * _MARGIN, 2 * _LINE + 2
    wide = max(sum(len(one.columns) * SIDE + 2 * _MARGIN for one in block) for block in blocks)
    font = ImageFont.load_default(_SIZE + 1)
    lines = _wrapped(title, font, wide - 2 * _MARGIN)
    top = 2 * _MARGIN + len(lines) * _LINE
    sheet = Image.new("RGB", (wide, top + len(blocks) * (head + high)), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for row, words in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + row * _LINE), words, _INK, font)
    for number, block in enumerate(blocks):
        left, upper = _MARGIN, top + number * (head + high)
        for group in block:
            room = len(group.columns) * SIDE
            for line, text in enumerate((group.title, group.note)):
                draw.text((left, upper + line * _LINE), _fitted(text, font, room), _INK, font)
            for column, pictures in enumerate(group.columns):
                for row, image in enumerate(pictures):
                    sheet.paste(_on_square(image), (left + column * SIDE, upper + head + row * SIDE))
            left += room + 2 * _MARGIN
    with replacing(file, UsageError) as temporary:
        sheet.save(temporary, "PNG")


def _picture(source: IndexedSource, index: int) -> Image.Image:
    """Return one picture on a square."""
    try:
        return _on_square(picture(source[index].image, short_side=2 * SIDE))
    except DecodeError:
        return _square()


def _square() -> Image.Image:
    return Image.new("RGB", (SIDE - 2, SIDE - 2), _FAINT)


def _on_square(pixels: np.ndarray) -> Image.Image:
    """Return a picture, uint8 [H, W, 3], in the middle of a square."""
    image, square = Image.fromarray(pixels), _square()
    factor = min(square.width / image.width, square.height / image.height)
    way = Image.Resampling.NEAREST if factor > 2 else Image.Resampling.BILINEAR
    small = image.resize([max(1, round(factor * side)) for side in image.size], way)
    square.paste(small, ((square.width - small.width) // 2, (square.height - small.height) // 2))
    return square


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Return the lines of a text, each of as many words as `width` pixels hold. A longer word is shortened."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(_fitted(word, font, width))
    return lines[lines[0] == "" :]


def _fitted(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Return the end of a text, which is the part that tells file names apart, in at most `width` pixels."""
    text = text.encode("utf-8", "replace").decode().replace("\n", " ")
    if font.getlength(text) <= width:
        return text
    while text and font.getlength("..." + text) > width:
        text = text[1:]
    return "..." + text
