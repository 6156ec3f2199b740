"""The batches of a run: their loaders, one endless stream of them, the size of their images, and their pictures.

Progressive resizing (`Sizes`): training starts with small images, which grow; the network's positions are resampled. A
ViT's cost falls with the number of tokens. Early in training the network learns little from detail, and with small
images several times as many steps fit into the same time (Howard's fast.ai course; EfficientNetV2; FixRes is the
reverse).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitrail import world
from vitrail.data.image_names import bad_kinds
from vitrail.data.images.batched import divided
from vitrail.data.images.ops import eval_transform, train_transform
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels
from vitrail.data.item import IndexedSource
from vitrail.data.labels.sets import class_counts
from vitrail.data.loading.loader import Batch, Loader
from vitrail.data.settings import Preprocess
from vitrail.device import choose_device
from vitrail.errors import DataError
from vitrail.model.variants import NetworkConfig, ViTConfig
from vitrail.objective.settings import DINO
from vitrail.training.run import Progressive, Run

CPU = torch.device("cpu")
AT_ONCE = 256
"""Number of images resized at a time on an accelerator."""
SHOWN = 32
"""Largest number of images of a batch."""
SHOWN_ROWS = 8
"""Largest number of rows in a picture with columns."""
COLUMNS = 8
SMALLEST = 112
"""Pixels. Smaller images are enlarged, with visible pixels."""
CAPTION = 16
"""Height of a caption in pixels."""


def training_loader(run: Run, source: IndexedSource) -> Loader:
    """Return a loader of this process's share of `source`, augmented. `run` has every decision made."""
    assert run.batch_size is not None
    preprocess = loaded(run)
    transform, rest = train_transform(run.augment, preprocess), None
    if "device" in (run.augment_on, run.decode_on):
        parts = divided(transform, preprocess.size, decodes=run.decode_on == "device")
        transform, rest = (transform, None) if parts is None else parts
    return Loader(
        source,
        transform=transform,
        rest=rest,
        image_size=preprocess.size,
        batch_size=run.batch_size // world.size(),
        repeats=run.augment.repeats,
        together=run.data.together,
        sampler=run.data.sampler,
        worker_kind="processes" if run.worker_kind == "processes" else "threads",
        pinned_for=choose_device(run.device),
        **_common(run),
    )


def loaded(run: Run) -> Preprocess:
    """Return how the objective of a run gets training images. `run` has every decision made."""
    assert isinstance(run.preprocess, Preprocess)
    if not isinstance(run.objective, DINO):
        return run.preprocess
    # whole images, and larger, because crops are cut from them
    height, width = (round(side * run.objective.view) for side in run.preprocess.image_size)
    return replace(run.preprocess, image_size=(height, width), crop=1.0)


