"""k nearest neighbours by cosine similarity; votes have weight exp(similarity / temperature) (Wu et al. 2018; DINO).

Similarities are computed in blocks and only the largest are stored, so memory does not depend on the number of training
or test images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail import world
from vitrail.device import fast_float32, to_device
from vitrail.errors import UsageError
from vitrail.evaluation.features import Features, labelled_pair, unit_rows

TEST_ROWS = 1024
TRAIN_ROWS = 16384
"""Rows and columns of a block of similarities, 64 MiB."""
NEIGHBOURS = (20,)
"""The value that is usually best among DINO's 10, 20, 100 and 200."""
TEMPERATURE = 0.07


@dataclass(frozen=True)
class KNN:
    """Accuracies by number of neighbours."""

    temperature: float
    top1: dict[int, float]
    """k -> share of test images whose class has the most votes."""
    top5: dict[int, float]
    """k -> share of test images whose class has votes and is among the five classes with the most."""
    train_images: int
    test_images: int


def knn(
    train: Features,
    test: Features,
    *,
    k: Sequence[int] = NEIGHBOURS,
    temperature: float = TEMPERATURE,
    device: torch.device | str = "cpu",
) -> KNN:
    """Classify the labelled images of `test` by their `k` nearest labelled images of `train`, for each of `k`.

    Processes share the test images, so all of them must call this together. Raises UsageError for a k beyond the number
    of training images or a temperature that is not above 0, DataError for features that are not finite or do not fit
    together.
    """
    source, labels, asked, truth = labelled_pair(train, test)
    if not k or min(k) < 1 or max(k) > len(labels):
        raise UsageError(f"k is {list(k)}; with {len(labels)} training images it must be from 1 to {len(labels)}")
    if not temperature > 0:
        raise UsageError(f"the temperature is {temperature:g}; it must be above 0")
    classes, place = len(train.class_names), torch.device(device)
    of = to_device(torch.from_numpy(labels), place)
    mine, begin = slice(world.rank(), None, world.size()), 0
    answers = to_device(torch.from_numpy(truth[mine]), place)
    hits = torch.zeros(len(k), 2, dtype=torch.int64, device=place)
    for similarity, row in neighbours(source, asked[mine], max(k), place):
        answer = answers[begin : begin + len(row)]
        begin += len(row)
        for at, count in enumerate(k):
            weight = ((similarity[:, :count] - similarity[:, :1]) / temperature).exp()  # the nearest one's is always 1
            votes = weight.new_zeros(len(row), classes).scatter_add_(1, of[row[:, :count]], weight)
            best = votes.topk(min(5, classes), dim=1)
            right = (best.indices == answer[:, None]) & (best.values > 0)
            hits[at] += torch.stack([right[:, 0].sum(), right.sum()])
    shares = (world.sum_(hits).cpu().double() / len(truth)).tolist()
    top1, top5 = ({count: share[i] for count, share in zip(k, shares, strict=True)} for i in (0, 1))
    return KNN(temperature, top1, top5, len(labels), len(truth))


@fast_float32()
def neighbours(
    train: np.ndarray, test: np.ndarray, k: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield cosine similarities [b, k] and rows in `train` [b, k] of the nearest neighbours of blocks of `test` rows.

    The nearest neighbour comes first. train, test: [n, width]; a row of zeros has similarity 0 to every row.
    """
    for begin in range(0, len(test), TEST_ROWS):
        asked = _unit(test[begin : begin + TEST_ROWS], device)
        similarity = asked.new_empty(len(asked), 0)
        row = torch.empty(len(asked), 0, dtype=torch.int64, device=asked.device)
        for start in range(0, len(train), TRAIN_ROWS):
            block = asked @ _unit(train[start : start + TRAIN_ROWS], device).T
            rows = torch.arange(start, start + block.shape[1], device=block.device).expand_as(block)
            candidates = torch.cat([similarity, block], dim=1)
            similarity, chosen = candidates.topk(min(k, candidates.shape[1]), dim=1)
            row = torch.cat([row, rows], dim=1).gather(1, chosen)
        yield similarity, row


def _unit(rows: np.ndarray, device: torch.device | str) -> Tensor:
    return to_device(torch.from_numpy(unit_rows(rows)), torch.device(device))
