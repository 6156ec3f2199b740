"""MLflow: in MLFLOW_TRACKING_URI, or else in its own default place, a file in the working directory."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from vitrail.training.trackers.tracker import PROJECT, TrackedRun, Tracker

DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # a server that does not answer must not hold the run up for the minutes that are MLflow's own defaults
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
"""Variables of MLflow's that are set unless the user has set them."""
AT_ONCE = 100
"""Maximum number of settings that MLflow takes in one request."""
LONGEST = 500
"""Maximum length of a setting in characters, for all versions."""
FORBIDDEN = re.compile(r"[^\w\-./ ]")
"""Characters that no name in MLflow may have."""


class MLflow(Tracker):
    """A run of MLflow: metrics, parameters, and artifacts for pictures and the report."""

    seen = "mlflow ui"

    def __init__(self, run: TrackedRun) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        self._id, found = self._find(run)
        settings = [Param(name, str(value)[:LONGEST]) for name, value in run.settings.items()]
        for first in range(0, 0 if found else len(settings), AT_ONCE):  # what is set cannot be changed
            self._client.log_batch(self._id, params=settings[first : first + AT_ONCE])

    def _find(self, run: TrackedRun) -> tuple[str, bool]:
        """Return the identifier of the run in MLflow, and whether it was there already."""
        name, tag = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), "vitrail.run"
        known: Any = self._client.get_experiment_by_name(name)
        experiment: str = self._client.create_experiment(name) if known is None else known.experiment_id
        if runs := self._client.search_runs([experiment], f"tags.`{tag}` = '{run.identifier}'", max_results=1):
            self._client.update_run(runs[0].info.run_id, status="RUNNING")
            return runs[0].info.run_id, True
        made = self._client.create_run(experiment, run_name=run.folder.name, tags={tag: run.identifier})
        return made.info.run_id, False

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        now = int(time.time() * 1000)
        metrics = [self._metric(FORBIDDEN.sub("_", name), float(value), now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def picture(self, name: str, png: bytes, step: int) -> None:
        """See `Tracker`. A later picture takes the place of an earlier one."""
        self._client.log_image(self._id, Image.open(io.BytesIO(png)), f"pictures/{name}.png")

    def report(self, page: Path) -> None:
        """See `Tracker`."""
        self._client.log_artifact(self._id, str(page))

    def close(self, *, finished: bool) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")
