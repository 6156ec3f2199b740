"""Small files that ask for much work: refused from their headers, and ordinary ones of their kind are not."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from io import BytesIO
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from vitrail.data.images.decode import decode
from vitrail.data.images.work import check_claim
from vitrail.errors import DecodeError


def tiled(side: int, tile: int) -> bytes:
    """Return a grey TIFF whose tiles all claim to be the first byte of the file."""
    tags = {256: side, 257: side, 258: 8, 259: 1, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: 1}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


def bmp_of_runs(width: int, height: int, run: bytes = b"") -> bytes:
    """Return an RLE8 BMP whose rows hold `run` and nothing else."""
    data = (run + b"\0\0") * height + b"\0\1"
    palette = bytes(4 * 256)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 14 + 40 + 1024 + len(data), 0, 0, 14 + 40 + 1024) + info + palette + data


def segment(marker: int, content: bytes) -> bytes:
    """Return a segment of a JPEG or a JPEG 2000."""
    return struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content


def jpeg(side: int, coding: int = 0xCA, before: bytes = b"") -> bytes:
    """Return a grey JPEG of one even colour, in arithmetic coding, which needs no bits for it."""
    frame = segment(coding, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0")
    scan = segment(0xDA, b"\1\1\0\0\0\0")
    return b"\xff\xd8" + before + segment(0xDB, bytes([0, *[1] * 64])) + frame + scan + bytes(16) + b"\xff\xd9"


def png(chunk: bytes = b"", count: int = 0) -> bytes:
    """Return a PNG of one pixel with `count` chunks of a kind in its header."""
    file = BytesIO()
    Image.new("L", (1, 1)).save(file, "PNG")
    content = zlib.compress(bytes(1000))
    part = struct.pack(">I", 3 + len(content)) + chunk + b"k\0\0" + content
    part += struct.pack(">I", zlib.crc32(part[4:]))
    return file.getvalue()[:33] + part * count + file.getvalue()[33:]


def gif(before: bytes) -> bytes:
    """Return a GIF of one pixel with blocks before it."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return head + before + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2\x44\1\0;"


