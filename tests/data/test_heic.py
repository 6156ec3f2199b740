"""HEIC, the photographs of phones: read with the package pillow-heif, refused with what to do without it."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.data import image_names
from vitrail.data.check import check, header_facts
from vitrail.data.images.decode import FORMATS, decode, upright_size
from vitrail.data.settings import Data
from vitrail.data.sources.files import find_images
from vitrail.data.sources.open import open_data_set
from vitrail.errors import DataError, DecodeError

pillow_heif = pytest.importorskip("pillow_heif")


def picture() -> np.ndarray:
    """A smooth picture that is darker at the left and redder at the top, 48 x 64 pixels."""
    rows, columns = np.mgrid[0:48, 0:64]
    return np.stack([255 - 4 * rows, 3 * columns, 2 * rows + columns], axis=-1).astype(np.uint8)


def encoded(pixels: np.ndarray, **options: object) -> bytes:
    """A HEIC file of the pixels, without loss except for the colour space."""
    file = io.BytesIO()
    image = pillow_heif.from_pillow(Image.fromarray(pixels))
    image.save(file, quality=-1, chroma=444, **options)
    return file.getvalue()


def test_pixels_are_those_that_were_stored() -> None:
    assert np.abs(decode(encoded(picture())).astype(int) - picture()).max() <= 4  # YCbCr of 8 bits
    grey = picture()[..., 0]
    assert np.abs(decode(encoded(grey)).astype(int) - grey[..., None]).max() <= 4


@pytest.mark.parametrize(
    ("orientation", "stored"), [(1, lambda a: a), (3, lambda a: a[::-1, ::-1]), (6, lambda a: np.rot90(a))]
)
def test_pictures_are_upright(orientation: int, stored: object) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(np.ascontiguousarray(stored(picture())), exif=exif.tobytes())  # type: ignore[operator]
    assert np.abs(decode(data).astype(int) - picture()).max() <= 4


def phone_photograph(orientation: int) -> bytes:
    """A picture that is stored lying, with a box `irot` that turns it, and this orientation in EXIF beside it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = bytearray(encoded(np.ascontiguousarray(np.rot90(picture())), exif=exif.tobytes()))
    tag = bytes.fromhex("0112 0003 00000001")
    assert data.count(b"irot") == data.count(tag) == 1
    place = data.index(tag) + len(tag)
    data[place : place + 2] = orientation.to_bytes(2, "big")
    return bytes(data)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_box_turns_the_picture_and_exif_does_not_turn_it_again(orientation: int) -> None:
    data = phone_photograph(orientation)
    assert np.abs(decode(data).astype(int) - picture()).max() <= 4
    assert upright_size(data) == (48, 64)


def test_more_bits_are_scaled() -> None:
    file = io.BytesIO()
    deep = picture().astype(np.uint16) * 257
    pillow_heif.from_bytes("RGB;16", (64, 48), deep.tobytes()).save(file, quality=-1, chroma=444)
    assert pillow_heif.open_heif(file, convert_hdr_to_8bit=False).info["bit_depth"] == 10
    assert np.abs(decode(file.getvalue()).astype(int) - picture()).max() <= 4


def test_alpha_is_drawn_on_white() -> None:
    alpha = np.where(np.arange(64) < 32, 0, 255).astype(np.uint8)[None, :].repeat(48, 0)
    found = decode(encoded(np.dstack([picture(), alpha]))).astype(int)
    assert (found[:, :32] == 255).all() and np.abs(found[:, 32:] - picture()[:, 32:]).max() <= 4


def test_of_several_images_the_primary_one_is_read() -> None:
    for primary in (0, 1):
        images = pillow_heif.from_pillow(Image.fromarray(255 - picture()))
        images.add_from_pillow(Image.fromarray(picture()))
        file = io.BytesIO()
        images.save(file, quality=-1, chroma=444, primary_index=primary)
        wanted = (255 - picture(), picture())[primary]
        assert np.abs(decode(file.getvalue()).astype(int) - wanted).max() <= 4


def test_a_lossy_picture_is_that_of_libheif() -> None:
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(picture())).save(file, quality=50)
    assert (decode(file.getvalue()) == np.asarray(pillow_heif.open_heif(file))).all()


