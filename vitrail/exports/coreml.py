"""Core ML programs for iPhones and Macs: coremltools writes them on any system. Nothing here runs them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitrail.errors import ExportError
from vitrail.exports.kinds import INPUT, reason, without_chatter
from vitrail.files import json_text

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def write(traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Write `path` (.mlpackage, a folder) with each entry of `about` as JSON in its metadata.

    Raises ExportError if the network has an operator that Core ML does not have.
    """
    program = traced.run_decompositions()
    (image,) = (node for node in program.graph.nodes if node.name == INPUT)
    pixels = image.meta["val"].dtype == torch.uint8
    image.meta["val"] = image.meta["val"].float()  # Core ML passes pixels as numbers from 0 to 255
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):  # it lacks this one
        node.replace_all_uses_with(node.args[0])
        program.graph.erase_node(node)
    try:
        with without_chatter():
            import coremltools

            kind = coremltools.ImageType if pixels else coremltools.TensorType
            half = about["program"]["precision"] == "float16"
            model = coremltools.convert(
                program,
                inputs=[kind(name=INPUT, shape=tuple(image.meta["val"].shape))],
                outputs=[coremltools.TensorType(name=about["output"]["name"])],
                minimum_deployment_target=coremltools.target.iOS16,
                compute_precision=coremltools.precision.FLOAT16 if half else coremltools.precision.FLOAT32,
            )
    except Exception as error:  # the converter raises what its operators do
        raise ExportError(f"Core ML cannot express this network: {reason(error)}") from error
    model.user_defined_metadata.update({key: json_text(value) for key, value in about.items()})
    model.save(str(path))
