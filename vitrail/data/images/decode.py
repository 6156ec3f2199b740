"""Decode the bytes of an image file to RGB, in the same way for training, prediction and serving.

Why ours and not Pillow alone: simplejpeg (libjpeg-turbo) decodes JPEGs faster, releases the interpreter lock, and can
reject damaged files, for which libjpeg alone invents gray pixels. Pillow decodes everything else, but does not give the
results below by itself, has a process-wide limit of pixels, and may raise any exception for hostile bytes.

| input | result |
|---|---|
| 8-bit gray or RGB of any format | its values; gray is repeated three times |
| JPEG, gray, YCbCr or RGB | libjpeg-turbo's exact values; at most half the size with `short_side` |
| CMYK, YCCK | R = (255 - C)(255 - K) / 255, likewise G and B; the inversion of JPEGs is undone |
| any embedded colour profile | not applied; the values count as sRGB |
| Lab TIFF | converted to sRGB (D50 white) |
| 1, 2 and 4 bits, palette | black is 0, white is 255 |
| 9 to 16 and 32 bits | scaled, not clipped: the upper 8 of the declared bits; negative values become 0 |
| float TIFF | scaled by the smallest of 1, 255 and 65535 that holds every value, else "unsupported" |
| alpha, transparent palette entries or colour | drawn on a white background |
| animated GIF, WebP, PNG; multi-page TIFF; MPO | the first picture |
| orientation in EXIF, else in XMP, also as ImageMagick writes them into PNGs | applied, once |
| no bytes | DecodeError "empty" |
| HTML, text, anything else | DecodeError "not-an-image" |
| PDF, SVG, ..., a format without its package, a rare variant of a format below | DecodeError "unsupported" |
| DICOM in colour with 8 bits | its values as RGB (`vitrail.data.images.dicom`) |
| arrays of NumPy, any other DICOM | DecodeError "unsupported": `vitrail.data.images.stored` reads them |
| cut off, even if an end marker was added (JPEG) or the data end cleanly (PNG) | DecodeError "truncated" |
| contradictory or damaged | DecodeError "corrupt" |
| more pixels than the limit by the header (half of it for WebP and the newer formats) | DecodeError "too-many-pixels" |
| a side of more than 65,536 pixels by the header | DecodeError "too-many-pixels" |
| more pixels than a file of its size holds, a header of very many parts | see `vitrail.data.images.work` |
| more memory than there is | DecodeError "out-of-memory" |

Formats: JPEG, PNG, GIF, WebP, BMP, TIFF, PNM, JPEG 2000, AVIF; DICOM with the package pydicom; HEIC with
pillow-heif and JPEG XL with imagecodecs (extra heic; see `vitrail.data.images.jpeg_xl`). Pillow reads more formats, but
they are not used for photographs, and one of them (EPS) runs a program.
No process-wide setting of Pillow is changed or needed.

No library reads the orientation, in EXIF or XMP, because this runs for every image and must never warn or raise. A
block that is missing, cut off or malformed says nothing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL.ImageFile import ImageFile

from vitrail.data.image_names import is_readable, package_advice
from vitrail.data.images import dicom, png
from vitrail.data.images.jpeg import JpegHeader, decode_ordinary, read_header
from vitrail.data.images.jpeg_xl import JpegXLFile
from vitrail.data.images.pillow import rows_of, stored_bits, tiff_tags, to_rgb
from vitrail.data.images.work import TILE_LENGTH, TILE_WIDTH, check_claim, check_parts, no_memory, within_memory
from vitrail.errors import DecodeError


def upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Return an image [H, W, C] or [H, W] that was stored with an EXIF `orientation` upright and contiguous.

    Orientations 5 to 8 exchange height and width.
    """
    if orientation >= 5:
        image = image.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return np.ascontiguousarray(image)


MAX_PIXELS = 2**27
"""Default maximum number of pixels, 134 million: above 100-megapixel cameras and 108-megapixel phones, below the usual
decompression bombs of 169 million and more."""

MAX_SIDE = 2**16
"""Maximum height and width in pixels: a JPEG can have 65,535. Resizing needs memory for one long side times the other
new side, so that a strip of 100 million pixels would take 60 GB."""

BYTES_PER_PIXEL = 16
"""Decoding and resizing take at most this number of bytes for each allowed pixel (tests/data/test_decode_memory.py)."""