def micro_batch(run: Run) -> int:
    """Return the number of images that each process has in the network at once. `run` has every decision made."""
    assert run.batch_size is not None
    return -(-run.batch_size // (world.size() * (run.accumulate or 1)))


def evaluation_loader(run: Run, source: IndexedSource, *, whole: bool = False) -> Loader:
    """Return a loader of this process's share of `source`, or of the `whole`, without augmentation, each image once."""
    assert isinstance(run.preprocess, Preprocess)
    return Loader(
        source,
        transform=eval_transform(run.preprocess),
        image_size=run.preprocess.size,
        batch_size=2 * micro_batch(run),  # fits in memory, because no activations are kept for a backward pass
        shuffle=False,
        drop_last=False,
        **_common(run) | ({"rank": 0, "world": 1} if whole else {}),
    )


def _common(run: Run) -> dict[str, Any]:
    cache, workers = run.cache == "yes", run.workers or 0
    return {"seed": run.seed, "workers": workers, "rank": world.rank(), "world": world.size(), "cache": cache}


def endless(
    loader: Loader, step: int, *, max_bad: float = 1.0, report: Callable[[str, str], None] = lambda image, reason: None
) -> Iterator[Batch]:
    """Yield the batches of a run from step number `step` on, epoch after epoch.

    `report(image, reason)` is called once for each unreadable image. Raises DataError if their share of the images
    exceeds `max_bad`, or if all images of a class are unreadable.
    """
    reported = 0
    while True:
        epoch, start = divmod(step, len(loader))
        for batch in loader.epoch(epoch, start):
            if reported < len(loader.bad):
                for image, reason in loader.bad[reported:]:
                    report(image, reason)
                _refuse_if_many(loader, max_bad)
                _refuse_if_a_class_is_gone(loader, loader.bad_index[reported:])
                reported = len(loader.bad)
            yield batch
            step += 1


def _refuse_if_many(loader: Loader, max_bad: float) -> None:
    bad, images = len(loader.bad), loader.share
    if bad > max_bad * images:
        (name, reason), kinds = loader.bad[0], bad_kinds(loader.bad)
        raise DataError(
            f"{bad} of {images:,} training images cannot be read, more than data.max_bad, {max_bad:.1%}: {kinds}. The "
            f"first is {name} ({reason}). `vitrail data check` lists them all; a larger --data.max-bad trains "
            "without them"
        )


def _refuse_if_a_class_is_gone(loader: Loader, newly: list[int]) -> None:
    """Raise DataError if no image of a class is readable in this process any more."""
    labels, classes = loader.source.labels, len(loader.source.class_names)
    new, all_bad, total = (
        class_counts(some, classes) for some in (labels[np.array(newly)], labels[np.array(loader.bad_index)], labels)
    )
    for label in np.flatnonzero(new).tolist():
        bad = int(all_bad[label])
        if bad == total[label]:
            what = "the only training image" if bad == 1 else f"all {bad} training images"
            raise DataError(
                f"{what} of class {loader.source.class_names[label]!r} cannot be read, so the network could never "
                "learn it. `vitrail data check` says why. Repair the images, or remove the class"
            )


class Sizes:
    """Resizes batches: `sizes(batch, growth)`, with growth from 0 (first images) to 1 (full size).

    What is left of the augmentation comes first, on the device.
    """

    def __init__(self, progressive: Progressive, config: NetworkConfig, device: torch.device = CPU) -> None:
        self.device = device
        self.start = progressive.start
        self.full = config.image_size
        self.step = config.patch if isinstance(config, ViTConfig) else 32

    def size(self, growth: float, full: tuple[int, int] | None = None) -> tuple[int, int]:
        """Return height and width in pixels, in whole patches, at least one; `full` defaults to the network's input."""
        share = self.start + (1 - self.start) * growth
        return tuple(max(int(side * share + 1e-6) // self.step, 1) * self.step for side in full or self.full)  # type: ignore[return-value]

    def __call__(self, batch: Batch, growth: float, device: torch.device | None = None) -> Batch:
        """Return the batch with its uint8 images augmented, on `device` or else the network's, and resized."""
        if batch.plan is not None:
            batch = replace(batch, images=batch.plan.apply(batch.images, device or self.device), plan=None)
        full = (batch.images.shape[-2], batch.images.shape[-1])  # may be larger than the network's input
        size = self.size(growth, full)
        if growth >= 1 or self.start == 1 or size == full:
            return batch
        return replace(batch, images=shrunk(batch.images, size))


def shrunk(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images [batch, channels, *size] of the same type, resized with antialiasing on their device."""
    if images.is_floating_point() or images.device.type == "cpu":
        return F.interpolate(images, size=size, mode="bilinear", antialias=True)
    # only on CPUs torch resizes uint8; a whole batch as float would take four times the memory
    parts = (F.interpolate(part.float(), size=size, mode="bilinear", antialias=True) for part in images.split(AT_ONCE))
    return torch.cat([part.round_().to(images.dtype) for part in parts])


def batch_picture(images: Tensor, captions: list[str], pixels: Pixels = EIGHT_BIT_RGB) -> bytes:
    """Return a PNG: a grid of up to 32 of `images`, [batch, channels, height, width], each with a caption.

    pixels: How the images are shown.

    It is the quickest way to notice that the data are wrong.
    """
    shown = pixels.shown(_enlarged(images[:SHOWN]))
    if shown.dtype != np.uint8:  # what an objective of the user's own has drawn may be values of any range
        shown = (255 * (shown - shown.min()) / max(np.ptp(shown), 1e-6)).astype(np.uint8)
    if shown.shape[-1] != 3:  # other channels have no colours: show the first as gray
        shown = np.repeat(shown[..., :1], 3, axis=-1)
    count, height, width, _ = shown.shape
    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    sheet = Image.new("RGB", (columns * (width + 4), rows * (height + CAPTION + 4)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for i, (image, caption) in enumerate(zip(shown, captions, strict=False)):
        left, top = i % columns * (width + 4), i // columns * (height + CAPTION + 4)
        caption = " ".join(caption[:width].split())  # measuring a very long text takes minutes
        while caption and draw.textlength(caption, font) > width:
            caption = caption[:-1]
        draw.text((left + 2, top + 1), caption, "black", font)
        sheet.paste(Image.fromarray(image), (left + 2, top + CAPTION))
    return _png(sheet)


def columns_picture(shown: dict[str, Tensor]) -> bytes:
    """Return a PNG with a row for each image and a title over each column."""
    columns = [_enlarged(pictures[:SHOWN_ROWS]) for pictures in shown.values()]
    count, height, width, _ = columns[0].shape
    sheet = Image.new("RGB", (len(columns) * (width + 4), count * (height + 4) + CAPTION), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for column, (title, pictures) in enumerate(zip(shown, columns, strict=True)):
        draw.text((column * (width + 4) + 2, 1), title, "black", font)
        for row, picture in enumerate(pictures):
            place = (column * (width + 4) + 2, row * (height + 4) + CAPTION + 2)
            sheet.paste(Image.fromarray(picture), place)
    return _png(sheet)


def _enlarged(images: Tensor) -> np.ndarray:
    """Return [batch, height, width, channels] in which the pixels of small images are repeated."""
    arrays = images.cpu().numpy().transpose(0, 2, 3, 1)
    scale = max(1, math.ceil(SMALLEST / min(arrays.shape[1:3])))
    return arrays.repeat(scale, axis=1).repeat(scale, axis=2)  # type: ignore[no-any-return]


def _png(sheet: Image.Image) -> bytes:
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()
