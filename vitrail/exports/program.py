"""PyTorch's own exported program, which needs no source code of ours to be run: `torch.export.load(path)`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.exports.kinds import CARD, Opened

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def write(traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Write `path`, with `about` as JSON inside."""
    traced.example_inputs = None  # would be written as a pickle
    buffer = io.BytesIO()  # torch's own writer ends the process where a disk is full
    torch.export.save(traced, buffer, extra_files={CARD: json.dumps(about, ensure_ascii=False)})
    path.write_bytes(buffer.getbuffer())


def read(path: Path) -> Opened:
    """Open `path`, which must be one's own: torch may run code that it finds in such a file."""
    inside = {CARD: "{}"}
    module = torch.export.load(path, extra_files=inside).module()

    def run(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(images)).numpy()

    return Opened(run, json.loads(inside[CARD]))
