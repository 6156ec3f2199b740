"""`vitrail weights verify`: do these weights still compute what they did, and what their origin's library does?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.errors import WeightsError
from vitrail.weights.libraries import PACKAGES, our_layers, their_layers
from vitrail.weights.load import load, local
from vitrail.weights.reference import IMAGE, TOLERANCE, differences, fixed_images, outputs, relative_error


@dataclass(frozen=True)
class Verification:
    """What a model was compared with, and the largest relative error of each comparison."""

    path: Path
    format: str
    reference: dict[str, float] | None
    """Against the outputs that the card keeps, by output; None where it keeps none."""
    library: str | None
    """The package that ran the same weights, with its version; None where none did."""
    layers: dict[str, float] = field(default_factory=dict)
    """Against that library: every block's output, then the network's."""
    notes: list[str] = field(default_factory=list)
    """Why something was not compared."""
    tolerance: float = TOLERANCE

    @property
    def compared(self) -> bool:
        """Was there anything to compare with?"""
        return self.reference is not None or self.library is not None

    @property
    def worst(self) -> float:
        """The largest of all relative errors."""
        return max([*(self.reference or {}).values(), *self.layers.values()], default=0.0)

    @property
    def passed(self) -> bool:
        """Are all relative errors within the tolerance? Never where nothing was compared."""
        return self.compared and math.isfinite(self.worst) and self.worst <= self.tolerance


def verify(source: Path | str) -> Verification:
    """Run a fixed image through a model (any that `load` takes) and compare features and logits with the vector its
    card keeps, and with the library the weights come from, layer by layer, where that is installed.

    Raises WeightsError where the weights cannot be loaded; what cannot be compared is in `notes`.
    """
    path = local(source)
    model: Any = load(path)
    card, format = model.card, model.load_report.format
    notes: list[str] = []
    kept = None
    if not card.reference:
        notes.append("the card keeps no reference vector: vitrail.save and `vitrail weights convert` write one")
    elif card.reference.get("image") != IMAGE:
        notes.append(f"the reference vector is of another image, {card.reference.get('image')!r}: save the model again")
    else:
        kept = _against_card(outputs(model), card.reference, path)
    origin = _origin(card.provenance.get("origin"), card.source)
    images = fixed_images(model.config)
    library, layers = None, {}
    try:
        theirs = their_layers(path, origin, model, images)
        ours = our_layers(model, images)
        layers = {name: relative_error(ours[name], tensor) for name, tensor in theirs.items() if name in ours}
        library = _versioned(PACKAGES[origin])
    except WeightsError as error:
        notes.append(f"not compared with another library: {error}")
    return Verification(path, format, kept, library, layers, notes)


def _against_card(found: Mapping[str, Any], kept: Mapping[str, Any], path: Path) -> dict[str, float]:
    try:
        return differences(found, kept)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"{path}: the reference vector in the card is damaged ({error!r})") from error


def _origin(recorded: object, source: str) -> str:
    """The format the weights were first in."""
    name = recorded.get("format") if isinstance(recorded, Mapping) else None
    return str(name or source)


def _versioned(package: str) -> str:
    from importlib.metadata import version

    return f"{package} {version(package)}"
