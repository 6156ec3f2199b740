"""The orientation of a stored picture, from EXIF or XMP.

No library reads it, because this runs for every image and must never warn or raise. A block that is missing, cut off or
malformed says nothing.
"""

from __future__ import annotations

import re
import struct
from typing import Any

TAG = 0x0112
# TIFF field types that real files use for an orientation: BYTE, SHORT, LONG
INTEGER_FORMATS = {1: "B", 3: "H", 4: "I"}
XMP = re.compile(rb"""tiff:Orientation\s*(?:=\s*["']|>)\s*([1-8])\b""")
"""The orientation in XMP, as an attribute or as an element."""


def orientation(exif: bytes, xmp: bytes = b"") -> int:
    """Return the orientation 1..8 that an EXIF block states, else that in XMP; 1, upright, if neither has one."""
    stated = _exif_orientation(exif)
    if stated is None and (match := XMP.search(xmp)):
        return int(match[1])
    return stated or 1


def orientation_in(info: dict[Any, Any]) -> int:
    """Return the orientation in what Pillow read beside a picture: EXIF, XMP, or ImageMagick's text in a PNG."""
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
            if tag == TAG:
                (value,) = struct.unpack_from(order + INTEGER_FORMATS.get(kind, "H"), tiff, entry + 8)
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
