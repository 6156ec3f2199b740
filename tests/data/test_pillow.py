"""An image of Pillow's becomes exactly what `predict` feeds to the network for the same file."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import server
from PIL import Image, ImageOps
from real_images import SHARED
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import vitrail
from vitrail.data.images.decode import decode, pillow_pixels
from vitrail.data.settings import Preprocess
from vitrail.errors import DecodeError, UsageError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.model.vit import ViT
from vitrail.tasks.predict import predict_files
from vitrail.tasks.prediction import Unreadable
from vitrail.weights.card import Card
from vitrail.weights.load import read_card
from vitrail.weights.store import save_model

CONFIG = ViTConfig(
    width=16, depth=1, heads=2, mlp_dim=16, image_size=(48, 64), patch=16, classes=2, mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.3, 0.25),
)  # fmt: skip
FILES = sorted(
    file
    for folder in ("awkward-images", "imagenet-samples", "imagenet-val20", "flowers12/test")
    for file in (SHARED / folder).rglob("*")
    if file.is_file() and file.suffix != ".json"
)[:240]


@pytest.fixture(scope="module", params=["small", "squash"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ViT:
    preprocess = Preprocess(
        (48, 64), resize=request.param, interpolation="bicubic" if request.param == "small" else "bilinear"
    )
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, ViT(CONFIG), Card(CONFIG, preprocess=preprocess))
    loaded = vitrail.load(folder)
    assert isinstance(loaded, ViT) and read_card(folder).transform().preprocess == preprocess
    return loaded


def fed(model: ViT, files: list[Path]) -> Iterator[Tensor | None]:
    """The normalised image that `predict` gives to the network for each file; None for one that it cannot read."""
    seen: list[Tensor] = []

    def spy(batch: Tensor) -> Tensor:
        seen.extend(model.normalise(batch))
        return torch.zeros(len(batch), 2)

    for row in predict_files(model, files, batch_size=1, workers=1, predict=spy):
        yield None if isinstance(row, Unreadable) else seen.pop()


@pytest.mark.full_size
@pytest.mark.skipif(not FILES, reason="VITRAIL_TEST_DATA has no images")
def test_every_file_gives_what_predict_feeds(model: ViT) -> None:
    transform, compared = model.card.transform(), 0
    assert len(FILES) > 150
    for file, expected in zip(FILES, fed(model, FILES), strict=True):
        if expected is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file) as image:
                before = dict(image.info)
                found = transform(image)
                assert image.info.keys() >= before.keys()
        assert found.dtype == torch.float32 and found.shape == (3, 48, 64) and found.is_contiguous()
        assert torch.equal(found, expected), file
        compared += 1
    assert compared > 150


NOISE = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_file_is_a_decode_error(kind: str) -> None:
    file = BytesIO()
    Image.fromarray(NOISE).save(file, kind)
    data = file.getvalue()
    with Image.open(BytesIO(data[: len(data) // 2])) as image, pytest.raises(DecodeError) as caught:
        Card(CONFIG).transform()(image)
    assert caught.value.reason == "truncated"


@pytest.mark.parametrize("turn", range(1, 9))
def test_orientations_are_applied_once(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    for kind in ("PNG", "TIFF"):
        file = BytesIO()
        Image.fromarray(NOISE).save(file, kind, exif=exif)
        with Image.open(file) as image:
            expected = np.asarray(ImageOps.exif_transpose(image))
            assert (pillow_pixels(image) == expected).all()
            for changed in (image.convert("RGB"), ImageOps.exif_transpose(image), image.copy()):
                assert (pillow_pixels(changed) == expected).all()


def test_a_transparent_colour_is_white_at_any_depth() -> None:
    gray = (NOISE[..., 0] >> 4).astype(np.uint8)
    for bits in (2, 4, 8):
        levels = gray & ((1 << bits) - 1)
        file = BytesIO()
        image = Image.fromarray(levels * (255 // ((1 << bits) - 1)))
        image.save(file, "PNG", transparency=1, bits=bits)
        assert (pillow_pixels(Image.open(file)) == decode(file.getvalue())).all()
        loaded = Image.open(file)
        loaded.load()
        pillow_pixels(loaded)
        assert loaded.info["transparency"] == 1  # the caller's image is not changed


def test_images_that_were_never_a_file() -> None:
    rgb = Image.fromarray(NOISE)
    assert (pillow_pixels(rgb) == NOISE).all()
    for mode in ("L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr", "HSV", "I;16", "F"):
        found = pillow_pixels(rgb.convert("L").convert(mode) if mode in ("I;16", "F") else rgb.convert(mode))
        assert found.shape == NOISE.shape and found.dtype == np.uint8
    assert (pillow_pixels(rgb.convert("RGBA")) == NOISE).all()


def test_the_result_is_torchvisions_for_ordinary_images() -> None:
    """Squashing and the normalisation; resizing differs by rounding to whole values in between."""
    preprocess = Preprocess((48, 64), resize="squash", interpolation="bilinear")
    theirs = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize((48, 64), antialias=True),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(CONFIG.mean, CONFIG.std),
        ]
    )
    image = Image.fromarray(NOISE)
    difference = (Card(CONFIG, preprocess=preprocess).transform()(image) - theirs(image)).abs().max()
    assert difference < 2 / 255 / min(CONFIG.std)


@pytest.mark.processes
def test_workers_of_a_data_loader(tmp_path: Path, model: ViT) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.fromarray(NOISE ^ number).save(tmp_path / name / f"{number}.png")
    transform = model.card.transform()
    again = pickle.loads(pickle.dumps(transform))
    images = ImageFolder(str(tmp_path), transform=transform)
    expected = torch.stack([again(image) for image, _ in ImageFolder(str(tmp_path))])
    for context, workers in (("fork", 2), (server(), 1)):
        loader = DataLoader(images, batch_size=4, num_workers=workers, multiprocessing_context=context)
        found = torch.cat([batch for batch, _ in loader])
        assert torch.equal(found, expected)
    with torch.inference_mode():
        uint8 = torch.stack([model.normalise.undo(image) for image in expected]).round().to(torch.uint8)
        assert torch.allclose(model(expected), model(uint8), atol=1e-5)


@pytest.mark.parametrize("wrong", ["cat.jpg", NOISE, torch.zeros(3, 8, 8), None])
def test_only_images_of_pillow_are_taken(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"expected an image of Pillow's, not .*: open a file with PIL.Image.open"):
        Card(CONFIG).transform()(wrong)


def test_a_model_of_other_channels_has_no_transform() -> None:
    with pytest.raises(UsageError, match="becomes RGB, 3 channels, and this model has 1"):
        Card(ResNetConfig(units=(1,), channels=1)).transform()
