"""What the open settings of a run depend on: its images, their labels, the weights to start from, and the machine."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from vitrail import world
from vitrail.data.images.bands import HeaderFacts, layouts, measure_bands
from vitrail.data.item import IndexedSource
from vitrail.data.labels.sets import Labels
from vitrail.data.loading.processes import obstacle
from vitrail.data.settings import Bands, Bits
from vitrail.device import (
    ComputePrecision,
    available_cores,
    choose_device,
    compute_precision,
    fast_bf16,
    free_memory,
    usable_cores,
)
from vitrail.training.run import Run
from vitrail.weights.card import Card
from vitrail.weights.load import read_card

log = logging.getLogger("vitrail")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Facts:
    """Everything besides the run itself that `vitrail.training.decide.decide` depends on."""

    images: int
    """Number of training images."""
    class_names: list[str]
    """Names of the classes, or of the targets if labels are numbers."""
    labels: Labels
    """Labels of the training images."""
    layouts: Sequence[HeaderFacts]
    """What the headers of a sample of the training images say; empty if none can be opened."""
    statistics: Callable[[int, Bits], tuple[Bands, str]]
    """Measures mean and deviation of this number of bands, with these bits, on training images. The text says on how
    many. Only images with other bands than 8-bit RGB need it."""
    start: str | None = None
    """The weights to build from: `Run.weights`, or their replacement (`checkpoints.state.starting_weights`)."""
    card: Card | None = None
    """Card of these weights."""
    model: nn.Module | None = None
    """The network to train, if there is one already."""
    device: torch.device = CPU
    precision: ComputePrecision = "float32"
    """That which is asked for, or else fast on the device."""
    cores: int = 1
    """Processor cores for this process, a share of those that it has in common with others of the run."""
    obstacle: Callable[[], str] = str
    """Says why no other process can read the images; "" if it can."""
    memory: int = 0
    """Free bytes of main memory."""
    processes: int = 1

    @classmethod
    def of(
        cls,
        run: Run,
        train: IndexedSource,
        class_names: list[str],
        start: str | None = None,
        model: nn.Module | None = None,
    ) -> Facts:
        """Return the facts about `run` with these training images. Raises UsageError, DataError and WeightsError.

        start: See the field; None for `run.weights`.
        """
        start = start or run.weights
        card = None if start is None else read_card(start)
        bands = None if card is None else card.preprocess.bands
        device = choose_device(run.device)
        if run.precision == "bf16" and device == CPU and not fast_bf16(device):
            log.warning("this cpu lacks fast bfloat16: --precision float32 is many times faster")
        return cls(
            images=len(train),
            class_names=list(class_names),
            labels=train.labels,
            layouts=layouts(train, run.data.channels or (None if bands is None else bands.channels)),
            statistics=partial(measure_bands, train),
            start=start,
            card=card,
            model=model,
            device=device,
            precision=compute_precision(device, run.precision),
            cores=max(1, available_cores() // _sharing_cores()),
            memory=free_memory(CPU),
            processes=world.size(),
            obstacle=partial(obstacle, train, run.augment),
        )

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Height and width in pixels of the sample of training images."""
        return [(one.height, one.width) for one in self.layouts]


def _sharing_cores() -> int:
    """Return the number of processes of the run, this one included, that may use cores of this one."""
    every = world.gather((platform.node(), usable_cores()))
    host, ours = every[world.rank()]
    return sum(host == theirs and bool(ours & cores) for theirs, cores in every)