def jpeg2000(side: int, tile: int, block: int = 4, place: str = "header") -> bytes:
    """Return a JPEG 2000 of empty tiles, with blocks of 2^(2 + block) values a side."""
    size = segment(0x51, struct.pack(">H8IH3B", 0, side, side, 0, 0, tile, tile, 0, 0, 1, 7, 1, 1))
    coding = [segment(0x52, struct.pack(">BBHBBBBBB", 0, 0, 1, 0, 5, one, one, 0, 1)) for one in (4, block)]
    coding = coding if place == "tile" else [coding[1], b""]
    quant = segment(0x5C, bytes([0x40] * 17))
    start = segment(0x90, struct.pack(">HIBB", 0, 14 + len(coding[1]) + 600, 0, 1))
    return b"\xff\x4f" + size + coding[0] + quant + start + coding[1] + b"\xff\x93" + bytes(600) + b"\xff\xd9"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (jpeg(11_584), "134,189,056|11584 x 11584 pixels in a file of"),
        (jpeg(8, before=segment(0xFE, b"") * 20_000), "16,384 parts"),
        (jpeg(8, before=b"\xff" * 20_000), "16,384 parts"),
        (jpeg(8, before=(b"\xff\0" + segment(0xE5, b"") * 10_000) * 2), "16,384 parts"),
        (png(b"teSt", 20_000), "16,384 parts"),
        (png(b"iCCP", 300), "16,384 parts"),
        (gif(b"!\xfe\0" * 20_000), "16,384 parts"),
        (gif(b"!\xfe" + b"\1a" * 20_000 + b"\0"), "16,384 parts"),
        (b"\0\0\0\x0cjP  \r\n\x87\n" + b"\0\0\0\x08free" * 20_000, "16,384 parts"),
        (jpeg2000(255, 1), "65,025 tiles"),
        (jpeg2000(4_000, 4_000, 0), "blocks of 16 values"),
        (jpeg2000(4_000, 4_000, 0, "tile"), "blocks of 16 values"),
        (jpeg2000(4_000, 4_000, 0).replace(b"\xff\x52", b"\xff\x62\xff\x52", 1), "unknown marker 0xff62"),
        (tiled(8_000, 8), "tiles of 8 x 8"),
        (tiled(2000, 1), "tiles of 1 x 1"),
        (tiled(4000, 7), "tiles of 7 x 7"),
        (bmp_of_runs(60_000, 2_000), "16,777,216"),
        (b"P6\n5000 5000\n100\n" + bytes(9_000), "16,777,216"),
        (b"P6\n" + b"#\n" * 100_000 + b"1 1 255\nabc", "comments"),
        (b"P3\n1 1 255\n" + b"#\n" * 100_000 + b"1 2 3", "comments"),
    ],
    ids=[
        "arithmetic JPEG",
        "segments of a JPEG",
        "fill bytes of a JPEG",
        "hidden segments of a JPEG",
        "chunks of a PNG",
        "profiles of a PNG",
        "blocks of a GIF",
        "a comment of a GIF",
        "boxes of a JPEG 2000",
        "tiles of a JPEG 2000",
        "blocks of a JPEG 2000",
        "blocks of a tile of a JPEG 2000",
        "hidden blocks of a JPEG 2000",
        "tiles of a TIFF",
        "tiles",
        "larger tiles",
        "runs",
        "white values",
        "comments",
        "comments of a plain file",
    ],
)
def test_a_small_file_that_asks_for_much_work_is_refused(data: bytes, words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match=words):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("TIFF", options) for options in ({}, {"big_tiff": True}, {"compression": "tiff_lzw"})),
        ("JPEG2000", {}),
        ("JPEG2000", {"tile_size": (128, 128)}),
        ("JPEG2000", {"codeblock_size": (16, 16)}),
        ("JPEG2000", {"num_resolutions": 2}),
    ],
)
def test_ordinary_tiffs_and_jpeg_2000_are_read(kind: str, options: dict[str, object]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 500, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    np.testing.assert_array_equal(decode(file.getvalue()), pixels)


def test_ordinary_comments_and_runs_are_read() -> None:
    np.testing.assert_array_equal(decode(b"P6\n# made by hand\n1 1\n# two\n255\nabc"), [[[97, 98, 99]]])
    assert decode(bmp_of_runs(40, 20, b"\x28\x05")).shape == (20, 40, 3)


@pytest.mark.parametrize(
    "data",
    [jpeg(64), jpeg(64, before=segment(0xFE, b"a") * 99), png(b"iCCP", 1), jpeg2000(64, 64), jpeg2000(64, 16, 0)],
    ids=["arithmetic", "comments", "profile", "JPEG 2000", "small tiles and blocks"],
)
def test_files_of_ordinary_parts_are_what_pillow_reads(data: bytes) -> None:
    with Image.open(BytesIO(data)) as image:
        np.testing.assert_array_equal(decode(data), np.asarray(image.convert("RGB")))


def test_a_white_page_is_no_bomb() -> None:
    """The emptiest ordinary image: A4 with 600 dots an inch, as a fax stores it."""
    file = BytesIO()
    Image.new("1", (4960, 7016), 1).save(file, "TIFF", compression="group4")
    check_claim(7016, 4960, len(file.getvalue()))


def test_too_little_memory_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """libjpeg's own words for a failed allocation, and Python's."""
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    for error in (ValueError("Insufficient memory (case 4)"), MemoryError()):
        monkeypatch.setattr("simplejpeg.decode_jpeg", Mock(side_effect=error))
        with pytest.raises(DecodeError) as caught:
            decode(file.getvalue())
        assert caught.value.reason == "out-of-memory"
