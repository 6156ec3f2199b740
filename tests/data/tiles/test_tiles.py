"""Tiles of images: where they lie, and that parts of a TIFF hold the pixels of the whole image."""

from __future__ import annotations

import struct
import zlib
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from peak_memory import peak_growth
from PIL import Image

from vitrail.data.images import tiff_parts
from vitrail.data.images.decode import MAX_PIXELS, decode
from vitrail.data.images.ops import tile_transform
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Banded
from vitrail.data.images.tiff_parts import NotInParts, TiffParts
from vitrail.data.images.tiles import (
    MISSING,
    DecodedImage,
    TileBox,
    Tiling,
    open_image,
    prepared_tiles,
    read_tile,
    reduced,
    tiling,
)
from vitrail.data.settings import Bands, Preprocess
from vitrail.errors import DecodeError, UsageError

RGB = np.random.default_rng(0).integers(0, 256, (150, 133, 3), dtype=np.uint8)
PARTS = ((0, 0, 150, 133), (5, 7, 40, 40), (110, 93, 40, 40), (149, 132, 1, 1))
"""Top, left, height and width of parts."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Small images have many blocks, too."""
    if "memory" not in request.node.name:
        monkeypatch.setattr(tiff_parts, "BLOCK", 2**13)


@pytest.mark.parametrize("height, width", [(10, 10), (11, 10), (25, 31), (100, 17), (7, 40), (3, 3)])
@pytest.mark.parametrize("overlap", [0, 3, 9])
def test_every_pixel_lies_in_a_tile_and_all_tiles_have_one_size(height: int, width: int, overlap: int) -> None:
    boxes = list(Tiling(10, 10, overlap).boxes(height, width))
    seen = np.zeros((height, width), int)
    for box in boxes:
        assert (box.width, box.height) == (min(10, width), min(10, height))
        assert 0 <= box.x <= width - box.width and 0 <= box.y <= height - box.height
        seen[box.y : box.y + box.height, box.x : box.x + box.width] += 1
    assert seen.min() >= 1 and len(set(boxes)) == len(boxes)
    assert boxes == sorted(boxes, key=lambda box: (box.y, box.x))
    steps = {after.x - before.x for before, after in pairwise(boxes) if after.y == before.y}
    assert all(step <= 10 - overlap for step in steps)


def test_tiles_have_the_shape_of_the_networks_input() -> None:
    assert tiling(200, 8, (32, 64)) == Tiling(100, 200, 8)
    with pytest.raises(UsageError, match="overlap is 100; it must be below 100"):
        tiling(200, 100, (32, 64))


@pytest.mark.parametrize("compression", [None, "deflate", "lzw", "jpeg", "packbits", "zstd"])
def test_parts_hold_the_pixels_that_pillow_reads_from_the_whole(compression: str | None, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"tile": (32, 48)}, {"rowsperstrip": 13}, {}]
    kinds: list[dict[str, Any]] = [
        {}, {"bigtiff": True}, {"byteorder": ">"}, {"planarconfig": "separate"}, {"photometric": "minisblack"},
    ]  # fmt: skip
    for number, (layout, kind) in enumerate(product(layouts, kinds)):
        kind = {"photometric": "rgb", **kind}
        values = RGB[..., 0] if kind["photometric"] == "minisblack" else RGB
        if kind.get("planarconfig"):
            values = RGB.transpose(2, 0, 1)
        kind["predictor"] = compression in ("deflate", "lzw", "zstd")
        path = tmp_path / f"{number}.tif"
        tifffile.imwrite(path, values, compression=compression, **layout, **kind)
        check_parts(path)


