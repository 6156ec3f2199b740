"""No image takes more memory than its limit of pixels says, whatever its format and its shape."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from forked import Forked
from imagecodecs import jpegxl_encode
from peak_memory import peak_growth
from PIL import Image

from vitrail.data.images.decode import BYTES_PER_PIXEL, MAX_SIDE, decode
from vitrail.data.images.geometry import ResizeSmall, Squash, resize
from vitrail.errors import DecodeError

SIDE = 4096


def measure(large: Path, small: Path, grown: Path) -> None:
    """Write how many KiB more are in use, at most, while `large` is read, after `small` has been."""
    read(small)
    with peak_growth() as growth:
        read(large)
        grown.write_text(str(growth()))


def read(path: Path) -> None:
    image = decode(path.read_bytes(), max_pixels=2 * SIDE**2)
    for transform in (Squash((224, 224)), ResizeSmall((224, 224))):
        transform(image, None)


def png(
    width: int, height: int, *, bits: int = 8, colour: int = 2, rows: int | None = None, interlaced: int = 0
) -> bytes:
    """A black PNG. With `rows`, its compressed data end cleanly after them."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    row = bytes(1 + (width * bits * channels + 7) // 8)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    squeeze = zlib.compressobj(9)
    data = b"".join(squeeze.compress(row) for _ in range(height if rows is None else rows)) + squeeze.flush()
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)
    palette = chunk(b"PLTE", bytes(768)) + chunk(b"tRNS", b"\0") if colour == 3 else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def encoded(mode: str, format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (SIDE, SIDE)).save(stream, format, **options)
    return stream.getvalue()


def heic() -> bytes:
    stream = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGBA", (SIDE, SIDE))).save(stream, enc_params={"preset": "ultrafast"})
    return stream.getvalue()


LARGE = {
    "1 bit": lambda: png(SIDE, SIDE, bits=1, colour=0),
    "palette": lambda: png(SIDE, SIDE, colour=3),
    "RGB": lambda: png(SIDE, SIDE),
    "RGBA of 16 bits": lambda: png(SIDE, SIDE, bits=16, colour=6),
    "gray of 16 bits": lambda: png(SIDE, SIDE, bits=16, colour=0),
    "JPEG, CMYK": lambda: encoded("CMYK", "JPEG"),
    "JPEG, progressive": lambda: encoded("RGB", "JPEG", progressive=True),
    "TIFF, float": lambda: encoded("F", "TIFF", compression="tiff_adobe_deflate"),
    "TIFF, Lab": lambda: encoded("LAB", "TIFF", compression="tiff_adobe_deflate"),
    "GIF": lambda: encoded("L", "GIF"),
    "BMP": lambda: encoded("RGB", "BMP"),
    "WebP": lambda: encoded("RGBA", "WEBP", lossless=True),
    "JPEG 2000": lambda: encoded("RGBA", "JPEG2000"),
    "HEIC": heic,
    "JPEG XL": lambda: jpegxl_encode(np.zeros((SIDE, SIDE, 4), np.uint8), distance=1.0, effort=1),
    "JPEG XL, lossless": lambda: jpegxl_encode(np.zeros((SIDE, SIDE, 4), np.uint16), lossless=True, effort=1),
    "tall strip": lambda: png(1, MAX_SIDE),
    "wide strip": lambda: png(MAX_SIDE, 1),
    "strip": lambda: png(SIDE**2 // MAX_SIDE, MAX_SIDE),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", LARGE)
def test_memory_per_pixel(tmp_path: Path, name: str) -> None:
    (tmp_path / "large").write_bytes(LARGE[name]())
    (tmp_path / "small").write_bytes(png(8, 8))
    reader = Forked(measure, tmp_path / "large", tmp_path / "small", tmp_path / "grown", env=os.environ)
    assert reader.wait(300) == 0
    used = int((tmp_path / "grown").read_text()) * 1024
    weight = 2 if name.startswith(("WebP", "JPEG 2000", "HEIC", "JPEG XL")) else 1
    assert used <= BYTES_PER_PIXEL * weight * SIDE**2


@pytest.mark.parametrize("size", [(1, 100_000_000), (100_000_000, 1), (1, MAX_SIDE + 1)])
def test_a_side_has_a_limit(size: tuple[int, int]) -> None:
    data = png(*size, bits=1, colour=0, rows=1)
    with pytest.raises(DecodeError, match="a side is longer than the 65,536 pixels allowed") as error:
        decode(data)
    assert (error.value.reason == "too-many-pixels" and len(data) < 100) or size[0] > 1


def test_long_panoramas_are_read() -> None:
    assert decode(png(30_000, 1_000)).shape == (1_000, 30_000, 3)
    assert decode(png(MAX_SIDE, 2)).shape == (2, MAX_SIDE, 3)


@pytest.mark.parametrize("interlaced", [0, 1])
@pytest.mark.parametrize(("bits", "colour"), [(1, 0), (8, 0), (16, 0), (8, 2), (4, 3), (8, 4), (8, 6)])
def test_a_png_whose_data_end_early_but_cleanly(bits: int, colour: int, interlaced: int) -> None:
    if not interlaced:
        assert decode(png(13, 9, bits=bits, colour=colour)).shape == (9, 13, 3)
    for rows in (1, 5):
        with pytest.raises(DecodeError) as error:
            decode(png(13, 9, bits=bits, colour=colour, rows=rows, interlaced=interlaced))
        assert error.value.reason == "truncated"


def test_a_whole_interlaced_png_is_read() -> None:
    """Data as long as the seven passes of 13 x 9 pixels need."""
    rows = [(2, 2), (2, 2), (4, 1), (3, 3), (7, 2), (6, 5), (13, 4)]  # columns and rows of each pass
    data = b"".join(bytes(1 + 3 * columns) * count for columns, count in rows)
    whole = png(13, 9, interlaced=1, rows=0)
    start = whole.index(b"IDAT") - 4
    content = zlib.compress(data)
    chunk = struct.pack(">I", len(content)) + b"IDAT" + content + struct.pack(">I", zlib.crc32(b"IDAT" + content))
    assert decode(whole[:start] + chunk + whole[whole.index(b"IEND") - 4 :]).shape == (9, 13, 3)


def test_a_strip_is_resized_as_its_halves_are() -> None:
    """Resizing in the other order gives the same picture to a rounding."""
    tall = np.random.default_rng(0).integers(0, 256, (40_000, 3, 3), dtype=np.uint8)
    found = resize(tall, 16, 1024)
    narrow = resize(resize(tall, 16, 3), 16, 1024)
    assert np.abs(found.astype(int) - narrow).max() <= 1
