"""A program in the place of a network, for predictions: `vitrail predict flowers-onnx photos/`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import ExportError
from vitrail.exports.describe import card_in
from vitrail.exports.kinds import KINDS, runtime
from vitrail.weights.card import Card

READ = ("onnx", "openvino")
"""Kinds that are read from anybody; a program of PyTorch's may hold code, which would run."""


class Engine:
    """images uint8 [batch, channels, height, width] -> logits float32 [batch, classes], by a program's own runtime."""

    def __init__(self, path: Path) -> None:
        """Open a program. Raises ExportError where it is none of ours, UsageError where its runtime is missing."""
        kind = next(name for name in KINDS if path.suffix == Path(KINDS[name].file).suffix)
        if kind not in READ:
            raise ExportError(
                f"{path} is not run: such files can hold code. Take the model itself, or a program for "
                f"{' or '.join(READ)}"
            )
        self._run, about = runtime(kind, writing=False).read(path)
        self.card: Card = card_in(about)
        self._output = about["output"]["name"]
        if self._output == "features":
            raise ExportError(f"{path} gives features, not classes: export it with logits or probabilities")

    def __call__(self, images: Tensor) -> Tensor:
        """See the class."""
        found = torch.from_numpy(self._run(images.numpy()))
        return found.log() if self._output == "probabilities" else found
