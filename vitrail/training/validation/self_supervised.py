"""Looking at held-out images while a network learns without labels: its own loss, and pictures of what it sees.

The masks of validation images are those of one step that training never has, so every evaluation, in any number of
processes, asks the same of the network, and losses can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitrail import world
from vitrail.data.item import Listed
from vitrail.data.loading.loader import Loader
from vitrail.data.sources.open import Splits
from vitrail.objective.base import Objective, Prepared
from vitrail.objective.beit.tokenizer import ImageTokenizer
from vitrail.objective.masks import VALIDATION
from vitrail.objective.seen import SelfSupervised
from vitrail.training.folder import RunFolder
from vitrail.training.optim.average import Swapped
from vitrail.training.run import Run
from vitrail.training.validation.rounds import Rounds
from vitrail.training.validation.seen_picture import SHOWN, seen_picture
from vitrail.training.validation.validation import Validation
from vitrail.weights.base import Base
from vitrail.weights.card import Card

SEEN = "seen.png"
"""Input, mask, prediction and target of some validation images, at the newest evaluation."""


def build_validation(
    objective: Objective,
    average: Swapped,
    loader: Loader | None,
    card: Card,
    run: Run,
    base: Base | None,
    train: Listed,
) -> Validation:
    """Return what evaluates `objective`: by its answers where it learns from labels, else by its loss."""
    if not isinstance(objective, SelfSupervised):
        return Validation(objective.kept, average, loader, card, run, base, train)
    return LossValidation(objective.kept, average, loader, card, run, base, train, objective=objective)


@dataclass
class LossValidation(Validation):
    """As `Validation`, by the loss of `objective`: the lowest is the best, and early stopping counts by it.

    Where the losses of two moments cannot be compared (`chosen_by_loss`), the newest is the best.

    The numbers are "loss", the objective's metrics and "count". What is kept is the network alone, without what
    predicts.
    """

    objective: SelfSupervised | None = None
    _picture: bytes | None = None

    def measure(self, loader: Rounds) -> dict[str, float]:
        """See `Validation`; also draws the first images."""
        assert self.objective is not None
        objective = self.objective
        training = objective.training
        objective.eval()
        try:
            return self._means(objective, loader)
        finally:
            objective.train(training)

    def order(self, numbers: dict[str, float]) -> tuple[float, ...]:
        """See `Validation`."""
        assert self.objective is not None
        return super().order(numbers) if self.objective.chosen_by_loss else (numbers["step"],) if numbers else ()

    def write(self, folder: RunFolder) -> None:
        """Write the picture of what the objective sees."""
        if self._picture is not None:
            folder.write_bytes(SEEN, self._picture)

    def save(self, place: Path, card: Card) -> None:
        """See `Validation`; a tokenizer has a file of its own."""
        if isinstance(self.model, ImageTokenizer):
            self.model.save(place)
        else:
            super().save(place, card)

    def test(self, splits: Splits, folder: RunFolder, check: object) -> dict[str, float] | None:
        """None: a network without a classifier has nothing to be tested for."""
        return None

    @torch.no_grad()
    def _means(self, objective: SelfSupervised, loader: Rounds) -> dict[str, float]:
        device = next(objective.parameters()).device
        sums: dict[str, float] = {"count": 0.0, "loss": 0.0}
        for number, batch in enumerate(loader.epoch(0)):
            prepared = objective.prepare(batch, step=VALIDATION)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.run.precision == "bf16"):
                loss, count, metrics = objective(prepared, step=VALIDATION)
            for name, value in {"count": count, "loss": loss, **metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            if number == 0 and world.is_main():
                self._picture = seen_picture(objective.show(_first(prepared, SHOWN)))
        totals: dict[str, float] = {}
        for part in world.gather(sums):  # a process may have had no image, and then knows no metric
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
        count = totals.pop("count")
        return {**{name: value / max(count, 1.0) for name, value in totals.items()}, "count": count}


def _first(prepared: Prepared, count: int) -> Prepared:
    names = ("images", "labels", "index", "targets")
    return replace(prepared, **{name: getattr(prepared, name)[:count] for name in names})
