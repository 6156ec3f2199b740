"""PyTorch's exported programs, which run without the source code of vitrail: `torch.export.load(path)`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.exports.kinds import CARD, Opened
from vitrail.files import json_text

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def write(traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Write `path`, with `about` as JSON in it."""
    traced.example_inputs = None  # torch would write them as a pickle
    buffer = io.BytesIO()  # torch's file writer ends the process if the disk is full
    torch.export.save(traced, buffer, extra_files={CARD: json_text(about)})
    path.write_bytes(buffer.getbuffer())


def read(path: Path, device: str = "cpu") -> Opened:
    """Open `path`, a file from a trusted origin: torch may run code that it finds in the file."""
    extra_files = {CARD: "{}"}
    module = torch.export.load(path, extra_files=extra_files).module()

    def run(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(images)).numpy()

    return Opened(run, json.loads(extra_files[CARD]))