# A progressive JPEG repeats its work in every scan; ordinary ones have about 10 scans. This limits the time, as
# MAX_PIXELS limits the memory.
MAX_SCAN_PASSES = 20

IN_PYTHON, PYTHON_WEIGHT = ("bmp_rle", "ppm", "ppm_plain"), 8
"""Pillow's decoders in Python: run lengths of a BMP, numbers as text and unusual white values of a PNM. A pixel counts
as 8, because it takes as long."""


def open_avif(file: IO[bytes]) -> ImageFile:
    """Open an AVIF file. Raises DecodeError "unsupported" if Pillow was built without libavif."""
    if not AvifImagePlugin.SUPPORTED:
        message = "this Pillow has no AVIF. Install a build that has it, such as that of `pip install -U pillow`"
        raise DecodeError(message, reason="unsupported")
    return AvifImagePlugin.AvifImageFile(file)


def open_heic(file: IO[bytes]) -> ImageFile:
    """Open a HEIC file. Its pixels come upright. Raises DecodeError "unsupported" without the package."""
    check_package("HEIC")
    from pillow_heif import HeifImageFile

    return HeifImageFile(file)


def open_jpeg_xl(file: IO[bytes]) -> ImageFile:
    """Open a JPEG XL file. Its pixels come upright. Raises DecodeError "unsupported" without the package."""
    check_package("JPEG XL")
    return JpegXLFile(file)


def check_package(format: str) -> None:
    """Raise DecodeError "unsupported" if the package that reads a format is not installed."""
    if not is_readable(format):
        raise DecodeError(package_advice(format), reason="unsupported")


class ImageFormat(NamedTuple):
    """A file format: its name, the beginning of its files, and the function that opens it (None: unsupported)."""

    name: str
    magic: re.Pattern[bytes]
    reader: Callable[[IO[bytes]], ImageFile] | None
    weight: int = 1
    """A pixel counts as this number of pixels, because the decoder needs more memory than the other ones."""


def _format(
    name: str, magic: bytes, reader: Callable[[IO[bytes]], ImageFile] | None = None, weight: int = 1
) -> ImageFormat:
    return ImageFormat(name, re.compile(magic, re.DOTALL), reader, weight)


DICOM = "DICOM"
FORMATS = (
    _format(DICOM, rb".{128}DICM"),  # first, because the 128 bytes may be the header of a TIFF
    _format("JPEG", rb"\xff\xd8", JpegImagePlugin.JpegImageFile),  # of an MPO, the first picture
    _format("PNG", rb"\x89PNG\r\n\x1a\n", PngImagePlugin.PngImageFile),
    _format("GIF", rb"GIF8[79]a", GifImagePlugin.GifImageFile),
    _format("WebP", rb"RIFF....WEBP", WebPImagePlugin.WebPImageFile, 2),
    _format("TIFF", rb"II[*+]\x00|MM\x00[*+]", TiffImagePlugin.TiffImageFile),
    _format("BMP", rb"BM", BmpImagePlugin.BmpImageFile),
    _format("PNM", rb"P[1-6]\s", PpmImagePlugin.PpmImageFile),
    _format("JPEG 2000", rb"\xff\x4f\xff\x51|\x00\x00\x00\x0cjP  ", Jpeg2KImagePlugin.Jpeg2KImageFile, 2),
    _format("AVIF", rb"....ftyp(avi[fs]|mif1.{4}(....)*avif)", open_avif, 2),
    _format("HEIC", rb"....ftyp(hei[cfmsx]|hev[cx]|mif1|msf1)", open_heic, 2),
    _format("JPEG XL", rb"\xff\x0a|\x00\x00\x00\x0cJXL ", open_jpeg_xl, 2),
    # recognised only to name the format in the error
    _format("PDF", rb"%PDF"),
    _format("PostScript", rb"%!PS|\xc5\xd0\xd3\xc6"),
    _format("Photoshop", rb"8BPS"),
    _format("SVG", rb"\s*(<\?xml[^>]*>\s*)?(<!--.{0,400}?-->\s*)?(<!DOCTYPE svg[^>]*>\s*)?<svg"),
    _format("NumPy array", rb"\x93NUMPY"),
    _format("NumPy archive", rb"PK\x03\x04.{26}[^\x00]{0,200}\.npy"),
    _format("icon", rb"\x00\x00\x01\x00.\x00"),
)
READABLE = ", ".join(format.name for format in FORMATS if format.reader or format.name == DICOM)


