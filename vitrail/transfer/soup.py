"""Model soups: one network whose weights are the mean of those of several, fine-tuned from the same weights.

"Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing inference time"
(Wortsman et al. 2022). The uniform soup is the mean of all networks. The greedy soup (recipe 1) goes through the
networks from the best to the worst on validation images, and keeps each that does not make the soup worse. So its
accuracy on these images is at least that of the best network.

The running statistics of BatchNorm, which some stems have, are averaged as weights are. Fine-tuning leaves them as they
were (`vitrail.training.optim.tune`), and so does their mean. Of networks that have trained them, the mean need not be
the statistics of the soup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.evaluation.classify import Batches, Predict
from vitrail.evaluation.confidence import KeptLogits
from vitrail.evaluation.results import Results
from vitrail.model.variants import flat
from vitrail.tasks.catalog import task_of
from vitrail.weights.card import PARENTS, Card
from vitrail.weights.save import UNTOLD

Tensors = Mapping[str, Tensor]
"""Name -> tensor of a network."""


@dataclass(frozen=True)
class Ingredient:
    """One of the networks, in the order in which they were tried."""

    name: str
    kept: bool = True
    """Whether the soup holds it."""
    alone: Results | None = None
    """Its results on the validation images; None if they were not needed."""
    soup: Results | None = None
    """Those of the soup with it, whether it was kept or not."""


def uniform(networks: Mapping[str, Callable[[], Tensors]]) -> tuple[dict[str, Tensor], list[Ingredient]]:
    """Return the mean of the tensors of all networks. `networks`: name -> function that loads the tensors."""
    total: Tensors = {}
    for load in networks.values():
        tensors = load()
        total = _sum(total, tensors)
    return _mean(total, len(networks), tensors), [Ingredient(name) for name in networks]


def greedy(
    networks: Mapping[str, Callable[[], Tensors]], measure: Callable[[Tensors], Results]
) -> tuple[dict[str, Tensor], list[Ingredient]]:
    """Return the tensors of the greedy soup, and its ingredients, the best network first.

    measure: Tensors -> results on validation images.
    """
    alone = {name: measure(load()) for name, load in networks.items()}
    total, soup, best = dict[str, Tensor](), dict[str, Tensor](), -float("inf")
    tried: list[Ingredient] = []
    for name in sorted(alone, key=lambda name: _rank(alone[name]), reverse=True):
        tensors = networks[name]()
        with_it = _sum(total, tensors)
        mean = _mean(with_it, 1 + sum(one.kept for one in tried), tensors)
        found = measure(mean)
        if kept := _rank(found)[0] >= best:
            total, soup, best = with_it, mean, _rank(found)[0]
        tried.append(Ingredient(name, kept, alone[name], found))
    return soup, tried


def _sum(total: Tensors, tensors: Tensors) -> dict[str, Tensor]:
    """Return the sum of the tensors of some networks, none at first, and of one more, in float64."""
    return {name: tensor.double() + total.get(name, 0) for name, tensor in tensors.items()}


def _mean(total: Tensors, count: int, like: Tensors) -> dict[str, Tensor]:
    """Return the mean of `count` networks whose sum is `total`, in the types of the tensors `like`."""
    return {name: (total[name] / count).to(tensor.dtype) for name, tensor in like.items()}


def _rank(found: Results) -> tuple[float, float]:
    """Return what orders results: the number that says how good a network is, and for equal ones the loss."""
    numbers = found.metrics()
    return float(getattr(found, found.headline)), -numbers.get("nll", numbers.get("loss", 0.0))


def statistics_differ(mean: Tensors, one: Tensors) -> bool:
    """Return whether the mean of several networks has other running statistics than one of these networks."""
    return any(not torch.equal(tensor, one[name]) for name, tensor in mean.items() if name.endswith("running_mean"))


def require_alike(cards: Mapping[str, Card]) -> None:
    """Raise WeightsError, naming the first difference, for networks whose weights have no mean. Name -> card."""
    (first, card), *others = cards.items()
    if card.answers:
        raise WeightsError(f"{first} gives several answers, and networks that do are not averaged")
    for name, other in others:
        if type(card.config) is not type(other.config) or card.task != other.task:
            raise WeightsError(f"{first} and {name} are networks of different kinds, so their weights have no mean")
        mine, theirs = _described(card), _described(other)
        if (what := next((field for field in mine if mine[field] != theirs[field]), None)) is None:
            continue
        values = f"{mine[what]!r} and {theirs[what]!r}"
        if what == "class_names":  # as many as outputs, which are compared first
            pairs = enumerate(zip(card.class_names, other.class_names, strict=False))
            values = next((f"class {at} is {one!r} and {two!r}" for at, (one, two) in pairs if one != two), values)
        raise WeightsError(
            f"the weights of {first} and {name} have no mean, because the networks differ in {what}: {values}. Average "
            "networks that were fine-tuned from the same weights on the same classes; or average what others predict: "
            f"vitrail predict {first} {name} IMAGES"
        )


def _described(card: Card) -> dict[str, Any]:
    """Return what networks must agree in: sizes, classes, how images are prepared, and the scale of numbers."""
    training_only = {*UNTOLD} - {"mean", "std", "class_token"}
    config = {name: value for name, value in flat(card.config).items() if name not in training_only}
    return config | {"class_names": card.class_names, "preprocess": card.preprocess, "scale": card.scale}


def soup_card(card: Card, names: Sequence[str], parents: Sequence[Card], kind: str) -> Card:
    """Return the card of the mean of networks with these cards, without what was measured on them."""
    made_of = [{"run": name, **parent.provenance} for name, parent in zip(names, parents, strict=True)]
    source = f"{kind} soup: the mean of the weights of {', '.join(names)}"
    return replace(card.unmeasured(), source=source, provenance={PARENTS: made_of})


def measured(card: Card, predict: Predict, images: Batches) -> Results:
    """Return the results of a network with this card; thresholds of labels are chosen on the images."""
    task, names = task_of(card), card.class_names
    return task.measure(predict, images, names, card.unchosen(), temperature=1.0)  # type: ignore[no-any-return]


def measured_card(card: Card, predict: Predict, images: Batches, count: int) -> tuple[Card, Results]:
    """Return the card of a network with its temperature, thresholds and results, and the results.

    All of them are from `count` validation images.
    """
    task = task_of(card)
    logits = KeptLogits(predict, images, count) if task.probable else None
    found = measured(card, predict, images) if logits is None else measured(card, logits, logits)
    metrics = {f"validation {name}": value for name, value in found.metrics().items()}
    card = replace(task.on_card(card, found), metrics=metrics)
    if logits is None:
        return card, found
    card = card.with_confidence(task.fitted(card, *logits.rows()))
    again, kept = logits.again()
    found = task.measure(again, kept, card.class_names, card, temperature=card.temperature)
    return card.with_confidence(task.confidence(found, card.temperature)), found
