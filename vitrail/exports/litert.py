"""LiteRT programs (TensorFlow Lite's format): litert-torch converts a network, LiteRT runs it on phones and here."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import ExportError
from vitrail.exports.kinds import INPUT, Opened, description_beside, one_at_a_time, reason, without_chatter

if TYPE_CHECKING:
    from torch.export import ExportedProgram

PRODUCTS = ("FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D", "BATCH_MATMUL")
"""Operators of matrix products and convolutions. The second input is the weight."""


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
            program = litert_torch.convert(network, sample_kwargs={INPUT: image})
    except Exception as error:  # the converter's passes raise exceptions of many kinds
        raise ExportError(f"LiteRT cannot express this network: {reason(error)}") from error
    with without_chatter():
        program.export(str(path))


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


def write_int8(path: Path, changed: Path) -> tuple[int, int]:
    """See `vitrail.exports.int8.OwnInt8`. Weights become int8; activations do as it runs, by each one's range."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType
    from ai_edge_quantizer import quantizer, recipe

    with without_chatter(), redirect_stdout(io.StringIO()):
        quantizer.Quantizer(str(path), recipe.dynamic_wi8_afp32()).quantize().export_model(str(changed))
        plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES  # which lists each operation
        interpreter = Interpreter(str(changed), experimental_op_resolver_type=plain)
    types = {tensor["index"]: tensor["dtype"] for tensor in interpreter.get_tensor_details()}
    operations = interpreter._get_ops_details()
    computed = {output for operation in operations for output in operation["outputs"]}
    products = (operation for operation in operations if operation["op_name"] in PRODUCTS)
    weights = [types[taken[1]] for taken in (product["inputs"] for product in products) if taken[1] not in computed]
    return len(weights), sum(kind == np.int8 for kind in weights)
