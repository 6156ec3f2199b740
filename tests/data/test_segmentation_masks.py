"""Images with masks: what is read, what is held out, and what is refused, with nothing written beside the data."""

from __future__ import annotations

import logging
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.data.images.decode import class_values, decode, upright_size
from vitrail.data.labels.masks import Masks
from vitrail.data.roles import Splits
from vitrail.data.settings import IGNORED, Data
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError, DecodeError


def write(root: Path, name: str, mask: Any, size: tuple[int, int] = (6, 8)) -> None:
    """An image of `size` (height, width), and its mask: a value for all pixels, an array, or an image of Pillow's."""
    image, target = root / "images" / f"{name}.jpg", root / "masks" / f"{name}.png"
    image.parent.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size[::-1], (90, 120, 30)).save(image)
    if isinstance(mask, int):
        mask = np.full(size, mask, np.uint8)
    (Image.fromarray(mask) if isinstance(mask, np.ndarray) else mask).save(target)


def opened(root: Path, seed: int = 0, **settings: Any) -> Splits:
    return open_data(Data(str(root), **settings), seed=seed)


def masks(source: Any) -> Masks:
    assert isinstance(source.labels, Masks)
    return source.labels


def two_classes() -> np.ndarray:
    mask = np.zeros((6, 8), np.uint8)
    mask[2:, 3:], mask[0] = 7, 255
    return mask


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_folders_of_ade20k(tmp_path: Path) -> None:
    """As its challenge's archive is unpacked: annotations/, training and validation, and lists beside them."""
    for name, mask in (("training/ADE_train_00000001", 1), ("training/ADE_train_00000002", 150)):
        write(tmp_path, name, mask)
    write(tmp_path, "validation/ADE_val_00000001", two_classes())
    (tmp_path / "masks").rename(tmp_path / "annotations")
    (tmp_path / "objectInfo150.txt").write_text(
        "Idx\tRatio\tTrain\tVal\tStuff\tName\n1\t0.1576\t11664\t1172\t1\twall\n"
    )
    (tmp_path / "sceneCategories.txt").write_text("ADE_train_00000001 airport_terminal\n")
    before = contents(tmp_path)
    found = opened(tmp_path, ignore=(0, 255))
    assert (found.class_names, found.held_out) == (["1", "7", "150"], {"validation": "validation"})
    assert [found.train.id(row) for row in range(2)] == ["ADE_train_00000001.jpg", "ADE_train_00000002.jpg"]
    assert masks(found.validation).path(0) == tmp_path / "annotations" / "validation" / "ADE_val_00000001.png"
    counted = masks(found.validation).mask(0)
    assert np.unique(counted).tolist() == [1, IGNORED] and (counted == 1).sum() == 20  # 4 rows of 5 pixels
    assert contents(tmp_path) == before
    (tmp_path / "annotations" / "training" / "ADE_train_00000002.png").unlink()
    with pytest.raises(DataError, match=r"1 of 2 images in .*ADE_train_00000002.jpg.*annotations/training"):
        opened(tmp_path)


def test_classes_are_the_values_and_others_are_ignored(tmp_path: Path) -> None:
    for name in ("train/a", "train/deep/b", "val/c"):
        write(tmp_path, name, two_classes())
    before = contents(tmp_path)
    found = opened(tmp_path)
    assert (found.class_names, found.held_out) == (["0", "7"], {"validation": "val"})
    assert [found.train.id(row) for row in range(2)] == ["a.jpg", "deep/b.jpg"] and len(masks(found.validation)) == 1
    expected = np.full((6, 8), 0)
    expected[2:, 3:], expected[0] = 1, IGNORED
    assert (masks(found.train).mask(1) == expected).all()
    assert opened(tmp_path, ignore=(7,)).class_names == ["0", "255"]
    (tmp_path / "classes.txt").write_text("wall\n\u00e4 b\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a.png holds the value 7, and classes.txt names the classes 0 to 1"):
        opened(tmp_path)
    named = opened(tmp_path, ignore=(7, 255))
    assert named.class_names == ["wall", "\u00e4 b"]
    (tmp_path / "classes.txt").unlink()
    assert contents(tmp_path) == before


def test_what_is_left_out_of_images_with_masks_is_said(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "val/c"):
        write(tmp_path, name, two_classes())
    Image.new("RGB", (8, 6)).save(tmp_path / "images" / "beside.jpg")
    (tmp_path / "images" / "train" / "gone.jpg").symlink_to(tmp_path / "nothing")
    (tmp_path / "images" / "others").mkdir()
    (tmp_path / "images" / "train" / "notes.txt").touch()
    findings = opened(tmp_path, exclude=("b.jpg",)).report
    assert findings.examples["file beside the split folders"] == ["beside.jpg"]
    assert findings.examples["not an image (.txt)"] == ["notes.txt"]
    assert findings.examples["left out by data.exclude 'b.jpg'"] == ["b.jpg"]
    assert findings.dropped == [("gone.jpg", "dangling link")]
    assert findings.warnings == ["folder 'others' is not a split: left out"]


def test_names_as_windows_writes_them(tmp_path: Path) -> None:
    """Capital suffixes, and a mark at the beginning of a text."""
    for name in ("a", "b"):
        write(tmp_path, name, two_classes())
    for mask in (tmp_path / "masks").iterdir():
        mask.rename(mask.with_suffix(".PNG"))
    (tmp_path / "classes.txt").write_text("wall\nroof\n", encoding="utf-8-sig")
    found = opened(tmp_path, ignore=(7, 255), holdout=0)
    assert found.class_names == ["wall", "roof"]
    assert [masks(found.train).path(row).name for row in range(2)] == ["a.PNG", "b.PNG"]


