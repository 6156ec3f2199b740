"""JPEG XL: read with the package imagecodecs, refused with what to do without it."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data import image_names
from vitrail.data.check import check, header_facts
from vitrail.data.images.decode import decode, upright_size
from vitrail.data.images.jpeg_xl import Header, header
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data_set
from vitrail.errors import DataError, DecodeError

imagecodecs = pytest.importorskip("imagecodecs")
SIZES = ((1, 1), (8, 8), (17, 40), (48, 64), (256, 8), (300, 520), (480, 640), (720, 1280), (3, 5000))


def picture(height: int = 48, width: int = 64) -> np.ndarray:
    """A smooth picture that is darker at the left and redder at the top."""
    rows, columns = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return np.stack([250 - 200 * rows, 240 * columns, 120 * rows + 90 * columns], axis=-1).astype(np.uint8)


def encoded(pixels: np.ndarray, **options: object) -> bytes:
    return imagecodecs.jpegxl_encode(pixels, **{"lossless": True, "effort": 1, **options})


def jpeg(orientation: int) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(picture()).save(file, "JPEG", quality=95, subsampling=0, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("boxes", [False, True])
def test_lossless_pixels_are_those_that_were_stored(boxes: bool) -> None:
    rgb = picture()
    found = decode(encoded(rgb, usecontainer=boxes))
    assert (found == rgb).all() and found.flags.c_contiguous and found.flags.writeable
    assert (decode(encoded(rgb[..., 0], usecontainer=boxes)) == rgb[..., :1]).all()


def test_alpha_is_drawn_on_white() -> None:
    rgb, alpha = picture(), np.where(np.arange(64) < 32, 0, 255).astype(np.uint8)[None, :].repeat(48, 0)
    for pixels in (np.dstack([rgb, alpha]), np.dstack([rgb[..., 0], alpha])):
        found = decode(encoded(pixels))
        assert (found[:, :32] == 255).all() and (found[:, 32:] == pixels[:, 32:, : pixels.shape[2] - 1]).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 7, 10, 12, 16])
def test_the_declared_range_becomes_that_of_bytes(bits: int) -> None:
    values = picture().astype(int) * (2**bits - 1) // 255
    found = decode(encoded(values.astype(np.uint8 if bits < 8 else np.uint16), bitspersample=bits))
    assert (found == (values * 255 // (2**bits - 1) if bits < 8 else values >> (bits - 8))).all()


@pytest.mark.parametrize("type", [np.float16, np.float32])
def test_floats_are_clipped(type: np.dtype) -> None:
    values = picture().astype(type) / 255
    assert (decode(encoded(values)) == picture()).all()
    values[0] = 2
    assert (decode(encoded(values))[0] == 255).all()


def test_a_lossy_picture_is_that_of_the_decoder_and_near_the_original() -> None:
    data = encoded(picture(), lossless=False, distance=0.5)
    assert (decode(data) == imagecodecs.jpegxl_decode(data)).all()
    assert np.abs(decode(data).astype(int) - picture()).mean() < 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_upright(orientation: int) -> None:
    """The encoder writes the orientation of a JPEG's EXIF into the header, and keeps the EXIF beside it."""
    data = imagecodecs.jpegxl_encode_jpeg(jpeg(orientation))
    wanted = decode(jpeg(orientation)).astype(int)
    assert np.abs(decode(data) - wanted).max() <= 4
    assert upright_size(data) == wanted.shape[:2] == header_facts(data)[0]


def test_of_an_animation_the_first_picture_is_read() -> None:
    assert (decode(encoded(np.stack([picture(), 255 - picture()]))) == picture()).all()


@pytest.mark.parametrize("size", SIZES)
def test_the_header_states_what_the_decoder_finds(size: tuple[int, int]) -> None:
    height, width = size
    rgb = picture(*size)
    assert header(encoded(rgb)) == Header(width, height)
    assert header(encoded(rgb, lossless=False, distance=2.0, usecontainer=True)) == Header(width, height)
    assert header(encoded(rgb[..., 0])) == Header(width, height, "L")
    assert header(encoded(rgb[..., :2].astype(np.uint16))) == Header(width, height, "LA", 16)
    assert header(encoded(np.dstack([rgb, rgb[..., :1]]).astype(np.float32))) == Header(width, height, "RGBA", None)


def test_other_channels_are_refused() -> None:
    with pytest.raises(DecodeError, match="3 channels besides its colours") as error:
        decode(encoded(np.stack([picture()[..., 0]] * 4), planar=True, photometric="GRAY"))
    assert error.value.reason == "unsupported"


def test_damaged_and_large_files() -> None:
    data = encoded(picture())
    for broken in (data[:-1], data[: len(data) // 2], data[:4], data[:2]):
        with pytest.raises(DecodeError) as error:
            decode(broken)
        assert error.value.reason == "truncated"
    with pytest.raises(DecodeError, match="more than the 1,000 allowed") as error:
        decode(data, max_pixels=2000)
    assert error.value.reason == "too-many-pixels"
    with pytest.raises(DecodeError, match="parts"):
        decode(b"\0\0\0\x0cJXL \r\n\x87\n" + struct.pack(">I4s", 8, b"free") * 20_000 + data)


def test_a_few_bytes_that_claim_many_pixels_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = bytes.fromhex("ff0a7abb014171230802011818a000a91848") + bytes(500)  # libjxl's header of a grey picture
    assert header(data) == Header(6000, 6000, "L")
    monkeypatch.setattr(imagecodecs, "jpegxl_decode", None)
    with pytest.raises(DecodeError, match="6000 x 6000 pixels in a file of") as error:
        decode(data)
    assert error.value.reason == "too-many-pixels"


def test_a_folder_with_and_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cat/1.JXL", "cat/2.jxl", "dog/1.jxl", "dog/2.jxl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(picture()))
    assert check(tmp_path).stats.formats == {"JPEG XL": 4} and not check(tmp_path).bad
    monkeypatch.setattr(image_names, "find_spec", lambda name: None if name == "imagecodecs" else name)
    with pytest.raises(DataError, match=r"4 \.jxl images of") as error:
        open_data_set(Data(str(tmp_path)))
    said = str(error.value)
    assert "need the package imagecodecs" in said and "vitrail's extra heic" in said and "djxl" in said
    with pytest.raises(DecodeError, match="vitrail's extra heic") as wrong:
        decode((tmp_path / "cat" / "1.JXL").read_bytes())
    assert wrong.value.reason == "unsupported"
