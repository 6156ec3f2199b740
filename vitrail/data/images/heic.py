"""Read HEIC, the photographs of phones, by the package pillow-heif. Pillow's own list of formats is not changed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import IO, TYPE_CHECKING

from vitrail.errors import DecodeError
from vitrail.version import install_extra

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

CONVERT = "convert them to JPEG (`sips -s format jpeg *.heic --out jpeg` on a Mac, `heif-convert` on Linux)"


def installed() -> bool:
    """Return whether HEIC files can be read."""
    return find_spec("pillow_heif") is not None


def advice() -> str:
    """Return what HEIC files need, and what else can be done with them."""
    return f"HEIC files need the package pillow-heif: {install_extra('heic')}, or {CONVERT}"


def open_heic(file: IO[bytes]) -> ImageFile:
    """Open a HEIC file. Its pixels come upright. Raises DecodeError "unsupported" without the package."""
    if not installed():
        raise DecodeError(advice(), reason="unsupported")
    from pillow_heif import HeifImageFile

    return HeifImageFile(file)
