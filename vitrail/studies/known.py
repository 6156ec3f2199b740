"""Numbers of earlier studies, which are not measured again although their networks are gone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.config import plain
from vitrail.errors import DataError, UsageError
from vitrail.files import read_json_object
from vitrail.studies.measure import DRAWS, SHOTS, Probes
from vitrail.studies.study import Cell, Stage, at_rate
from vitrail.studies.table import CellResult
from vitrail.studies.training import Training
from vitrail.transfer.trial import ELSEWHERE


@dataclass(frozen=True)
class EarlierNumbers:
    """The numbers of studies, from their .json files."""

    cells: Mapping[str, Mapping[str, Any]]
    """`number_key` -> the cell as `vitrail.studies.table.CellResult.as_json` writes it."""

    @classmethod
    def read(cls, paths: Iterable[str]) -> EarlierNumbers:
        """Return the numbers of these files. Raises UsageError for a file that is not of a study."""
        found: dict[str, Mapping[str, Any]] = {}
        for path in paths:
            try:
                cells = read_json_object(Path(path), UsageError)["cells"]
                found |= {one["key"]: one for one in cells if one.get("key") and one["score"] is not None}
            except (KeyError, TypeError, AttributeError) as error:
                raise UsageError(f"{path} is not the .json file that `vitrail study` writes") from error
        return cls(found)

    def result(self, cell: Cell, seed: int, key: str) -> CellResult:
        """Return the number with this key as that of a cell of today's grid."""
        one = self.cells[key]
        return CellResult(cell, seed, one["score"], "", one["run"], one["rate"], one["seconds"], key)


def number_key(cell: Cell, seed: int, training: Training) -> str:
    """Return a hash of what decides the number of a cell: the settings of all its trainings, its images and its seed.

    Empty if the data are absent, or if the learning rate would not tell which of its trainings counts.
    """
    if len({stage.run.optim.lr for stage in cell.tried}) < len(cell.tried):
        return ""
    runs = [stage.run for tried in cell.tried for stage in tried.chain()]
    try:
        images = [training.fingerprint(replace(run, seed=seed)) for run in runs]
        if cell.metric not in ("top-1", "stored"):
            images.append(Probes(training.sets[seed], cell.on).fingerprint)
    except DataError:
        return ""
    settings = [{name: value for name, value in plain(run).items() if name not in ELSEWHERE} for run in runs]
    measured = [seed, cell.metric, cell.best, SHOTS, DRAWS]
    text = json.dumps([measured, settings, images], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def stages_of(result: CellResult) -> list[Stage]:
    """Return the training that a known number was measured of, then the others that its cell tries."""
    cell = result.cell
    best = cell.stage if result.rate is None else at_rate(cell.stage, result.rate)
    return [best, *(stage for stage in cell.tried if stage != best)]
