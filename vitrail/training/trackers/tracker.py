"""`Tracker`: what shows a run besides its folder. Each file beside this one is one tracker.

A tracker may raise any exception, anywhere: `vitrail.training.trackers.trackers` drops it with a warning, and the run
continues. None of them uses the network unless the user's environment names a server.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.config import dotted, plain
from vitrail.training.run import Run

PROJECT = "vitrail"
"""Name of the project, or experiment, in which a tracker keeps the runs."""
CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@|(?<=\?)\S+")
"""User and password of a web address, and what follows its question mark, where signatures and tokens stand."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker learns about a run when it starts."""

    folder: Path
    identifier: str
    """Differs between any two runs, and stays when a run is resumed."""
    settings: dict[str, Any]
    """Dotted name -> value, without credentials: {"optim.lr": 0.001}."""
    step: int = 0
    """Step at which the run starts or resumes."""

    @classmethod
    def of(cls, run: Run, folder: Path, facts: Mapping[str, Any], step: int) -> TrackedRun:
        """Return what trackers learn about `run`, whose run.json says `facts`."""
        origin = [facts.get(name) for name in ("name", "started", "directory", "command", "machine")]
        identifier = hashlib.sha256(json.dumps(origin, sort_keys=True, default=str).encode()).hexdigest()[:12]
        return cls(folder, identifier, {name: _shown(value) for name, value in dotted(plain(run))}, step)


class Tracker(ABC):
    """Shows one run. It is made with a `TrackedRun`, and gets what the run folder gets, as it is written."""

    seen: str = ""
    """How a person sees the run, as a sentence; "" if everybody knows."""

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Start, or find the run again that was started before a resume."""

    @abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Show numbers by name, such as "train/loss", after `step` optimiser steps."""

    @abstractmethod
    def picture(self, name: str, png: bytes, step: int) -> None:
        """Show a picture."""

    def report(self, page: Path) -> None:  # noqa: B027  # optional
        """Show the report, an HTML page, once it is written."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Send what is pending and close. finished: Whether the run ended by itself, not by a signal or an error."""


def without_credentials(text: str) -> str:
    """Return a text in which the credentials of web addresses are replaced by three stars."""
    return CREDENTIALS.sub("***", text) if "://" in text else text


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_shown(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value
