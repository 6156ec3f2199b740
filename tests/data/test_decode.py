from __future__ import annotations

import math
import struct
import time
import warnings
import zlib
from io import BytesIO

import imagecodecs
import numpy as np
import pillow_heif
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peak_memory import peak_growth
from PIL import Image, ImageFile, ImageOps, PngImagePlugin

from vitrail.data.images.decode import MAX_PIXELS, decode, orientation
from vitrail.errors import DecodeError

REFUSED = {
    "65536-uint32-limit.png": "too-many-pixels",
    "Bad_height.bmp": "too-many-pixels",
    "badwidth.bmp": "too-many-pixels",
    "giant-image.jpg": "too-many-pixels",
    "truncated_image.png": "truncated",
    "truncated_jpeg.jpg": "truncated",
    "ultrahdr.jpg": "truncated",  # ends inside the first scan
    "badheadersize.bmp": "unsupported",
    "TODO hpredict_cmyk.tiff": "unsupported",
    "zero-loop-count.gif": "corrupt",
}


def picture(height: int = 20, width: int = 27) -> np.ndarray:
    """Smooth, with a noisy corner, no symmetry, all values used."""
    y, x = np.mgrid[:height, :width]
    image = np.stack([x * 255 // (width - 1), y * 255 // (height - 1), (x * y) % 256], -1).astype(np.uint8)
    image[2:6, 3:9] = np.random.default_rng(0).integers(0, 256, (4, 6, 3))
    return image


def encoded(image: np.ndarray | Image.Image, format: str, **options: object) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(bits: int, colour: int, rows: list[bytes], *chunks: bytes, width: int | None = None) -> bytes:
    """A PNG written from its specification; colour 0 gray, 2 RGB, 3 palette, 4 gray + alpha, 6 RGBA."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    width = width or len(rows[0]) * 8 // (bits * channels)
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), bits, colour, 0, 0, 0))
    data = png_chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + data + png_chunk(b"IEND", b"")


def tiff(pixels: bytes, width: int, height: int, bits: int, *, samples: int = 1, **more: int) -> bytes:
    """A little-endian TIFF of one uncompressed strip, written from its specification."""
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: 1, 273: 8, 277: samples, 278: height, 279: len(pixels)}
    tags |= {int(tag[1:]): value for tag, value in more.items()}
    at = 8 + len(pixels)
    bits_at = at + 2 + 12 * len(tags) + 4
    entries = b""
    for tag in sorted(tags):
        if tag == 258 and samples > 1:
            entries += struct.pack("<HHII", tag, 3, samples, bits_at)
        else:
            entries += struct.pack("<HHII", tag, 4, 1, tags[tag])
    directory = struct.pack("<H", len(tags)) + entries + b"\0\0\0\0" + struct.pack("<H", bits) * samples
    return b"II*\0" + struct.pack("<I", at) + pixels + directory


def exif_block(value: int, order: str = "<", kind: int = 3) -> bytes:
    """An EXIF block that says nothing but the orientation."""
    number = struct.pack(order + {1: "B3x", 3: "H2x", 4: "I"}[kind], value)
    start = b"II*\0" if order == "<" else b"MM\0*"
    return start + struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, 1) + number + b"\0\0\0\0"


def seen(stored: np.ndarray, orientation: int) -> np.ndarray:
    """EXIF 2.3, 4.6.4 A: where the 0th row and the 0th column of what is stored are to be seen."""
    row0, column0 = {
        1: ("top", "left"),
        2: ("top", "right"),
        3: ("bottom", "right"),
        4: ("bottom", "left"),
        5: ("left", "top"),
        6: ("right", "top"),
        7: ("right", "bottom"),
        8: ("left", "bottom"),
    }[orientation]
    height, width = stored.shape[:2]
    out = np.empty((width, height, 3) if row0 in ("left", "right") else (height, width, 3), np.uint8)
    for r in range(height):
        for c in range(width):
            r_back, c_back = height - 1 - r, width - 1 - c
            if row0 in ("top", "bottom"):
                out[r if row0 == "top" else r_back, c if column0 == "left" else c_back] = stored[r, c]
            else:
                out[c if column0 == "top" else c_back, r if row0 == "left" else r_back] = stored[r, c]
    return out


def reason(data: bytes, **options: int) -> str:
    with pytest.raises(DecodeError) as caught:
        decode(data, **options)
    return caught.value.reason


def gray(data: bytes) -> list[int]:
    image = decode(data)
    assert (image == image[..., :1]).all()
    return image[..., 0].ravel().tolist()


# ---------------------------------------------------------------- the real awkward files


def test_every_awkward_file_has_its_outcome(shared_data):
    paths = sorted((shared_data / "awkward-images").iterdir())
    assert len(paths) >= 60
    for path in paths:
        began = time.process_time()
        if path.name in REFUSED:
            assert reason(path.read_bytes()) == REFUSED[path.name], path.name
        else:
            image = decode(path.read_bytes())
            assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3, path.name
            assert image.flags.c_contiguous and image.flags.writeable, path.name
        assert time.process_time() - began < 5, path.name


def test_awkward_pictures_show_what_they_show(shared_data):
    """The same photograph stored in several ways, and pictures whose content is known."""
    folder = shared_data / "awkward-images"
    read = lambda name: decode((folder / name).read_bytes()).astype(int)  # noqa: E731
    assert abs(read("hopper.Lab.tif") - read("hopper.webp")).mean() < 6  # WebP is lossy
    gray_hopper = read("hopper.webp") @ [0.299, 0.587, 0.114]
    assert abs(read("hopper_gray.jpg")[..., 0] - gray_hopper).mean() < 3
    flag = read("Flag_of_the_Netherlands-16bit.png")  # red, white, blue
    assert flag[50, 450].argmax() == 0 and (flag[300, 450] > 240).all() and flag[550, 450].argmax() == 2
    mpo = folder / "sugarshack.mpo"
    with Image.open(mpo) as image:
        assert abs(read("sugarshack.mpo") - np.asarray(image.convert("RGB"))).max() <= 1


@pytest.mark.full_size
def test_pictures_stored_turned_are_upright(shared_data):
    folder = shared_data / "awkward-images"
    landscapes = [decode((folder / f"Landscape_{k}.jpg").read_bytes()).astype(int) for k in (4, 7, 8)]
    assert all(image.shape == (1200, 1800, 3) for image in landscapes)
    for image in landscapes[1:]:
        # JPEG blocks and printed captions differ; turned wrongly the mean difference is 60
        assert abs(image - landscapes[0]).mean() < 12
    assert abs(landscapes[0][::-1] - landscapes[0]).mean() > 40
    for name in ("Landscape_4.jpg", "Landscape_7.jpg", "Landscape_8.jpg", "Portrait_2.jpg"):
        with Image.open(folder / name) as image:
            expected = np.asarray(ImageOps.exif_transpose(image))
        assert abs(decode((folder / name).read_bytes()).astype(int) - expected).max() <= 1


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("format", ["PNG", "BMP", "PPM", "TIFF"])
def test_lossless_rgb_is_exact(format):
    assert (decode(encoded(picture(), format)) == picture()).all()


def test_lossless_webp_and_jpeg_2000_are_exact():
    assert (decode(encoded(picture(), "WEBP", lossless=True)) == picture()).all()
    assert (decode(encoded(picture(64, 64), "JPEG2000")) == picture(64, 64)).all()


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_jpeg_equals_pillow(options):
    for image in (Image.fromarray(picture(70, 53)), Image.fromarray(picture(70, 53)).convert("L")):
        data = encoded(image, "JPEG", **options)
        expected = np.asarray(Image.open(BytesIO(data)).convert("RGB")).astype(int)
        assert abs(decode(data) - expected).max() <= 1


def test_few_bits():
    assert gray(png(1, 0, [bytes([0b10100000])], width=3)) == [255, 0, 255]
    assert gray(png(2, 0, [bytes([0b00011011])])) == [0, 85, 170, 255]
    assert gray(png(4, 0, [bytes([0x0F, 0x80])])) == [0, 255, 136, 0]
    assert gray(encoded(Image.new("1", (2, 1), 1), "TIFF")) == [255, 255]


def test_palette():
    palette = png_chunk(b"PLTE", bytes([10, 20, 30, 200, 100, 0]))
    assert decode(png(8, 3, [bytes([1, 0])], palette)).tolist() == [[[200, 100, 0], [10, 20, 30]]]


SIXTEEN = [0, 255, 256, 0x7FFF, 0x8000, 0xFF00, 0xFFFF]
EIGHT = [0, 0, 1, 127, 128, 255, 255]


def test_sixteen_bits_are_scaled_not_clipped():
    big = struct.pack(">7H", *SIXTEEN)
    assert gray(png(16, 0, [big])) == EIGHT
    assert gray(png(16, 2, [b"".join(struct.pack(">3H", v, v, v) for v in SIXTEEN)])) == EIGHT
    assert gray(png(16, 4, [b"".join(struct.pack(">2H", v, 0xFFFF) for v in SIXTEEN)])) == EIGHT
    assert gray(png(16, 6, [b"".join(struct.pack(">4H", v, v, v, 0xFFFF) for v in SIXTEEN)])) == EIGHT
    assert gray(tiff(struct.pack("<7H", *SIXTEEN), 7, 1, 16)) == EIGHT
    triples = b"".join(struct.pack("<3H", v, v, v) for v in SIXTEEN)
    assert gray(tiff(triples, 7, 1, 16, samples=3, t262=2)) == EIGHT
    assert gray(b"P5 7 1 65535\n" + big) == EIGHT


def test_other_depths():
    assert gray(tiff(bytes([0x80, 0x0F, 0xFF]), 2, 1, 12)) == [128, 255]  # packed 0x800, 0xFFF
    signed = struct.pack("<4h", -5, 0, 16384, 32767)
    assert gray(tiff(signed, 4, 1, 16, t339=2)) == [0, 0, 128, 255]
    assert gray(tiff(struct.pack("<3I", 0, 2**31, 2**32 - 1), 3, 1, 32)) == [0, 128, 255]
    assert gray(tiff(struct.pack("<3i", -7, 2**30, 2**31 - 1), 3, 1, 32, t339=2)) == [0, 128, 255]


def test_float_pictures():
    def of(*values: float) -> bytes:
        return tiff(struct.pack(f"<{len(values)}f", *values), len(values), 1, 32, t339=3)

    assert gray(of(0, 0.25, 1)) == [0, 64, 255]
    assert gray(of(0, 100, 255)) == [0, 100, 255]
    assert gray(of(0, 25700, 65535)) == [0, 100, 255]
    for bad in (-0.1, 70000.0, math.nan, math.inf):
        assert reason(of(0, bad)) == "unsupported"


def over_white(colour: list[int], alpha: int) -> np.ndarray:
    return np.asarray(colour) * alpha / 255 + 255 * (1 - alpha / 255)


@pytest.mark.parametrize("alpha", [0, 1, 100, 128, 254, 255])
def test_alpha_is_laid_over_white(alpha):
    colour = [10, 200, 77]
    expected = over_white(colour, alpha)
    assert abs(decode(png(8, 6, [bytes([*colour, alpha])]))[0, 0] - expected).max() <= 0.51
    assert abs(decode(png(8, 4, [bytes([10, alpha])]))[0, 0] - expected[0]).max() <= 0.51
    palette = png_chunk(b"PLTE", bytes([0, 0, 0, *colour])) + png_chunk(b"tRNS", bytes([255, alpha]))
    assert abs(decode(png(8, 3, [bytes([1])], palette))[0, 0] - expected).max() <= 0.51
    rgba = Image.new("RGBA", (3, 2), (*colour, alpha))
    for format, options in (("TIFF", {}), ("WEBP", {"lossless": True, "exact": True})):
        assert abs(decode(encoded(rgba, format, **options))[0, 0] - expected).max() <= 0.51


def test_transparent_colour_is_white():
    """A PNG may name one colour that is transparent, in as many bits as its pixels have."""
    assert gray(png(8, 0, [bytes([7, 8])], png_chunk(b"tRNS", struct.pack(">H", 7)))) == [255, 8]
    assert gray(png(4, 0, [bytes([0x38])], png_chunk(b"tRNS", struct.pack(">H", 3)))) == [255, 136]
    assert gray(png(1, 0, [bytes([0])], png_chunk(b"tRNS", struct.pack(">H", 0)), width=2)) == [255, 255]
    deep = struct.pack(">2H", 300, 301)
    assert gray(png(16, 0, [deep], png_chunk(b"tRNS", struct.pack(">H", 300)))) == [255, 1]
    key = png_chunk(b"tRNS", struct.pack(">3H", 1, 2, 3))
    assert decode(png(8, 2, [bytes([1, 2, 3, 1, 2, 4])], key)).tolist() == [[[255] * 3, [1, 2, 4]]]
    key = png_chunk(b"tRNS", struct.pack(">3H", 256, 512, 768))
    deep = struct.pack(">6H", 256, 512, 768, 256, 512, 1024)
    assert decode(png(16, 2, [deep], key)).tolist() == [[[255] * 3, [1, 2, 4]]]
    gif = Image.new("P", (2, 1))
    gif.putpalette([9, 9, 9, 1, 2, 3])
    gif.putpixel((1, 0), 1)
    assert decode(encoded(gif, "GIF", transparency=0)).tolist() == [[[255] * 3, [1, 2, 3]]]


@pytest.mark.parametrize("ink", [(0, 0, 0, 0), (255, 0, 0, 0), (10, 100, 200, 50), (30, 60, 90, 255)])
def test_cmyk(ink):
    expected = [(255 - colour) * (255 - ink[3]) / 255 for colour in ink[:3]]
    image = Image.new("CMYK", (16, 16), ink)
    assert abs(decode(encoded(image, "TIFF"))[5, 5] - expected).max() <= 1
    data = encoded(image, "JPEG", quality=100)  # Pillow writes inverted inks with Adobe's marker
    assert abs(decode(data)[5, 5] - expected).max() <= 2
    assert abs(decode(data).astype(int) - np.asarray(Image.open(BytesIO(data)).convert("RGB"))).max() <= 1


def test_lab():
    """CIE L*a*b* under D50 to linear sRGB (Bradford-adapted matrix), then its transfer function."""
    for lightness, a, b in ((100, 0, 0), (0, 0, 0), (50, 0, 0), (60, 30, -20), (40, -20, 30)):
        f = (lightness + 16) / 116
        f = np.array([f + a / 500, f, f - b / 200])
        xyz = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * [0.9642, 1, 0.8249]
        matrix = [
            [3.1338561, -1.6168667, -0.4906146],
            [-0.9787684, 1.9161415, 0.0334540],
            [0.0719453, -0.2289914, 1.4052427],
        ]
        linear = np.clip(np.array(matrix) @ xyz, 0, 1)
        expected = 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
        pixel = struct.pack("Bbb", round(lightness * 255 / 100), a, b)
        image = decode(tiff(pixel * 4, 2, 2, 8, samples=3, t262=8))
        assert abs(image[0, 0] - expected).max() <= 2


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_picture_of_several(format):
    first, second = Image.new("RGB", (8, 6), (255, 0, 0)), Image.new("RGB", (8, 6), (0, 0, 255))
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(first, format, save_all=True, append_images=[second], **options)
    assert (decode(data) == [255, 0, 0]).all()


# ---------------------------------------------------------------- orientation


@pytest.mark.parametrize("value", range(1, 9))
def test_orientation_is_applied_once_whatever_the_format(value):
    stored = picture(16, 24)
    expected = seen(stored, value)
    exif = Image.Exif()
    exif[0x0112] = value
    for format, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
        assert (decode(encoded(stored, format, exif=exif, **options)) == expected).all(), format
    jpeg = encoded(stored, "JPEG", quality=100, subsampling=0, exif=exif)
    assert abs(decode(jpeg).astype(int) - expected).mean() < 2
    avif = encoded(stored, "AVIF", quality=100, subsampling="4:4:4", exif=exif)
    assert abs(decode(avif).astype(int) - expected).mean() < 4


def test_both_jpeg_decoders_turn_alike():
    """Stray bytes between segments send a JPEG to the careful decoder."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(picture(), "JPEG", exif=exif)
    at = data.index(b"\xff\xdb")
    assert (decode(data[:at] + b"\x00\x17" + data[at:]) == decode(data)).all()


XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description {0}/></rdf:RDF></x:xmpmeta>'


@pytest.mark.parametrize(
    "written", ['tiff:Orientation="6"', "tiff:Orientation = '6'", "><tiff:Orientation>6</tiff:Orientation><a"]
)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_orientation_in_xmp(format, written):
    stored, block = picture(), XMP.format(written).encode()
    if format == "PNG":
        info = PngImagePlugin.PngInfo()
        info.add_itxt("XML:com.adobe.xmp", block.decode())
        data = encoded(stored, "PNG", pnginfo=info)
    else:
        data = encoded(stored, format, xmp=block, **({"lossless": True} if format == "WEBP" else {}))
    plain = encoded(stored, format, **({"lossless": True} if format == "WEBP" else {}))
    assert (decode(data) == np.rot90(decode(plain), -1)).all()
    exif = Image.Exif()
    exif[0x0112] = 1
    if format == "JPEG":  # what EXIF states comes first
        assert (decode(encoded(stored, format, xmp=block, exif=exif)) == decode(plain)).all()


@pytest.mark.parametrize("name", ["exif", "APP1", "xmp"])
@pytest.mark.parametrize("compressed", [False, True])
def test_orientation_as_imagemagick_writes_it_into_a_png(name, compressed):
    block = XMP.format('tiff:Orientation="6"').encode() if name == "xmp" else b"Exif\0\0" + exif_block(6)
    digits = block.hex()
    lines = "\n".join(digits[at : at + 72] for at in range(0, len(digits), 72))
    info = PngImagePlugin.PngInfo()
    info.add_text(f"Raw profile type {name}", f"\n{name}\n{len(block):8d}\n{lines}\n", zip=compressed)
    stored = picture()
    assert (decode(encoded(stored, "PNG", pnginfo=info)) == np.rot90(decode(encoded(stored, "PNG")), -1)).all()
    info = PngImagePlugin.PngInfo()
    info.add_text(f"Raw profile type {name}", "\nexif\n 12\nno digits\n")
    assert (decode(encoded(stored, "PNG", pnginfo=info)) == decode(encoded(stored, "PNG"))).all()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_orientation_tag_as_it_is_written_in_the_wild(order, kind):
    assert orientation(exif_block(6, order, kind)) == 6
    assert orientation(b"Exif\0\0" + exif_block(8, order, kind)) == 8


def test_meaningless_orientations_are_upright():
    assert [orientation(exif_block(value)) for value in (0, 9, 65535)] == [1, 1, 1]
    assert orientation(b"") == orientation(b"Exif\0\0") == orientation(b"II*\0\xff\xff\xff\x7f") == 1


@given(st.binary(max_size=64))
def test_orientation_never_fails(tail):
    for start in (b"", b"II*\0", b"MM\0*", b"Exif\0\0II*\0\x08\0\0\0"):
        assert 1 <= orientation(start + tail) <= 8


# ---------------------------------------------------------------- refusals


def test_what_is_no_image():
    assert reason(b"") == "empty"
    assert reason(b"<!DOCTYPE html><html>404</html>") == "not-an-image"
    assert reason(b"\0" * 1000) == "not-an-image"
    assert reason(b"photo") == "not-an-image"


def test_known_but_unsupported_formats_are_named():
    for name, data in {"PDF": b"%PDF-1.7", "SVG": b'<?xml version="1.0"?>\n<svg/>'}.items():
        with pytest.raises(DecodeError, match=name) as caught:
            decode(data)
        assert caught.value.reason == "unsupported"


@pytest.mark.parametrize("height, width", [(13000, 13000), (50000, 50000)])
def test_bombs_are_refused_by_their_header(height, width):
    """169 megapixels and 2.5 gigapixels: small files whose header claims that size."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    small = encoded(picture(), "JPEG")
    at = small.index(b"\xff\xc0") + 5
    bombs = {
        "png": b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"\0" * 10**6)),
        "jpeg": small[:at] + struct.pack(">HH", height, width) + small[at + 4 :],
        "gif": b"GIF89a" + struct.pack("<HH", width, height) + encoded(picture(), "GIF")[10:],
        "bmp": encoded(picture(), "BMP")[:18] + struct.pack("<ii", width, height) + b"\1\0\x18\0" + b"\0" * 99,
        "tiff": tiff(b"\0" * 99, width, height, 8),
        "pnm": b"P6 %d %d 255\n" % (width, height) + b"\0" * 99,
        "tile": tiff(b"\0" * 99, 16, 16, 8, t322=width, t323=height),
    }
    if max(height, width) <= 16383:
        lossless = 0x2F | ((width - 1) << 8) | ((height - 1) << 22)
        stream = lossless.to_bytes(5, "little") + b"\0" * 30
        webp = b"WEBPVP8L" + struct.pack("<I", len(stream)) + stream
        bombs["webp"] = b"RIFF" + struct.pack("<I", len(webp)) + webp
    with peak_growth() as growth:
        for name, data in bombs.items():
            began = time.process_time()
            found = reason(data)
            assert found == "too-many-pixels" or (name == "webp" and found in ("corrupt", "truncated")), name
            assert time.process_time() - began < 1, name
        assert growth() < 64 * 1024


@pytest.mark.full_size
def test_compressed_text_bomb_takes_no_memory():
    text = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 2**28, 9))
    data = png(8, 0, [bytes([7, 8])], text)
    with peak_growth() as growth:
        assert reason(data) == "corrupt"
        assert growth() < 64 * 1024


def test_the_cap_is_exact_and_can_be_chosen():
    for data in (encoded(picture(20, 27), "PNG"), encoded(picture(20, 27), "JPEG")):
        assert decode(data, max_pixels=540).shape == (20, 27, 3)
        assert reason(data, max_pixels=539) == "too-many-pixels"
    assert 108e6 < MAX_PIXELS < 169e6


def test_a_jpeg_of_endless_scans_is_refused():
    data = encoded(picture(64, 64), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    assert decode(data, max_pixels=64 * 64).shape == (64, 64, 3)
    assert reason(data[:-2] + last * 50 + data[-2:], max_pixels=64 * 64) == "too-many-pixels"


def heic(pixels):
    stream = BytesIO()
    pillow_heif.from_pillow(Image.fromarray(pixels)).save(stream)
    return stream.getvalue()


SMALL_FILES = {
    "png": encoded(picture(), "PNG"),
    "rgba png": encoded(Image.fromarray(picture()).convert("RGBA"), "PNG"),
    "deep png": png(16, 0, [struct.pack(">7H", *SIXTEEN)]),
    "gif": encoded(picture(), "GIF"),
    "webp": encoded(picture(), "WEBP"),
    "lossless webp": encoded(picture(), "WEBP", lossless=True),
    "bmp": encoded(picture(), "BMP"),
    "ppm": encoded(picture(), "PPM"),
    "tiff": encoded(picture(), "TIFF"),
    "lzw tiff": encoded(picture(), "TIFF", compression="tiff_lzw"),
    "jpeg tiff": encoded(picture(), "TIFF", compression="jpeg"),
    "jpeg": encoded(picture(), "JPEG"),
    "progressive": encoded(picture(), "JPEG", progressive=True),
    "cmyk": encoded(Image.fromarray(picture()).convert("CMYK"), "JPEG"),
    "jpeg 2000": encoded(picture(), "JPEG2000"),
    "avif": encoded(picture(), "AVIF"),
    "heic": heic(picture()),
    "lossless jpeg xl": imagecodecs.jpegxl_encode(picture(), lossless=True),
    "jpeg xl in boxes": imagecodecs.jpegxl_encode(picture(), distance=1.0, usecontainer=True),
    "jpeg xl of a jpeg": imagecodecs.jpegxl_encode_jpeg(encoded(picture(), "JPEG")),
}


@pytest.mark.parametrize("name", SMALL_FILES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_file_cut_anywhere_is_refused_or_whole(name):
    """Cutting off trailing metadata loses nothing; anything else must not come out as a picture."""
    data = SMALL_FILES[name]
    whole = decode(data)
    accepted = []
    for length in range(len(data)):
        try:
            assert (decode(data[:length]) == whole).all(), length
            accepted.append(length)
        except DecodeError:
            pass
    assert not accepted or min(accepted) >= len(data) - 21


@pytest.mark.parametrize("name", ["jpeg", "progressive", "cmyk"])
def test_a_cut_jpeg_with_an_end_put_on_is_refused(name):
    """libjpeg fills the missing part with gray, and many programs take that for a picture."""
    data = SMALL_FILES[name]
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    assert reason(data[:middle] + b"\xff\xd9") == "truncated"


def test_bytes_after_the_end_do_not_matter():
    for name in ("jpeg", "png", "gif", "webp", "bmp"):
        assert (decode(SMALL_FILES[name] + b"trailing" * 9) == decode(SMALL_FILES[name])).all(), name


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(
    name=st.sampled_from(sorted(SMALL_FILES)),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6),
    keep=st.floats(0.2, 1),
    inserted=st.binary(max_size=3),
)
def test_damaged_files_give_a_picture_or_a_decode_error(name, changes, keep, inserted):
    data = bytearray(SMALL_FILES[name])
    for place, value in changes:
        data[int(place * len(data))] = value
    middle = int(changes[0][0] * len(data))
    data[middle:middle] = inserted
    try:
        image = decode(bytes(data[: math.ceil(keep * len(data))]), max_pixels=100_000)
    except DecodeError as error:
        assert error.reason in {"not-an-image", "truncated", "corrupt", "too-many-pixels", "unsupported"}
    else:
        assert image.dtype == np.uint8 and image.shape[2] == 3 and image.flags.c_contiguous
        assert 0 < image.shape[0] * image.shape[1] <= 100_000


# ---------------------------------------------------------------- scaled decoding, and the process around


@pytest.mark.parametrize(
    "short_side, expected",
    [(30, (38, 50)), (75, (75, 100)), (76, (113, 150)), (114, (150, 200)), (151, (300, 400)), (999, (300, 400))],
)
def test_short_side_shrinks_a_jpeg_while_it_covers(short_side, expected):
    smooth = Image.fromarray(picture(15, 20)).resize((400, 300), Image.Resampling.BICUBIC)
    data = encoded(smooth, "JPEG", quality=95)
    image = decode(data, short_side=short_side)
    assert image.shape[:2] == expected
    small = Image.fromarray(decode(data)).resize(expected[::-1], Image.Resampling.BILINEAR)
    assert abs(image.astype(int) - np.asarray(small)).mean() < 3


def test_short_side_counts_after_turning_and_leaves_other_formats_alone():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(picture(100, 800), "JPEG", exif=exif), short_side=50).shape == (400, 50, 3)
    assert decode(encoded(picture(100, 200), "PNG"), short_side=50).shape == (100, 200, 3)


def test_settings_of_the_process_are_neither_needed_nor_changed(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("png", "jpeg", "bmp", "ppm"):
            assert decode(SMALL_FILES[name]).shape == (20, 27, 3)
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)) == before
