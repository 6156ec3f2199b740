"""Bands as the network gets them: their statistics, their augmentation, and the decision to read them."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from vitrail.data.check import header_facts
from vitrail.data.images.augment import MOVES, ErasingBands, MovingAugment
from vitrail.data.images.bands import choose_bands, layouts, measure_bands
from vitrail.data.images.decode import FORMATS, decode
from vitrail.data.images.geometry import Flip
from vitrail.data.images.ops import colour_changes_left_out, eval_transform, train_transform, views
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Banded, pixels_of
from vitrail.data.loading.loader import Loader
from vitrail.data.settings import Augment, Bands, Data, Preprocess
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.sources.indexed import GivenImages
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError, DecodeError, UsageError

RNG = np.random.default_rng(0)
IMAGES = (RNG.normal(30_000, 50, (6, 8, 10, 4)) + np.array([0, 100, 10_000, -20_000])).astype(np.uint16)
BANDS = Bands("16", (10.0, 20.0), (2.0, 4.0), (0.0, 0.0), (100.0, 24.0))


def source(images: np.ndarray) -> ArraySource:
    return ArraySource("x", images, np.arange(len(images)) % 2, ["a", "b"])


def npy(folder: Path, images: np.ndarray) -> GivenImages:
    for number, image in enumerate(images):
        np.save(folder / f"{number}.npy", image)
    return GivenImages(sorted(folder.glob("*.npy")))


def chosen(
    train: Any, weights: Bands | None = None, given: Bands | None = None, **data: Any
) -> tuple[Any, dict[str, str]]:
    return choose_bands(
        Data(**data), given, weights, layouts(train, data.get("channels")), partial(measure_bands, train)
    )


# statistics


def test_statistics_are_numpys_over_all_pixels() -> None:
    found, of = measure_bands(source(IMAGES), 4, "16")
    pixels = IMAGES.reshape(-1, 4).astype(np.float64)
    assert found.mean == pytest.approx(pixels.mean(axis=0), rel=1e-12)
    assert found.std == pytest.approx(pixels.std(axis=0), rel=1e-9)
    assert found.low == tuple(pixels.min(axis=0)) and found.high == tuple(pixels.max(axis=0))
    assert of == "mean and std of each band: those of 6 training images"


def test_images_that_cannot_be_read_do_not_count_and_a_constant_band_is_named() -> None:
    images = IMAGES.astype(np.float32)
    images[1, 2, 3, 0] = np.nan
    images[..., 2] = 7
    found, of = measure_bands(source(images), 4, "32f")
    assert found.mean[0] == pytest.approx(np.delete(images, 1, axis=0)[..., 0].astype(np.float64).mean())
    assert (found.mean[2], found.std[2]) == (7.0, 1.0)
    assert "5 training images; band 3 has one value only" in of
    with pytest.raises(DataError, match=r"none of 6 training images can be read.*NaN or infinity in band 1, 2, 3, 4"):
        measure_bands(source(np.full_like(images, np.nan)), 4, "32f")


# reading


def test_bands_are_normalised() -> None:
    stored = np.array([[[10, 20], [12, 12]]], np.uint16)
    found = Banded(BANDS).read(stored)
    assert found.dtype == np.float32 and found.tolist() == [[[0.0, 0.0], [1.0, -2.0]]]
    images = Banded(measure_bands(source(IMAGES), 4, "16")[0])
    pixels = np.stack([images.read(image) for image in IMAGES]).reshape(-1, 4)
    assert pixels.mean(axis=0) == pytest.approx(np.zeros(4), abs=1e-4) and pixels.std(axis=0) == pytest.approx(
        np.ones(4)
    )


def test_16_bits_reach_the_network() -> None:
    """Two images that differ in one of the lower 8 bits are two images."""
    banded = Banded(measure_bands(source(IMAGES), 4, "16")[0])
    assert not np.array_equal(banded.read(IMAGES[0]), banded.read(IMAGES[0] ^ 1))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_have_a_reason(value: float) -> None:
    image = np.zeros((3, 3, 2), np.float32)
    image[1, 1, 1] = value
    with pytest.raises(DecodeError, match=r"NaN or infinity in band 2") as error:
        Banded(replace(BANDS, bits="32f")).read(image)
    assert error.value.reason == "not-finite"


def test_display() -> None:
    """From the mean minus two deviations to the mean plus two, within the range of the training images."""
    stored = np.array([[[6, 12], [14, 24], [10, 18], [0, 0], [100, 100]]], np.uint16)
    image = Banded(BANDS).read(stored)
    first = Banded(BANDS).shown(image)
    assert first.shape == (1, 5, 3) and first[0, :, 0].tolist() == [0, 255, 128, 0, 255]  # 6 is black, 14 is white
    second = Banded(replace(BANDS, display=(2,))).shown(image)
    assert second[0, :, 0].tolist() == [0, 255, 128, 0, 255]  # 12 is black, and 24, the largest value, is white
    three = Banded(replace(BANDS, display=(2, 1, 2))).shown(image)
    assert np.array_equal(three, np.stack([second[..., 0], first[..., 0], second[..., 0]], axis=2))


# transforms


def test_bands_are_resized_as_torch_resizes_floats() -> None:
    bands = measure_bands(source(IMAGES), 4, "16")[0]
    transform = eval_transform(Preprocess((4, 4), "squash", bands=bands))
    image = transform.pixels.read(IMAGES[0])
    found = transform(image, RNG)
    tensor = torch.from_numpy(image).permute(2, 0, 1)[None]
    expected = F.interpolate(tensor, (4, 4), mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    assert found.dtype == np.float32 and np.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["flip", "crops"])
def test_views_of_bands(kind: Any) -> None:
    preprocess = Preprocess((4, 4), "small", 0.5, bands=measure_bands(source(IMAGES), 4, "16")[0])
    all_views = views(kind, preprocess, eval_transform(preprocess))
    assert all_views.pixels == pixels_of(preprocess.bands)
    assert all_views(all_views.pixels.read(IMAGES[0]), RNG).shape == ({"flip": 8, "crops": 40}[kind], 4, 4)


def test_augmentations_move_all_bands_alike_and_change_no_value_of_an_even_image() -> None:
    band = RNG.standard_normal((8, 8, 1), np.float32)
    bands = np.repeat(band, 3, axis=2)
    augment = Augment(randaugment=(5, 9), erasing=0.0)
    three = Bands("16", (0, 0, 0), (1, 1, 1), (0, 0, 0), (1, 1, 1))
    transform = train_transform(augment, Preprocess((8, 8), bands=three))
    for seed in range(20):
        found = transform(bands, np.random.default_rng(seed))
        assert found.dtype == np.float32 and found.shape == (8, 8, 3)
        assert np.array_equal(found, np.repeat(found[..., :1], 3, axis=2))
        zeros = transform(np.zeros_like(bands), np.random.default_rng(seed))
        assert not zeros.any()  # the gap that a move leaves is filled with the mean, 0


def test_a_shift_of_bands_is_that_of_the_values() -> None:
    image = RNG.standard_normal((20, 20, 2), np.float32)
    move = MovingAugment(1, 10, 0.0, 1.0)
    for seed in range(200):
        which = list(MOVES)[int(np.random.default_rng(seed).random(3)[0] * len(MOVES))]
        if which == "translate_x":
            found = move(image, np.random.default_rng(seed))
            left, right = np.zeros_like(image), np.zeros_like(image)
            left[:, :11], right[:, 9:] = image[:, 9:], image[:, :11]  # 0.45 of 20 pixels
            assert np.allclose(found, left, atol=1e-6) or np.allclose(found, right, atol=1e-6)
            return
    raise AssertionError("no shift was drawn")


def test_erased_rectangles_have_normal_noise() -> None:
    image = np.zeros((40, 40, 3), np.float32)
    found = ErasingBands(1.0, scale=(0.3, 0.33))(image, np.random.default_rng(1))
    noise = found[found != 0]
    assert not image.any() and 0.3 * image.size * 0.9 < noise.size < 0.36 * image.size
    assert abs(noise.mean()) < 0.1 and abs(noise.std() - 1) < 0.1


def test_colour_operations_are_left_out_and_named() -> None:
    augment = Augment(randaugment=(2, 9), three_augment=True, color_jitter=0.3, erasing=0.1)
    assert colour_changes_left_out(augment, Preprocess()) == ""
    named = colour_changes_left_out(augment, Preprocess(bands=BANDS))
    assert named == "the operations of RandAugment that change colours, 3-Augment, colour jitter"
    kinds = [type(op) for op in train_transform(augment, Preprocess(bands=BANDS)).ops]  # type: ignore[attr-defined]
    assert kinds[-3:] == [Flip, MovingAugment, ErasingBands]


def test_an_operation_of_ones_own_must_keep_the_bands() -> None:
    class Own(Augment):
        def operations(self, preprocess: Preprocess) -> Any:
            return [lambda image, rng: image[..., :1]]

    with pytest.raises(UsageError, match=r"an operation returns an image, float32 \[H, W, 2\]"):
        train_transform(Own(), Preprocess(bands=BANDS))(np.zeros((4, 4, 2), np.float32), RNG)


# loading


def test_the_loader_gives_normalised_bands_and_leaves_out_only_what_is_damaged(tmp_path: Path) -> None:
    files = npy(tmp_path, IMAGES)
    np.save(tmp_path / "1.npy", IMAGES[1][..., :3])
    np.save(tmp_path / "2.npy", IMAGES[2].astype(np.uint8))
    (tmp_path / "3.npy").write_bytes(b"\x93NUMPY")
    bands = measure_bands(files, 4, "16")[0]
    assert bands.mean == pytest.approx(IMAGES[[0, 4, 5]].reshape(-1, 4).mean(axis=0))
    loader = Loader(files, transform=eval_transform(Preprocess((8, 10), "squash", bands=bands)), image_size=(8, 10),
                    batch_size=6, shuffle=False, drop_last=False)  # fmt: skip
    (batch,) = loader.epoch(0)
    assert batch.images.dtype == torch.float32 and batch.images.shape == (3, 4, 8, 10)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    expected = (IMAGES[[0, 4, 5]] - np.array(bands.mean)) / np.array(bands.std)
    assert np.allclose(batch.images.permute(0, 2, 3, 1), expected, atol=1e-4)
    reasons = {Path(name).name: reason for name, reason in loader.bad}
    assert reasons == {"1.npy": "wrong-bands", "2.npy": "wrong-depth", "3.npy": "corrupt"}


def test_rgb_is_read_as_ever() -> None:
    transform = eval_transform(Preprocess((8, 8), "squash"))
    image = np.zeros((8, 8, 3), np.uint8)
    assert transform.pixels is EIGHT_BIT_RGB and transform.pixels.read(image) is image
    assert transform.pixels.shown(image) is image


# the decision


def test_arrays_keep_what_they_hold(tmp_path: Path) -> None:
    found, decisions = chosen(npy(tmp_path, IMAGES))
    assert (found.channels, found.bits, found.display) == (4, "16", (1, 2, 3))
    assert decisions["bands"] == "4 bands of 16 bits: as they are stored"
    assert chosen(source(IMAGES[..., 0]))[0].channels == 1
    many = np.random.default_rng(0).integers(0, 99, (4, 5, 6, 12)).astype(np.uint16)
    assert chosen(source(many), channels=12)[0].channels == 12  # more bands than rows: only the setting can tell
    assert chosen(source(np.zeros((4, 8, 8, 3), np.uint8)))[0] is None


def png(folder: Path, array: np.ndarray) -> GivenImages:
    for number in range(3):
        Image.fromarray(array).save(folder / f"{number}.png")
    return GivenImages(sorted(folder.glob("*.png")))


def test_pictures_are_rgb_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    files = png(tmp_path, IMAGES[0, ..., 0])
    found, decisions = chosen(files)
    assert found is None
    assert decisions["bits"].startswith("8 bits of RGB: 3 of 3 images have 1 band of 16 bits. data.channels")
    for settings in ({"bits": "16"}, {"channels": 1}, {"channels": 1, "bits": "16"}):
        found, decisions = chosen(files, **settings)
        assert (found.channels, found.bits, found.display) == (1, "16", (1,))
        assert decisions["bands"] == "1 band of 16 bits: as data.channels and data.bits say"


def encoded(format: str, pixels: np.ndarray) -> bytes:
    """A file of this format."""
    file = io.BytesIO()
    if format == "JPEG XL":
        return pytest.importorskip("imagecodecs").jpegxl_encode(pixels)
    if format == "HEIC":
        pytest.importorskip("pillow_heif").from_pillow(Image.fromarray(pixels)).save(file)
    else:
        Image.fromarray(pixels).save(file, {"PNM": "PPM", "JPEG 2000": "JPEG2000"}.get(format, format))
    return file.getvalue()


@pytest.mark.parametrize("format", [one.name for one in FORMATS if one.reader])
def test_pictures_of_every_readable_format_are_rgb(tmp_path: Path, format: str) -> None:
    data = encoded(format, np.zeros((20, 30, 3), np.uint8))
    assert decode(data).shape == (20, 30, 3)
    for number in range(3):
        (tmp_path / str(number)).write_bytes(data)
    files = GivenImages(sorted(tmp_path.iterdir()))
    assert {one.picture for one in layouts(files)} == {True}
    assert chosen(files) == (None, {})


def test_three_channels_of_8_bits_are_rgb(tmp_path: Path) -> None:
    files = png(tmp_path, np.zeros((4, 4, 3), np.uint8))
    assert chosen(files, channels=3, bits="8") == chosen(files) == (None, {})


def test_bands_of_weights(tmp_path: Path) -> None:
    files = npy(tmp_path, IMAGES[..., :2])
    found, decisions = chosen(files, BANDS)
    assert found == BANDS and decisions["bands"] == "2 bands of 16 bits: as the weights need"
    assert decisions["statistics"].endswith("those of the weights")
    assert chosen(files, BANDS, display=(2,))[0] == replace(BANDS, display=(2,))
    with pytest.raises(
        DataError, match=r"2 bands of 16 bits are needed .as the weights need.*6 with 4 bands of 16 bits"
    ):
        chosen(npy(tmp_path, IMAGES), BANDS)


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    files = npy(tmp_path, IMAGES)
    with pytest.raises(
        DataError, match=r"images with 5 bands of 16 bits are needed .as data.channels and data.bits say"
    ):
        chosen(files, channels=5)
    with pytest.raises(DataError, match=r"images with 4 bands of 8 bits are needed"):
        chosen(files, bits="8")
    with pytest.raises(UsageError, match=r"data.channels is 4, and preprocess.bands has 2"):
        chosen(files, given=BANDS, channels=4)
    with pytest.raises(UsageError, match=r"display is 5: name one band or three, from 1 to 4"):
        chosen(files, display=(5,))
    with pytest.raises(UsageError, match=r"std has 1 values for 2 bands"):
        chosen(files, given=Bands("8", (1.0, 2.0), (1.0,)))
    with pytest.raises(UsageError, match=r"needs mean, std, low and high"):
        chosen(files, given=Bands("16"))


# sources


def test_an_npz_of_any_bands(tmp_path: Path) -> None:
    for name, images in {"last": IMAGES, "first": np.moveaxis(IMAGES, 3, 1)}.items():
        np.savez(tmp_path / f"{name}.npz", images=images, labels=np.arange(6) % 2)
        train = open_data(Data(str(tmp_path / f"{name}.npz"), holdout=0)).train
        assert np.array_equal(train[3].image, IMAGES[3])


def test_arrays_beside_pictures_are_no_images(tmp_path: Path) -> None:
    for name in ("cat", "dog", "features"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "0.npy", IMAGES[0])
        if name != "features":
            Image.new("RGB", (4, 4)).save(tmp_path / name / "0.png")
    found = open_data(Data(str(tmp_path), holdout=0))
    assert [found.train.id(index) for index in range(len(found.train))] == ["cat/0.png", "dog/0.png"]
    assert "ignored 3 x not an image (.npy)" in "\n".join(found.report.lines())
    for name in ("cat", "dog"):
        (tmp_path / name / "0.png").unlink()
    assert open_data(Data(str(tmp_path), holdout=0)).class_names == ["cat", "dog", "features"]


def test_layouts_read_headers_only(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (30, 20)).save(file, "JPEG")
    data = file.getvalue()
    (tmp_path / "a.jpg").write_bytes(data[: data.index(b"\xff\xda") + 14])  # up to the first pixels
    (found,) = layouts(GivenImages([tmp_path / "a.jpg", tmp_path / "missing.jpg"]))
    assert found == (20, 30, 3, "8", True)


def test_layouts_are_those_of_upright_images(tmp_path: Path) -> None:
    for number, turn in enumerate((1, 6)):
        exif = Image.Exif()
        exif[0x0112] = turn
        Image.new("RGB", (30, 20)).save(tmp_path / f"{number}.jpg", exif=exif)
    files = [tmp_path / "0.jpg", tmp_path / "1.jpg"]
    wanted = [decode(file.read_bytes()).shape[:2] for file in files]
    assert [found[:2] for found in layouts(GivenImages(files))] == wanted == [(20, 30), (30, 20)]
    assert [header_facts(file.read_bytes())[0] for file in files] == wanted
