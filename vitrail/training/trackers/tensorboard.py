"""TensorBoard: event files in the run folder. They hold no report, because TensorBoard shows no pages."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from PIL import Image

from vitrail.training.trackers.tracker import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Writes events, and hides those that an earlier process wrote from the step of a resume on."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._excepthook = threading.excepthook
        threading.excepthook = partial(_show_error, self._excepthook)
        try:
            self._writer = SummaryWriter(str(run.folder), purge_step=run.step or None)  # type: ignore[no-untyped-call]
            rows = "\n".join(f"| {name} | {value} |" for name, value in run.settings.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", run.step)  # type: ignore[no-untyped-call]
        except BaseException:
            threading.excepthook = self._excepthook
            raise

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def picture(self, name: str, png: bytes, step: int) -> None:
        """See `Tracker`."""
        pixels = np.asarray(Image.open(io.BytesIO(png)))
        self._writer.add_image(name, pixels, step, dataformats="HWC")  # type: ignore[no-untyped-call]

    def close(self, *, finished: bool) -> None:
        """See `Tracker`."""
        try:
            self._writer.close()  # type: ignore[no-untyped-call]
        finally:
            threading.excepthook = self._excepthook


def _show_error(show: Callable[[threading.ExceptHookArgs], object], args: threading.ExceptHookArgs) -> None:
    """Show the error of a thread, except what TensorBoard's own thread cannot write: the next event raises it again."""
    if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
        show(args)
