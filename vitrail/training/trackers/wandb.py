"""Weights & Biases. Files in WANDB_DIR or ./wandb, for `wandb sync`; with WANDB_MODE=online it sends them itself."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from vitrail.training.trackers.tracker import PROJECT, TrackedRun, Tracker

PATIENCE = 60
"""Seconds that a start, a login and an end may take; what has not been sent by then stays on the disk."""


class WandB(Tracker):
    """A run of W&B with its numbers over "step". It holds nothing about the machine, the code or its repository."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which would use the network; read at the import
        import wandb

        self._wandb, mode = wandb, os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            id=run.identifier,
            dir=os.environ.get("WANDB_DIR") or os.getcwd(),  # W&B itself stays where the process first used it
            resume="allow" if mode == "online" else None,  # offline, `wandb sync` joins files of the same identifier
            reinit="create_new",
            config=run.settings,
            settings=wandb.Settings(
                mode=mode,  # type: ignore[arg-type]
                silent=True,
                console="off",
                init_timeout=PATIENCE,
                login_timeout=PATIENCE,
                finish_timeout=PATIENCE,
                finish_timeout_raises=True,
                disable_git=True,  # the address of a repository may hold a token
                disable_code=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        # steps of its own may not go back, which those of a resumed run do
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        files = Path(self._run.dir).parent
        self.seen = f"upload it with wandb sync {files}" if self._run.offline else str(self._run.url)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log({**numbers, "step": step})

    def picture(self, name: str, png: bytes, step: int) -> None:
        """See `Tracker`."""
        self._run.log({name: self._wandb.Image(Image.open(io.BytesIO(png))), "step": step})

    def report(self, page: Path) -> None:
        """See `Tracker`."""
        self._run.log({"report": self._wandb.Html(str(page), inject=False)})

    def close(self, *, finished: bool) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=0 if finished else 1)
