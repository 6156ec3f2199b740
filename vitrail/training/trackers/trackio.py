"""Trackio: in TRACKIO_DIR or its own cache folder; sent only with TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from vitrail.training.trackers.tracker import PROJECT, TrackedRun, Tracker


class Trackio(Tracker):
    """A run of Trackio. Its name holds the identifier, because Trackio tells runs apart by their names."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._trackio = trackio
        self._run = trackio.init(
            project=project,
            name=f"{run.folder.name}-{run.identifier}",
            resume="allow",
            config=run.settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.seen = f"trackio show --project {project}"

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(numbers), step=step)

    def picture(self, name: str, png: bytes, step: int) -> None:
        """See `Tracker`."""
        self._run.log({name: self._trackio.Image(Image.open(io.BytesIO(png)))}, step=step)

    def report(self, page: Path) -> None:
        """See `Tracker`."""
        self._run.log({"report": self._trackio.Html(page.read_text(encoding="utf-8"))})

    def close(self, *, finished: bool) -> None:
        """See `Tracker`."""
        self._trackio.finish()  # not self._run.finish(), which Trackio would repeat, and announce, when Python ends
