"""Images of the galleries: which ones are worth looking at, what was predicted, and where the network attended.

Images with masks are drawn beside these and the network's predictions.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitrail.data.images.ops import eval_transform, shown_transform
from vitrail.data.images.pixels import Pixels
from vitrail.data.item import evenly_spaced
from vitrail.data.labels.masks import Masks
from vitrail.errors import DecodeError, VitrailError
from vitrail.evaluation.pixel_scores import PixelResults, pixel_classes
from vitrail.evaluation.results import Guess, Results
from vitrail.inspection.figures.class_maps import draw_segmentation
from vitrail.inspection.overlay import under_attention
from vitrail.inspection.rollout import rollout
from vitrail.model.vit import ViT

SHOWN = 12
"""Maximum number of images in a gallery of one run."""
DRAWN = 8
"""Maximum number of images that are drawn beside their masks."""
DPI = 110
_BATCH = 4


@dataclass(frozen=True)
class Exhibit:
    """One image of a gallery."""

    id: str
    image: np.ndarray
    """uint8 [H, W, 3]."""
    true: str | None
    """The name of its class; None if it is not known."""
    guesses: list[list[Guess]]
    """The best guesses of each network, best first; an empty list if its outputs were not finite."""
    attention: np.ndarray | None = None
    """uint8 [H, W, 3]: the image under its attention rollout."""


def exhibits(rows: np.ndarray, evaluation: Results, source: Any, model: Any) -> list[Exhibit]:
    """Return the images of these rows as the network sees them, with attention rollout if `model` is a ViT.

    `model` is a network with its card, in eval mode. Images that can no longer be decoded are left out.
    """
    transform = shown_transform(model.card.preprocess)
    unused = np.random.default_rng(0)  # nothing is random in evaluation
    found = []
    for row in rows.tolist():
        if (decoded := decode_image(source, int(evaluation.index[row]), transform.pixels.read)) is not None:
            found.append((row, decoded[0], transform(decoded[1], unused)))
    maps = _rollouts(model, [image for _, _, image in found], transform.pixels)
    return [
        Exhibit(
            name, transform.pixels.shown(image), true_class(evaluation, row), [evaluation.guesses(row, 3)], attention
        )
        for (row, name, image), attention in zip(found, maps, strict=True)
    ]


def masks_picture(results: PixelResults, model: Any, source: Any) -> bytes | None:
    """Return a PNG of evenly spaced images with their masks and predictions; None without readable masks.

    `model` is a network with its card, in eval mode; `source` has the images of `results`.
    """
    if not isinstance(source.labels, Masks):
        return None
    transform, unused = eval_transform(model.card.preprocess), np.random.default_rng(0)
    device, drawn = next(model.parameters()).device, []
    for row in evenly_spaced(len(results.index), DRAWN):
        index = int(results.index[row])
        if (decoded := decode_image(source, index, transform.pixels.read)) is None:
            continue
        name, image = decoded
        mask = source.labels.mask(index)
        with torch.inference_mode():
            pixels = torch.from_numpy(transform(image, unused)).permute(2, 0, 1)[None]
            predicted = pixel_classes(model(pixels.to(device))[0], *mask.shape)
        drawn.append((name, transform.pixels.shown(image), mask, predicted))
    if not drawn:
        return None
    file = io.BytesIO()
    draw_segmentation(results.in_words(), results.class_names, drawn).savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def decode_image(source: Any, index: int, read: Callable[[Any], np.ndarray]) -> tuple[str, np.ndarray] | None:
    """Return id and pixels of image `index`, as `read` returns them; None if it is absent or unreadable."""
    if index >= len(source):  # the results are those of other images
        return None
    try:
        item = source[index]
        return item.id, read(item.image)
    except DecodeError:
        return None


def true_class(evaluation: Results, row: int) -> str | None:
    """Return the name of an image's class, the names of its labels, or its numbers; None if they are not known."""
    names = evaluation.true_names(row)
    return None if names is None else ", ".join(names) or "no label"


def _rollouts(model: Any, images: list[np.ndarray], pixels: Pixels) -> Iterable[np.ndarray | None]:
    if not isinstance(model, ViT):
        return [None] * len(images)
    device, found = next(model.parameters()).device, []
    at_once = _BATCH if len({image.shape for image in images}) == 1 else 1
    for start in range(0, len(images), at_once):
        batch = images[start : start + at_once]
        try:
            shares = rollout(model, torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2).to(device)).cpu().numpy()
        except VitrailError:
            return [None] * len(images)
        found += [under_attention(pixels.shown(image), share) for image, share in zip(batch, shares, strict=True)]
    return found
