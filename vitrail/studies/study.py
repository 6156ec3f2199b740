"""A study: networks to train, the numbers that are measured of each, and the claims that these numbers decide.

A study is the grid behind one table or figure of the papers, at two scales. `laptop` fits into about an hour on two
cores and needs any folder of images. `paper` is the published grid, on the data of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vitrail.studies.claims import Claim, Column
from vitrail.training.run import Run

Scale = Literal["laptop", "paper"]
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
Published = Mapping[tuple[str, str, Column], float]
"""(table, row, column) -> the number that a paper prints."""


@dataclass(frozen=True)
class LaptopData:
    """The data on which the grids at laptop scale depend."""

    images: int = 39_200
    """Number of images to pre-train on, without those that are held out; that of 80 classes of CIFAR-100."""
    sets: Sequence[str] = ("down",)
    """Names of the data sets that networks are transferred to."""


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
    at: Column
    """Its place on the axis, one column of the table."""
    stage: Stage
    """The training whose network is measured."""
    others: Sequence[Stage] = ()
    """Trainings that are tried too. The one that is best on the images held out of training counts; the first seed
    chooses it for all seeds. If it diverges with another seed, the next best counts there."""
    metric: MetricName = "5-shot"
    what: str = ""
    """The table that it belongs to, such as the data set that it is measured on (default: the metric)."""
    on: str = "down"
    """Data set on which features are measured: "down", which is ImageNet at the paper's scale, or one that is given."""
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


def with_data(run: Run, **changes: Any) -> Run:
    """Return a run with changes of its section `data`."""
    return replace(run, data=replace(run.data, **changes))


def at_rate(stage: Stage, rate: float) -> Stage:
    """Return the same training at another learning rate."""
    return replace(stage, run=replace(stage.run, optim=replace(stage.run.optim, lr=rate)))


def best_of(
    row: str, at: Column, tried: Iterable[Stage], what: str = "", metric: Trained = "top-1", on: str = "down"
) -> Cell:
    """Return the cell of several trainings, of which the best one on held-out images counts."""
    first, *others = tried
    return Cell(row, at, first, others, metric, what, on)


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
    laptop: Callable[[LaptopData], Iterable[Cell]]
    """Function: the data -> the cells at laptop scale, the most important first."""
    paper: Callable[[], Iterable[Cell]]
    """Function that returns the cells of the published grid."""
    claims: Sequence[Claim] = ()
    published: Published = field(default_factory=dict)
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

    def cells(self, scale: Scale, given: LaptopData | None = None) -> list[Cell]:
        """Return the cells of the grid at a scale; at laptop scale, of the data that are given."""
        return list(self.paper() if scale == "paper" else self.laptop(given or LaptopData()))