@within_memory()
def decode(data: bytes, *, max_pixels: int = MAX_PIXELS, short_side: int | None = None) -> np.ndarray:
    """Decode the bytes of an image file to uint8 [H, W, 3] RGB, upright, contiguous and writable (see the table above).

    `short_side` (pixels) lets a JPEG be decoded at 1/2, 3/8, 1/4 or 1/8 of its size, as long as its shorter side keeps
    at least this length. This is faster if the picture will be shrunk anyway; its pixel values differ slightly from
    those of shrinking the whole picture. Raises only DecodeError, whatever the input; its `reason` is one of the table.
    Releases the interpreter lock while decoding.
    """
    format = format_of(data)
    if format.name == DICOM:
        return _dicom(data, max_pixels)
    reader = _reader(format)
    if format.name == "JPEG" and (header := read_header(data)) is not None:
        check_jpeg(header, len(data), max_pixels)
        if header.ordinary:
            image = decode_ordinary(data, header, short_side)
            if image is not None:
                return upright(image, orientation(header.exif, header.xmp))
    return _decode_carefully(data, format, reader, max_pixels)


def check_jpeg(header: JpegHeader, size: int, max_pixels: int = MAX_PIXELS) -> None:
    """Raise DecodeError, from its header, for a JPEG of `size` bytes that would take too much memory or time."""
    _check_size(header.height, header.width, max_pixels, header.scans)
    check_claim(header.height, header.width, size)


def _dicom(data: bytes, max_pixels: int) -> np.ndarray:
    """Return a DICOM image in colour with 8 bits. Raises DecodeError "unsupported" for another one."""
    found = dicom.header(data)
    if found.dtype != "uint8":
        message = f"a DICOM image of {found.dtype} values is not 8-bit RGB. Set data.channels and data.bits to read it"
        raise DecodeError(message, reason="unsupported")
    _check_size(found.shape[0], found.shape[1], max_pixels)
    check_claim(found.shape[0], found.shape[1], len(data))
    return np.ascontiguousarray(found.load())


