"""Crops that are resized, and JPEGs that are decoded, by the device: the same images as by the host."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from device_work import DeviceWork, Elsewhere
from PIL import Image

from vitrail.data.images import device_crop
from vitrail.data.images.decode import decode
from vitrail.data.images.device_crop import BYTES, COLUMNS, DeviceCrop
from vitrail.data.images.geometry import InceptionCrop, Interpolation
from vitrail.data.loading.order import stream
from vitrail.errors import DataError, DecodeError
from vitrail.torch_private import FakeTensorMode

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def files(shared_data: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((shared_data / "imagenet-val20").glob("*.JPEG"))[:8]]


def saved(image: Image.Image, format: str = "JPEG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def by_host(crop: InceptionCrop, stored: list[bytes]) -> np.ndarray:
    return np.stack([crop(decode(data), stream(0, 0, number)) for number, data in enumerate(stored)])


def placed(how: DeviceCrop, stored: list[bytes]) -> tuple[torch.Tensor, np.ndarray]:
    memory = np.full((len(stored), how.room), 99, np.uint8)
    rows = [how.place(data, memory[number], stream(0, 0, number)) for number, data in enumerate(stored)]
    return torch.from_numpy(memory), np.stack(rows).astype(np.int64)


def by_device(how: DeviceCrop, stored: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    memory, rows = placed(how, stored)
    images = how.images(memory, rows, lambda place: f"number {place}", CPU)
    assert images.dtype == torch.uint8 and images.is_contiguous(memory_format=torch.channels_last)
    return images.permute(0, 2, 3, 1).numpy(), rows


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(224, 224), (96, 64)])
@pytest.mark.parametrize("decodes", [False, True])
def test_images_are_those_of_the_host_to_the_bit(
    decodes: bool, size: tuple[int, int], interpolation: Interpolation, files: list[bytes]
) -> None:
    """On a CPU torchcodec decodes with the library of `decode`, and torch resizes with the kernel of the host."""
    crop = InceptionCrop(size, interpolation=interpolation)
    found, rows = by_device(DeviceCrop(crop, decodes), files)
    assert np.array_equal(found, by_host(crop, files))
    sizes = [len(data) * (decodes and len(data) <= DeviceCrop(crop, decodes).room) for data in files]
    assert rows[:, BYTES].tolist() == sizes and any(sizes) == decodes


@pytest.mark.parametrize(("interpolation", "most"), [("bilinear", 1), ("bicubic", 8)])
def test_the_kernels_of_a_gpu_round_once(
    interpolation: Interpolation, most: int, files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute in float32, while the host rounds, and cuts off what overshoots, between the two directions."""
    crop = InceptionCrop((96, 96), interpolation=interpolation)
    how = DeviceCrop(crop)
    monkeypatch.setattr(device_crop, "to_device", lambda memory, device: memory.as_subclass(Elsewhere))
    memory, rows = placed(how, files)
    found = how.images(memory, rows, str, torch.device("cuda")).permute(0, 2, 3, 1).as_subclass(torch.Tensor)
    difference = found.numpy().astype(int) - by_host(crop, files)
    assert abs(difference).max() <= most and abs(difference.mean()) < 0.02 and difference.any()
    assert (abs(difference) > 1).mean() < 0.001


def test_what_a_gpu_may_not_decode_stays_with_the_host(files: list[bytes]) -> None:
    photograph = Image.open(io.BytesIO(files[0])).convert("RGB").resize((150, 120))
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = [
        saved(photograph, "PNG"),
        saved(photograph, exif=exif),
        saved(photograph.convert("CMYK")),
        saved(photograph, keep_rgb=True),
        saved(photograph) + b"\0" * 200,
        saved(photograph.resize((1500, 1200)), quality=100),  # more bytes than there is room
        saved(photograph),
        saved(photograph.convert("L")),
        saved(photograph, progressive=True),
    ]
    crop = InceptionCrop((64, 64))
    found, rows = by_device(DeviceCrop(crop, decodes=True), stored)
    assert rows[:, BYTES].astype(bool).tolist() == [False] * 6 + [True] * 3
    assert np.array_equal(found, by_host(crop, stored))


def test_damaged_files_are_found_by_the_host(files: list[bytes]) -> None:
    how = DeviceCrop(InceptionCrop((224, 224)), decodes=True)
    memory = np.zeros(how.room, np.uint8)
    for bad, reason in ((files[0][:-100], "truncated"), (b"", "empty"), (b"<html>", "not-an-image")):
        with pytest.raises(DecodeError) as error:
            how.place(bad, memory, stream(0, 0, 0))
        assert error.value.reason == reason


def test_what_a_gpu_refuses_the_host_decodes_and_names(files: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("nvJPEG: the bitstream is not supported")

    crop = InceptionCrop((96, 96))
    monkeypatch.setattr("torchcodec.decoders.decode_jpeg", refused)
    found, rows = by_device(DeviceCrop(crop, decodes=True), files)
    assert rows[:, BYTES].any() and np.array_equal(found, by_host(crop, files))
    cut = files[1][: len(files[1]) // 2] + b"\xff\xd9"
    with pytest.raises(DataError, match=r"image number 1 cannot be decoded: .* cut off"):
        by_device(DeviceCrop(crop, decodes=True), [files[1], cut])


def test_nothing_waits_for_a_gpu() -> None:
    how, rng = DeviceCrop(InceptionCrop((32, 32))), np.random.default_rng(0)
    image = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
    rows = np.stack([how.place(image, np.empty(how.room, np.uint8), rng) for _ in range(16)]).astype(np.int64)
    assert rows.shape == (16, len(COLUMNS))
    with FakeTensorMode(), DeviceWork("cuda") as work:
        images = how.images(torch.zeros(16, how.room, dtype=torch.uint8), rows, str, torch.device("cuda"))
    assert images.shape == (16, 3, 32, 32) and images.device.type == "cuda"
    assert work.found() == {} and sum(work.launches.values()) <= 16 * 3 + 6
