"""Random crops whose resize, and of JPEGs the decoding too, are left to the device of the network.

The host reads an image, draws the part of it that is shown, and puts into the memory of the batch either the pixels of
this part or, for the device to decode, the whole JPEG. The device makes images of one size of them.

A GPU decodes JPEGs by nvJPEG, through torchcodec, which decodes on a CPU with libjpeg-turbo as `decode` does. What its
decoder may not know stays with the host: other formats, CMYK, orientations, files without an end. nvJPEG rounds colours
in its own way, so that its images differ by some levels. Unlike `decode` it may show a damaged file, in part grey.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.images.decode import check_jpeg, decode, orientation
from vitrail.data.images.geometry import InceptionCrop, resize
from vitrail.data.images.jpeg import read_header
from vitrail.data.images.pixels import EIGHT_BIT_RGB
from vitrail.device import to_device
from vitrail.errors import DataError, DecodeError

COLUMNS = BYTES, TOP, LEFT, HEIGHT, WIDTH = range(5)
"""Numbers of an image: bytes of its JPEG, 0 if its pixels are there; its part."""
ROOM = 1.75
"""Bytes for an image, as a multiple of those of its result: enough for every part of an image packed at 256 pixels, for
results of 224, and for the JPEGs of most photographs. A part for which it is too small is resized by the host."""
JPEG_ROOM = 2**17
"""Least number of bytes where the device decodes: few JPEGs of ImageNet are larger."""
END = b"\xff\xd9"
"""Last marker of a JPEG; some cameras write a few bytes behind it."""
BEHIND = 64
MARKED = 2**16
"""Bytes in which the marker of an Adobe program is looked for."""


@dataclass(frozen=True)
class DeviceCrop:
    """An `InceptionCrop` of RGB images in two halves: `place` on the host, and `images` on the device."""

    crop: InceptionCrop
    decodes: bool = False
    """Whether the device decodes, too."""

    @property
    def room(self) -> int:
        """Bytes of memory for an image."""
        height, width = self.crop.size
        return max(int(ROOM * 3 * height * width), JPEG_ROOM if self.decodes else 0)

    def place(self, stored: bytes | np.ndarray, memory: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Put what the device needs of an image into `memory`, uint8 [room], and return its numbers (see `COLUMNS`).

        The random numbers are those of the crop. Raises DecodeError for an image that cannot be read.
        """
        found = _decodable(stored) if self.decodes and isinstance(stored, bytes) else None
        if found is not None and len(stored) <= self.room:
            memory[: len(stored)] = np.frombuffer(stored, np.uint8)
            return np.array((len(stored), *self.crop.box(*found, rng)), np.float64)
        image = EIGHT_BIT_RGB.read(stored)
        top, left, height, width = self.crop.box(image.shape[0], image.shape[1], rng)
        part = image[top : top + height, left : left + width]
        if part.size > self.room:
            part = resize(part, *self.crop.size, self.crop.interpolation)
        memory[: part.size].reshape(part.shape)[:] = part
        return np.array((0, 0, 0, *part.shape[:2]), np.float64)

    def images(self, memory: Tensor, rows: np.ndarray, name: Callable[[int], str], device: torch.device) -> Tensor:
        """Return images on the device, uint8 [batch, 3, height, width], in channels_last order.

        memory: uint8 [batch, room], on the CPU. rows: int64 [batch, COLUMNS]. name: Place in the batch -> name of the
        image, for errors. Raises DataError for a damaged JPEG that only decoding shows.
        """
        jpegs = {place: memory[place, :count] for place, count in enumerate(rows[:, BYTES].tolist()) if count}
        decoded = _decoded(jpegs, name, device)
        there = to_device(memory, device) if len(jpegs) < len(rows) else memory
        parts = []
        for place, (_, top, left, height, width) in enumerate(rows.tolist()):
            if place in decoded:
                part = decoded[place][:, top : top + height, left : left + width]
            else:
                part = there[place, : 3 * height * width].view(height, width, 3).permute(2, 0, 1)
            parts.append(self._resized(part))
        images = torch.cat(parts)
        images = images if images.dtype == torch.uint8 else images.round_().clamp_(0, 255).to(torch.uint8)
        return images.contiguous(memory_format=torch.channels_last)

    def _resized(self, part: Tensor) -> Tensor:
        """Return a part [3, h, w] as [1, 3, height, width]: uint8 on a CPU, float32 on other devices."""
        pixels = part[None] if part.device.type == "cpu" else part[None].float()  # their kernels have no uint8
        if part.shape[1:] == self.crop.size:
            return pixels
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return F.interpolate(pixels, self.crop.size, mode=self.crop.interpolation, antialias=True)


def decodes_on_device() -> bool:
    """Return whether torchcodec, which decodes JPEGs on a GPU, is installed."""
    return find_spec("torchcodec") is not None


def _decodable(data: bytes) -> tuple[int, int] | None:
    """Return (height, width) of a JPEG that a device decodes as the host does; None for other files.

    Raises DecodeError for a picture that is too large.
    """
    header = read_header(data) if data.startswith(b"\xff\xd8") else None
    if header is None or not header.ordinary or header.components == 4 or END not in data[-BEHIND:]:
        return None
    if orientation(header.exif, header.xmp) != 1:  # torchcodec turns it on a CPU
        return None
    if (adobe := data.find(b"Adobe\0", 0, MARKED)) >= 0 and data[adobe + 11 : adobe + 12] == b"\0":
        return None  # its components are red, green and blue
    check_jpeg(header, len(data))
    return header.height, header.width


def _decoded(jpegs: dict[int, Tensor], name: Callable[[int], str], device: torch.device) -> dict[int, Tensor]:
    """Return the pictures of JPEGs on the device, uint8 [3, H, W]. If it refuses one of them, the host decodes all."""
    if not jpegs:
        return {}
    from torchcodec.decoders import decode_jpeg

    try:
        return dict(zip(jpegs, decode_jpeg([*jpegs.values()], mode="RGB", device=device), strict=True))
    except RuntimeError:
        return {place: _decoded_by_host(data, name(place), device) for place, data in jpegs.items()}


def _decoded_by_host(jpeg: Tensor, name: str, device: torch.device) -> Tensor:
    try:
        image = decode(jpeg.numpy().tobytes())
    except DecodeError as error:
        raise DataError(
            f"image {name} cannot be decoded: {error}. `vitrail data check` lists such images, and --decode-on host "
            "leaves them out"
        ) from error
    return to_device(torch.from_numpy(image).permute(2, 0, 1), device)
