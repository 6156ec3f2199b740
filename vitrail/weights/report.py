"""`LoadReport`: what happened to every tensor on the way from a file into a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class LoadReport:
    """What happened to each tensor on the way from the file into the model, by name."""

    path: Path
    format: str = "vitrail"
    """The format the file is in: "vitrail", or a name of `vitrail.weights.formats.NAMES`."""
    loaded: list[str] = field(default_factory=list)
    """Our names of what came from the file. With a base, from either."""
    base: str = ""
    """Of a file that holds only what was tuned: how many tensors came from where."""
    resampled: dict[str, str] = field(default_factory=dict)
    """Name: what was done, such as "14 x 14 -> 24 x 24, official"."""
    reset: list[str] = field(default_factory=list)
    """Started anew, at zero: the classifier."""
    unused: dict[str, str] = field(default_factory=dict)
    """Name in the file: why it has no place in this model, such as "replaced by a new head"."""
    missing: dict[str, str] = field(default_factory=dict)
    """Our names that the file lacks: why they are zero, such as "BEiT's keys have no bias"."""
    assumptions: list[str] = field(default_factory=list)
    """What the file does not say and was taken for granted."""

    def __str__(self) -> str:
        parts = [f"loaded {len(self.loaded)} tensors from {self.path} ({self.format})"]
        parts += [f"of which {self.base}"] * bool(self.base)
        parts += [f"resampled {name} ({how})" for name, how in self.resampled.items()]
        parts += [f"reset to zero: {', '.join(self.reset)}"] * bool(self.reset)
        parts += [f"not in the file, zero: {_grouped(self.missing)}"] * bool(self.missing)
        parts += [f"left out: {_grouped(self.unused)}"] * bool(self.unused)
        parts += [f"assumed: {text}" for text in self.assumptions]
        return "; ".join(parts)


def _grouped(names: dict[str, str]) -> str:
    """Names with their reasons, each reason once: a decoder has a hundred tensors and one reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in names.items():
        by_reason.setdefault(reason, []).append(name)
    return ", ".join(f"{_few(group)} ({reason})" for reason, group in by_reason.items())


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, ... {names[-1]} ({len(names)} tensors)"
