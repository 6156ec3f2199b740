"""Convert a picture that Pillow has loaded, of any mode, to RGB: in bands of rows, so that little memory is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin, TiffImagePlugin

from vitrail.errors import DecodeError

BACKGROUND = (255, 255, 255)
"""Background colour of transparent pixels."""
BAND = 1 << 22
"""Number of pixels that are converted at a time."""

BITS_PER_SAMPLE, SAMPLE_FORMAT = 258, 339  # TIFF tags
SIGNED = 2  # a SAMPLE_FORMAT


def stored_bits(image: Image.Image) -> int:
    """Return the bits of a sample of a PNG's in its file, for its transparent colour; 8 for anything else.

    Once the image is loaded, only 16 bits can be told, by a colour beyond 255.
    """
    if not isinstance(image, PngImagePlugin.PngImageFile) or image.mode == "1":
        return 8
    if image.tile and (match := re.search(r";(\d+)", str(image.tile[0].args))):
        return int(match[1])
    key = image.info.get("transparency", 0)  # bytes for a palette, whose colours have 8 bits
    return 16 if not isinstance(key, bytes) and np.max(key) > 255 else 8


def tiff_tags(image: Image.Image) -> dict[int, Any]:
    """Return the tags of a TIFF; none for another format."""
    return dict(image.tag_v2) if isinstance(image, TiffImagePlugin.TiffImageFile) else {}


def to_rgb(image: Image.Image, bits: int) -> np.ndarray:
    """Return a loaded picture as uint8 [H, W, 3]; `bits` are its `stored_bits`.

    Raises DecodeError for unusual float values.
    """
    convert = _conversion(image, bits)
    rgb = np.empty((image.height, image.width, 3), dtype=np.uint8)
    top = 0
    for band in _bands(image):
        rgb[top : top + band.height] = convert(band)
        top += band.height
    return rgb


def _bands(image: Image.Image) -> Iterator[Image.Image]:
    """Yield the picture from top to bottom in bands of rows."""
    rows = max(BAND // image.width, 1)
    if image.height <= rows:
        yield image
        return
    for top in range(0, image.height, rows):
        yield rows_of(image, top, min(top + rows, image.height))


def rows_of(image: Image.Image, top: int, bottom: int) -> Image.Image:
    """Return some rows of a picture. Pillow's `crop` would compare it with its process-wide limit of pixels."""
    box = (0, top, image.width, bottom)
    return image.resize((image.width, bottom - top), Image.Resampling.NEAREST, box=box)


def _conversion(image: Image.Image, bits: int) -> Callable[[Image.Image], np.ndarray]:
    """Return the function that converts a band of this picture to uint8 [rows, W, 3] or [rows, W, 1]."""
    mode = image.mode
    if mode == "F":
        scale = _float_scale(image)
        return lambda band: np.rint(np.asarray(band) * (255 / scale)).astype(np.uint8)[..., None]
    if mode.startswith("I"):
        return _deep_conversion(image)
    if mode == "LAB":
        transform = ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")
        return lambda band: np.asarray(ImageCms.applyTransform(band, transform))
    if mode in ("RGBA", "RGBa", "LA", "La", "PA") or (mode == "P" and "transparency" in image.info):
        return _on_background
    # a transparent colour is removed before Pillow's conversion, which ignores its number of bits
    key = image.info.pop("transparency", None)
    if key is None:
        return lambda band: np.asarray(band.convert("RGB"))
    levels = np.asarray(key) >> 8 if bits == 16 else np.asarray(key) * 255 // ((1 << bits) - 1)

    def without_key(band: Image.Image) -> np.ndarray:
        rgb = np.array(band.convert("RGB"))
        rgb[(rgb == levels).all(-1)] = BACKGROUND
        return rgb

    return without_key


def _on_background(band: Image.Image) -> np.ndarray:
    """Return a band with transparency, drawn on the background."""
    opaque = Image.new("RGB", band.size, BACKGROUND)
    picture = (band.convert("LA") if band.mode == "La" else band).convert("RGBA")
    opaque.paste(picture, mask=picture)
    return np.asarray(opaque)


def _deep_conversion(image: Image.Image) -> Callable[[Image.Image], np.ndarray]:
    """Return the function for one channel of integers: the upper 8 bits of the range that the file declares."""
    tags = tiff_tags(image)
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
    signed = tags.get(SAMPLE_FORMAT, (1,))[0] == SIGNED  # half of the range is below black
    key = image.info.get("transparency")

    def upper_bits(band: Image.Image) -> np.ndarray:
        values = np.asarray(band)
        if signed:
            values = np.maximum(values, 0)
        elif values.dtype == np.int32:  # Pillow has no unsigned 32-bit mode, but the bits are right
            values = values.view(np.uint32)
        gray = (values >> max(bits - signed - 8, 0)).astype(np.uint8)
        if isinstance(key, int):
            gray[values == key] = BACKGROUND[0]
        return gray[..., None]

    return upper_bits


def _float_scale(image: Image.Image) -> int:
    """Return the white of float values. Raises DecodeError for values that are in none of the usual ranges."""
    ends = [(float(values.min()), float(values.max())) for values in map(np.asarray, _bands(image))]
    low, high = np.min([low for low, _ in ends]), np.max([high for _, high in ends])
    scale = next((scale for scale in (1, 255, 65535) if high <= scale), None)
    if scale is None or not low >= 0:  # also false for NaN
        message = f"float values from {low:g} to {high:g} are not a picture. Valid ranges are 0..1, 0..255, 0..65535"
        raise DecodeError(message, reason="unsupported")
    return scale
