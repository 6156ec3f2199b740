"""The rows of new and merged classes before the first step of a run that keeps classes (`vitrail.training.classes`).

They are fitted to the features of the frozen network, in seconds, while all other rows stay as they are. Otherwise the
first steps would change the network for the sake of rows that know nothing yet (compare `vitrail.training.probe_head`).

* A merged class should be as probable as its parts together, so its logit should be the logarithm of the sum of their
  exponentials. No row gives that for all images. Ridge regression finds the row that is nearest for training images.
* New classes are learned by softmax regression, with the other rows fixed, among the classes with training images.

That says little about how a new class compares with one that has no training image: without its images, softmax
would learn that it never occurs. So one number is added to the biases of the new classes, chosen on the validation
images (compare "Large scale incremental learning", Wu et al. 2019): the one with the best geometric mean over the
classes of their accuracies, where each class has the mean accuracy of its kind, old or new. If no image is of an old
class, half of them are taken for new classes. So neither kind takes all: the mean would then be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import world
from vitrail.data.item import UNKNOWN, IndexedSource, Subset
from vitrail.data.labels.masks import Masks
from vitrail.training.assemble import Setup
from vitrail.training.classes import ClassChange
from vitrail.training.pixel_head import start_fitted
from vitrail.training.probe_head import MOST, frozen_features, set_whole, start_as_probe
from vitrail.weights.load import load

STRENGTH = 1e-5
"""Strength of the penalty on what is added to a row, in units of the mean squared length of the features."""
ITERATIONS = 100
"""Maximum number of iterations of L-BFGS."""


def begin_classifier(setup: Setup, seconds: float, say: Callable[[str], None]) -> str:
    """Set the classifier of a run that starts as a linear probe or keeps classes. Return what was done; "" for others.

    seconds, say: See `start_fitted`.
    """
    if setup.run.probe_head:
        masks = isinstance(setup.splits.train.labels, Masks)
        return start_fitted(setup, seconds, say) if masks else start_as_probe(setup, seconds)
    if setup.change is None:
        return ""
    told, setup.state.status.before = fit_rows(setup)
    return told


@torch.no_grad()
def fit_rows(setup: Setup) -> tuple[str, dict[str, float]]:
    """Set the rows of the new and the merged classes of a run (see the module).

    Return what was done, in words, and how right the weights were on the validation images (`ClassChange.accuracy`).
    """
    change, model, train, measured = setup.change, setup.objective.model, setup.splits.train, setup.splits.validation
    assert change is not None and setup.decision.start is not None
    theirs, heads = _combined(_heads(load(setup.decision.start))), _heads(model)
    held_out = None if measured is None else _known(setup, measured)
    before = {} if held_out is None else _accuracy_of(theirs, change, *held_out)
    if not change.unlike:
        return "the classifier begins with the rows of the weights", before
    picked = np.sort(np.random.default_rng(setup.run.seed).permutation(len(train))[:MOST])
    features, labels = _known(setup, Subset(train, picked))
    rows, told = _combined(heads), [f"{len(features):,} training images"]
    merged, new = ([place for place in change.unlike if bool(change.rows[place]) == old] for old in (True, False))
    if merged:
        parts = features @ theirs.T
        wanted = torch.stack([parts[:, change.rows[place]].logsumexp(1) for place in merged], dim=1)
        rows[merged] += _ridge(features, wanted - features @ rows[merged].T)
        told += [f"{len(merged)} merged classes are fitted to the sum of their parts"]
    if new:
        rows[new] = _learned(rows, new, features, labels, getattr(setup.run.objective, "smoothing", 0.0))
        level, why = _level(*held_out or (features, labels), rows, new)
        rows[new, -1] += level
        told += [f"{len(new)} new classes are learned with the network frozen; {why}"]
    width = (rows.shape[1] - 1) // len(heads)
    for number, head in enumerate(heads):
        weight, bias = _whole(head.weight), _whole(head.bias)
        weight[change.unlike] = len(heads) * rows[change.unlike, number * width : (number + 1) * width]
        bias[change.unlike] = rows[change.unlike, -1]
        set_whole(head.weight, weight)
        set_whole(head.bias, bias)
    return f"rows of the classifier: {'; '.join(told)}; training starts from them", before


def _accuracy_of(rows: Tensor, change: ClassChange, features: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the accuracy with the `rows` of the weights on images with labels among the classes of the run."""
    place = torch.full((len(rows),), UNKNOWN)
    for number, of in enumerate(change.rows):
        place[of] = number
    right = place[(features @ rows.T).argmax(1)] == labels
    counted = (torch.bincount(some, minlength=len(change.rows)).numpy() for some in (labels, labels[right]))
    return change.accuracy(*counted)


