"""Read the header of a JPEG, and decode a JPEG with an error for damaged files instead of invented pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import simplejpeg

from vitrail.data.images.pillow import BAND
from vitrail.data.images.work import MAX_PARTS, too_many_parts
from vitrail.errors import DecodeError

START_OF_SCAN = 0xDA
# all frame headers: baseline, extended, progressive, lossless, arithmetic, JPEG-LS; C4, C8 and CC are other segments
START_OF_FRAME = frozenset((*range(0xC0, 0xD0), 0xF7)) - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
# segments without a length: no marker, TEM, restart markers, start of image
STANDALONE = frozenset({0x00, 0x01, *range(0xD0, 0xD9)})
# libjpeg's warnings that mean wrong pixels
DAMAGE = ("bad Huffman code", "bad arithmetic code", "instead of RST")


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """Contents of the segments before the first scan. Sizes are in pixels as stored, before EXIF turns them."""

    height: int
    width: int
    components: int
    precision: int
    exif: bytes
    xmp: bytes
    scans: int
    """Number of times the decoder processes the whole picture."""

    @property
    def ordinary(self) -> bool:
        """Whether the picture is 8-bit gray, colour or CMYK, which the fast decoder supports."""
        return self.precision == 8 and self.components in (1, 3, 4) and self.height > 0 and self.width > 0


def read_header(data: bytes) -> JpegHeader | None:
    """Return the header of a JPEG, up to its first scan, in microseconds; None if there is no scan.

    Raises DecodeError for a header of more than `MAX_PARTS` segments.
    """
    frame: tuple[int, int, int, int] | None = None
    exif, xmp, progressive = b"", b"", False
    at, parts = 2, 0
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        parts += 1
        if parts > MAX_PARTS:
            raise too_many_parts("JPEG")
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if marker in STANDALONE:
            at += 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        segment = data[at + 4 : at + 2 + length]
        if marker in START_OF_FRAME and len(segment) >= 6:
            height, width = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
            frame, progressive = (height, width, segment[5], segment[0]), marker in PROGRESSIVE
        elif marker == 0xE1 and not exif and segment.startswith(b"Exif\0\0"):
            exif = segment
        elif marker == 0xE1 and not xmp and segment.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
            xmp = segment
        elif marker == START_OF_SCAN:
            if frame is None or not segment:
                return None
            # a sequential scan of all components is the only scan; counting scans takes as long as reading the file
            single = not progressive and segment[0] == frame[2]
            return JpegHeader(*frame, exif, xmp, 1 if single else data.count(b"\xff\xda", at))
        at += 2 + length
    return None


def decode_ordinary(data: bytes, header: JpegHeader, short_side: int | None) -> np.ndarray | None:
    """Decode an `ordinary` JPEG to uint8 [H, W, 3] RGB, not yet turned upright.

    With `short_side` the picture is shrunk inside the inverse DCT to the smallest of 1/2, 3/8, 1/4 and 1/8 that keeps
    both sides at least this long. Larger factors are slower than decoding the whole picture.

    libjpeg fills missing parts with gray and only warns. Strict decoding turns the warning into an error, which is
    raised here as DecodeError. Return None if the warning is about something harmless (stray bytes between segments,
    unknown versions), so that Pillow decodes the file.
    """
    colorspace = "CMYK" if header.components == 4 else "RGB"
    limits = {} if short_side is None else {"min_height": short_side, "min_width": short_side, "min_factor": 2}
    try:
        image = simplejpeg.decode_jpeg(data, colorspace, **limits)
    except ValueError as error:
        message = str(error)
        if "nsufficient memory" in message:
            raise MemoryError(message) from error
        if "remature end" in message:
            raise DecodeError(f"the JPEG is cut off: {message}", reason="truncated") from error
        if any(sign in message for sign in DAMAGE):
            raise DecodeError(f"the JPEG is damaged: {message}", reason="corrupt") from error
        return None
    return without_ink(image) if colorspace == "CMYK" else image


def without_ink(paper: np.ndarray) -> np.ndarray:
    """Return the RGB [H, W, 3] of a JPEG's CMYK [H, W, 4].

    JPEGs store CMYK inverted, as Adobe does: 255 means no ink, hence R = C K / 255.
    """
    rgb = np.empty((*paper.shape[:2], 3), dtype=np.uint8)
    rows = max(BAND // paper.shape[1], 1)  # the products need twice the memory of the picture
    for top in range(0, len(paper), rows):
        band = paper[top : top + rows]
        rgb[top : top + rows] = (band[..., :3] * band[..., 3:].astype(np.uint16) + 127) // 255
    return rgb
