"""PNGs of every size, depth and kind, whole or ending early: a picture of the stated size, or one clear refusal."""

from __future__ import annotations

import os
import struct
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitrail.data.images.decode import MAX_SIDE, decode
from vitrail.errors import DecodeError

pytestmark = pytest.mark.fuzz

EXAMPLES = int(os.environ.get("VITRAIL_TEST_EXAMPLES", "150"))
QUIETLY = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
KINDS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
"""Colour type -> valid bits per value."""
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


sides = st.one_of(st.integers(1, 40), st.sampled_from([MAX_SIDE, MAX_SIDE + 1, 10**6, 10**8, 2**31 - 1]))
texts = st.sampled_from(["Raw profile type exif", "Raw profile type APP1", "Raw profile type xmp", "XML:com.adobe.xmp"])
blocks = st.one_of(st.binary(max_size=40), st.integers(0, 9).map(lambda n: b'tiff:Orientation="%d"' % n))


@given(sides, sides, st.sampled_from(sorted(KINDS)), st.data(), st.booleans(), texts, blocks, st.booleans())
@QUIETLY
def test_any_png(
    width: int, height: int, colour: int, data: st.DataObject, whole: bool, text: str, block: bytes, digits: bool
) -> None:
    bits = data.draw(st.sampled_from(KINDS[colour]))
    row = 1 + (width * bits * CHANNELS[colour] + 7) // 8
    rows = height if whole else data.draw(st.integers(0, min(height - 1, 50)))
    allowed = max(width, height) <= MAX_SIDE and width * height <= 2**20
    content = zlib.compress(bytes(row * rows)) if allowed else zlib.compress(bytes(100))
    content = content if data.draw(st.booleans()) else content[: data.draw(st.integers(0, len(content)))]
    present = len(zlib.decompressobj().decompress(content)) if allowed else 0
    said = f"\nexif\n{len(block)}\n{block.hex()}" if digits else block.decode("latin-1")
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    palette = chunk(b"PLTE", bytes(3 << bits)) if colour == 3 else b""
    extra = chunk(b"tEXt", text.encode() + b"\0" + said.encode("latin-1"))
    parts = [chunk(b"IHDR", header), extra, palette, chunk(b"IDAT", content), chunk(b"IEND", b"")]
    file = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    if present == row * height:
        try:
            picture = decode(file, max_pixels=2**20)
        except DecodeError as error:  # the end of the compressed data is missing, though all pixels are there
            assert error.reason == "truncated" and content != zlib.compress(bytes(row * height))
            return
        assert sorted(picture.shape) == sorted((height, width, 3)) and picture.min() == picture.max()
        return
    with pytest.raises(DecodeError) as refusal:
        decode(file, max_pixels=2**20)
    assert refusal.value.reason == ("truncated" if allowed else "too-many-pixels"), str(refusal.value)
