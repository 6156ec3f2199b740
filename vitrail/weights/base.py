"""`BaseWeights`: a reference to the base model of a file that holds only the tuned part of a model.

Fine-tuning that leaves most tensors unchanged (`Run.tune`) stores only the others and refers to its base model for
the rest (follow-up paper, section 4: saves two thirds of the storage of each further model). The file holds the
absolute path of the base and the relative path from its own folder: both may move, as long as one path still leads
there. A checksum of the shared tensors makes sure that no other weights are taken for the base.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vitrail.errors import WeightsError
from vitrail.words import shown

LONGEST_PATH, LONGEST_PART = 4096, 255
"""Maximum number of bytes of a path, and of a name in it, on usual file systems."""


def _is_path(text: str) -> bool:
    """Return whether a file system can be asked for a path."""
    parts = text.encode("utf-8", "surrogatepass").split(b"/")
    return "\0" not in text and len(text) <= LONGEST_PATH and max(map(len, parts)) <= LONGEST_PART


@dataclass(frozen=True)
class BaseWeights:
    """Reference to the weights that a model was tuned from and shares tensors with."""

    source: str
    """As the user gave it: a path, or a name on the hub, with the commit that was read."""
    path: str
    """Its absolute path on the machine that tuned."""
    sha256: str
    """Checksum of names and bytes of the shared tensors (`vitrail.weights.store.checksum`)."""
    hub: bool = False
    """Whether `source` is a name on the hub, which can be downloaded again."""
    relative: str = ""
    """Path to `path` from the folder that holds the file."""
    shared: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of the tensors shared with the base. A file does not list them: they are the tensors it lacks."""

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
            raise WeightsError(f"{where} refers to its base model in an unknown way: {shown(values)}")
        for name in ("source", "path", "relative"):
            if not _is_path(values[name]):
                raise WeightsError(
                    f"{where} refers to its base model by {name} {shown(values[name])}, which is not a path"
                )
        return cls(**values)

    def places(self, folder: Path) -> list[Path]:
        """Return the paths where the base of a file in `folder` may be, the likeliest first; they need not exist."""
        found = [Path(self.path)]
        if self.relative and (beside := Path(os.path.realpath(folder / self.relative))) not in found:
            found.append(beside)
        return found

    def located(self, folder: Path) -> str:
        """Return what to load as the base of a file in `folder`: an existing path, or the name on the hub.

        The content is not compared. Raises WeightsError that lists the paths it looked at.
        """
        if self.hub:
            return self.source
        for place in self.places(folder):
            if place.exists():
                return str(place)
        raise WeightsError(self.unavailable(folder, [f"{place}: does not exist" for place in self.places(folder)]))

    def unavailable(self, where: Path, tried: list[str]) -> str:
        """Return the message if the base of the file or run `where` cannot be loaded; `tried` has a line per place."""
        looked = "".join(f"\n  {line}" for line in tried)
        return (
            f"{where} holds only the tuned part of a model, and its base model {self.source} cannot be loaded:"
            f"{looked}\n"
            "Put the weights it was tuned from, or a link to them, back in one of these places. (While the base is "
            "there, `vitrail weights convert RUN OUT` writes a complete model that needs no base.)"
        )
