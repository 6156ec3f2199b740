"""Read images of any number of bands with the depth they are stored with, without converting them to 8-bit RGB.

| stored as | bands |
|---|---|
| .npy, or .npz with one array: [H, W], [H, W, bands] or [bands, H, W] | the array's |
| TIFF, GeoTIFF (package tifffile) | those of all pages of one size, in order; overviews and masks are left out |
| PNG of 16 bits (in colour: package imagecodecs) | grey, with alpha, RGB, RGBA |
| DICOM (package pydicom) | grey as 32f, in the units of its modality; colour as RGB |
| 8 bits of any other format | grey, with alpha, RGB, RGBA, upright; palettes and CMYK as RGB |

Nothing is allocated before the header was compared with the limits and with the length of the data.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitrail.data.images import dicom, png, tiff
from vitrail.data.images.decode import BYTES_PER_PIXEL, DICOM, MAX_PIXELS, MAX_SIDE, format_of, native
from vitrail.data.images.work import within_memory
from vitrail.data.npz import DAMAGED_ZIP, read_array_header
from vitrail.data.settings import Bits
from vitrail.errors import DecodeError
from vitrail.version import install_extra

ARRAY, ARCHIVE = "NumPy array", "NumPy archive"
"""Names of formats, as in `vitrail.data.images.decode.FORMATS`."""
DEPTHS: dict[str, Bits] = {
    **dict.fromkeys(("uint8",), "8"),
    **dict.fromkeys(("uint16", "int16"), "16"),
    **dict.fromkeys(("float16", "float32", "float64", "uint32", "int32"), "32f"),
}
"""Type of the stored values -> `Bands.bits` that holds them."""


@dataclass(frozen=True)
class Stored:
    """What the header of an image says, and a function that reads its values."""

    shape: tuple[int, ...]
    """[H, W], [H, W, bands], or, in an array, also [bands, H, W]."""
    dtype: str
    """Type of the values, a name of NumPy's."""
    format: str
    load: Callable[[], np.ndarray]
    """Function that returns the values, of `shape`."""

    @property
    def bits(self) -> Bits | None:
        """Depth of the values; None for a type that no image has."""
        return DEPTHS.get(self.dtype)

    def axis(self, bands: int | None = None) -> int | None:
        """Return the axis of the bands, None if there is none: the one of this length, else as `bands_first` says."""
        if len(self.shape) == 2:
            return None
        if bands is not None and bands in (self.shape[2], self.shape[0]):
            return 2 if self.shape[2] == bands else 0
        return 0 if self.format in (ARRAY, ARCHIVE, "array") and bands_first(self.shape) else 2

    def size(self, bands: int | None = None) -> tuple[int, int, int]:
        """Return height, width and number of bands."""
        axis = self.axis(bands)
        height, width = (side for place, side in enumerate(self.shape) if place != axis)
        return height, width, 1 if axis is None else self.shape[axis]


def bands_first(shape: tuple[int, ...]) -> bool:
    """Return whether three axes are [bands, H, W] rather than [H, W, bands].

    An image is square more often than it has as many bands as rows; otherwise it has fewer bands than rows.
    """
    first, middle, last = shape
    if (middle == last) != (first == middle):
        return middle == last
    return first < last


@within_memory()
def stored(image: bytes | np.ndarray, max_pixels: int = MAX_PIXELS) -> Stored:
    """Return what the header of a stored image says. Raises DecodeError, whatever the bytes."""
    if isinstance(image, np.ndarray):
        found = Stored(image.shape, image.dtype.name, "array", lambda: image)
    else:
        found = _of_bytes(image, max_pixels)
    if len(found.shape) not in (2, 3) or not all(found.shape):
        message = f"values of shape {found.shape} are not an image. Valid are [H, W], [H, W, bands] and [bands, H, W]"
        raise DecodeError(message, reason="unsupported")
    if found.bits is None:
        raise DecodeError(f"values of type {found.dtype}. Valid are {', '.join(DEPTHS)}", reason="unsupported")
    height, width, _ = found.size()
    size, most = math.prod(found.shape) * (np.dtype(found.dtype).itemsize + 4), BYTES_PER_PIXEL * max_pixels
    if max(height, width) > MAX_SIDE or height * width > max_pixels or size > most:
        what = f"{found.dtype} of shape {found.shape}, {size:,} bytes as it is stored and as float32"
        message = f"{what}, is more than {max_pixels:,} pixels, {most:,} bytes or {MAX_SIDE:,} pixels along a side"
        raise DecodeError(message, reason="too-many-pixels")
    return found


