"""The linear segmentation probe: tokens of all training images, a linear layer, and scores on validation images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from vitrail.data.item import IndexedSource, evenly_spaced
from vitrail.data.masks import MaskedData, MaskedImages
from vitrail.evaluation.feature_files import growing_npy
from vitrail.transfer.segmentation.linear import fit_tokens, predict_pixels
from vitrail.transfer.segmentation.scores import PixelScores, confusions

DRAWN = 8
"""Maximum number of validation images whose predictions are kept, to be drawn."""
EmbedTokens = Callable[[IndexedSource, Callable[[np.ndarray], None]], tuple[np.ndarray, list[tuple[str, str]]]]
"""Images, and a function that receives their tokens batch by batch, float32 [batch, rows, columns, width] ->
the index of each readable image, and (id, reason) of the others."""


@dataclass(frozen=True)
class Example:
    """One validation image with its mask and the prediction."""

    path: Path
    truth: np.ndarray
    """uint8 [H, W]: classes, IGNORED where they do not count"""
    predicted: np.ndarray
    """uint8 [H, W]"""


@dataclass(frozen=True)
class Segmentation:
    """The result of a segmentation probe."""

    scores: PixelScores
    train_images: int
    validation_images: int
    width: int
    """Number of features of a token, those of all layers together."""
    grid: tuple[int, int]
    """Rows and columns of tokens of an image."""
    examples: list[Example]
    unreadable: list[tuple[str, str]]
    """(image, reason) of each unreadable image; they do not count."""


def probe_segmentation(
    data: MaskedData,
    embed: EmbedTokens,
    size: tuple[int, int],
    *,
    steps: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Segmentation:
    """Fit a linear layer to the tokens of the training images, and measure it on the validation images.

    `size` (height, width) is that of the network's input, at which the loss is computed. The scores count the pixels of
    the validation masks as they are stored. Tokens wait in a temporary folder, so they may be larger than memory.
    Raises DataError.
    """
    classes = len(data.values)
    with _stored(data, data.train, embed, size) as train:
        model = fit_tokens(train.tokens, train.truth, classes, steps=steps, seed=seed, device=device, progress=progress)
    confusion, examples = np.zeros((classes, classes), dtype=np.int64), []
    with _stored(data, data.validation, embed) as asked:
        drawn = set(evenly_spaced(len(asked.images), DRAWN))
        for row, number in enumerate(asked.images.tolist()):
            truth = data.read_mask(data.validation.masks[number])
            predicted = predict_pixels(model, torch.tensor(asked.tokens[row]).to(device), *truth.shape)
            confusion += confusions(truth, predicted, classes)
            if row in drawn:
                examples.append(Example(data.validation.images.path(number), truth, predicted))
    return Segmentation(
        PixelScores(data.class_names, confusion),
        len(train.images),
        len(asked.images),
        int(asked.tokens.shape[3]),
        asked.tokens.shape[1:3],
        examples,
        [*train.bad, *asked.bad],
    )


class _Stored(NamedTuple):
    """Tokens of images in a temporary file."""

    tokens: np.ndarray
    """float32 [N, rows, columns, width]"""
    truth: np.ndarray
    """uint8 [N, H, W]: classes of the pixels at the size of the network's input; [0] if they are not needed"""
    images: np.ndarray
    """int64 [N]: index of each image in its source"""
    bad: list[tuple[str, str]]


@contextmanager
def _stored(
    data: MaskedData, images: MaskedImages, embed: EmbedTokens, size: tuple[int, int] | None = None
) -> Iterator[_Stored]:
    """Context of the tokens of all readable images, and with `size` of their masks at that size."""
    with TemporaryDirectory(prefix="vitrail-segment-") as temporary:
        folder = Path(temporary) / "arrays"
        with growing_npy(folder) as arrays:
            index, bad = embed(images.images, lambda tokens: arrays.append("", {"tokens": tokens}))
            for number in index.tolist() if size is not None else ():
                arrays.append("", {"truth": _nearest(data.read_mask(images.masks[number]), *size)[None]})  # type: ignore[misc]
            arrays.save({})
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        truth = np.load(folder / "truth.npy", mmap_mode="r") if size is not None else np.empty(0, np.uint8)
        yield _Stored(tokens, truth, index, bad)


def _nearest(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return a mask [H, W] resized to [height, width]: each pixel takes the value at its centre."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(np.int64)
        for new, old in zip((height, width), mask.shape, strict=True)
    )
    return mask[rows[:, None], columns]
