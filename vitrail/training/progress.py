"""Showing how training goes: one live line on a terminal, plain lines elsewhere, numbers for the log."""

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
from vitrail.training.step import Outcome

PLAIN_EVERY = 10.0
"""Seconds between lines where there is no terminal."""
LIVE_EVERY = 0.25
NOTES = 10
"""Lines about the data at the start of a run."""
SMOOTHED = 20
"""Steps over which the line on a terminal averages, at least."""


class Window:
    """Sums over the steps since a moment."""

    def __init__(self, waited: float = 0.0) -> None:
        self._since = time.monotonic()
        self._waited = waited
        self.steps = 0
        self.count = 0
        self._sums: dict[str, float] = {}

    def add(self, outcome: Outcome) -> None:
        """Count one step."""
        self.steps += 1
        self.count += outcome.count
        for name, value in {"loss": outcome.loss * outcome.count, **outcome.metrics}.items():
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
    """What training says on stderr, and the numbers for the log.

    Used as a context; `total` is the number of optimiser steps planned, `images` the images per step over all
    processes. Only the main process prints: a live line on a terminal, and a plain line every ten seconds
    elsewhere.
    """

    def __init__(self, total: int, images: int, device: torch.device) -> None:
        self.total = total
        self.images = images
        self.device = device
        self.step = 0
        self.console = Console(stderr=True, highlight=False)
        self.quiet = logging.getLogger("vitrail").level > logging.INFO  # --quiet: warnings alone
        self._live: Live | None = None
        self._shown = time.monotonic()
        self._energy = EnergyMeter(gpu_powers(device, everyone=world.size() > 1))
        self._lr = self._waited = 0.0
        self._left: float | None = None
        self._logged: Window
        self._visible: Window
        self.reset()

    def __enter__(self) -> Progress:
        if world.is_main() and self.console.is_terminal and not self.quiet:
            self._live = Live(console=self.console, transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, outcome: Outcome, lr: float, waited: float, left: float | None) -> None:
        """Count one finished step, and show a line if it is time.

        waited: seconds the loop has waited for data since the start; left: seconds that a time limit leaves.
        """
        self.step, self._lr, self._waited, self._left = step, lr, waited, left
        self._logged.add(outcome)
        self._visible.add(outcome)
        self._energy.sample()
        now = time.monotonic()
        if now - self._shown > (LIVE_EVERY if self._live else PLAIN_EVERY):
            self._show(self.line())
            self._shown = now
            if self._visible.steps >= SMOOTHED:
                self._visible = Window(waited)

    def numbers(self) -> dict[str, float]:
        """Return what happened since the last call: loss, metrics, lr, images per second, share waiting, memory.

        Joules too, where the machine tells; an evaluation's are among them.
        """
        window, self._logged = self._logged, Window(self._waited)
        gib = {"memory_gib": round(memory_in_use(self.device) / 2**30, 3)}
        return {**window.means(), "lr": self._lr, **window.rates(self._waited), **gib, **self._energy.numbers()}

    def reset(self) -> None:
        """Leave out of the rates what was not training: an evaluation."""
        self._logged = Window(self._waited)
        self._visible = Window(self._waited)

    def line(self) -> str:
        """Return the line that is shown."""
        means, rates = self._visible.means(), self._visible.rates(self._waited)
        speed = rates["images_per_second"]
        left = (self.total - self.step) * self.images / speed if speed else 0.0
        left = left if self._left is None else min(left, self._left)
        metrics = "".join(f"  {name} {value:.1%}" for name, value in means.items() if name != "loss")
        return (
            f"step {self.step}/{self.total}  loss {means['loss']:.4f}{metrics}  lr {self._lr:.2e}  "
            f"{speed:.0f} images/s  {clock(left)} left  {memory_in_use(self.device) / 2**30:.1f} GiB  "
            f"waiting {rates['waiting']:.0%}"
        )

    def announce(self, folder: Path, decisions: dict[str, str], notes: Sequence[str] = ()) -> None:
        """Say where the run goes, what was found in its data, and what was decided for it."""
        self.say(f"run folder: {folder}")
        for note in notes[:NOTES]:
            self.say(note)
        if len(notes) > NOTES:
            self.say(f"... and {len(notes) - NOTES:,} more, all in {folder / 'run.json'}")
        for name, decision in decisions.items():
            self.say(f"  {name}: {decision}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if world.is_main() and (not self.quiet or text.startswith("warning")):
            self.console.print(Text(text), soft_wrap=True)

    def _show(self, text: str) -> None:
        if self._live is not None:
            self._live.update(Text(text), refresh=True)
        else:
            self.say(text)


def clock(seconds: float) -> str:
    """Write a time span: "42 s", "3:05" (minutes), "2:03:05" (hours)."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
