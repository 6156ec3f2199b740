"""The loss of queries: each class of an image is matched with the query that predicts its mask best.

Source: EoMT (`vitrail.model.queries`), whose loss is that of Mask2Former (Cheng et al. 2022, section 3.3). The costs of
a match and the losses of matched masks are binary cross-entropy and dice, each at random points; of three times as many
points as needed, the most uncertain ones are kept for three quarters. All other queries learn "no object".

What differs: pixels that do not count have no influence. EoMT's code takes them for pixels outside of all masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail import world
from vitrail.data.loading.order import stream
from vitrail.data.settings import IGNORED
from vitrail.model.queries import QueryOutputs
from vitrail.objective.base import Objective, Prepared, RunFacts

CLASS, MASK, DICE = 2.0, 5.0, 5.0
"""Weights of the losses, and of the costs of a match."""
NO_OBJECT = 0.1
"""Weight of a query without a mask in the loss of the classes."""
OVERSAMPLED, UNCERTAIN = 3, 0.75
"""Number of points that are drawn for each that is kept, and the share of the uncertain ones among those."""
POINTS = 112 * 112
"""Largest number of points of a mask; a small mask has as many as cells."""
POINTS_OF = 47
"""Purpose of a random stream (the others are in `vitrail.data` and `vitrail.objective`)."""
POWER = 0.9
"""Exponent of the end of masked attention in a block."""


class QueryObjective(Objective):
    """Predict a class and a mask with each query of a network whose head are `Queries`.

    All noise of an image is a function of (seed, step, index of the image): its points, and which queries are masked.
    """

    model: Any

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__(model)
        self.seed = seed

    @classmethod
    def of(cls, model: Any, settings: Any, task: RunFacts) -> Self:
        """See `Objective`."""
        return cls(model, task.seed)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """See `Objective`."""
        return replace(prepared, numbers=(step,))

    def before_step(self, prepared: Prepared, parts: int) -> Prepared:
        """Give each image the mean number of matched masks of an image of the step."""
        counts = present(prepared.targets).sum(1).clamp(max=self.model.config.queries)
        total, images = world.sum_(torch.stack([counts.sum(), counts.new_tensor(len(counts))])).float()
        return replace(prepared, precomputed=(total / images).expand(len(counts)).contiguous())

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`: the sum over the answers before each of the last blocks and behind them."""
        head, device, truth = self.model.head, prepared.images.device, Masks(prepared.targets)
        (step,), generators = prepared.numbers, []
        for index in prepared.index.tolist():  # torch reads 32 bits of a seed
            seed = int(stream(self.seed, step, index, POINTS_OF).integers(2**32))
            generators.append(torch.Generator(device).manual_seed(seed))
        queries = self.model.config.queries
        drawn = torch.stack([torch.rand(head.blocks, queries, generator=each, device=device) for each in generators])
        shares = [masked_share(self.moment.done, block, head.blocks) for block in range(head.blocks)]
        answers = head.ask(self.model, prepared.images, drawn < drawn.new_tensor(shares)[:, None])
        masks, points = prepared.precomputed, min(POINTS, answers[-1].masks[0, 0].numel())
        if masks is None:  # in an evaluation, where an image's loss does not depend on others
            masks = drawn.new_tensor(truth.counts).clamp(max=queries)
        with torch.autocast(device.type, enabled=False):
            losses = [combined(*query_losses(each, truth, points, generators), masks, queries) for each in answers]
        return torch.stack(losses).sum(), len(prepared), {}


def masked_share(done: float, block: int, blocks: int) -> float:
    """Return the share of the queries that attend to their own mask alone in a block, at a moment of a run (0 to 1).

    It falls from 1 to 0 in one of `blocks + 2` equal parts of the run, in the first block first: the first and the last
    part have masks in all blocks and in none (EoMT's settings for ADE20K and COCO).
    """
    return (1 - min(max(done * (blocks + 2) - block - 1, 0.0), 1.0)) ** POWER


def present(truth: Tensor) -> Tensor:
    """Return which classes each image has, bool [batch, 256], from classes uint8 [batch, height, width]."""
    found = torch.zeros(len(truth), 256, dtype=torch.bool, device=truth.device)
    found.scatter_(1, truth.flatten(1).long(), True)
    found[:, IGNORED] = False
    return found


class Masks:
    """The masks of the classes in each image of a batch, from classes uint8 [batch, height, width].

    images, classes: int64 [masks], in the order of the images. masks: float32 [masks, 1, height, width], 0 or 1.
    counts: Number of masks of each image. counted: float32 [batch, 1, height, width], 1 for the pixels that count.
    """

    def __init__(self, truth: Tensor) -> None:
        found = present(truth)
        self.images, self.classes = found.nonzero(as_tuple=True)
        self.masks = (truth[self.images] == self.classes[:, None, None])[:, None].float()
        self.counts: list[int] = found.sum(1).tolist()
        self.counted = (truth != IGNORED)[:, None].float()


