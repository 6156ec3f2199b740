"""Bytes of an image file to RGB, the same for training, prediction and serving, whatever the file is.

| input | result |
|---|---|
| 8-bit gray or RGB of any format | its values; gray three times |
| JPEG, gray, YCbCr or RGB | libjpeg-turbo's exact decode; a half or less with `short_side` |
| CMYK, YCCK | R = (255 - C)(255 - K) / 255, likewise G and B; the inverted inks of JPEGs undone |
| any embedded colour profile | not applied: the numbers are taken as sRGB |
| Lab TIFF | converted to sRGB (D50 white) |
| 1, 2 and 4 bits, palette | black is 0, white is 255 |
| 9 to 16 and 32 bits | scaled, not clipped: the upper 8 of the declared bits; negative values are 0 |
| float TIFF | scaled by the smallest of 1, 255 and 65535 that holds every value, else "unsupported" |
| alpha, transparent palette entries or colour | laid over white, the page such pictures are drawn for |
| animated GIF, WebP, PNG; multi-page TIFF; MPO | the first picture |
| EXIF orientation | applied, once |
| no bytes | DecodeError "empty" |
| HTML, text, anything else | DecodeError "not-an-image" |
| HEIC, PDF, SVG ..., an odd variant of a format below | DecodeError "unsupported" |
| cut off, even if an end was put on (JPEG) | DecodeError "truncated" |
| contradictory or damaged | DecodeError "corrupt" |
| more pixels than the cap, by its header, nothing decoded | DecodeError "too-many-pixels" |

Formats: JPEG, PNG, GIF, WebP, BMP, TIFF, PNM, JPEG 2000, AVIF. Pillow reads more, but those are no photographs,
and one of them (EPS) runs a program. No process-wide setting of Pillow is changed or needed.
"""

from __future__ import annotations

import re
import struct
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageCms,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL.ImageFile import ImageFile

from vitrail.data.images.jpeg import decode_ordinary, read_header
from vitrail.errors import DecodeError

ORIENTATION = 0x0112
# TIFF field types an orientation is written with in the wild: BYTE, SHORT, LONG
INTEGER_FORMATS = {1: "B", 3: "H", 4: "I"}


def orientation(exif: bytes) -> int:
    """Return the EXIF orientation 1..8 of an EXIF block, with or without its "Exif" prefix.

    Read here rather than by a library because it runs for every image and must never warn or raise: a block
    that is absent, cut or malformed means 1, as it stands. Only the first directory counts, as in browsers.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(order + "HH", tiff, entry)
            if tag == ORIENTATION:
                (value,) = struct.unpack_from(order + INTEGER_FORMATS.get(kind, "H"), tiff, entry + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Return an image [H, W, C] stored with EXIF `orientation` turned upright; contiguous.

    Orientations 5 to 8 exchange height and width.
    """
    if orientation >= 5:
        image = image.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return np.ascontiguousarray(image)


MAX_PIXELS = 2**27
"""Largest picture decoded by default, 134 million pixels: above every 100-megapixel camera and 108-megapixel
phone, below the 169 and more of the usual decompression bombs; 0.4 GB as RGB, about 1 GB at the peak in Pillow."""

BACKGROUND = (255, 255, 255)
"""Background colour of transparent pixels."""

# A progressive JPEG repeats its work in every scan, and ordinary ones have about 10 of them: this bounds the
# time as the pixel cap bounds the memory.
MAX_SCAN_PASSES = 20

TILE_WIDTH, TILE_LENGTH, BITS_PER_SAMPLE, SAMPLE_FORMAT = 322, 323, 258, 339  # TIFF tags
SIGNED = 2  # a SAMPLE_FORMAT


class Format(NamedTuple):
    """A file format: its name, how its files begin, and the class that reads it (None: not read)."""

    name: str
    magic: re.Pattern[bytes]
    reader: type[ImageFile] | None


def _format(name: str, magic: bytes, reader: type[ImageFile] | None = None) -> Format:
    return Format(name, re.compile(magic, re.DOTALL), reader)


