"""The linear segmentation probe: how well frozen patch tokens tell the classes of pixels, as DINOv2 measures it.

The tokens of all training images are computed, a linear layer learns the class of each pixel from them, and it is
scored on validation images.

Source: Oquab et al. 2023, DINOv2, section 7.4, "linear", and its code (dinov2/eval/segmentation and the configuration
dinov2_vits14_ade20k_linear): batch normalisation of the tokens, a linear layer to the classes, bilinear upsampling of
the logits to the pixels, cross-entropy without ignored pixels. AdamW, learning rate 0.001, weight decay 0.0001, batch
16, linear warm-up in the first 1,500 of 40,000 steps, then linear decay to 0.

What differs: the whole image is resized to the square input, once, in place of random crops of 512 pixels with random
scale, mirroring and colours in training and a sliding window in evaluation. So the tokens are computed once. The steps
are fewer, and the loss is the mean over the pixels that count, where mmsegmentation divides by all pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.images.masked import nearest
from vitrail.data.images.pixels import picture
from vitrail.data.item import IndexedSource, evenly_spaced
from vitrail.data.labels.masks import Masks
from vitrail.data.settings import IGNORED
from vitrail.device import fast_float32
from vitrail.evaluation.classify import confusion_counts
from vitrail.evaluation.feature_files import growing_npy
from vitrail.evaluation.pixel_scores import PixelNumbers, pixel_classes
from vitrail.training.pixel_head import fit_tokens


class TokenClassifier(nn.Module):
    """Batch normalisation and a linear layer: tokens [B, rows, columns, width] -> logits [B, classes, rows, columns].

    The weights start as mmsegmentation's do, from a normal distribution with deviation 0.01.
    """

    def __init__(self, width: int, classes: int, seed: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.linear = nn.Conv2d(width, classes, 1)
        nn.init.normal_(self.linear.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.linear.bias)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        logits: Tensor = self.linear(self.norm(tokens.movedim(-1, 1)))
        return logits


@torch.inference_mode()
@fast_float32()
def predict_pixels(model: TokenClassifier, tokens: Tensor, height: int, width: int) -> np.ndarray:
    """Return the class of each pixel, uint8 [height, width], from tokens [rows, columns, width] of one image."""
    return pixel_classes(model(tokens[None])[0], height, width)


def confusions(truth: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return the number of pixels of each true class (row) that are predicted as each class (column), int64 [K, K].

    `truth` and `predicted` are arrays of one shape with the numbers of classes; pixels with IGNORED in `truth` do not
    count.
    """
    counted = truth != IGNORED
    return confusion_counts(truth[counted], predicted[counted], classes)


@dataclass(frozen=True)
class PixelScores(PixelNumbers):
    """The scores of a probe."""

    class_names: Sequence[str]
    confusion: np.ndarray
    """int64 [K, K]: see `confusions`"""

    @property
    def totals(self) -> np.ndarray:
        """See `PixelNumbers`."""
        return np.stack([self.confusion.diagonal(), self.confusion.sum(axis=1), self.confusion.sum(axis=0)])


DRAWN = 8
"""Maximum number of validation images whose predictions are kept, to be drawn."""
EmbedTokens = Callable[[IndexedSource, Callable[[np.ndarray], None]], tuple[np.ndarray, list[tuple[str, str]]]]
"""Images, and a function that receives their tokens batch by batch, float32 [batch, rows, columns, width] ->
the index of each readable image, and (id, reason) of the others."""


@dataclass(frozen=True)
class Example:
    """One validation image with its mask and the prediction."""

    name: str
    image: np.ndarray
    """uint8 [H, W, 3]"""
    truth: np.ndarray
    """uint8 [H, W]: classes, IGNORED where they do not count"""
    predicted: np.ndarray
    """uint8 [H, W]"""


@dataclass(frozen=True)
class ProbedPixels:
    """The result of a segmentation probe."""

    scores: PixelScores
    train_images: int
    validation_images: int
    width: int
    """Number of features of a token, those of all layers together."""
    grid: tuple[int, int]
    """Rows and columns of tokens of an image."""
    values: list[int]
    """Value of each class in the masks."""
    examples: list[Example]
    unreadable: list[tuple[str, str]]
    """(image, reason) of each unreadable image; they do not count."""


def probe_segmentation(
    train: IndexedSource,
    validation: IndexedSource,
    embed: EmbedTokens,
    size: tuple[int, int],
    *,
    steps: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> ProbedPixels:
    """Fit a linear layer to the tokens of the training images, and measure it on the validation images.

    The labels of both are `Masks`. `size` (height, width) is that of the network's input, at which the loss is
    computed. The scores count the pixels of the validation masks as they are stored. Tokens wait in a temporary folder,
    so they may be larger than memory. Raises DataError, and DecodeError for masks that have changed.
    """
    masks, classes = _masks(validation), len(train.class_names)
    with _stored(train, embed, size) as learned:
        model = TokenClassifier(learned.tokens.shape[-1], classes, seed).to(device)
        fit_tokens(model, learned.tokens, learned.truth, steps=steps, seed=seed, progress=progress)
    confusion, examples = np.zeros((classes, classes), dtype=np.int64), []
    with _stored(validation, embed) as asked:
        drawn = set(evenly_spaced(len(asked.images), DRAWN))
        for row, number in enumerate(asked.images.tolist()):
            truth = masks.mask(number)
            predicted = predict_pixels(model, torch.tensor(asked.tokens[row]).to(device), *truth.shape)
            confusion += confusions(truth, predicted, classes)
            if row in drawn:
                image = picture(validation[number].image)
                examples.append(Example(Path(validation.id(number)).name, image, truth, predicted))
    return ProbedPixels(
        PixelScores(train.class_names, confusion),
        len(learned.images),
        len(asked.images),
        int(asked.tokens.shape[3]),
        asked.tokens.shape[1:3],
        [int(np.argmax(masks.table == number)) for number in range(classes)],
        examples,
        [*learned.bad, *asked.bad],
    )


def _masks(images: IndexedSource) -> Masks:
    assert isinstance(images.labels, Masks)
    return images.labels


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
def _stored(images: IndexedSource, embed: EmbedTokens, size: tuple[int, int] | None = None) -> Iterator[_Stored]:
    """Context of the tokens of all readable images, and with `size` of their masks at that size."""
    with TemporaryDirectory(prefix="vitrail-segment-") as temporary:
        folder = Path(temporary) / "arrays"
        with growing_npy(folder) as arrays:
            index, bad = embed(images, lambda tokens: arrays.append("", {"tokens": tokens}))
            for number in index.tolist() if size is not None else ():
                arrays.append("", {"truth": nearest(_masks(images).mask(number), *size)[None]})  # type: ignore[misc]
            arrays.save({})
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        truth = np.load(folder / "truth.npy", mmap_mode="r") if size is not None else np.empty(0, np.uint8)
        yield _Stored(tokens, truth, index, bad)
