"""kNN accuracy while training goes on: how well the features of the network as it is tell classes apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitrail.data.item import Listed, View
from vitrail.data.split import subset
from vitrail.errors import UsageError
from vitrail.evaluation.classify import Predict
from vitrail.evaluation.features import collect
from vitrail.evaluation.knn import knn
from vitrail.training.batches import evaluation_loader
from vitrail.training.run import Run
from vitrail.training.validation.rounds import Rounds

MOST = 20_000
"""Training images that are looked at, classes in proportion: memory and time do not grow with the data beyond."""


class TrainingKNN:
    """Accuracy on the validation images by the `run.knn` nearest training images (`vitrail.evaluation.knn`).

    Which training images is decided once, so every evaluation looks at the same; they are prepared as validation images
    are. Raises UsageError where no training image has a label, or `run.knn` is below 1.
    """

    kind = "knn"
    """Of its lines in metrics.jsonl."""

    def __init__(self, run: Run, train: Listed) -> None:
        assert run.knn is not None
        labelled = np.flatnonzero(train.labels >= 0)
        if run.knn < 1 or len(labelled) < run.knn:
            raise UsageError(
                f"knn is {run.knn}; it is a number of neighbours, at least 1, among training images that have labels, "
                f"{len(labelled)} of them"
            )
        known = View(train, labelled)
        rows = subset(known, min(MOST, len(known)), run.seed)
        self.neighbours = min(run.knn, len(rows))
        self.class_names = list(train.class_names)
        self.loader = evaluation_loader(run, View(known, rows))

    def __call__(self, embed: Predict, validation: Rounds, check: Callable[[], None]) -> dict[str, float]:
        """Return {"knn": top-1}; `embed` is images -> features. Raises DataError for features that are not finite."""
        train = collect(embed, Rounds(self.loader, check), self.class_names)
        found = knn(train, collect(embed, validation, self.class_names), k=(self.neighbours,))
        return {"knn": found.top1[self.neighbours]}

    def close(self) -> None:
        """End the loader's threads."""
        self.loader.close()
