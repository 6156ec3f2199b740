"""Read DICOM files by the package pydicom: radiographs, CT, MR, and colour images of endoscopes and skin.

| stored as | values |
|---|---|
| MONOCHROME2 | float32 [H, W]: stored value -> modality LUT or rescale slope and intercept (Hounsfield units of CT) |
| MONOCHROME1 (its smallest value is white) | the same, reversed between the ends of its range: large is white |
| RGB, YBR | uint8, uint16 or uint32 [H, W, 3], RGB |
| PALETTE COLOR | the colours of the palette: uint8 or uint16 [H, W, 3] |
| several frames | DecodeError "unsupported" |

A network reads values of the modality (DICOM PS3.3, C.11.1). The window of an image (VOI LUT, C.11.2) is for display:
it differs between images of one kind, and cuts off values. It is not applied.

Only the elements in `TAGS` are parsed, so that nothing about a patient can get into a message.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitrail.data.images.jpeg import read_header
from vitrail.errors import DecodeError
from vitrail.version import install_extra
from vitrail.words import listing

if TYPE_CHECKING:
    from pydicom import Dataset

DEFLATED = "1.2.840.10008.1.2.1.99"
RLE = "1.2.840.10008.1.2.5"
DIRECTORY = "1.2.840.10008.1.3.10"
"""SOP class of a DICOMDIR."""
REVERSED, PALETTE = "MONOCHROME1", "PALETTE COLOR"
GREY = ("MONOCHROME2", REVERSED)
COLOURS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
PALETTES = [
    f"{colour}PaletteColorLookupTable{part}" for colour in ("Red", "Green", "Blue") for part in ("Descriptor", "Data")
]
VALUES = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
NEEDED = ("Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated")
GROUPS = ("PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence")
"""Where enhanced images have their rescale slope and intercept (PS3.3, C.7.6.16.2.9)."""
TAGS = [
    *NEEDED, "NumberOfFrames", "PlanarConfiguration", "BitsStored", "HighBit", "PixelRepresentation", "RescaleSlope",
    "RescaleIntercept", "ModalityLUTSequence", "ExtendedOffsetTable", "ExtendedOffsetTableLengths", *GROUPS, *PALETTES,
    *VALUES,
]  # fmt: skip
LARGEST_OVERHEAD = 4096
"""Bytes of headers that the compressed values of an image may have in addition to twice the length of its values."""


class Dicom(NamedTuple):
    """What the header of a DICOM file says, and a function that reads its values."""

    shape: tuple[int, ...]
    """[H, W] of grey images, [H, W, 3] of colour."""
    dtype: str
    load: Callable[[], np.ndarray]
    """Function that returns the values as this module's table says. Raises DecodeError."""


def header(data: bytes) -> Dicom:
    """Return what the header of a DICOM file says. Raises DecodeError, whatever the bytes."""
    with _explained():
        about = _elements(data)
        kind, height, width = about.PhotometricInterpretation, int(about.Rows), int(about.Columns)
        if kind not in (*GREY, *COLOURS, PALETTE):
            known = ", ".join((*GREY, *COLOURS, PALETTE))
            raise _unsupported(f"a DICOM image of an unknown photometric interpretation. Valid are {known}")
        if kind in GREY:
            return Dicom((height, width), "float32", lambda: _grey(about))
        bits = about.RedPaletteColorLookupTableDescriptor[2] if kind == PALETTE else about.BitsAllocated
        return Dicom((height, width, 3), f"uint{int(bits)}", lambda: _colour(about))


def _elements(data: bytes) -> Dataset:
    """Return the elements of one image. Raises DecodeError if there is no image, or more than one."""
    from pydicom import dcmread

    if DEFLATED.encode() in data[:2048]:  # pydicom would unpack it without a limit
        raise _unsupported("the DICOM file is deflated. Save it with another transfer syntax")
    about = dcmread(io.BytesIO(data), specific_tags=[*TAGS])
    if about.file_meta.get("MediaStorageSOPClassUID") == DIRECTORY:
        raise _unsupported("a DICOMDIR is a list of files, not an image. Give the files that it lists")
    stored = next((name for name in VALUES if about.get(name)), None)
    if stored is None:
        raise _unsupported("the DICOM file has no pixel data: it is not an image, or it is cut off")
    missing = [name for name in NEEDED if name not in about]
    if missing:
        raise DecodeError(f"the DICOM file has pixel data, but no {listing(missing)}", reason="corrupt")
    frames = int(about.get("NumberOfFrames") or 1)
    if frames != 1:
        raise _unsupported(f"a DICOM file of {frames} frames. Write each frame that is an image to a file of its own")
    _check_length(about, stored)
    return about


