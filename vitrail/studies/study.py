"""A study: networks to train, the numbers that are measured of each, and the claims that these numbers decide.

A study is the grid behind one table or figure of the papers, at two scales. `laptop` fits into about an hour on two
cores and needs any folder of images. `paper` is the published grid, on the data of the paper.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.training.run import Run

Scale = Literal["laptop", "paper"]
Verdict = Literal["holds", "does not hold", "too noisy to tell"]
Trained = Literal["top-1", "ReaL", "5-shot", "20-NN", "linear", "stored"]
Counted = Literal["parameters", "MACs", "images/s", "latency", "memory", "step"]
MetricName = Trained | Counted
UNITS: dict[MetricName, str] = {
    "top-1": "top-1 on the test images, %",
    "ReaL": "top-1 by the labels of ImageNet ReaL, %",
    "5-shot": "5-shot top-1, %",
    "20-NN": "top-1 of 20 nearest neighbours, %",
    "linear": "top-1 of a linear classifier, %",
    "stored": "stored weights, MB",
    "parameters": "parameters, million",
    "MACs": "multiply-adds of an image, million",
    "images/s": "images/s at the best batch size on this machine",
    "latency": "milliseconds for an image on this machine",
    "memory": "peak memory of a training step of 64 images, MiB",
    "step": "milliseconds of a training step of 64 images on this machine",
}
"""Metric -> what it is, with its unit. The first six need a trained network; the others only its configuration."""
COUNTED: tuple[Counted, ...] = ("parameters", "MACs", "images/s", "latency", "memory", "step")


@dataclass(frozen=True)
class LaptopData:
    """The data on which the grids at laptop scale depend."""

    images: int = 39_200
    """Number of images to pre-train on, without those that are held out; that of 80 classes of CIFAR-100."""
    sets: Sequence[str] = ("up", "down", "digits")
    """Names of the data sets that networks are fine-tuned on."""


@dataclass(frozen=True)
class Stage:
    """One training, and those that come before it."""

    run: Run
    """How it is trained. `data.path` is the name of a data set: "up", "down", "all" or one that is given, at laptop
    scale; one of `vitrail.data.benchmarks.catalog` at the paper's."""
    start: Stage | None = None
    """The stage whose network it starts from."""
    tokenizer: Stage | None = None
    """The stage that trains the tokenizer of its objective."""

    @property
    def before(self) -> tuple[Stage, ...]:
        """The stages that have to be finished first."""
        return tuple(stage for stage in (self.start, self.tokenizer) if stage is not None)

    @property
    def depth(self) -> int:
        """Length of the longest chain of stages before this one."""
        return max((1 + stage.depth for stage in self.before), default=0)

    def chain(self) -> Iterator[Stage]:
        """Yield the stages before this one, then this one."""
        for stage in self.before:
            yield from stage.chain()
        yield self


@dataclass(frozen=True)
class Cell:
    """One number of a study, and its place in the table and the figure."""

    row: str
    """Its family, one line of the figure and one row of the table."""
    at: float | str
    """Its place on the axis, one column of the table."""
    stage: Stage
    """The training whose network is measured."""
    others: Sequence[Stage] = ()
    """Trainings that are tried too. The one that is best on the images held out of training counts; the first seed
    chooses it for all seeds."""
    metric: MetricName = "5-shot"
    what: str = ""
    """The table that it belongs to, such as the data set that it is measured on (default: the metric)."""
    best: bool = False
    """Measure the weights that are best on the validation images (early stopping), not the last ones."""

    @property
    def tried(self) -> tuple[Stage, ...]:
        """All its trainings."""
        return (self.stage, *self.others)

    @property
    def table(self) -> str:
        """The table that it belongs to."""
        return self.what or UNITS[self.metric]


Place = tuple[str, float | str]
"""(row, at)."""
Scores = Mapping[Place, Sequence[float]]
"""Place -> the measured numbers of one table, one for each seed, in the order of the seeds."""
MEAN = "mean"
"""The table of the means over all other tables, where a study has it."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the difference that is above 0 if it holds."""

    text: str
    difference: Callable[[Scores], Sequence[float]]
    """Function: the scores of its table -> the difference for each seed, in the unit of the table."""
    table: str | None = None
    """The table whose numbers decide it (default: the first)."""
    paper: Mapping[Any, float | str] = field(default_factory=dict)
    """Row, column or table of the laptop's grid -> that of the paper's, where the names differ."""

    def of_paper(self, scores: Scores) -> Scores:
        """Return scores of the paper's grid by the names of the laptop's, which `difference` reads."""
        back = {theirs: ours for ours, theirs in self.paper.items()}
        hidden = self.paper.keys() - back.keys()  # in the paper's grid, these names mean other networks
        return {
            (back.get(row, row), back.get(at, at)): values
            for (row, at), values in scores.items()
            if row not in hidden and at not in hidden
        }

    def verdict(self, scores: Scores) -> tuple[Verdict, float, float]:
        """Return the verdict, the mean difference and its deviation over seeds (n - 1; NaN for one seed).

        A claim holds, or does not hold, if the difference is more than twice its deviation away from 0. With a single
        seed, nobody can tell.
        """
        values = list(self.difference(scores))
        mean = statistics.fmean(values)
        if len(values) < 2:
            return "too noisy to tell", mean, math.nan
        deviation = statistics.stdev(values)
        if abs(mean) <= 2 * deviation:
            return "too noisy to tell", mean, deviation
        return ("holds" if mean > 0 else "does not hold"), mean, deviation


@dataclass(frozen=True)
class Study:
    """One table or figure of the papers."""

    name: str
    where: str
    """The table or figure that it reproduces: "Figure 4"."""
    title: str
    """What it shows, in one line."""
    axis: str
    """What the columns are, with their unit."""
    laptop: Callable[[LaptopData], Sequence[Cell]]
    """Function: the data -> the cells at laptop scale, the most important first."""
    paper: Callable[[], Sequence[Cell]]
    """Function that returns the cells of the published grid."""
    claims: Sequence[Claim] = ()
    published: Mapping[tuple[str, str, float | str], float] = field(default_factory=dict)
    """(table, row, column) -> the number that the paper prints."""
    quoted: Sequence[str] = ()
    """Rows of `published` that are other authors' networks, which the paper quotes."""
    log: bool = False
    """Whether the axis is logarithmic."""
    mean: bool = False
    """Whether there is a table of the means over all tables."""
    over: Sequence[Counted] = ()
    """Costs of a network that are the axes of the figure, in place of the columns."""
    scatter: tuple[str, str] | None = None
    """Two columns, the second of which is drawn over the first, with a point for each row."""
    tiles: bool = False
    """Whether the position embeddings of all networks are drawn (Figure 10)."""


def minus(scores: Scores, one: Place, other: Place) -> list[float]:
    """Return score of `one` minus score of `other`, seed by seed."""
    return [a - b for a, b in zip(scores[one], scores[other], strict=True)]


def mean_of(differences: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of several differences, seed by seed."""
    return [statistics.fmean(values) for values in zip(*differences, strict=True)]
