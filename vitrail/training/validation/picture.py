"""The first augmented batch as the network saw it: the quickest way to notice that the data are wrong."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SHOWN = 32
COLUMNS = 8
SMALLEST = 112
"""Pixels: smaller images are shown enlarged, with visible pixels."""
CAPTION = 16


def batch_picture(images: Tensor, captions: list[str]) -> bytes:
    """Return a PNG: a grid of up to 32 of `images`, uint8 [batch, channels, height, width], each with a caption."""
    shown = images[:SHOWN].cpu().numpy().transpose(0, 2, 3, 1)
    if shown.shape[-1] != 3:  # other channels have no colours: show the first as gray
        shown = np.repeat(shown[..., :1], 3, axis=-1)
    count, height, width, _ = shown.shape
    scale = max(1, math.ceil(SMALLEST / min(height, width)))
    tile = (width * scale + 4, height * scale + CAPTION + 4)
    columns = min(COLUMNS, count)
    sheet = Image.new("RGB", (columns * tile[0], math.ceil(count / columns) * tile[1]), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(11)
    for i, (image, caption) in enumerate(zip(shown, captions, strict=False)):
        left, top = i % columns * tile[0], i // columns * tile[1]
        enlarged = Image.fromarray(image).resize((width * scale, height * scale), Image.Resampling.NEAREST)
        while caption and draw.textlength(caption, font) > width * scale:
            caption = caption[:-1]
        draw.text((left + 2, top + 1), caption, "black", font)
        sheet.paste(enlarged, (left + 2, top + CAPTION))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()