def query_losses(
    answers: QueryOutputs, truth: Masks, points: int, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Return the losses of each image [batch]: the sum over its masks, and the sum over its queries, both weighted.

    The points are drawn from the generator of each image.
    """
    classes, masks = answers.classes.float(), answers.masks.float()
    queries, rows = match(classes.detach(), masks.detach(), truth, points, generators)
    images, none = truth.images[rows], classes.shape[-1] - 1
    wanted = torch.full(classes.shape[:2], none, device=classes.device)
    wanted[images, queries] = truth.classes[rows]
    weights = torch.where(wanted == none, NO_OBJECT, 1.0)
    of_queries = F.cross_entropy(classes.flatten(0, 1), wanted.flatten(), reduction="none").view_as(weights) * weights
    of_masks = _mask_losses(masks[images, queries][:, None], truth, rows, points, generators)
    return classes.new_zeros(len(classes)).index_add(0, images, of_masks), CLASS * of_queries.sum(1)


def combined(of_masks: Tensor, of_classes: Tensor, masks: Tensor, queries: int) -> Tensor:
    """Return the loss of each image [batch], from the sums of `query_losses` of an image with `queries` queries.

    `masks` [batch] is the mean number of matched masks of an image. With that of a whole step, the mean loss is EoMT's:
    the mean over all masks, and the weighted mean over all queries.
    """
    return of_masks / masks.clamp(min=1e-3) + of_classes / (masks + NO_OBJECT * (queries - masks))


@torch.no_grad()
def match(
    classes: Tensor, masks: Tensor, truth: Masks, points: int, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Return the queries and the rows of `truth` that belong together, int64 [matches] each, image after image.

    The sum of the costs of the pairs of an image is as small as can be (the Hungarian method). A cost that is no number
    is the largest.
    """
    from scipy.optimize import linear_sum_assignment

    places = _draw(generators, [1] * len(generators), points, masks.device)
    logits, counted = sample(masks, places), sample(truth.counted, places, nearest=True)
    labels = sample(truth.masks, places[truth.images])[:, 0]
    costs, found = [], zip(labels.split(truth.counts), truth.classes.split(truth.counts), strict=True)
    for image, (here, kinds) in enumerate(found):
        pairs = logits[image], here * counted[image], counted[image]
        costs.append(MASK * _pair_cross_entropy(*pairs) + DICE * _pair_dice(*pairs))
        costs[-1] -= CLASS * classes[image].softmax(-1)[:, kinds]
    largest = torch.finfo(torch.float32).max
    tables = torch.cat(costs, dim=1).nan_to_num(largest, largest, largest).cpu().split(truth.counts, dim=1)
    best = [linear_sum_assignment(table.numpy()) for table in tables]
    begins = np.cumsum([0, *truth.counts])
    queries = np.concatenate([query for query, _ in best])
    rows = np.concatenate([begin + row for begin, (_, row) in zip(begins, best, strict=False)])
    return torch.from_numpy(queries).to(masks.device), torch.from_numpy(rows).to(masks.device)


def _mask_losses(
    logits: Tensor, truth: Masks, rows: Tensor, points: int, generators: Sequence[torch.Generator]
) -> Tensor:
    """Return the weighted sum of both losses of each matched mask [n]: logits [n, 1, rows, columns]."""
    images = truth.images[rows]
    with torch.no_grad():
        numbers = torch.bincount(images, minlength=len(generators)).tolist()
        places = _draw(generators, numbers, points * OVERSAMPLED, logits.device)
        kept, counted = int(UNCERTAIN * points), truth.counted[images]
        certain = torch.where(sample(counted, places, nearest=True) > 0, sample(logits, places).abs(), torch.inf)[:, 0]
        uncertain = certain.topk(kept, dim=1, largest=False).indices
        places = places.gather(1, uncertain[..., None].expand(-1, -1, 2))
        places = torch.cat([places, _draw(generators, numbers, points - kept, logits.device)], dim=1)
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


def _draw(generators: Sequence[torch.Generator], counts: Sequence[int], points: int, device: torch.device) -> Tensor:
    """Return sets of random places in 0 to 1, as many as counted of each generator: float32 [sets, points, 2]."""
    pairs = zip(generators, counts, strict=True)
    return torch.cat([torch.rand(count, points, 2, generator=each, device=device) for each, count in pairs])


def _pair_cross_entropy(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Return the binary cross-entropy [queries, masks] of logits [queries, points] and labels [masks, points].

    `counted` [1, points] is 0 for points that do not count.
    """
    inside = (F.softplus(-logits) * counted).sum(1)  # of a point outside of the mask it is the logit more
    return (inside[:, None] + logits * counted @ (1 - labels).T) / counted.sum().clamp(min=1)


def _pair_dice(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Return the dice losses [queries, masks] of logits [queries, points] and labels [masks, points]."""
    shares = logits.sigmoid() * counted
    return 1 - (2 * shares @ labels.T + 1) / (shares.sum(1)[:, None] + labels.sum(1) + 1)
