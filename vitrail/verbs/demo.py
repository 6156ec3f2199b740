"""`vitrail demo`: everything, once, on data that came with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.verbs import train as training

if TYPE_CHECKING:
    from vitrail.training.checkpoints.state import Result

as_json = training.as_json


def demo(*, out: str | Path = "runs", seed: int = 0) -> Result:
    """Train a small Vision Transformer on the embedded handwritten digits, in about a minute.

    The result is the accuracy on digits that the network has never seen, and the path of report.html.

    Args:
        out: Folder in which the run folder is created.
        seed: Seed of the run.
    """
    return training.train(recipe="digits", name="demo", out=out, seed=seed)  # type: ignore[return-value]


def show(result: Result) -> str:
    """Return the result as text for a terminal."""
    return training.show(result)
