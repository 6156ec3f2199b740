"""Images of any bands and bits, as other programs write them, and damaged ones."""

from __future__ import annotations

import io
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tifffile
from PIL import Image

from vitrail.data.images.decode import decode
from vitrail.data.images.pixels import picture
from vitrail.data.images.stored import bands_first, read_stored, stored
from vitrail.data.npz import read_array_header
from vitrail.data.settings import Bits
from vitrail.errors import DecodeError

VALUES = np.random.default_rng(0).integers(0, 65536, (5, 7, 4)).astype(np.uint16)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def tiff(*pages: np.ndarray, byteorder: Literal["<", ">"] = "<", **options: Any) -> bytes:
    file = io.BytesIO()
    with tifffile.TiffWriter(file, byteorder=byteorder) as writer:
        for page in pages:
            writer.write(page, photometric="minisblack", **options)
    return file.getvalue()


def pillow(array: np.ndarray, format: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, format)
    return file.getvalue()


FIRST = np.moveaxis(VALUES, 2, 0)


@pytest.mark.parametrize(
    "data",
    [
        VALUES,
        FIRST,
        npy(VALUES),
        npy(FIRST),
        npy(np.asfortranarray(VALUES)),
        npy(VALUES.astype(">u2")),
        npz(bands=FIRST),
        tiff(*FIRST),
        tiff(*FIRST, compression="zlib", predictor=True),
        tiff(*FIRST, compression="lzw"),
        tiff(FIRST, planarconfig="separate"),
        tiff(VALUES, byteorder=">", planarconfig="contig"),
        tiff(VALUES[..., :2], VALUES[..., 2:], planarconfig="contig"),
    ],
)
def test_every_way_to_store_bands_gives_the_same_values(data: bytes | np.ndarray) -> None:
    found = read_stored(data, 4, "16")
    assert np.array_equal(found, VALUES) and found.dtype == np.uint16
    assert stored(data).size(4) == (5, 7, 4)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_grey_of_16_bits(format: str) -> None:
    assert np.array_equal(read_stored(pillow(VALUES[..., 0], format), 1, "16"), VALUES[..., :1])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint32"])
def test_numbers_of_other_types(dtype: str) -> None:
    values = VALUES.astype(dtype) if dtype != "float16" else (VALUES / 65536).astype(dtype)
    assert np.array_equal(read_stored(npy(values), 4, "32f"), values)


def test_pictures_of_8_bits_keep_their_channels() -> None:
    eight = (VALUES >> 8).astype(np.uint8)
    assert np.array_equal(read_stored(pillow(eight, "PNG"), 4, "8"), eight)
    assert np.array_equal(read_stored(pillow(eight[..., :3], "BMP"), 3, "8"), eight[..., :3])
    assert np.array_equal(read_stored(pillow(eight[..., 0], "PNG"), 1, "8"), eight[..., :1])
    repeated = np.repeat(eight[..., :1], 3, axis=2)
    assert np.array_equal(read_stored(repeated, 1, "8"), eight[..., :1])
    with pytest.raises(DecodeError, match="three different bands"):
        read_stored(eight[..., :3], 1, "8")


@pytest.mark.parametrize(
    ("shape", "first"),
    [((8, 8, 13), False), ((13, 8, 8), True), ((4, 9, 7), True), ((9, 7, 4), False), ((64, 64, 64), False)],
)
def test_the_axis_of_the_bands(shape: tuple[int, int, int], first: bool) -> None:
    assert bands_first(shape) is first
    assert stored(np.zeros(shape, np.uint8)).axis() == (0 if first else 2)
    assert stored(np.zeros((9, 7, 12), np.uint8)).size(9) == (7, 12, 9)  # a known number of bands decides


def test_overviews_and_masks_are_no_bands() -> None:
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(VALUES[..., 0], subifds=0)
        writer.write(VALUES[::2, ::2, 0], subfiletype=1)
    assert np.array_equal(read_stored(file.getvalue(), 1, "16"), VALUES[..., :1])


def test_real_files(shared_data: Path) -> None:
    real = shared_data / "awkward-images"
    microscope = (real / "16bit.cropped.tif").read_bytes()
    assert np.array_equal(read_stored(microscope, 1, "16")[..., 0], np.asarray(Image.open(io.BytesIO(microscope))))
    colours = (real / "tiff_16bit_RGBa.tiff").read_bytes()
    assert np.array_equal(read_stored(colours, 4, "16"), tifffile.imread(io.BytesIO(colours)))
    flag = (real / "Flag_of_the_Netherlands-16bit.png").read_bytes()
    assert np.array_equal(read_stored(flag, 3, "16") >> 8, decode(flag))  # RGB with 8 bits keeps the upper half


def test_any_awkward_file_gives_bands_or_a_reason(shared_data: Path) -> None:
    kinds = set()
    for path in sorted((shared_data / "awkward-images").iterdir()):
        data = path.read_bytes()
        try:
            found = stored(data, 2**20)
            assert found.bits is not None
            assert read_stored(data, found.size()[2], found.bits, 2**20).shape == found.size()
            kinds.add((found.size()[2], found.bits))
        except DecodeError as error:
            kinds.add(error.reason)
    assert kinds >= {(1, "8"), (3, "8"), (4, "8"), (1, "16"), (3, "16"), (4, "16"), "truncated", "too-many-pixels"}


