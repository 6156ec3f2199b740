"""A picture of what an objective without labels sees: a row for each image, with input, prediction and target."""

from __future__ import annotations

import io
import math

from PIL import Image, ImageDraw, ImageFont

from vitrail.objective.seen import Columns
from vitrail.training.validation.picture import CAPTION, SMALLEST

SHOWN = 8
"""Images, at most."""


def seen_picture(seen: Columns) -> bytes:
    """Return a PNG with a title over each column; small images are enlarged, with visible pixels."""
    columns = [pictures[:SHOWN].cpu().numpy().transpose(0, 2, 3, 1) for pictures in seen.columns()]
    count, height, width, _ = columns[0].shape
    scale = max(1, math.ceil(SMALLEST / min(height, width)))
    tile = (width * scale + 4, height * scale + 4)
    sheet = Image.new("RGB", (len(columns) * tile[0], count * tile[1] + CAPTION), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for column, (title, pictures) in enumerate(zip(seen.titles, columns, strict=True)):
        draw.text((column * tile[0] + 2, 1), title, "black", font)
        for row, picture in enumerate(pictures):
            enlarged = Image.fromarray(picture).resize((width * scale, height * scale), Image.Resampling.NEAREST)
            sheet.paste(enlarged, (column * tile[0] + 2, row * tile[1] + CAPTION + 2))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()