def test_a_size_that_the_header_hides_is_refused() -> None:
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.new("L", (1000, 1000))).save(file)
    data = bytearray(file.getvalue())
    place = data.index(b"ispe") + 8
    data[place : place + 8] = struct.pack(">II", 64, 64)
    with pytest.raises(DecodeError, match="Security limit") as error:
        decode(bytes(data))
    assert error.value.reason == "too-many-pixels"


def test_the_list_of_pillow_is_not_changed() -> None:
    decode(encoded(picture()))
    assert ".heic" not in Image.registered_extensions() and "HEIF" not in Image.OPEN


def test_damaged_and_large_files() -> None:
    data = encoded(picture())
    for broken in (data[: len(data) // 2], data[:40]):
        with pytest.raises(DecodeError) as error:
            decode(broken)
        assert error.value.reason == "truncated"
    with pytest.raises(DecodeError, match="more than the 1,000 allowed"):
        decode(data, max_pixels=2000)
    assert header_facts(data) == ((48, 64), "HEIC", "RGB")


def phone(root: Path, *names: str) -> Path:
    """Photographs of a phone: HEIC, or JPEG where the name ends in .jpg."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jpg"):
            Image.fromarray(picture()).save(root / name)
        else:
            (root / name).write_bytes(encoded(picture()))
    return root


def test_a_folder_of_photographs_of_a_phone(tmp_path: Path) -> None:
    root = phone(tmp_path, "cat/1.HEIC", "cat/2.heif", "dog/1.heic", "dog/2.jpg")
    report = check(root)
    assert report.stats.formats == {"HEIC": 3, "JPEG": 1} and not report.bad
    assert [path.name for path in find_images([root / "cat"])] == ["1.HEIC", "2.heif"]


def test_without_the_package_they_are_counted_and_the_cure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_names, "find_spec", lambda name: None)
    root = phone(tmp_path, "cat/1.HEIC", "cat/2.heif", "dog/1.heic", "dog/2.jpg")
    with pytest.raises(DataError) as error:
        open_data_set(Data(str(root)))
    said = str(error.value)
    assert "2 .heic and 1 .heif images" in said and "vitrail's extra heic" in said and "convert them" in said
    assert said.endswith("leave them out: --data.exclude '*.heic' --data.exclude '*.heif'")
    left = open_data_set(Data(str(root), exclude=("*.heic", "*.heif")))
    assert left.splits[""].class_names == ["dog"]
    with pytest.raises(DataError, match="convert them") as error:
        open_data_set(Data(str(phone(tmp_path / "all", "cat/1.heic", "dog/1.heic"))))
    assert "leave them out" not in str(error.value)
    with pytest.raises(DecodeError, match="vitrail's extra heic") as wrong:
        decode((root / "cat" / "1.HEIC").read_bytes())
    assert wrong.value.reason == "unsupported"


def test_the_kinds_of_apple_and_others_are_recognised() -> None:
    (format,) = [format for format in FORMATS if format.name == "HEIC"]
    for brand in (b"heic", b"heix", b"hevc", b"heim", b"mif1", b"msf1"):
        assert format.magic.match(b"\0\0\0\x18ftyp" + brand)
    assert not format.magic.match(b"\0\0\0\x18ftypavif")


@pytest.mark.train
def test_a_training_keeps_the_weights_statistics_and_the_network_reads_other_pictures(tmp_path: Path) -> None:
    names = (f"{name}/{number}.heic" for name in ("cat", "dog") for number in range(4))
    quick: dict[str, Any] = {"batch_size": 4, "duration": "1 step", "device": "cpu", "workers": 0}
    run = vitrail.finetune(phone(tmp_path / "photos", *names), out=str(tmp_path / "runs"), **quick).folder
    network: Any = vitrail.load(run)
    assert network.card.preprocess.bands is None
    assert network.config.mean == vitrail.load("vitrail/tiny").config.mean
    Image.fromarray(picture()[..., 0]).save(tmp_path / "grey.png")
    assert vitrail.predict(run, [tmp_path / "grey.png"], device="cpu").rows[0].probabilities
