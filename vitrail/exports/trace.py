"""A network as a graph of operators: `torch.export`, for any number of images at one size."""

from __future__ import annotations

import torch
from torch.export import Dim, ExportedProgram, export

from vitrail.errors import ExportError
from vitrail.exports.kinds import INPUT, Output, reason
from vitrail.exports.network import Exportable
from vitrail.model.attention import attention_path
from vitrail.model.resnet.network import ResNet
from vitrail.model.vit import ViT

EXAMPLES = 2
"""Images to trace with: of one, torch would take the batch to be always one."""


def trace(model: ViT | ResNet, size: tuple[int, int], output: Output, dtype: torch.dtype) -> ExportedProgram:
    """Return the program uint8 images [batch, channels, *size] -> `output` of a model, size in pixels.

    Raises UsageError for a size that does not fit the model; ExportError, with torch's reason, where the network
    cannot be written down as a graph.
    """
    network = Exportable(model, size, output, dtype)
    example = torch.zeros(EXAMPLES, model.config.channels, *size, dtype=torch.uint8)
    try:
        with torch.no_grad(), attention_path("fused"):
            return export(network, (example,), dynamic_shapes={INPUT: {0: Dim("batch", min=1)}}, strict=False)
    except Exception as error:  # whatever code is traced may raise: torch has no common class for it
        raise ExportError(f"torch.export cannot trace this network: {reason(error)}") from error


def width(traced: ExportedProgram) -> int:
    """Return how many numbers a traced program gives of each image."""
    (result,) = traced.graph.output_node().args[0]  # type: ignore[misc]
    return int(result.meta["val"].shape[1])
