"""The classifier of a fine-tuning begins as a linear probe (`Run.probe_head`).

A new classifier of zeros sends gradients into the network that say little until the classifier has learned. The best
classifier of the frozen features changes these features less (Kumar et al. 2022, "Fine-tuning can distort pretrained
features and underperform out-of-distribution": linear probing, then fine-tuning). It takes seconds, and is the floor
that the fine-tuned network has to beat: the run evaluates it before its first step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import world
from vitrail.data.item import IndexedSource, Subset
from vitrail.errors import UsageError
from vitrail.evaluation.features import extract
from vitrail.evaluation.linear_probe import fit_probe
from vitrail.model.own_part import is_own_part
from vitrail.tasks.catalog import task_for
from vitrail.training.assemble import Setup
from vitrail.training.batches import evaluation_loader
from vitrail.training.run import Run

MOST = 5_000
"""Maximum number of images that the probe learns from. A few thousand decide on a classifier of some hundred features
per class, and take seconds."""

ROUND = 500
"""Number of images that are read at a time if there is a time limit, and the smallest number."""

SMOOTHING = 0.2
"""Label smoothing of the loss that decides how certain the classifier is at first. At its optimum the true class has
about this much less than all of the probability."""

BOTH = (
    "probe_head fits a new classifier, and keep_head keeps that of the weights: set --no-probe-head or --no-keep-head"
)


def start_as_probe(setup: Setup, seconds: float = math.inf) -> str:
    """Set the classifier of a run to a linear probe on its training images. Return what was done, in words.

    seconds: After which no more images are read.

    Raises UsageError for a network or labels without a linear softmax classifier, and DataError if no image can be held
    out to choose the strength of the penalty.
    """
    run, model, train = setup.run, setup.objective.model, setup.splits.train
    heads = [head for head in (getattr(model, name, None) for name in ("head", "head_dist")) if head is not None]
    if run.keep_head:
        raise UsageError(BOTH)
    single = run.supervised and task_for(train.labels).name == "classes"
    # one of the user's own may be a kind of nn.Linear that computes something else
    linear = all(isinstance(head, nn.Linear) and not is_own_part(head) for head in heads)
    if not single or not heads or not linear:
        raise UsageError(
            "probe_head fits a linear classifier of one label for each image, which this run does not have: set "
            "--no-probe-head"
        )
    began = time.monotonic()
    rows, parts = np.random.default_rng(run.seed).permutation(len(train))[:MOST], []
    for part in np.split(rows, range(ROUND, len(rows), ROUND)) if math.isfinite(seconds) else [rows]:
        parts.append(frozen_features(setup, run, Subset(train, np.sort(part))))
        if world.any_(time.monotonic() - began > seconds):
            break
    features, labels = map(np.concatenate, zip(*parts, strict=True))
    _, setting, solution, _ = fit_probe(features, labels, len(setup.splits.class_names), seed=run.seed)
    classifier = solution.classifier
    scale = _scale(classifier.logits(torch.from_numpy(features)), torch.from_numpy(labels))
    weights = scale * classifier.weight
    bias = scale * classifier.bias - weights @ classifier.mean
    for head, weight in zip(heads, weights.chunk(len(heads), dim=1), strict=True):
        set_whole(head.weight, weight * len(heads))  # the logits of a distilled network are the mean of two classifiers
        set_whole(head.bias, bias)
    return (
        f"linear probe on the features of {len(labels):,} training images in {time.monotonic() - began:.0f} s: "
        f"{setting.top1:.1%} of the held-out ones; training starts from it"
    )


@contextmanager
def whole_network(setup: Setup) -> Iterator[nn.Module]:
    """Context of the network of a run, whole where its weights are sharded; all processes must enter it."""
    objective, weights = setup.network.for_evaluation(setup.average)
    with weights.swapped():
        yield objective.model


def frozen_features(setup: Setup, run: Run, source: IndexedSource) -> tuple[np.ndarray, np.ndarray]:
    """Return the features, float32 [N, width], and classes, int64 [N], of the labelled images of `source`.

    They are those of the network of `setup`, and of images as `run` prepares them for evaluation.
    """
    with closing(evaluation_loader(run, source)) as loader, whole_network(setup) as network:
        found = extract(network, loader, setup.splits.class_names, precision=run.precision)
    return found.labelled("training")


@torch.no_grad()
def _scale(logits: Tensor, labels: Tensor) -> float:
    """Return the factor, at most 1, of the logits with which their loss with label smoothing is smallest.

    A probe with a weak penalty is certain of each training image, and wrong about their crops: on magnetic tiles the
    first loss was 11.6, and its gradients undid the features. Predictions do not change.
    """
    losses = {
        factor: F.cross_entropy(factor * logits, labels.to(logits.device), label_smoothing=SMOOTHING).item()
        for factor in (2.0 ** (-step / 2) for step in range(21))
    }
    return min(losses, key=losses.__getitem__)


@torch.no_grad()
def set_whole(parameter: Any, value: Tensor) -> None:
    """Copy a whole tensor into a parameter, which may be sharded over the processes."""
    whole = value.to(parameter.device, parameter.dtype)
    sharded = world.is_sharded(parameter)
    world.local_part(parameter).copy_(world.local_part(world.copied_like(whole, parameter)) if sharded else whole)
