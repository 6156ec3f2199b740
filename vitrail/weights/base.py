"""`BaseWeights`: where the rest of a model is of which only the tuned part was stored, and how to know it again.

Fine-tuning that leaves most tensors as they were (`Run.tune`) stores the others, and for the rest says where it came
from (follow-up paper, section 4: two thirds of the storage saved for each further model). The file holds the absolute
place of the base and the way to it from its own folder, so that either may move as long as one of them still leads
there, and a checksum over the shared tensors, so that other weights in that place are never taken for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vitrail.errors import WeightsError


@dataclass(frozen=True)
class BaseWeights:
    """The weights that a partly stored model shares tensors with."""

    source: str
    """As it was asked for: a path, or a name on the hub, with the commit that was read."""
    path: str
    """Its absolute place on the machine that tuned."""
    sha256: str
    """Over names and bytes of the shared tensors (`vitrail.weights.store.checksum`)."""
    hub: bool = False
    """Is `source` a name on the hub, which can be downloaded again?"""
    relative: str = ""
    """The way to `path` from the folder this is written in."""
    shared: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of the tensors that are as in the base; a file does not list them: they are those it lacks."""

    def written_in(self, folder: Path) -> dict[str, Any]:
        """Return the JSON values for a file in `folder`."""
        relative = "" if self.hub else os.path.relpath(os.path.realpath(self.path), os.path.realpath(folder))
        there = replace(self, relative=relative)
        return {item.name: getattr(there, item.name) for item in fields(BaseWeights) if item.name != "shared"}

    @classmethod
    def read(cls, values: Any, where: Path | str) -> BaseWeights:
        """Return what `written_in` wrote. Raises WeightsError, naming `where`, for anything else."""
        types = {"source": str, "path": str, "sha256": str, "hub": bool, "relative": str}
        known = isinstance(values, Mapping) and values.keys() == types.keys()
        if not known or any(not isinstance(values[name], kind) for name, kind in types.items()):
            raise WeightsError(f"{where} says in no known way where the rest of its weights is: {values!r}")
        return cls(**values)

    def places(self, folder: Path) -> list[Path]:
        """Return where to look for the base of a file in `folder`, the likeliest first, whether it is there or not."""
        found = [Path(self.path)]
        if self.relative and (beside := Path(os.path.realpath(folder / self.relative))) not in found:
            found.append(beside)
        return found

    def located(self, folder: Path) -> str:
        """Return what to load as the base of a file in `folder`: a place that is there, or the name on the hub.

        What is there is not compared. Raises WeightsError, saying where it was looked for.
        """
        if self.hub:
            return self.source
        for place in self.places(folder):
            if place.exists():
                return str(place)
        raise WeightsError(self.unavailable(folder, [f"{place}: nothing there" for place in self.places(folder)]))

    def unavailable(self, where: Path, tried: list[str]) -> str:
        """Return the message for a base that cannot be had for the file or run `where`; `tried` says why, by place."""
        looked = "".join(f"\n  {line}" for line in tried)
        return (
            f"{where} holds only the tuned part of a model, and the rest cannot be had from {self.source}:{looked}\n"
            "Put the weights it was tuned from back in one of these places; a link to them will do. (While a base is "
            "there, `vitrail weights convert RUN OUT` makes a model that needs none.)"
        )
