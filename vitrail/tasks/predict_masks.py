"""Predict the class of each pixel of image files: one mask per file, of the image's size, in the order of the files.

An image is resized to the network's input, and the logits are enlarged to the image. With tiles each tile is, and where
tiles overlap their logits are added, so that no seam shows. Only the rows of one row of tiles are in memory as logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.images.geometry import Op
from vitrail.data.images.ops import eval_transform, tile_transform
from vitrail.data.images.tiles import TileBox, TiledImage, Tiling, open_image, read_tile
from vitrail.data.images.work import within_memory
from vitrail.data.loading.loader import check_batch_size
from vitrail.data.loading.prefetch import ordered, stuck, threads
from vitrail.data.sources.folder import read_file
from vitrail.errors import DecodeError, finite_rows, not_finite
from vitrail.evaluation.classify import NOT_FINITE, Predict
from vitrail.evaluation.pixel_scores import enlarged, pixel_classes
from vitrail.tasks.prediction import Unreadable


class PredictedMask(NamedTuple):
    """The class of each pixel of a file."""

    path: Path
    mask: np.ndarray
    """uint8 [H, W]"""


def predict_masks(
    model: Any,
    files: Iterable[Path],
    predict: Predict,
    *,
    batch_size: int = 32,
    workers: int = 1,
    tiles: Tiling | None = None,
) -> Iterator[PredictedMask | Unreadable]:
    """Yield the mask of each file, or why there is none.

    `model` is a network with a card, which `predict` computes. `workers` threads decode whole images. Raises DataError
    if reading one takes longer than `prefetch.TIMEOUT`.
    """
    check_batch_size(batch_size)
    card = model.card
    if tiles is not None:
        transform = tile_transform(card.preprocess)
        for path in files:
            try:
                with within_memory():
                    image = open_image(path, transform.pixels, tiles.height)
                    found = _of_tiles(image, tiles, transform, predict, card.config.classes, batch_size)
            except DecodeError as error:
                yield Unreadable(str(path), error.reason, str(error))
                continue
            yield _not_finite(path) if found is None else PredictedMask(path, found)
        return
    transform = eval_transform(card.preprocess)
    prepare, ahead = partial(_whole, transform), 2 * batch_size
    with threads(workers) as pool:
        read = ordered(pool, prepare, iter(files), ahead=ahead, hung=lambda path: stuck(str(path)))
        for batch in iter(lambda: list(islice(read, batch_size)), []):
            yield from _of_batch(batch, predict)


class _Whole(NamedTuple):
    """An image as the network's input, and its own size."""

    path: Path
    image: np.ndarray
    size: tuple[int, int]


def _whole(transform: Op, path: Path) -> _Whole | Unreadable:
    try:
        with within_memory():
            image = transform.pixels.read(read_file(path))
            size = image.shape[0], image.shape[1]
            return _Whole(path, transform(image, np.random.default_rng(0)), size)  # nothing is random in evaluation
    except DecodeError as error:
        return Unreadable(str(path), error.reason, str(error))


def _of_batch(batch: Sequence[_Whole | Unreadable], predict: Predict) -> Iterator[PredictedMask | Unreadable]:
    images = [one.image for one in batch if isinstance(one, _Whole)]
    logits = iter(_logits(images, predict) if images else ())
    for one in batch:
        if isinstance(one, Unreadable):
            yield one
            continue
        found = next(logits)
        fine = bool(finite_rows(found[None])[0])
        yield PredictedMask(one.path, pixel_classes(found, *one.size)) if fine else _not_finite(one.path)


def _logits(images: Sequence[np.ndarray], predict: Predict) -> Tensor:
    """Return float32 [n, classes, rows, columns] on the CPU of images [H, W, channels]."""
    return predict(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)).float().cpu()


def _not_finite(path: Path) -> Unreadable:
    return Unreadable(str(path), NOT_FINITE, not_finite("output for this image"))


def _of_tiles(
    image: TiledImage, tiles: Tiling, transform: Op, predict: Predict, classes: int, batch_size: int
) -> np.ndarray | None:
    """Return the class of each pixel of an image, uint8 [H, W]; None if an output is not finite. Raises DecodeError."""
    mask = np.empty((image.height, image.width), np.uint8)
    band = np.zeros((classes, min(tiles.height, image.height), image.width), np.float32)
    rows = [list(row) for _, row in groupby(tiles.boxes(image.height, image.width), lambda box: box.y)]
    ends = [following[0].y for _, following in pairwise(rows)] + [image.height]
    for row, end in zip(rows, ends, strict=True):
        for begin in range(0, len(row), batch_size):
            if not _add(band, image, row[begin : begin + batch_size], tiles, transform, predict):
                return None
        done = end - row[0].y
        mask[row[0].y : end] = band[:, :done].argmax(axis=0)
        band = np.concatenate([band[:, done:], np.zeros_like(band[:, :done])], axis=1)
    return mask


def _add(
    band: np.ndarray, image: TiledImage, boxes: Sequence[TileBox], tiles: Tiling, transform: Op, predict: Predict
) -> bool:
    """Add the logits of tiles of one row to those of their pixels, and return whether they are finite."""
    unused = np.random.default_rng(0)  # nothing is random in evaluation
    images = [transform(transform.pixels.read(read_tile(image, box, tiles)), unused) for box in boxes]
    logits = _logits(images, predict)
    for box, found in zip(boxes, logits, strict=True):
        wide = torch.cat(list(enlarged(found, tiles.height, tiles.width)), dim=1).numpy()
        band[:, : box.height, box.x : box.x + box.width] += wide[:, : box.height, : box.width]
    return bool(finite_rows(logits).all())