FORMATS = (
    _format("JPEG", rb"\xff\xd8", JpegImagePlugin.JpegImageFile),  # of an MPO, the first picture
    _format("PNG", rb"\x89PNG\r\n\x1a\n", PngImagePlugin.PngImageFile),
    _format("GIF", rb"GIF8[79]a", GifImagePlugin.GifImageFile),
    _format("WebP", rb"RIFF....WEBP", WebPImagePlugin.WebPImageFile),
    _format("TIFF", rb"II[*+]\x00|MM\x00[*+]", TiffImagePlugin.TiffImageFile),
    _format("BMP", rb"BM", BmpImagePlugin.BmpImageFile),
    _format("PNM", rb"P[1-6]\s", PpmImagePlugin.PpmImageFile),
    _format("JPEG 2000", rb"\xff\x4f\xff\x51|\x00\x00\x00\x0cjP  ", Jpeg2KImagePlugin.Jpeg2KImageFile),
    _format("AVIF", rb"....ftyp(avi[fs]|mif1.{4}(....)*avif)", AvifImagePlugin.AvifImageFile),
    # recognised only for the sake of the message
    _format("HEIC", rb"....ftyp(hei[cfmsx]|hev[cx]|mif1|msf1)"),
    _format("PDF", rb"%PDF"),
    _format("PostScript", rb"%!PS|\xc5\xd0\xd3\xc6"),
    _format("Photoshop", rb"8BPS"),
    _format("SVG", rb"\s*(<\?xml[^>]*>\s*)?(<!--.{0,400}?-->\s*)?(<!DOCTYPE svg[^>]*>\s*)?<svg"),
    _format("JPEG XL", rb"\xff\x0a|\x00\x00\x00\x0cJXL "),
    _format("icon", rb"\x00\x00\x01\x00.\x00"),
)
READABLE = ", ".join(format.name for format in FORMATS if format.reader)


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS, short_side: int | None = None) -> np.ndarray:
    """Decode an image file's bytes to uint8 [H, W, 3] RGB, upright, contiguous and writable (table above).

    `short_side` (pixels) allows a JPEG to be decoded at 1/2, 3/8, 1/4 or 1/8 of its size as long as its shorter
    side stays at least that long: faster where the picture is going to be shrunk anyway, at slightly other
    pixel values than shrinking the whole picture gives. Raises DecodeError, and nothing else, for every input;
    its `reason` is one of those in the table. Releases the interpreter lock while decoding.
    """
    if not data:
        raise DecodeError("the file is empty (0 bytes)", reason="empty")
    format = next((format for format in FORMATS if format.magic.match(data[:512])), None)
    if format is None:
        message = f"not an image: it begins with {data[:16]!r}; readable formats are {READABLE}"
        raise DecodeError(message, reason="not-an-image")
    if format.reader is None:
        message = f"{format.name} files are not supported; convert it to one of {READABLE}"
        raise DecodeError(message, reason="unsupported")
    if format.name == "JPEG" and (header := read_header(data)) is not None:
        _check_size(header.height, header.width, max_pixels, header.scans)
        if header.ordinary:
            image = decode_ordinary(data, header, short_side)
            if image is not None:
                return upright(image, orientation(header.exif))
    return _decode_carefully(data, format, format.reader, max_pixels)


def _check_size(height: int, width: int, max_pixels: int, passes: int = 1) -> None:
    """Raise DecodeError, from the header alone, for an image that would take too much memory or time."""
    pixels = height * width
    if pixels > max_pixels:
        message = f"{width} x {height} is {pixels:,} pixels, more than the {max_pixels:,} allowed"
        raise DecodeError(message, reason="too-many-pixels")
    if pixels * passes > MAX_SCAN_PASSES * max_pixels:
        message = f"{width} x {height} pixels are coded in {passes} passes, more work than a picture needs"
        raise DecodeError(message, reason="too-many-pixels")


