"""Pictures for the run folder: the first augmented batch, and what an objective without labels sees."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels

SHOWN = 32
"""Largest number of images of a batch."""
SHOWN_ROWS = 8
"""Largest number of rows in a picture with columns."""
COLUMNS = 8
SMALLEST = 112
"""Pixels. Smaller images are enlarged, with visible pixels."""
CAPTION = 16
"""Height of a caption in pixels."""


def batch_picture(images: Tensor, captions: list[str], pixels: Pixels = EIGHT_BIT_RGB) -> bytes:
    """Return a PNG: a grid of up to 32 of `images`, [batch, channels, height, width], each with a caption.

    pixels: How the images are shown.

    It is the quickest way to notice that the data are wrong.
    """
    shown = pixels.shown(_enlarged(images[:SHOWN]))
    if shown.dtype != np.uint8:  # what an objective of the user's own has drawn may be values of any range
        shown = (255 * (shown - shown.min()) / max(np.ptp(shown), 1e-6)).astype(np.uint8)
    if shown.shape[-1] != 3:  # other channels have no colours: show the first as gray
        shown = np.repeat(shown[..., :1], 3, axis=-1)
    count, height, width, _ = shown.shape
    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    sheet = Image.new("RGB", (columns * (width + 4), rows * (height + CAPTION + 4)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for i, (image, caption) in enumerate(zip(shown, captions, strict=False)):
        left, top = i % columns * (width + 4), i // columns * (height + CAPTION + 4)
        caption = " ".join(caption[:width].split())  # measuring a very long text takes minutes
        while caption and draw.textlength(caption, font) > width:
            caption = caption[:-1]
        draw.text((left + 2, top + 1), caption, "black", font)
        sheet.paste(Image.fromarray(image), (left + 2, top + CAPTION))
    return _png(sheet)


def columns_picture(shown: dict[str, Tensor]) -> bytes:
    """Return a PNG with a row for each image and a title over each column."""
    columns = [_enlarged(pictures[:SHOWN_ROWS]) for pictures in shown.values()]
    count, height, width, _ = columns[0].shape
    sheet = Image.new("RGB", (len(columns) * (width + 4), count * (height + 4) + CAPTION), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for column, (title, pictures) in enumerate(zip(shown, columns, strict=True)):
        draw.text((column * (width + 4) + 2, 1), title, "black", font)
        for row, picture in enumerate(pictures):
            place = (column * (width + 4) + 2, row * (height + 4) + CAPTION + 2)
            sheet.paste(Image.fromarray(picture), place)
    return _png(sheet)


def _enlarged(images: Tensor) -> np.ndarray:
    """Return [batch, height, width, channels] in which the pixels of small images are repeated."""
    arrays = images.cpu().numpy().transpose(0, 2, 3, 1)
    scale = max(1, math.ceil(SMALLEST / min(arrays.shape[1:3])))
    return arrays.repeat(scale, axis=1).repeat(scale, axis=2)  # type: ignore[no-any-return]


def _png(sheet: Image.Image) -> bytes:
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()
