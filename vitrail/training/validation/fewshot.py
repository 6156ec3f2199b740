"""Few-shot accuracy while training goes on: the features of the network as it is, and a closed form on top."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vitrail.data.item import Listed, View
from vitrail.evaluation.classify import Predict
from vitrail.evaluation.features import collect
from vitrail.evaluation.fewshot import Plan, fewshot
from vitrail.training.batches import evaluation_loader
from vitrail.training.run import Run
from vitrail.training.validation.rounds import Rounds


class TrainingFewShot:
    """Few-shot accuracy on the validation images, the shots from the training images (protocol "big_vision-2023").

    Which images are shots is decided once, so every evaluation looks at the same ones, and at no other training
    image. They are prepared as validation images are. Raises UsageError for shots that make no sense, DataError for
    a class without training images.
    """

    kind = "fewshot"
    """Of its lines in metrics.jsonl."""

    def __init__(self, run: Run, train: Listed) -> None:
        assert run.fewshot is not None
        self.plan = Plan(train.labels, list(train.class_names), shots=run.fewshot)
        self.loader = evaluation_loader(run, View(train, self.plan.rows))

    def __call__(self, embed: Predict, validation: Rounds, check: Callable[[], None]) -> dict[str, float]:
        """Return {"5-shot": mean over seeds, "5-shot std": their deviation, ...}; `embed` is images -> features.

        No random number is drawn but those of the protocol's own generators. Raises DataError for features that are
        not finite.
        """
        names = self.plan.class_names
        shots = collect(embed, Rounds(self.loader, check), names)
        shots = replace(shots, index=self.plan.rows[shots.index])
        found = fewshot(self.plan, shots, collect(embed, validation, names))
        numbers: dict[str, float] = {}
        for row, count in enumerate(found.shots):
            numbers |= {f"{count}-shot": float(found.mean[row, 0]), f"{count}-shot std": float(found.std[row, 0])}
        return numbers

    def close(self) -> None:
        """End the loader's threads."""
        self.loader.close()
