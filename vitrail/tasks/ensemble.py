"""Several networks in the place of one: the mean of what they say about an image.

Probabilities are averaged after each network's own temperature ("Simple and Scalable Predictive Uncertainty Estimation
using Deep Ensembles", Lakshminarayanan et al. 2017, section 2.4), sigmoid for several labels; numbers are averaged in
the units of their data. Each network sees the image in its own size and preprocessing; the file is decoded once, and
resized once for networks that agree. All networks are in memory together, so that images are read only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.images.ops import SeveralInputs
from vitrail.data.settings import Preprocess
from vitrail.device import to_device
from vitrail.errors import UsageError
from vitrail.evaluation.classify import Predict
from vitrail.evaluation.confidence import mean_probabilities
from vitrail.tasks.catalog import task_of
from vitrail.weights.card import PARENTS, Card
from vitrail.words import listing


class Ensemble:
    """Networks with a card of their own, such as those of `vitrail.load`, that predict the same classes or numbers.

    Its `card` has the classes in the order of the first network, no temperature, because the probabilities have theirs,
    and for several labels the mean of the networks' thresholds. `names` say in errors which network is meant. Raises
    UsageError for networks whose outputs or whose images are of different kinds.
    """

    def __init__(self, members: Sequence[Any], names: Sequence[str]) -> None:
        self.members = list(members)
        cards: list[Card] = [member.card for member in members]
        if cards[0].answers:
            raise UsageError(f"{names[0]} gives several answers, and networks that do are not averaged. Give one")
        for name, card in zip(names[1:], cards[1:], strict=True):
            if why := _difference(names[0], cards[0], name, card):
                raise UsageError(f"{why}. Networks that are averaged must agree in this")
        first = cards[0]
        self._orders = [_order(card, first) for card in cards]
        each = zip(cards, self._orders, strict=True)
        chosen = [[card.thresholds[k] for k in order if card.several] for card, order in each]
        self.card = replace(
            first.unmeasured(),
            preprocess=SeveralInputs.of([card.preprocess for card in cards]),
            provenance={PARENTS: list(names)},
            thresholds=[sum(of_one) / len(cards) for of_one in zip(*chosen, strict=True)],
        )
        self.cards = [replace(self.card, thresholds=own) for own in chosen]
        """For each network: the card of the mean with the thresholds of the network."""

    def outputs(self, computed: Sequence[Predict]) -> list[Predict]:
        """Return for each network: images of all of them -> its outputs, as the card of this one describes them.

        computed: Images of one network -> its own outputs, for each network.
        """
        each = zip(self.members, self._orders, computed, strict=True)
        return [self._of_one(member.card, order, predict) for member, order, predict in each]

    def mean(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the mean of the outputs [batch, classes] of each network: logits of probabilities, or numbers."""
        if task_of(self.card).probable:
            return mean_probabilities(outputs, several=self.card.several)
        return torch.stack(list(outputs)).mean(dim=0)

    def _of_one(self, card: Card, order: list[int], predict: Predict) -> Predict:
        seen, chosen = _seen_by(card.preprocess, self.card.preprocess), torch.tensor(order)
        gain, shift = torch.tensor(1 / card.temperature), torch.tensor(0.0)
        if card.scale is not None and self.card.scale is not None:
            mean, deviation = (np.array(part)[order] for part in (card.scale.mean, card.scale.deviation))
            gain = torch.tensor(deviation / self.card.scale.deviation, dtype=torch.float32)
            shift = torch.tensor((mean - self.card.scale.mean) / self.card.scale.deviation, dtype=torch.float32)

        def outputs(images: Tensor) -> Tensor:
            found = predict(seen(images)).float()
            chosen_here, gain_here, shift_here = (to_device(part, found.device) for part in (chosen, gain, shift))
            return found[:, chosen_here] * gain_here + shift_here

        return outputs


def _order(card: Card, first: Card) -> list[int]:
    """Return the output of a network for each output of the `first` one."""
    if card.class_names == first.class_names:  # names may occur twice, as in some lists of ImageNet's classes
        return list(range(first.config.classes))
    return [card.class_names.index(name) for name in first.class_names]


def _seen_by(own: Preprocess, all_of_them: Preprocess) -> Callable[[Tensor], Tensor]:
    """Return images -> those of the network with its `own` preprocessing, which is a part of `all_of_them`."""
    if not isinstance(all_of_them, SeveralInputs):
        return lambda images: images
    place, pixels = all_of_them.each.index(own), [prod(one.size) for one in all_of_them.each]
    return lambda images: images[..., 0].split(pixels, dim=2)[place].unflatten(2, own.size)


def _difference(first: str, of_first: Card, other: str, of_other: Card) -> str:
    """Return in what two networks differ, so that they have no mean; "" if they have one."""
    one, two = task_of(of_first), task_of(of_other)
    if one is not two:
        return f"{first} predicts {one.predicts}, and {other} predicts {two.predicts}"
    if one.name == "segmentation":
        return f"{first} and {other} predict the class of each pixel, of which no mean is taken"
    names, others = of_first.class_names, of_other.class_names
    if not (names and others) and (names or others or of_first.config.classes != of_other.config.classes):
        return (
            f"{first} has {of_first.config.classes} outputs and {other} {of_other.config.classes}, some without names"
        )
    lacking = {first: sorted({*others} - {*names}), other: sorted({*names} - {*others})}
    if said := [f"{name} does not know {listing(lacks, 5)}" for name, lacks in lacking.items() if lacks]:
        return ", and ".join(said)
    if names != others and len({*names}) < len(names):
        return f"{first} and {other} have their classes in different orders, and some names occur twice"
    if (of_first.config.channels, of_first.preprocess.bands) != (of_other.config.channels, of_other.preprocess.bands):
        return f"{first} and {other} take images of other channels, or of bands with other statistics"
    return ""