def _check_length(about: Dataset, stored: str) -> None:
    """Raise DecodeError if the values do not have the length that the header needs, before anything is allocated."""
    from pydicom.pixels import get_decoder
    from pydicom.pixels.utils import get_expected_length

    needed, there = get_expected_length(about), len(about[stored].value)
    syntax = about.file_meta.TransferSyntaxUID
    if not syntax.is_encapsulated:
        if there < needed:
            message = f"the DICOM file is cut off: {needed:,} bytes of pixel data are needed, and {there:,} are there"
            raise DecodeError(message, reason="truncated")
        return
    if there > 2 * needed + LARGEST_OVERHEAD:
        message = f"the DICOM file has {there:,} bytes of compressed pixel data, for {needed:,} bytes of pixels"
        raise DecodeError(message, reason="corrupt")
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError as error:
        raise _unsupported(f"pydicom does not read DICOM files with the transfer syntax {syntax.name}") from error
    if not decoder.is_available:
        raise _unsupported(f"a DICOM file with {syntax.name} needs more packages: {install_extra('medical')}")
    if syntax != RLE:
        _check_stream(about)


def _check_stream(about: Dataset) -> None:
    """Raise DecodeError if compressed data claim another size than the file, because decoders allocate this size."""
    from pydicom.encaps import get_frame

    stream = get_frame(about.PixelData, 0, number_of_frames=1)
    start = stream.find(b"\xff\x4f\xff\x51")  # of JPEG 2000, also within a JP2
    if start >= 0 and not stream.startswith(b"\xff\xd8"):
        width, height, left, top = (
            int.from_bytes(stream[at : at + 4], "big") for at in range(start + 8, start + 24, 4)
        )
        claimed = (height - top, width - left)
    else:
        found = read_header(stream)
        if found is None:
            raise DecodeError("the compressed pixel data of the DICOM file have no header", reason="corrupt")
        claimed = (found.height, found.width)
    if claimed != (about.Rows, about.Columns):
        message = f"the DICOM file has {about.Columns} x {about.Rows} pixels, and its compressed data others"
        raise DecodeError(message, reason="corrupt")


def _grey(about: Dataset) -> np.ndarray:
    from pydicom.pixels import apply_modality_lut, pixel_array

    with _explained():
        values, modality = pixel_array(about), _modality(about)
        large = apply_modality_lut(values, modality)
        if about.PhotometricInterpretation == REVERSED:
            bits, signed = int(about.BitsStored), int(about.PixelRepresentation)
            lowest = -(1 << (bits - 1)) if signed else 0
            ends = apply_modality_lut(np.array([lowest, lowest + (1 << bits) - 1]), modality)
            large = ends.astype(np.float64).sum() - large
        return large.astype(np.float32)


def _colour(about: Dataset) -> np.ndarray:
    from pydicom.pixels import apply_color_lut, pixel_array

    with _explained():
        values = pixel_array(about)
        values = apply_color_lut(values, about) if about.PhotometricInterpretation == PALETTE else values
        return values.astype(values.dtype.newbyteorder("="), copy=False)


def _modality(about: Dataset) -> Dataset:
    """Return the elements that hold the rescale slope and intercept of an image of one frame."""
    for groups in GROUPS:
        for group in about.get(groups) or []:
            if group.get("PixelValueTransformationSequence"):
                found: Dataset = group.PixelValueTransformationSequence[0]
                return found
    return about


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what pydicom and its decoders raise for hostile bytes into DecodeError."""
    try:
        yield
    except (DecodeError, MemoryError):
        raise
    except ModuleNotFoundError as error:
        if error.name != "pydicom":
            raise
        raise _unsupported(f"DICOM files need the package pydicom: {install_extra('medical')}") from error
    except EOFError as error:
        raise DecodeError("the DICOM file is cut off", reason="truncated") from error
    except Exception as error:  # as with Pillow, hostile bytes cause any exception
        last = (str(error) or type(error).__name__).splitlines()[-1].strip()
        raise DecodeError(f"corrupt DICOM file, or one that pydicom does not read: {last}", reason="corrupt") from error


def _unsupported(message: str) -> DecodeError:
    return DecodeError(message, reason="unsupported")
