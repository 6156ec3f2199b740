"""Images beside their masks and the network's predictions."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from vitrail.data.images.ops import eval_transform
from vitrail.data.item import evenly_spaced
from vitrail.data.labels.masks import Masks
from vitrail.evaluation.pixel_scores import PixelResults, pixel_classes
from vitrail.inspection.figures.class_maps import draw_segmentation
from vitrail.reports.gallery import decode_image

DRAWN = 8
"""Maximum number of images that are drawn."""
DPI = 110


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
