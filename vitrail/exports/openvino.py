"""OpenVINO programs: OpenVINO converts an ONNX program to its intermediate representation and runs it on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import ExportError
from vitrail.exports import onnx
from vitrail.exports.kinds import Opened, reason

if TYPE_CHECKING:
    from torch.export import ExportedProgram

SECTION = "vitrail"
"""Section of a model's runtime information that holds its description."""


def write(traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Write `path` (.xml) and the weights beside it (.bin), with each entry of `about` as JSON.

    Weights are stored in the precision that `about` names and computed with in float32. Raises ExportError if the
    network has an operator that ONNX or OpenVINO does not have.
    """
    # openvino.convert_model would report each conversion to Intel
    import openvino

    with TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder) / "model.onnx"
        onnx.write(traced, file, {"output": about["output"]})
        try:
            model = openvino.Core().read_model(file)
            for key, value in about.items():
                model.set_rt_info(json.dumps(value, ensure_ascii=False), [SECTION, key])
            openvino.save_model(model, path, compress_to_fp16=about["program"]["precision"] == "float16")
        except RuntimeError as error:
            raise ExportError(f"OpenVINO cannot express this network: {reason(error)}") from error


def read(path: Path) -> Opened:
    """Open `path` on the CPU in float32. Raises ExportError if OpenVINO rejects it."""
    import openvino

    core = openvino.Core()
    try:
        model = core.read_model(path)
        # without this hint OpenVINO computes in bfloat16 if the processor supports it
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    except RuntimeError as error:
        raise ExportError(f"OpenVINO {openvino.__version__} does not run it: {reason(error)}") from error
    about = {}
    if model.has_rt_info([SECTION]):
        keys = model.get_rt_info([SECTION]).astype(dict)
        about = {key: json.loads(model.get_rt_info([SECTION, key]).astype(str)) for key in keys}
    return Opened(lambda images: np.array(compiled(images)[0]), about)
