"""A program on another machine: its first outputs are compared with those that it had where it was exported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.device import processor
from vitrail.errors import ExportError
from vitrail.exports.kinds import CARD, KINDS, RunProgram
from vitrail.exports.parity import TOLERANCES
from vitrail.files import read_json_object
from vitrail.weights.card import Card
from vitrail.weights.reference import fixed_input, relative_error

OUTPUTS = 1_000
"""Maximum number of outputs that are compared."""


@dataclass(frozen=True)
class Origin:
    """Where a program was exported, and what it computed there for a fixed image."""

    processor: str
    runtime: str
    """Name and version of the runtime."""
    outputs: list[float]
    """Its first outputs for `vitrail.weights.reference.fixed_pixels`."""


def origin_here(run: RunProgram, to: str, card: Card) -> Origin:
    """Return this machine and what a program computes on it."""
    return Origin(processor(), _runtime(to), _outputs(run, card).tolist())


def check_here(path: Path, run: RunProgram, to: str, card: Card) -> None:
    """Run a program once if it was exported on another processor or for another version of its runtime.

    Raises ExportError if its outputs differ from those that it had there by more than its parity check allows. A
    program without the card that was written beside it is not checked.
    """
    if not (beside := path.parent / CARD).is_file():
        return
    about: dict[str, Any] = read_json_object(beside, ExportError)
    if "origin" not in about:
        return
    try:
        there, allowed = Origin(**about["origin"]), TOLERANCES[about["program"]["precision"]]
        expected = torch.tensor(there.outputs, dtype=torch.float32)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ExportError(f"{beside} has no usable origin of the program. Export the model again") from error
    if (there.processor, there.runtime) == (here := (processor(), _runtime(to))):
        return
    difference = relative_error(torch.from_numpy(_outputs(run, card)), expected)
    if not difference <= allowed:
        raise ExportError(
            f"{path} computes something else on this machine: the largest difference, relative to the largest output, "
            f"is {difference:.1e} (allowed {allowed:g}). It was exported on {there.processor} with {there.runtime}, "
            f"and this is {here[0]} with {here[1]}. Export the model again here (vitrail export)."
        )


def _outputs(run: RunProgram, card: Card) -> np.ndarray:
    image = fixed_input(card, *card.preprocess.image_size).transpose(2, 0, 1)
    return run(np.ascontiguousarray(image[None]))[0, :OUTPUTS]


def _runtime(to: str) -> str:
    name = KINDS[to].packages[-1]
    return f"{name} {version(name)}"
