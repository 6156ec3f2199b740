"""The network that a run evaluates: how it is saved in the run folder and read again, and what can be asked of it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

from torch import nn

from vitrail import world
from vitrail.model.build import build
from vitrail.objective.tokenizer import ImageTokenizer, load_tokenizer
from vitrail.training.folder import RunFolder
from vitrail.training.python_objects import ForeignNetwork
from vitrail.weights.base import BaseWeights
from vitrail.weights.card import Card
from vitrail.weights.load import load, read_card
from vitrail.weights.store import save_model


class SavedNetwork(ABC):
    """A network in a run folder."""

    has_card = False
    """Whether a card is saved with it, from which `vitrail.load` builds it. Only then is it signed and calibrated."""
    has_features = False
    """Whether it gives the features of an image, for the probes few-shot and kNN."""

    @abstractmethod
    def save(self, place: Path, card: Card, base: BaseWeights | None) -> None:
        """Write the network into a model folder. With a `base`, only its tuned part is written."""

    @abstractmethod
    def best(self, folder: RunFolder, card: Card) -> nn.Module:
        """Return the best model of a run with this `card`, in evaluation mode."""

    def best_card(self, folder: RunFolder, card: Card) -> Card:
        """Return the best model's card, which is `card` with what was measured on that model."""
        return card


class OurNetwork(SavedNetwork):
    """A network of vitrail."""

    has_card = has_features = True

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def save(self, place: Path, card: Card, base: BaseWeights | None) -> None:
        """See `SavedNetwork`."""
        save_model(place, self._network, card, base)

    def best(self, folder: RunFolder, card: Card) -> nn.Module:
        """See `SavedNetwork`. Only the main process reads it, because the others may not see its folder."""
        with world.main_alone("reading the best model"):
            best = load(folder.path) if world.is_main() else build(card.config)
        best = best.to(next(self._network.parameters()).device)
        for tensor in best.state_dict().values():
            world.from_main_(tensor)
        return best

    def best_card(self, folder: RunFolder, card: Card) -> Card:
        """See `SavedNetwork`. Only the main process reads it."""
        stored: Card = world.gather(read_card(folder.path) if world.is_main() else None)[0]
        return replace(card, thresholds=stored.thresholds, confidence=stored.confidence)


class SavedForeign(SavedNetwork):
    """A network of the user's own, whose code only Python has."""

    def __init__(self, network: ForeignNetwork) -> None:
        self._network = network

    def save(self, place: Path, card: Card, base: BaseWeights | None) -> None:
        """See `SavedNetwork`."""
        self._network.save(place)

    def best(self, folder: RunFolder, card: Card) -> nn.Module:
        """See `SavedNetwork`."""
        return self._network.with_saved(folder.best)


class SavedTokenizer(SavedNetwork):
    """A tokenizer, which has a file format of its own."""

    def __init__(self, network: ImageTokenizer) -> None:
        self._network = network

    def save(self, place: Path, card: Card, base: BaseWeights | None) -> None:
        """See `SavedNetwork`."""
        self._network.save(place)

    def best(self, folder: RunFolder, card: Card) -> nn.Module:
        """See `SavedNetwork`."""
        return load_tokenizer(folder.best)


def copied_network(network: nn.Module) -> nn.Module:
    """Return a copy of `network` in main memory, which does not change with it."""
    tensors: dict[int, object] = {
        id(each): nn.Parameter(each.detach().to("cpu", copy=True), each.requires_grad) for each in network.parameters()
    }
    tensors |= {id(each): each.detach().to("cpu", copy=True) for each in network.buffers()}
    return copy.deepcopy(network, tensors)


def saved_network(network: nn.Module) -> SavedNetwork:
    """Return how `network` is saved and read again."""
    if isinstance(network, ForeignNetwork):
        return SavedForeign(network)
    return SavedTokenizer(network) if isinstance(network, ImageTokenizer) else OurNetwork(network)