@pytest.mark.parametrize("mode", ["1", "P", "I;16", "CMYK", "RGBA", "LAB", "YCbCr", "LA"])
def test_parts_of_every_kind_of_picture(mode: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    pictures = {
        "1": Image.fromarray(RGB[..., 0] > 128),
        "P": Image.fromarray(RGB).quantize(200),
        "I;16": Image.fromarray(rng.integers(0, 2**16, (150, 133)).astype(np.uint16)),
    }
    channels = {"CMYK": 4, "RGBA": 4, "LA": 2}.get(mode, 3)
    values = rng.integers(0, 256, (150, 133, channels), dtype=np.uint8)
    picture = pictures.get(mode) or Image.frombytes(mode, (133, 150), values.tobytes())
    for compression in ("raw", "tiff_lzw", "group4" if mode == "1" else "tiff_deflate"):
        path = tmp_path / f"{compression}.tif"
        picture.save(path, compression=compression, strip_size=133 * 40)
        check_parts(path)


def check_parts(path: Path) -> None:
    whole = decode(path.read_bytes())
    image = TiffParts(path, EIGHT_BIT_RGB, 40)
    assert (image.height, image.width) == (150, 133)
    for top, left, height, width in PARTS:
        expected = whole[top : top + height, left : left + width]
        np.testing.assert_array_equal(image.values(top, left, height, width), expected)


@pytest.mark.parametrize("layout", [{"tile": (16, 32)}, {"rowsperstrip": 9}, {"planarconfig": "separate"}])
def test_parts_of_bands_of_16_bits(layout: dict[str, Any], tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (70, 90, 4), dtype=np.uint16)
    layout = {"planarconfig": "contig", **layout}
    stored = values.transpose(2, 0, 1) if layout["planarconfig"] == "separate" else values
    tifffile.imwrite(tmp_path / "a.tif", stored, photometric="minisblack", compression="deflate", **layout)
    tifffile.imwrite(tmp_path / "pages.tif", values.transpose(2, 0, 1), photometric="minisblack", tile=(16, 16))
    bands = Banded(Bands("16", (0.0,) * 4, (1.0,) * 4))
    for name in ("a.tif", "pages.tif"):
        image = TiffParts(tmp_path / name, bands, 20)
        np.testing.assert_array_equal(image.values(13, 50, 20, 40), values[13:33, 50:90])
    wrong = Banded(Bands("16", (0.0,) * 3, (1.0,) * 3))
    with pytest.raises(DecodeError, match="4 bands, and 3 are needed"):
        open_image(tmp_path / "a.tif", wrong, 20)


def test_damage_costs_only_the_tiles_that_touch_it(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, RGB, photometric="rgb", tile=(32, 32), compression="deflate")
    with tifffile.TiffFile(path) as file:
        offset, count = file.pages[0].dataoffsets[7], file.pages[0].databytecounts[7]  # rows 32 to 63, columns 64 to 95
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(b"\xff" * count)
    found = list(prepared_tiles([path], Tiling(16, 16, 4), tile_transform(Preprocess((16, 16))), ahead=8, workers=2))
    assert len(found) == 13 * 11
    for _, box, image in found:
        assert box is not None
        touches = box.y < 64 and box.y + 16 > 32 and box.x < 96 and box.x + 16 > 64
        if touches:
            assert isinstance(image, DecodeError) and f"the tile at x {box.x}, y {box.y}: " in str(image)
        else:
            np.testing.assert_array_equal(image, RGB[box.y : box.y + 16, box.x : box.x + 16])
    picture = reduced(open_image(path, EIGHT_BIT_RGB, 16), EIGHT_BIT_RGB)
    shown = (picture == RGB).all(axis=2)
    assert not shown[32:64, 64:96].any() and (picture[32:64, 64:96] == MISSING).all()
    assert shown[:22].all() and shown[80:].all() and shown[:, :48].all() and shown[:, 112:].all()


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, RGB, photometric="rgb", rowsperstrip=10)
    path.write_bytes(path.read_bytes()[: -RGB.nbytes // 2])
    image = open_image(path, EIGHT_BIT_RGB, 10)
    np.testing.assert_array_equal(image.values(0, 0, 60, 133), RGB[:60])
    with pytest.raises(DecodeError) as caught:
        image.values(140, 0, 10, 10)
    assert caught.value.reason == "truncated"


def test_a_header_that_claims_too_much_has_no_tiles(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, RGB, photometric="rgb")
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name in ("ImageWidth", "ImageLength", "RowsPerStrip"):
            file.pages[0].tags[name].overwrite(2**30)
    with pytest.raises(DecodeError, match=r"most of its data are missing") as error:
        open_image(path, EIGHT_BIT_RGB, 10)
    assert error.value.reason == "too-many-pixels"


def test_what_is_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tif"
    for why, values, options in (
        ("floating-point", RGB[..., 0].astype(np.float32), {}),
        ("turned", RGB, {"extratags": [(274, "H", 1, 6)]}),
        ("strips of 150 x 133", RGB, {"compression": "deflate", "rowsperstrip": 150}),
    ):
        monkeypatch.setattr(tiff_parts, "MAX_PIXELS", 10_000)
        tifffile.imwrite(path, values, **options)
        with pytest.raises(NotInParts, match=why):
            TiffParts(path, EIGHT_BIT_RGB, 10)
        image = open_image(path, EIGHT_BIT_RGB, 10)
        assert isinstance(image, DecodedImage)
        np.testing.assert_array_equal(image.image, decode(path.read_bytes()))


def test_too_many_pixels_in_another_format_name_the_way_out(tmp_path: Path) -> None:
    header = struct.pack(">2I5B", 30_000, 20_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    path = tmp_path / "scan.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I4s", 100, b"IDAT") + bytes(104))
    with pytest.raises(
        DecodeError, match=r"600,000,000 pixels.* vips autorot .*scan.png '.*scan-tiled.tif\[tile,"
    ) as error:
        open_image(path, EIGHT_BIT_RGB, 224)
    assert error.value.reason == "too-many-pixels"


def test_without_tifffile_the_image_is_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tifffile.imwrite(tmp_path / "a.tif", RGB, photometric="rgb", tile=(32, 32))
    monkeypatch.setitem(__import__("sys").modules, "tifffile", None)
    assert isinstance(open_image(tmp_path / "a.tif", EIGHT_BIT_RGB, 16), DecodedImage)


def test_a_smaller_image_is_continued_to_one_tile() -> None:
    box = next(Tiling(8, 8, 2).boxes(5, 20))
    assert box == TileBox(0, 0, 8, 5)
    tile = read_tile(DecodedImage(RGB[:5, :20]), box, Tiling(8, 8, 2))
    np.testing.assert_array_equal(tile[:5], RGB[:5, :8])
    np.testing.assert_array_equal(tile[5:], np.broadcast_to(RGB[4, :8], (3, 8, 3)))


def test_memory_of_a_large_image_is_bounded(tmp_path: Path) -> None:
    path, side = tmp_path / "large.tif", 6000
    colours = (np.full((256, 256, 3), number % 251, np.uint8) for number in range(24 * 24))
    tifffile.imwrite(path, colours, shape=(side, side, 3), dtype=np.uint8, tile=(256, 256), compression="deflate",
                     photometric="rgb")  # fmt: skip
    transform = tile_transform(Preprocess((16, 16)))
    options: dict[str, Any] = dict(ahead=16, workers=1)
    tifffile.imwrite(tmp_path / "small.tif", RGB)
    list(prepared_tiles([tmp_path / "small.tif"], Tiling(64, 64), transform, **options))  # threads, libraries
    with peak_growth() as growth:
        means = [tile.image.mean() for tile in prepared_tiles([path], Tiling(512, 512, 32), transform, **options)]
        assert growth() < 90 * 1024  # as a whole it takes 250 MB: 108 as an array, 144 in Pillow
    assert len(means) == 13 * 13
    assert means[0] == pytest.approx(np.mean([0, 1, 24, 25]), abs=0.6)  # the pieces below the first tile
    assert (21 * 24 + 21) % 251 < means[-1] < (23 * 24 + 23) % 251


def test_memory_of_an_image_beyond_the_cap_is_bounded(tmp_path: Path) -> None:
    path, side = tmp_path / "huge.tif", 20_000
    stored = tifffile.memmap(path, shape=(side, side, 3), dtype=np.uint8, photometric="rgb")
    stored[-1, -1], stored[10_000, 10_000] = (9, 8, 7), (1, 2, 3)
    stored.flush()
    del stored
    assert side * side > MAX_PIXELS
    with peak_growth() as growth:
        image = open_image(path, EIGHT_BIT_RGB, 224)
        last, middle = image.values(side - 224, side - 224, 224, 224), image.values(9_900, 9_900, 224, 224)
        assert growth() < 250 * 1024
    assert last[-1, -1].tolist() == [9, 8, 7] and last.sum() == 24
    assert middle[100, 100].tolist() == [1, 2, 3] and middle.sum() == 6