PNG_HEADER = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">IIBB", 1, 1, 16, 2)
BROKEN: dict[str, tuple[bytes | np.ndarray, int, Bits, str]] = {
    "a band is missing": (npy(VALUES[..., :3]), 4, "16", "wrong-bands"),
    "8 bits for 16": (npy(VALUES.astype(np.uint8)), 4, "16", "wrong-depth"),
    "16 bits for 8": (tiff(*FIRST), 4, "8", "wrong-depth"),
    "cut off": (npy(VALUES)[:-1], 4, "16", "truncated"),
    "a TIFF cut off": (tiff(*FIRST)[:-30], 4, "16", "truncated"),
    "pages of two sizes": (tiff(FIRST[0], FIRST[1, :3]), 2, "16", "unsupported"),
    "pages of two types": (tiff(FIRST[0], FIRST[1].astype(np.uint8)), 2, "16", "unsupported"),
    "several arrays": (npz(a=VALUES, b=VALUES), 4, "16", "unsupported"),
    "five axes": (npy(VALUES[None, None]), 4, "16", "unsupported"),
    "no rows": (npy(VALUES[:0]), 4, "16", "unsupported"),
    "complex numbers": (npy(VALUES.astype(np.complex64)), 4, "16", "unsupported"),
    "objects": (npy(np.array([None])), 4, "16", "corrupt"),
    "a header without an end": (b"\x93NUMPY\x01\x00v\x00{'descr': '<u2'", 4, "16", "corrupt"),
    "an archive that is damaged": (npz(a=VALUES)[:-40], 4, "16", "corrupt"),
    "a PNG cut off in its header": (PNG_HEADER, 3, "16", "truncated"),
    "nothing": (b"", 4, "16", "empty"),
    "text": (b"bands", 4, "16", "not-an-image"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_bands_have_a_reason(name: str) -> None:
    data, bands, bits, reason = BROKEN[name]
    with pytest.raises(DecodeError) as error:
        read_stored(data, bands, bits)
    assert error.value.reason == reason


def header(shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize("shape", [(100_000, 100_000, 4), (70_000, 1, 4), (2**40,), (-1, 5, 4)])
def test_a_header_that_claims_too_much_allocates_nothing(shape: tuple[int, ...]) -> None:
    with pytest.raises(DecodeError, match=r"claims|more than"):
        stored(header(shape))


def test_more_pixels_or_bytes_than_allowed() -> None:
    for data in (npy(VALUES), tiff(*FIRST), VALUES):
        with pytest.raises(DecodeError) as error:
            read_stored(data, 4, "16", 34)
        assert error.value.reason == "too-many-pixels"
    for data in (
        npy(VALUES),
        npz(a=VALUES),
        tiff(*FIRST),
        VALUES,
    ):  # 16 bytes for each allowed pixel: 140 values of 2 + 4
        assert stored(data, 53).bits == "16"
        with pytest.raises(DecodeError) as error:
            stored(data, 52)
        assert error.value.reason == "too-many-pixels"
    with pytest.raises(DecodeError, match=r"claims to unpack to"):
        stored(npz(a=np.zeros((100, 100), np.uint8)), 100)


def test_a_picture_of_bands_is_stretched_between_its_own_percentiles() -> None:
    ramp = np.arange(101, dtype=np.uint16)[:, None, None].repeat(2, axis=1) * np.array([1, 10, 100, 5], np.uint16)
    shown = picture(npy(ramp))
    assert shown.shape == (101, 2, 3) and shown.dtype == np.uint8
    assert (shown[:3] == 0).all() and (shown[98:] == 255).all()  # the percentiles 2 and 98 of 0 to 100
    assert (shown[50] == 128).all()  # 255 * 48 / 96, rounded to even
    assert np.array_equal(picture(npy(ramp[..., 0])), shown[..., :1].repeat(3, axis=2))


def test_a_picture_of_a_usual_file_is_what_decode_gives(shared_data: Path) -> None:
    data = (shared_data / "awkward-images" / "cat.jpg").read_bytes()
    assert np.array_equal(picture(data), decode(data))
    with pytest.raises(DecodeError, match="not an image"):
        picture(b"text")


def test_rgb_says_how_arrays_are_read() -> None:
    with pytest.raises(DecodeError, match=r"NumPy array files are not 8-bit RGB. Set data\.channels") as error:
        decode(npy(VALUES))
    assert error.value.reason == "unsupported"


def test_one_thread_at_a_time_parses_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy does it with `ast`, which may fail in Python 3.11 where two threads parse at once."""
    within = [0]
    parse = np.lib.format.read_array_header_1_0

    def slow(stream: io.BytesIO) -> Any:
        within[0] += 1
        time.sleep(0.005)
        assert within == [1]
        within[0] -= 1
        return parse(stream)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", slow)
    with ThreadPoolExecutor(4) as threads:
        headers = list(threads.map(read_array_header, [io.BytesIO(npy(VALUES)) for _ in range(8)]))
    assert {(header.shape, header.dtype) for header in headers} == {(VALUES.shape, VALUES.dtype)}


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> None:
    flag = (shared_data / "awkward-images" / "Flag_of_the_Netherlands-16bit.png").read_bytes()
    for package, data, bands in (("tifffile", tiff(*FIRST), 4), ("imagecodecs", flag, 3)):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(DecodeError, match=rf"package {package}: pip install .*extra bands") as error:
            read_stored(data, bands, "16")
        assert error.value.reason == "unsupported"
