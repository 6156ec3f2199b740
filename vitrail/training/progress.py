"""The progress of a run on stderr, and its numbers for the log: loss, speed, memory and the share of waiting."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from vitrail import world
from vitrail.costs.energy import EnergyMeter, gpu_powers
from vitrail.device import memory_in_use
from vitrail.training.checkpoints.state import RunStatus
from vitrail.training.step import FinishedStep
from vitrail.words import time_span

PLAIN_EVERY = 10.0
"""Seconds between two lines without a terminal."""
LIVE_EVERY = 0.25
"""Seconds between two updates of the line on a terminal."""
NOTES = 10
"""Largest number of lines about the data at the start of a run."""
SMOOTHED = 20
"""Smallest number of steps over which the line on a terminal averages."""


class Window:
    """Sums over the steps since a moment, at which the loop had waited `waited` seconds for data."""

    def __init__(self, waited: float) -> None:
        self._since = time.monotonic()
        self._waited = waited
        self.steps = 0
        self.count = 0
        self._sums: dict[str, float] = {}

    def add(self, done: FinishedStep) -> None:
        """Count one step."""
        self.steps += 1
        self.count += done.sums.count
        for name, value in {"loss": done.sums.loss * done.sums.count, **done.sums.metrics}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Return loss and metrics, each the mean over the images."""
        return {name: value / max(self.count, 1) for name, value in self._sums.items()}

    def rates(self, waited: float) -> dict[str, float]:
        """Return images per second and the share of time spent waiting for data."""
        seconds = max(time.monotonic() - self._since, 1e-9)
        share = min(max((waited - self._waited) / seconds, 0.0), 1.0)
        return {"images_per_second": round(self.count / seconds, 2), "waiting": round(share, 4)}


class Progress:
    """Context that shows progress on stderr and returns the numbers for the log.

    images: number of images per step over all processes. Only the main process prints: one live line on a terminal,
    otherwise a line every ten seconds.
    """

    def __init__(self, images: int, device: torch.device) -> None:
        self.images = images
        self.device = device
        self.console = Console(stderr=True, highlight=False)
        self.quiet = logging.getLogger("vitrail").level > logging.INFO  # --quiet: only warnings
        self._live: Live | None = None
        self._shown = time.monotonic()
        self._energy = EnergyMeter(gpu_powers(device, everyone=world.size() > 1))
        self._step = self._skipped = 0
        self._rate = self._waited = 0.0
        self._left: float | None = None
        self._expected: int | None = None
        self._logged, self._visible = Window(0.0), Window(0.0)

    def __enter__(self) -> Progress:
        if world.is_main() and self.console.is_terminal and not self.quiet:
            self._live = Live(console=self.console, transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(
        self, done: FinishedStep, status: RunStatus, waited: float, left: float | None, expected: int | None
    ) -> None:
        """Count one finished step, and show a line if it is time.

        waited: seconds the loop has waited for data since the start; left: seconds that a time limit leaves; expected:
        number of steps of the whole run, an estimate with a time limit; None if it is not known.
        """
        self._expected = expected
        self._step, self._rate, self._skipped = done.step + 1, done.rate, status.skipped
        self._waited, self._left = waited, left
        self._logged.add(done)
        self._visible.add(done)
        self._energy.sample()
        now = time.monotonic()
        if now - self._shown <= (LIVE_EVERY if self._live else PLAIN_EVERY):
            return
        if self._live is not None:
            self._live.update(Text(self.line(self.console.width)), refresh=True)
        else:
            self.say(self.line())
        self._shown = now
        if self._visible.steps >= SMOOTHED:
            self._visible = Window(waited)

    def numbers(self) -> dict[str, float]:
        """Return the numbers since the last call: loss, metrics, lr, images per second, share of waiting, memory.

        If the machine measures energy, it is in joules and includes evaluations.
        """
        window, self._logged = self._logged, Window(self._waited)
        gib = {"memory_gib": round(self._memory_gib(), 3)}
        return {**window.means(), "lr": self._rate, **window.rates(self._waited), **gib, **self._energy.numbers()}

    def reset(self) -> None:
        """Leave the time up to now out of the rates, because it was an evaluation."""
        self._logged = Window(self._waited)
        self._visible = Window(self._waited)

    def line(self, width: int | None = None) -> str:
        """Return the line that is shown, without what does not fit into a terminal of this width."""
        means, rates = self._visible.means(), self._visible.rates(self._waited)
        speed = rates["images_per_second"]
        left, of = self._left, ""
        if left is None:
            assert self._expected is not None
            left = (self._expected - self._step) * self.images / speed if speed else 0.0
            of = f"/{self._expected}"
        elif self._expected is not None:
            of = f" of about {self._expected}"
        metrics = "".join(
            f"  {name} {value:.4f}" if name.endswith((" loss", ".loss")) else f"  {name} {value:.1%}"
            for name, value in means.items()
            if name != "loss"
        )
        skipped = f"  {self._skipped} updates skipped" if self._skipped else ""
        spare = (f"  lr {self._rate:.2e}", f"  {self._memory_gib():.1f} GiB", f"  waiting {rates['waiting']:.0%}")
        for kept in range(len(spare), -1, -1):
            rate, memory, waiting = (*spare[:kept], "", "", "")[:3]
            line = (
                f"step {self._step}{of}  loss {means['loss']:.4f}{metrics}{rate}  {speed:.0f} images/s  "
                f"{time_span(left)} left{memory}{waiting}{skipped}"
            )
            if width is None or len(line) < width:
                break
        return line

    def announce(self, folder: Path, decisions: dict[str, str], notes: Sequence[str]) -> None:
        """Print the run folder, the notes about the data, and the decisions."""
        self.say(f"run folder: {folder}")
        for note in notes[:NOTES]:
            self.say(note)
        if len(notes) > NOTES:
            self.say(f"... and {len(notes) - NOTES:,} more, all in {folder / 'run.json'}")
        for name, decision in decisions.items():
            self.say(f"  {name}: {decision}")

    def say(self, text: str) -> None:
        """Print a line that stays; with --quiet only a warning."""
        if world.is_main() and (not self.quiet or text.startswith("warning")):
            self.console.print(Text(text), soft_wrap=True)

    def _memory_gib(self) -> float:
        return memory_in_use(self.device) / 2**30
