"""Predictions by an exported program instead of a network: `vitrail predict flowers-onnx photos/`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import ExportError
from vitrail.exports.describe import card_in
from vitrail.exports.kinds import KINDS, runtime
from vitrail.weights.card import Card

READ = ("onnx", "openvino")
"""Kinds of program that are safe to open from any origin. PyTorch would run the code in an exported program."""


class Engine:
    """uint8 images [batch, channels, height, width] -> float32 logits [batch, classes], by the program's runtime."""

    def __init__(self, path: Path) -> None:
        """Open a program. Raises ExportError if vitrail did not write it, UsageError if its runtime is missing."""
        kind = next(name for name in KINDS if path.suffix == Path(KINDS[name].file).suffix)
        if kind not in READ:
            raise ExportError(
                f"{path} is not run, because such files can hold code. Use the model itself, or export it to "
                f"{' or '.join(READ)}"
            )
        self._run, about = runtime(kind, writing=False).read(path)
        self.card: Card = card_in(about)
        self._output = about["output"]["name"]
        if self._output == "features":
            raise ExportError(f"{path} computes features, not classes: export it with output logits or probabilities")

    def __call__(self, images: Tensor) -> Tensor:
        """See the class."""
        outputs = torch.from_numpy(self._run(images.numpy()))
        return outputs.log() if self._output == "probabilities" else outputs