@within_memory()
def read_stored(image: bytes | np.ndarray, bands: int, bits: Bits, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return a stored image as [H, W, bands], in the type it is stored with.

    Three equal bands of 8 bits are read as one if one is wanted, because grey pictures are often stored so. Raises
    DecodeError with the reason "wrong-bands" or "wrong-depth" for another number of bands, or another depth.
    """
    found = stored(image, max_pixels)
    count = found.size(bands)[2]
    if found.bits != bits:
        message = f"the image has values of type {found.dtype}, and data.bits is {bits}"
        raise DecodeError(message, reason="wrong-depth")
    repeated = bands == 1 and count == 3 and bits == "8"
    if count != bands and not repeated:
        raise DecodeError(f"the image has {bands_text(count)}, and {bands} are needed", reason="wrong-bands")
    values, axis = found.load(), found.axis(count)
    values = values[:, :, None] if axis is None else np.moveaxis(values, axis, 2)
    if repeated:
        if not (values == values[:, :, :1]).all():
            raise DecodeError("the image has three different bands, and 1 is needed", reason="wrong-bands")
        values = values[:, :, :1]
    return values


def bands_text(count: int) -> str:
    """Return a number of bands in words: "1 band", "4 bands"."""
    return "1 band" if count == 1 else f"{count} bands"


def _of_bytes(data: bytes, max_pixels: int) -> Stored:
    format = format_of(data)
    try:
        if format.name == ARRAY:
            return _array(io.BytesIO(data), len(data), ARRAY)
        if format.name == ARCHIVE:
            return _archive(data, BYTES_PER_PIXEL * max_pixels)
    except DAMAGED_ZIP as error:
        raise DecodeError(f"the {format.name} cannot be read: {error}", reason="corrupt") from error
    if format.name == DICOM:
        about = dicom.header(data)
        return Stored(about.shape, about.dtype, DICOM, about.load)
    if format.name == "TIFF":
        found = tiff.header(data, BYTES_PER_PIXEL * max_pixels)
        return Stored(found.shape, found.dtype, "TIFF", lambda: tiff.values(data, found))
    if format.name == "PNG" and png.bits(data) == 16 and len(shape := png.shape(data)) == 3:
        return Stored(shape, "uint16", "PNG", lambda: _deep_png(data))
    values = native(data, max_pixels)  # other formats say in their headers what Pillow makes of them only when it reads
    return Stored(values.shape, values.dtype.name, format.name, lambda: values)


def _deep_png(data: bytes) -> np.ndarray:
    """Return the values of a PNG in colour with 16 bits, of which Pillow keeps 8: uint16 [H, W, channels]."""
    try:
        import imagecodecs
    except ImportError as error:
        message = f"a PNG in colour with 16 bits needs the package imagecodecs: {install_extra('bands')}"
        raise DecodeError(message, reason="unsupported") from error
    try:
        return np.asarray(imagecodecs.png_decode(data))
    except MemoryError:
        raise
    except Exception as error:  # as with Pillow, hostile bytes cause any exception
        raise DecodeError(f"corrupt PNG file: {error}", reason="corrupt") from error


def _array(stream: io.BytesIO, length: int, format: str) -> Stored:
    """Return the array of an .npy. Raises ValueError if its header does not fit the length of the data."""
    header = read_array_header(stream)
    size = math.prod(header.shape) * header.dtype.itemsize
    if header.dtype.hasobject:
        raise ValueError("it holds Python objects, which are not read")
    if min(header.shape, default=0) < 0 or header.length + size > length:
        raise DecodeError(
            f"the array is cut off: its header claims {header.dtype} of shape {header.shape}, {size:,} bytes, and "
            f"{length - header.length:,} are there",
            reason="truncated",
        )

    def load() -> np.ndarray:
        return header.array(stream.getbuffer()).astype(header.dtype.newbyteorder("="), copy=False)

    return Stored(header.shape, header.dtype.newbyteorder("=").name, format, load)


def _archive(data: bytes, max_bytes: int) -> Stored:
    """Return the array of an .npz that holds one. Raises one of `DAMAGED_ZIP` if it is damaged."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if len(members) != 1 or not members[0].filename.endswith(".npy"):
            names = ", ".join(member.filename for member in members[:5])
            raise DecodeError(
                f"an archive of {len(members)} files ({names}); one array is needed", reason="unsupported"
            )
        if members[0].file_size > max_bytes:
            what = f"{members[0].filename} claims to unpack to {members[0].file_size:,} bytes"
            raise DecodeError(f"{what}, more than the {max_bytes:,} allowed", reason="too-many-pixels")
        with archive.open(members[0]) as member:
            unpacked = io.BytesIO(member.read(members[0].file_size))
    return _array(unpacked, len(unpacked.getbuffer()), ARCHIVE)
