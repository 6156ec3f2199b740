"""LiteRT programs (TensorFlow Lite's format): litert-torch converts a network, LiteRT runs it on phones and here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import ExportError
from vitrail.exports.kinds import INPUT, Opened, description_beside, one_at_a_time, reason, without_chatter

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class Named(nn.Module):
    """A traced network whose input and output have the names of its description, which a program for LiteRT keeps."""

    def __init__(self, traced: nn.Module, output: str) -> None:
        super().__init__()
        self.traced, self.output = traced, output

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """See the class."""
        return {self.output: self.traced(images)}


def write(traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Write `path`. Its description stays in the card beside it.

    Raises ExportError if the network has an operator that LiteRT does not have.
    """
    import litert_torch

    litert_torch.config.show_progress = False
    (image,), _ = traced.example_inputs
    try:
        with without_chatter():
            network = Named(traced.module(), about["output"]["name"])
            litert_torch.convert(network, sample_kwargs={INPUT: image}).export(str(path))
    except OSError:
        raise
    except Exception as error:  # the converter's passes raise exceptions of many kinds
        raise ExportError(f"LiteRT cannot express this network: {reason(error)}") from error


def read(path: Path, device: str = "cpu") -> Opened:
    """Open `path` on the CPU. Raises ExportError if LiteRT rejects it."""
    try:
        with without_chatter():
            from ai_edge_litert.interpreter import Interpreter

            interpreter = Interpreter(str(path), num_threads=torch.get_num_threads())
            interpreter.allocate_tensors()
    except (RuntimeError, ValueError) as error:
        raise ExportError(f"LiteRT does not read it: {reason(error)}") from error
    (taken,), (given,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(image: np.ndarray) -> np.ndarray:
        try:
            interpreter.set_tensor(taken["index"], image)
            interpreter.invoke()
        except (RuntimeError, ValueError) as error:
            raise ExportError(f"LiteRT does not run it: {reason(error)}") from error
        return interpreter.get_tensor(given["index"])

    return Opened(one_at_a_time(run), description_beside(path))