def test_masks_of_another_format_are_not_taken_for_a_class(tmp_path: Path) -> None:
    """`images/` and `masks/` look like two class folders."""
    for name in ("a", "b"):
        write(tmp_path, name, two_classes())
        (tmp_path / "masks" / f"{name}.png").rename(tmp_path / "masks" / f"{name}.jpg")
    with pytest.raises(DataError, match=r"no image in .*: 'a.jpg', 'b.jpg'.* a.jpg beside it is none: JPEG"):
        opened(tmp_path)
    (tmp_path / "masks" / "a.jpg").unlink()
    (tmp_path / "masks" / "b.jpg").unlink()
    (tmp_path / "masks").rmdir()
    with pytest.raises(DataError, match=r"If each image has a mask, the folder .*masks is missing"):
        opened(tmp_path)


def test_a_palette_and_few_bits_keep_their_values() -> None:
    values = np.arange(12, dtype=np.uint8).reshape(3, 4)
    palette = Image.fromarray(values, "P")
    palette.putpalette([200, 3, 7] * 256)
    rows = b"".join(b"\0" + bytes(int(a) << 4 | int(b) for a, b in row.reshape(-1, 2)) for row in values)
    header = struct.pack(">IIBBBBB", 4, 3, 4, 0, 0, 0, 0)  # 4 bits of grey, which Pillow stretches to 255

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    grey = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert (class_values(png(palette)) == values).all() and (class_values(grey) == values).all()
    assert (class_values(png(Image.fromarray(values > 5))) == (values > 5)).all()


def png(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.fromarray(np.full((4, 4), 300, np.uint16)), "16 bits a pixel: a mask must be a PNG with a palette or"),
        (Image.new("RGB", (4, 4)), r"colours \(RGB\)"),
        (Image.new("LA", (4, 4)), r"colours \(LA\)"),
    ],
)
def test_masks_that_are_not_one_class_for_a_pixel(image: Image.Image, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        class_values(png(image))
    with pytest.raises(DecodeError, match="JPEG file: a mask must be a PNG"):
        class_values(png(Image.new("L", (4, 4)), "JPEG"))
    with pytest.raises(DecodeError, match="truncated"):
        class_values(png(Image.new("L", (400, 400)))[:-90])


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
@pytest.mark.parametrize("kind", ["JPEG", "TIFF", "PNG"])
def test_a_mask_belongs_to_the_upright_image(turn: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    stream = BytesIO()
    Image.new("RGB", (8, 6)).save(stream, kind, exif=exif)
    assert upright_size(stream.getvalue()) == decode(stream.getvalue()).shape[:2] == ((6, 8) if turn < 5 else (8, 6))


def test_without_splits_a_tenth_is_held_out_by_the_seed(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path, f"{number:02d}", number % 2)
    held = []
    for seed in (0, 0, 1):
        found = opened(tmp_path, seed)
        train, validation = (
            {masks(part).path(row) for row in range(len(masks(part)))} for part in (found.train, found.validation)
        )
        assert len(train) == 18 and len(validation) == 2 and not train & validation
        held.append(validation)
    assert held[0] == held[1] != held[2]
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    again = masks(opened(moved).validation)
    assert {again.path(row).name for row in range(len(again))} == {path.name for path in held[0]}


def test_masks_without_a_pixel_that_counts_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(6):
        write(tmp_path, f"train/{number}", number % 2)
    write(tmp_path, "train/void", 255)
    write(tmp_path, "val/1", 1)
    (tmp_path / "masks/train/other.png").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "vitrail"):
        found = opened(tmp_path)
    assert len(found.train) == 6
    assert "1 images are left out, because every pixel of their masks is ignored: 'void.png'" in caplog.text
    assert "1 masks in" in caplog.text and "'other.png'" in caplog.text
    write(tmp_path, "val/1", 255)
    with pytest.raises(DataError, match=r"every pixel of all 1 masks is ignored: '1.png'. Ignored: "):
        opened(tmp_path)


def no_mask(root: Path) -> None:
    (root / "masks/train/1.png").unlink()


def other_names(root: Path) -> None:
    for path in (root / "masks/train").iterdir():
        path.rename(path.with_name(f"mask_{path.name}"))


def other_size(root: Path) -> None:
    Image.new("L", (6, 8)).save(root / "masks/train/1.png")


def sixteen_bits(root: Path) -> None:
    Image.fromarray(np.full((6, 8), 3, np.uint16)).save(root / "masks/train/1.png")


def broken(root: Path) -> None:
    (root / "masks/train/1.png").write_bytes(b"no picture")


def one_class(root: Path) -> None:
    for path in (root / "masks").rglob("*.png"):
        Image.new("L", (8, 6)).save(path)


def names_twice(root: Path) -> None:
    (root / "classes.txt").write_text("wall\nsky\nwall\n")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_mask, r"1 of 2 images in .*images/train have no mask: '1.jpg'. Expected is .*masks/train/1.png"),
        (other_names, r"no image in .*images/train has a mask: '0.jpg', '1.jpg'"),
        (other_size, r"masks/train/1.png has 6 x 8 pixels, and its image .*1.jpg has 8 x 6"),
        (sixteen_bits, r"masks/train/1.png cannot be used: 16 bits a pixel"),
        (broken, r"masks/train/1.png cannot be used: not an image"),
        (one_class, "hold 1 class, and at least 2 are needed"),
        (names_twice, r"classes.txt, line 3: 'wall' is empty or a name that is already there"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, spoil: Any, message: str) -> None:
    for name in ("train/0", "train/1", "val/1"):
        write(tmp_path, name, two_classes())
    spoil(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=message):
        opened(tmp_path)
    assert contents(tmp_path) == before
