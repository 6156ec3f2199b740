"""The loss of queries: each class of an image is matched with the query that predicts its mask best.

Source: EoMT (`vitrail.model.queries`), whose loss is that of Mask2Former (Cheng et al. 2022, section 3.3). The costs of
a match and the losses of matched masks are binary cross-entropy and dice, each at random points; of three times as many
points as needed, the most uncertain ones are kept for three quarters. All other queries learn "no object".

What differs: pixels that do not count have no influence. EoMT's code takes them for pixels outside of all masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.model.queries import Answers

CLASS, MASK, DICE = 2.0, 5.0, 5.0
"""Weights of the losses, and of the costs of a match."""
NO_OBJECT = 0.1
"""Weight of a query without a mask in the loss of the classes."""
OVERSAMPLED, UNCERTAIN = 3, 0.75
"""Number of points that are drawn for each that is kept, and the share of the uncertain ones among those."""
POWER = 0.9
"""Exponent of the end of masked attention in a block."""


def masked_share(done: float, block: int, blocks: int) -> float:
    """Return the share of the queries that attend to their own mask alone in a block, at a moment of a run (0 to 1).

    It falls from 1 to 0 in one of `blocks + 2` equal parts of the run, in the first block first: the first and the last
    part have masks in all blocks and in none (EoMT's settings for ADE20K and COCO).
    """
    return (1 - min(max(done * (blocks + 2) - block - 1, 0.0), 1.0)) ** POWER


@dataclass(frozen=True)
class Masks:
    """The masks of the classes in each image of a batch."""

    classes: list[Tensor]
    """int64 [masks] of each image"""
    masks: Tensor
    """float32 [masks of all images, 1, height, width], 0 or 1"""
    counted: Tensor
    """float32 [batch, 1, height, width]: 1 for the pixels that count"""

    @classmethod
    def of(cls, truth: Tensor, ignored: int) -> Masks:
        """Return the masks of classes [batch, height, width], where pixels with `ignored` do not count."""
        found = [values[values != ignored] for values in map(torch.unique, truth)]
        masks = [image == values[:, None, None] for image, values in zip(truth, found, strict=True)]
        return cls(
            [each.long() for each in found], torch.cat(masks)[:, None].float(), (truth != ignored)[:, None].float()
        )

    @property
    def images(self) -> Tensor:
        """Index of the image of each mask, int64 [masks]."""
        counts = torch.tensor([len(each) for each in self.classes], device=self.masks.device)
        return torch.repeat_interleave(counts)


def query_losses(
    answers: Answers, truth: Masks, points: int, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Return the losses of each image [batch]: the sum over its masks, and the sum over its queries, both weighted.

    The points are drawn from the generator of each image.
    """
    classes, masks = answers.classes.float(), answers.masks.float()
    pairs = match(classes.detach(), masks.detach(), truth, points, generators)
    images = torch.cat([torch.full_like(query, image) for image, (query, _) in enumerate(pairs)])
    queries = torch.cat([query for query, _ in pairs])
    begins = np.cumsum([0, *map(len, truth.classes)])
    rows = torch.cat([begin + row for begin, (_, row) in zip(begins.tolist(), pairs, strict=False)])
    wanted = classes.new_full(classes.shape[:2], classes.shape[-1] - 1, dtype=torch.int64)
    wanted[images, queries] = torch.cat(truth.classes)[rows]
    weights = torch.where(wanted == classes.shape[-1] - 1, NO_OBJECT, 1.0)
    of_classes = F.cross_entropy(classes.flatten(0, 1), wanted.flatten(), reduction="none").view_as(weights) * weights
    of_masks = _mask_losses(masks[images, queries][:, None], truth, images, rows, points, generators)
    return classes.new_zeros(len(classes)).index_add(0, images, of_masks), CLASS * of_classes.sum(1)


def combined(of_masks: Tensor, of_classes: Tensor, masks: Tensor, queries: int) -> Tensor:
    """Return the loss of each image [batch], from the sums of `query_losses` of an image with `queries` queries.

    `masks` [batch] is the mean number of matched masks of an image. With that of a whole step, the mean loss is EoMT's:
    the mean over all masks, and the weighted mean over all queries.
    """
    return of_masks / masks.clamp(min=1e-3) + of_classes / (masks + NO_OBJECT * (queries - masks))


@torch.no_grad()
def match(
    classes: Tensor, masks: Tensor, truth: Masks, points: int, generators: Sequence[torch.Generator]
) -> list[tuple[Tensor, Tensor]]:
    """Return the queries and the masks (numbers within the image) that belong together, for each image.

    The sum of the costs of all pairs is as small as can be (the Hungarian method); costs that are no numbers are the
    largest of all.
    """
    from scipy.optimize import linear_sum_assignment

    places = torch.stack([_draw(generator, 1, points, masks.device)[0] for generator in generators])
    logits = sample(masks, places)
    counted = sample(truth.counted, places, nearest=True)
    labels = sample(truth.masks, places[truth.images])[:, 0]
    costs, begin = [], 0
    for image, found in enumerate(truth.classes):
        here = labels[begin : begin + len(found)] * counted[image]
        begin += len(found)
        cross = _pair_cross_entropy(logits[image], here, counted[image])
        dice = _pair_dice(logits[image], here, counted[image])
        costs.append(MASK * cross + DICE * dice - CLASS * classes[image].softmax(-1)[:, found])
    largest = torch.finfo(torch.float32).max
    on_cpu = torch.cat([cost.flatten() for cost in costs]).nan_to_num(largest, largest, largest).cpu()
    tables = on_cpu.split([cost.numel() for cost in costs])
    pairs = [linear_sum_assignment(table.view(cost.shape)) for table, cost in zip(tables, costs, strict=True)]
    return [(torch.from_numpy(query).to(masks.device), torch.from_numpy(row).to(masks.device)) for query, row in pairs]


def _mask_losses(
    logits: Tensor, truth: Masks, images: Tensor, rows: Tensor, points: int, generators: Sequence[torch.Generator]
) -> Tensor:
    """Return the weighted sum of both losses of each matched mask [n]: logits [n, 1, rows, columns]."""
    with torch.no_grad():
        counts = torch.bincount(images, minlength=len(generators)).tolist()
        many = [_draw(*each, points * OVERSAMPLED, logits.device) for each in zip(generators, counts, strict=True)]
        places = torch.cat(many)
        kept, counted = int(UNCERTAIN * points), truth.counted[images]
        certain = torch.where(sample(counted, places, nearest=True) > 0, sample(logits, places).abs(), torch.inf)[:, 0]
        uncertain = certain.topk(kept, dim=1, largest=False).indices
        places = places.gather(1, uncertain[..., None].expand(-1, -1, 2))
        rest = [_draw(*each, points - kept, logits.device) for each in zip(generators, counts, strict=True)]
        places = torch.cat([places, torch.cat(rest)], dim=1)
        counted = sample(counted, places, nearest=True)[:, 0]
        labels = sample(truth.masks[rows], places)[:, 0]
    at = sample(logits, places)[:, 0]
    cross = F.binary_cross_entropy_with_logits(at, labels, weight=counted, reduction="none").sum(1)
    shares, labels = at.sigmoid() * counted, labels * counted
    dice = 1 - (2 * (shares * labels).sum(1) + 1) / (shares.sum(1) + labels.sum(1) + 1)
    return MASK * cross / counted.sum(1).clamp(min=1) + DICE * dice


def sample(maps: Tensor, places: Tensor, *, nearest: bool = False) -> Tensor:
    """Return maps [n, channels, rows, columns] at places [n, points, 2] (x, y in 0 to 1): [n, channels, points]."""
    mode, padding = ("nearest", "border") if nearest else ("bilinear", "zeros")
    grid = 2 * places[:, :, None] - 1
    return F.grid_sample(maps, grid, mode=mode, padding_mode=padding, align_corners=False)[..., 0]


def _draw(generator: torch.Generator, count: int, points: int, device: torch.device) -> Tensor:
    """Return `count` sets of random places, float32 [count, points, 2], in 0 to 1."""
    return torch.rand(count, points, 2, generator=generator, device=device)


def _pair_cross_entropy(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Return the binary cross-entropy [queries, masks] of logits [queries, points] and labels [masks, points].

    `counted` [1, points] is 0 for points that do not count.
    """
    inside, outside = F.softplus(-logits) * counted, F.softplus(logits) * counted
    return (inside @ labels.T + outside @ (1 - labels).T) / counted.sum().clamp(min=1)


def _pair_dice(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Return the dice losses [queries, masks] of logits [queries, points] and labels [masks, points]."""
    shares = logits.sigmoid() * counted
    return 1 - (2 * shares @ labels.T + 1) / (shares.sum(1)[:, None] + labels.sum(1) + 1)
