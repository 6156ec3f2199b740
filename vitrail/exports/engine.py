"""Predictions by an exported program instead of a network: `vitrail predict flowers-onnx photos/`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vitrail.errors import ExportError, WeightsError
from vitrail.exports.describe import card_in
from vitrail.exports.elsewhere import check_here
from vitrail.exports.kinds import KINDS, runtime
from vitrail.weights.card import Card

READ = ("onnx", "openvino")
"""Kinds of program that are safe to open from any origin. PyTorch would run the code in an exported program."""


class Engine:
    """uint8 images [batch, channels, height, width] -> float32 [batch, classes or features], by the program's runtime.

    A program for probabilities returns their logarithms, which are logits, or with several labels their logits.
    """

    def __init__(self, path: Path, wanted: Literal["logits", "features"] = "logits") -> None:
        """Open a program.

        Raises ExportError if vitrail did not write it or if it computes something else here than where it was exported,
        and UsageError if its runtime is missing.
        """
        kind = next(name for name in KINDS if path.suffix == Path(KINDS[name].file).suffix)
        if kind not in READ:
            raise ExportError(
                f"{path} is not run, because such files can hold code. Use the model itself, or export it to "
                f"{' or '.join(READ)}"
            )
        self._run, about = runtime(kind, writing=False).read(path)
        try:
            self.card: Card = card_in(about)
        except (ExportError, WeightsError) as error:
            raise ExportError(f"{path}: {error}") from error
        self.path, self._output, self._width = path, about["output"]["name"], about["output"]["shape"][-1]
        if (self._output == "features") != (wanted == "features"):
            meant = "classes" if wanted == "logits" else wanted
            raise ExportError(f"{path} computes {self._output}, not {meant}: export it with --output {wanted}")
        if wanted == "logits":
            self._width = self.card.config.classes
        check_here(path, self._run, kind, self.card)

    def __call__(self, images: Tensor) -> Tensor:
        """See the class."""
        outputs = torch.from_numpy(self._run(images.numpy()))
        if outputs.shape != (len(images), self._width):
            raise ExportError(
                f"{self.path} computes outputs of shape {tuple(outputs.shape)} for {len(images)} images, but its card "
                f"describes {self._width} classes. Export the model again (vitrail export)."
            )
        if self._output != "probabilities":
            return outputs
        return outputs.logit() if self.card.several else outputs.log()