def _decode_carefully(data: bytes, format: Format, reader: type[ImageFile], max_pixels: int) -> np.ndarray:
    """Decode by Pillow; its reader is called directly, as Image.open has a process-wide limit of pixels."""
    try:
        with reader(BytesIO(data)) as image:
            _check_size(image.height, image.width, max_pixels)
            tags = _tiff_tags(image)
            # memory is taken per tile, and a tile may claim to be larger than the picture
            _check_size(tags.get(TILE_LENGTH, 0), tags.get(TILE_WIDTH, 0), max_pixels)
            if format.name == "JPEG 2000" and b"\xff\xd9" not in data:
                # Pillow takes a missing tile for a black one; the end marker occurs nowhere inside the data
                raise DecodeError("the JPEG 2000 file is cut off: no end marker", reason="truncated")
            image.load()
            # a TIFF, and only a TIFF, is turned by Pillow itself while loading
            turn = 1 if format.name == "TIFF" else orientation(image.info.get("exif", b""))
            return upright(_to_rgb(image, data), turn)
    except DecodeError:
        raise
    except Exception as error:  # for hostile bytes Pillow raises anything: struct, zlib, index, zero division
        raise _explained(error, format) from error


def _tiff_tags(image: ImageFile) -> dict[int, Any]:
    return dict(image.tag_v2) if isinstance(image, TiffImagePlugin.TiffImageFile) else {}


def _explained(error: Exception, format: Format) -> DecodeError:
    """Return a DecodeError for an exception of Pillow, whose text is the only way to distinguish the causes."""
    text = str(error)
    if isinstance(error, Image.DecompressionBombError):
        reason = "too-many-pixels"
    elif re.search("truncated|end of|not enough|incomplete|too small|not large enough", text, re.I):
        reason = "truncated"
    elif re.search("unsupported|not supported|unknown", text, re.I):
        reason = "unsupported"
    else:
        reason = "corrupt"
    return DecodeError(f"{reason} {format.name} file: {text or type(error).__name__}", reason=reason)


def _to_rgb(image: ImageFile, data: bytes) -> np.ndarray:
    """Turn a loaded picture of any mode into uint8 [H, W, 3]."""
    mode = image.mode
    if mode.startswith("I") or mode == "F":
        return _deep_to_rgb(image)
    if mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return np.array(ImageCms.applyTransform(image, ImageCms.buildTransform(lab, srgb, "LAB", "RGB")))
    if mode in ("RGBA", "RGBa", "LA", "La", "PA") or (mode == "P" and "transparency" in image.info):
        opaque = Image.new("RGB", image.size, BACKGROUND)
        picture = (image.convert("LA") if mode == "La" else image).convert("RGBA")
        opaque.paste(picture, mask=picture)
        return np.array(opaque)
    # a transparent colour: kept from Pillow's conversion, which ignores how many bits it was written with
    key = image.info.pop("transparency", None)
    rgb = np.array(image.convert("RGB"))
    if key is not None:
        bits = data[24] if data.startswith(b"\x89PNG") and mode != "1" else 8
        levels = np.asarray(key) >> 8 if bits == 16 else np.asarray(key) * 255 // ((1 << bits) - 1)
        rgb[(rgb == levels).all(-1)] = BACKGROUND
    return rgb


def _deep_to_rgb(image: ImageFile) -> np.ndarray:
    """Scale one channel of more than 8 bits to 8: the upper bits of what the file declares, not of its content."""
    values = np.asarray(image)
    if image.mode == "F":
        gray = _float_to_gray(values)
    else:
        tags = _tiff_tags(image)
        bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
        if tags.get(SAMPLE_FORMAT, (1,))[0] == SIGNED:  # half of the range is below black
            values, bits = np.maximum(values, 0), bits - 1
        elif values.dtype == np.int32:  # Pillow has no unsigned 32-bit mode; the bits are right
            values = values.view(np.uint32)
        gray = (values >> max(bits - 8, 0)).astype(np.uint8)
        key = image.info.get("transparency")
        if isinstance(key, int):
            gray[values == key] = BACKGROUND[0]
    return np.repeat(gray[..., None], 3, axis=-1)


def _float_to_gray(values: np.ndarray) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    scale = next((scale for scale in (1, 255, 65535) if high <= scale), None)
    if scale is None or not low >= 0:  # also false for NaN
        message = f"float values from {low:g} to {high:g} are not a picture; valid ranges are 0..1, 0..255 and 0..65535"
        raise DecodeError(message, reason="unsupported")
    return np.rint(values * (255 / scale)).astype(np.uint8)
