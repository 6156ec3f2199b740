"""The seconds that a run needs before its first step and after its last one, so that a time limit holds for all of it.

A time limit counts from the start of the command to its end: reading the data, every decision, training, evaluations,
the test images and the report. What comes before the first step is measured. What comes after the last step is
predicted: images by the newest evaluation of this run, or else by its steps, and the rest by the share of a core that
this process gets at the moment, because other programs may keep the machine busy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from vitrail.device import core_share
from vitrail.tasks.catalog import task_for
from vitrail.training.assemble import Setup
from vitrail.training.validation.floor import FEWEST, MOST, allowed

SAVING = 0.6
"""Seconds of a core that writing, reading and signing a small network takes after the last step."""
REPORTING = 2.4
"""Seconds of a core that report.html takes, apart from its images."""
LEAVING = 1.2
"""Seconds of a core that Python takes to leave, with torch and matplotlib. All three were measured on an EPYC core of
2.6 GHz."""
FLOOR = 2e-3
"""Seconds of a core for each image of the linear classifier that the network is compared with. With all its images it
takes 2.5 to 7.5 s on sets of 600 to 3,800 photographs."""
PICTURED = 24
"""Number of images in the report whose attention is drawn."""
FORWARD = 1 / 3
"""Work for an evaluated image as a share of the work for a training image."""
WINDOW = 5.0
"""Seconds over which the share of a core is measured."""
SMALLEST = 0.05
"""Smallest share of a core that is believed."""


@dataclass
class Ending:
    """Predicts the seconds after the last step."""

    validation: int
    """Number of validation images."""
    test: int
    """Number of test images; 0 if they are not evaluated."""
    calibrated: bool
    """Whether the validation images are evaluated once more, to calibrate the network."""
    reported: bool
    """Whether a report is written."""
    floor: int = 0
    """Number of images of the linear classifier that the network is compared with."""
    _evaluated: float | None = None
    """Seconds per image of the newest evaluation."""
    _share: float = field(default_factory=core_share)
    _since: tuple[float, float, float] | None = None
    """Time, time of a core, and seconds of waiting for data at the beginning of the newest window."""

    def evaluation(self, seconds: float) -> None:
        """Take in the seconds of an evaluation on the validation images."""
        if self.validation:
            self._evaluated = seconds / self.validation

    def step(self, waited: float) -> None:
        """Measure the share of a core that the steps of this thread get; `waited`: its seconds of waiting for data."""
        now = (time.monotonic(), time.thread_time(), waited)
        if self._since is None:
            self._since = now
        passed, computed, waiting = (new - old for new, old in zip(now, self._since, strict=True))
        if passed < WINDOW:
            return
        # where this thread waits for others that compute, too, its own time says little
        share = core_share() if torch.get_num_threads() > 1 else computed / max(passed - waiting, computed)
        self._share = (self._share + max(share, SMALLEST)) / 2
        self._since = now

    def seconds(self, image: float, training: float) -> float:
        """Return the seconds from the last step to the end; `image` is those of a training image.

        training: Seconds of the whole training, of which the linear classifier takes its share at most.
        """
        evaluated = self._evaluated or FORWARD * image
        images = (1 + self.calibrated) * self.validation + self.test
        alone = SAVING + (REPORTING + LEAVING) * self.reported
        pictured = min(PICTURED, self.validation) * image * self.reported
        return images * evaluated + pictured + self._floor(training) + alone / self._share

    def _floor(self, training: float) -> float:
        """Return the seconds of the linear classifier, which is left out if there is time for too few images."""
        most, measured = allowed(training), self.test or self.validation
        fewest = min(self.floor, FEWEST + measured) * FLOOR / self._share
        return 0.0 if most < fewest else min(most, self.floor * FLOOR / self._share)


def ending_of(setup: Setup, reported: bool) -> Ending:
    """Return what predicts the end of a run."""
    run, splits, validation = setup.run, setup.splits, setup.validation
    count = 0 if splits.validation is None else len(splits.validation)
    tested = len(splits.test) if splits.test is not None and validation.tests(splits) else 0
    single = run.supervised and task_for(splits.train.labels).name == "classes"
    floor = single * (min(len(splits.train), MOST) + (tested or count))
    share = 1.0 if run.time_limit is None else core_share()  # measuring it takes time
    return Ending(count, tested, run.calibrate and run.supervised, reported, floor, _share=share)
