"""Small files that ask for much work: refused from their headers, and ordinary ones of their kind are not."""

from __future__ import annotations

import struct
import tracemalloc
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from vitrail.data.images.decode import decode
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


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tiled(2000, 1), "tiles of 1 x 1"),
        (tiled(4000, 7), "tiles of 7 x 7"),
        (bmp_of_runs(60_000, 2_000), "16,777,216"),
        (b"P6\n" + b"#\n" * 100_000 + b"1 1 255\nabc", "comments"),
        (b"P3\n1 1 255\n" + b"#\n" * 100_000 + b"1 2 3", "comments"),
    ],
    ids=["tiles", "larger tiles", "runs", "comments", "comments of a plain file"],
)
def test_a_small_file_that_asks_for_much_work_is_refused(data: bytes, words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match=words):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", [{}, {"big_tiff": True}, {"compression": "tiff_lzw"}])
def test_ordinary_tiffs_are_read(options: dict[str, object]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "TIFF", **options)
    np.testing.assert_array_equal(decode(file.getvalue()), pixels)


def test_ordinary_comments_and_runs_are_read() -> None:
    np.testing.assert_array_equal(decode(b"P6\n# made by hand\n1 1\n# two\n255\nabc"), [[[97, 98, 99]]])
    assert decode(bmp_of_runs(40, 20, b"\x28\x05")).shape == (20, 40, 3)