@within_memory()
def native(data: bytes, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return the channels of an image file as they are stored, upright: [H, W] or [H, W, channels].

    Grey, grey with alpha, RGB and RGBA of 8 bits and grey of 16 bits stay what they are; everything else becomes RGB
    as in `decode`. Raises only DecodeError.
    """
    format = format_of(data)
    return _decode_carefully(data, format, _reader(format), max_pixels, _loaded_channels)


@within_memory()
def class_values(data: bytes) -> np.ndarray:
    """Return the values of a PNG that holds one class for each pixel, upright: uint8 [H, W].

    They are the indices of a palette, or grey values as they are stored: those of 1, 2 and 4 bits are not scaled.
    Raises only DecodeError, for another format, for 16 bits and for colours, too.
    """
    format = format_of(data)
    if format.name != "PNG":
        raise DecodeError(f"{format.name} file: a mask must be a PNG, which keeps each value", reason="unsupported")

    def loaded(image: Image.Image) -> np.ndarray:
        if image.mode not in ("1", "L", "P"):
            kind = "16 bits a pixel" if image.mode.startswith("I") else f"colours ({image.mode})"
            message = f"{kind}: a mask must be a PNG with a palette or 8-bit grey values, one value for each class"
            raise DecodeError(message, reason="unsupported")
        image.load()
        scale = 255 // (2 ** png.bits(data) - 1) if image.mode == "L" else 1  # Pillow stretches 2 and 4 bits to 255
        return upright(np.asarray(image).astype(np.uint8) // scale, orientation_in(dict(image.info)))

    return _decode_carefully(data, format, _reader(format), MAX_PIXELS, loaded)


def upright_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) of the image that `decode` returns, from the header alone, except for a TIFF.

    Raises only DecodeError.
    """
    format = format_of(data)
    if format.name == "TIFF":  # versions of Pillow differ in whether a header's size is that of the upright image
        height, width, _ = decode(data).shape
        return height, width
    with _explained(format.name), _reader(format)(BytesIO(data)) as image:
        return header_size(image)


def header_size(image: Image.Image) -> tuple[int, int]:
    """Return (height, width) of an opened picture when it is upright, by its header; of a TIFF as Pillow states it."""
    turned = not isinstance(image, TiffImagePlugin.TiffImageFile) and orientation_in(dict(image.info)) >= 5
    return (image.width, image.height) if turned else (image.height, image.width)


def format_of(data: bytes) -> ImageFormat:
    """Return the format of an image file by its first bytes. Raises DecodeError "empty" or "not-an-image"."""
    if not data:
        raise DecodeError("the file is empty (0 bytes)", reason="empty")
    format = next((format for format in FORMATS if format.magic.match(data[:512])), None)
    if format is None:
        message = f"not an image: it begins with {data[:16].decode('latin-1')!r}. Readable formats are {READABLE}"
        raise DecodeError(message, reason="not-an-image")
    return format


def _reader(format: ImageFormat) -> Callable[[IO[bytes]], ImageFile]:
    """Return the function that opens files of a format. Raises DecodeError "unsupported" if there is none."""
    if format.reader is None:
        message = f"{format.name} files are not supported. Convert the file to one of {READABLE}"
        if format.name.startswith("NumPy"):
            message = f"{format.name} files are not 8-bit RGB. Set data.channels and data.bits to read their bands"
        raise DecodeError(message, reason="unsupported")
    return format.reader


def _check_size(height: int, width: int, max_pixels: int, passes: int = 1) -> None:
    """Raise DecodeError, from the header alone, for an image that would take too much memory or time."""
    if max(height, width) > MAX_SIDE:
        message = f"{width} x {height} pixels: a side is longer than the {MAX_SIDE:,} pixels allowed"
        raise DecodeError(message, reason="too-many-pixels")
    pixels = height * width
    if pixels > max_pixels:
        message = f"{width} x {height} is {pixels:,} pixels, more than the {max_pixels:,} allowed"
        raise DecodeError(message, reason="too-many-pixels")
    if pixels * passes > MAX_SCAN_PASSES * max_pixels:
        message = f"{width} x {height} pixels in {passes} passes need more work than any ordinary picture"
        raise DecodeError(message, reason="too-many-pixels")


def _decode_carefully(
    data: bytes,
    format: ImageFormat,
    reader: Callable[[IO[bytes]], ImageFile],
    max_pixels: int,
    loaded: Callable[[Image.Image], np.ndarray] | None = None,
) -> np.ndarray:
    """Decode with Pillow. Its reader is called directly, because Image.open has a process-wide limit of pixels.

    loaded: Function that returns the pixels of an image of Pillow's (default: as RGB).
    """
    with _explained(format.name):
        check_parts(data, format.name)
        with reader(BytesIO(data)) as image:
            _check_size(image.height, image.width, max_pixels // format.weight)
            check_claim(image.height, image.width, len(data))
            if image.tile and image.tile[0][0] in IN_PYTHON:
                _check_size(image.height, image.width, max_pixels // PYTHON_WEIGHT)
            tags = tiff_tags(image)
            # memory is allocated per tile, and a tile may claim to be larger than the picture
            _check_size(tags.get(TILE_LENGTH, 0), tags.get(TILE_WIDTH, 0), max_pixels)
            if format.name == "JPEG 2000" and b"\xff\xd9" not in data:
                # Pillow makes missing tiles black; the end marker occurs nowhere inside the data
                raise DecodeError("the JPEG 2000 file is cut off: no end marker", reason="truncated")
            pixels = (loaded or _loaded)(image)
            if format.name == "PNG" and _may_lack_rows(image, data) and not png.is_whole(data):
                raise DecodeError("the PNG is cut off: its data end before its last row", reason="truncated")
            return pixels


@within_memory()
def pillow_pixels(image: Image.Image) -> np.ndarray:
    """Return the picture of an image that Pillow opened or made, as `decode` returns that of a file.

    The image is loaded, but not changed otherwise. Raises DecodeError if it cannot be loaded.
    """
    return _of_pillow(image, _loaded)


@within_memory()
def pillow_channels(image: Image.Image) -> np.ndarray:
    """Return the channels of an image that Pillow opened or made, as `native` returns those of a file.

    See `pillow_pixels`.
    """
    return _of_pillow(image, _loaded_channels)


def _of_pillow(image: Image.Image, loaded: Callable[[Image.Image], np.ndarray]) -> np.ndarray:
    info = dict(image.info)
    try:
        with _explained(image.format or "image"):
            return loaded(image)
    finally:
        image.info = info | image.info  # with the transparent colour again


def _loaded(image: Image.Image) -> np.ndarray:
    """Return the picture of an image of Pillow's as uint8 [H, W, 3], upright. It may lose its transparent colour."""
    bits = stored_bits(image)
    image.load()
    # Pillow itself turns a TIFF, and only a TIFF, while loading
    turn = 1 if isinstance(image, TiffImagePlugin.TiffImageFile) else orientation_in(dict(image.info))
    return upright(to_rgb(image, bits), turn)


def _loaded_channels(image: Image.Image) -> np.ndarray:
    """Return the channels of an image of Pillow's, upright; see `native`."""
    if image.mode not in ("L", "LA", "RGB", "RGBA", "I;16"):
        return _loaded(image)
    image.load()
    return upright(np.asarray(image), orientation_in(dict(image.info)))


def _may_lack_rows(image: Image.Image, data: bytes) -> bool:
    """Return whether a loaded PNG may lack its last rows, which are zero then. Counting its bytes takes much longer."""
    return png.is_interlaced(data) or not any(rows_of(image, image.height - 1, image.height).tobytes())


_TRUNCATED = (
    "truncated|end of|not enough|incomplete|too small|not large enough"
    "|insufficient input|cannot read full|need_more_input"  # libheif, libjxl
)
"""What libraries say of a file that is cut off."""


@contextmanager
def _explained(format: str) -> Iterator[None]:
    """Context that turns an exception of Pillow into a DecodeError. Only its text distinguishes the causes."""
    try:
        yield
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # hostile bytes cause any exception: struct, zlib, index, zero division
        text = str(error)
        bomb = isinstance(error, Image.DecompressionBombError) or "security limit" in text.lower()  # libheif's
        if not bomb and re.search("out of memory|insufficient memory|allocat", text, re.I):
            raise no_memory() from error
        if bomb:
            reason = "too-many-pixels"
        elif re.search(_TRUNCATED, text, re.I):
            reason = "truncated"
        elif re.search("unsupported|not supported|unknown", text, re.I):
            reason = "unsupported"
        else:
            reason = "corrupt"
        raise DecodeError(f"{reason} {format} file: {text or type(error).__name__}", reason=reason) from error


_ORIENTATION_TAG = 0x0112
# TIFF field types that real files use for an orientation: BYTE, SHORT, LONG
_INTEGER_FORMATS = {1: "B", 3: "H", 4: "I"}
_XMP = re.compile(rb"""tiff:Orientation\s*(?:=\s*["']|>)\s*([1-8])\b""")
"""The orientation in _XMP, as an attribute or as an element."""


def orientation(exif: bytes, xmp: bytes = b"") -> int:
    """Return the orientation 1..8 that an EXIF block states, else that in _XMP; 1, upright, if neither has one."""
    stated = _exif_orientation(exif)
    if stated is None and (match := _XMP.search(xmp)):
        return int(match[1])
    return stated or 1


def orientation_in(info: dict[Any, Any]) -> int:
    """Return the orientation in what Pillow read beside a picture: EXIF, _XMP, or ImageMagick's text in a PNG."""
    exif = info.get("exif") or _raw_profile(info, "exif") or _raw_profile(info, "APP1")
    xmp = info.get("xmp") or info.get("XML:com.adobe.xmp") or _raw_profile(info, "xmp")
    return orientation(exif, xmp.encode(errors="replace") if isinstance(xmp, str) else xmp)


def _exif_orientation(exif: bytes) -> int | None:
    """Return the orientation of an EXIF block, with or without its "Exif" prefix.

    Only the first directory counts, as in browsers.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return None
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(order + "HH", tiff, entry)
            if tag == _ORIENTATION_TAG:
                (value,) = struct.unpack_from(order + _INTEGER_FORMATS.get(kind, "H"), tiff, entry + 8)
                return value if 1 <= value <= 8 else None
    except struct.error:
        pass
    return None


def _raw_profile(info: dict[Any, Any], name: str) -> bytes:
    """Return a block that ImageMagick wrote into a PNG as text: its name, its length, then hexadecimal digits."""
    words = str(info.get(f"Raw profile type {name}", "")).split()
    try:
        return bytes.fromhex("".join(words[2:]))
    except ValueError:
        return b""