def _known(setup: Setup, images: IndexedSource) -> tuple[Tensor, Tensor]:
    """Return the features of images, float64 [N, width + 1] with a 1 at the end, and their classes."""
    features, labels = frozen_features(setup, setup.run, images)
    return F.pad(torch.from_numpy(features).double(), (0, 1), value=1.0), torch.from_numpy(labels)


def _heads(model: nn.Module) -> list[Any]:
    """Return the classifiers of a network: two of a distilled one, whose logits are their mean."""
    return [head for head in (getattr(model, name, None) for name in ("head", "head_dist")) if head is not None]


def _whole(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter, which may be sharded over the processes, as float64 in main memory."""
    return world.whole(world.local_part(parameter), parameter).detach().to("cpu", torch.float64, copy=True)


def _combined(heads: list[Any]) -> Tensor:
    """Return the rows by which features become logits, float64 [classes, width + 1], the bias last."""
    weight = torch.cat([_whole(head.weight) for head in heads], dim=1)
    bias = torch.stack([_whole(head.bias) for head in heads]).sum(0)
    return torch.cat([weight, bias[:, None]], dim=1) / len(heads)


def _strength(features: Tensor) -> float:
    return STRENGTH * features[:, :-1].square().sum(1).mean().item()


def _ridge(features: Tensor, wanted: Tensor) -> Tensor:
    """Return the rows [K, width + 1] that give about the values `wanted` [N, K]; the bias is not penalised."""
    products = features.T @ features
    products.diagonal()[:-1].add_(_strength(features) * len(features))
    return torch.linalg.solve(products, features.T @ wanted).T


def _learned(rows: Tensor, new: list[int], features: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return the rows of new classes at the optimum of softmax regression, in which the other rows are fixed."""
    seen = labels.unique()
    seen = seen if len(seen) > 1 else torch.arange(len(rows))
    logits, targets, strength = features @ rows.T, torch.searchsorted(seen, labels), _strength(features)
    added = torch.zeros(len(new), rows.shape[1], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([added], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        changed = logits.index_add(1, torch.tensor(new), features @ added.T)[:, seen]
        penalty = strength / 2 * added[:, :-1].square().sum()
        value: Tensor = F.cross_entropy(changed, targets, label_smoothing=smoothing) + penalty
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(loss)  # type: ignore[no-untyped-call]
    return rows[new] + added.detach()


def _level(features: Tensor, labels: Tensor, rows: Tensor, new: list[int]) -> tuple[float, str]:
    """Return what is added to the biases of the new classes, and why."""
    logits, is_new = features @ rows.T, torch.zeros(len(rows), dtype=torch.bool)
    is_new[new] = True
    best = [logits.masked_fill(of, -torch.inf).max(1) for of in (is_new, ~is_new)]  # of the old and the new classes
    margin, order = torch.sort(best[1].values - best[0].values)
    ours = is_new[labels]
    if ours.all() or not ours.any():
        return -margin.median().item(), "half of the validation images are taken for them, as none shows an old class"
    share = 1 / torch.bincount(labels)[labels].double()
    right = [(share * (one.indices == labels))[order] for one in best]
    # with k images below the threshold: the old classes are right in these, the new ones in the others
    counts = [len(labels[of].unique()) for of in (~ours, ours)]
    of_old = F.pad(right[0].cumsum(0), (1, 0)) / counts[0]
    of_new = F.pad(right[1].flip(0).cumsum(0).flip(0), (0, 1)) / counts[1]
    score = counts[0] * of_old.clamp(min=1e-9).log() + counts[1] * of_new.clamp(min=1e-9).log()
    cut = min(max(int(score.argmax()), 1), len(margin) - 1)
    why = f"with their bias {of_new[cut]:.1%} of their validation images are right, and {of_old[cut]:.1%} of the others"
    return -margin[cut - 1 : cut + 1].mean().item(), why
