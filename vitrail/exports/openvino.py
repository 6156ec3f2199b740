"""OpenVINO programs: OpenVINO converts an ONNX program to its intermediate representation and runs it on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from vitrail.device import has_amx
from vitrail.errors import ExportError
from vitrail.exports import onnx
from vitrail.exports.kinds import Opened, Scheme, parse_description, reason
from vitrail.files import json_text

if TYPE_CHECKING:
    import openvino
    from torch.export import ExportedProgram

SECTION = "vitrail"
"""Section of a model's runtime information that holds its description."""
IR = 11
"""Version of the format of OpenVINO's files."""
FIRST_RUNTIME = {12: "2023.1", 15: "2024.6", 16: "2025.3"}
"""Newest set of operators in a program -> first OpenVINO that computes it, as measured (docs/export.md)."""


def write(traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Write `path` (.xml) and the weights beside it (.bin), with each entry of `about` as JSON.

    float16 and bf16 are stored as float16. Raises ExportError if the network has an operator that ONNX or OpenVINO does
    not have.
    """
    # openvino.convert_model would report each conversion to Intel
    with TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder) / "model.onnx"
        onnx.write(traced, file, {"output": about["output"], "program": about["program"]})
        write_network(read_network(file), path, about)


def read(path: Path, device: str = "cpu") -> Opened:
    """Open `path` on the CPU. Raises ExportError if OpenVINO rejects it."""
    network = read_network(path)
    about = {}
    if network.has_rt_info([SECTION]):
        keys = network.get_rt_info([SECTION]).astype(dict)
        about = parse_description({key: network.get_rt_info([SECTION, key]).astype(str) for key in keys})
    program = about.get("program")
    compute = function(network, program.get("precision", "float32") if isinstance(program, dict) else "float32")
    return Opened(lambda images: compute(images)[0], about)


def read_network(path: Path) -> openvino.Model:
    """Return the network of a program, or of an ONNX program. Raises ExportError if OpenVINO rejects it."""
    import openvino

    try:
        return openvino.Core().read_model(path)
    except RuntimeError as error:
        raise ExportError(f"OpenVINO {openvino.__version__} does not read it: {reason(error)}") from error


def write_network(network: openvino.Model, path: Path, about: dict[str, Any]) -> None:
    """Write a network and its description, to which the versions of the program are added. Raises ExportError."""
    import openvino

    about["program"] |= {"ir_version": IR, "needs": f"openvino>={_first_runtime(network)}"}
    try:
        for key, value in about.items():
            network.set_rt_info(json_text(value), [SECTION, key])
        openvino.save_model(network, path, compress_to_fp16=about["program"]["precision"] in ("float16", "bf16"))
    except RuntimeError as error:
        raise ExportError(f"OpenVINO cannot express this network: {reason(error)}") from error


def _first_runtime(network: openvino.Model) -> str:
    """Return the first OpenVINO that computes a network: this one if it has operators that were never measured."""
    import openvino

    sets = (node.get_type_info().version_id.removeprefix("opset") for node in network.get_ops())
    newest = max(int(number) if number.isdecimal() else max(FIRST_RUNTIME) + 1 for number in sets)
    here = ".".join(openvino.__version__.split("-")[0].split(".")[:2])
    return next((version for number, version in FIRST_RUNTIME.items() if newest <= number), here)


def hint(precision: str) -> Literal["f32", "bf16"]:
    """Return the type in which programs of a precision compute what is not in int8.

    Without a hint OpenVINO computes in bfloat16 wherever the processor supports it. Beside int8 that is faster only
    with AMX (`python -m benchmarks.export`).
    """
    return "bf16" if precision == "bf16" or (precision == "int8" and has_amx()) else "f32"


def function(network: openvino.Model, precision: str = "float32") -> Callable[[np.ndarray], list[np.ndarray]]:
    """Return what the network of a program of this precision computes on the CPU. Raises ExportError."""
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": hint(precision), "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    try:
        compiled = openvino.Core().compile_model(network, "CPU", settings)
    except RuntimeError as error:
        raise ExportError(f"OpenVINO {openvino.__version__} does not run it: {reason(error)}") from error

    def run(images: np.ndarray) -> list[np.ndarray]:
        try:
            return [np.array(output) for output in compiled(images).values()]
        except RuntimeError as error:
            raise ExportError(f"OpenVINO does not run it: {reason(error)}") from error

    return run


def argument(images: np.ndarray) -> np.ndarray:
    """Return images as the argument of a compiled model."""
    return images


def products(network: openvino.Model) -> list[str]:
    """Return the names of the matrix products and convolutions of a network, in its order."""
    return [node.get_friendly_name() for node in _products(network)]


def _products(network: openvino.Model) -> list[openvino.Node]:
    return [node for node in network.get_ordered_ops() if node.get_type_name() in ("MatMul", "Convolution")]


def scheme(network: openvino.Model) -> Scheme:
    """Return what of a network should be in int8 on this processor.

    With AMX, attention's two products stay in bf16, so that OpenVINO computes them and their softmax as one operation,
    without conversions in between; and its int8 products are faster with symmetric ranges. Without AMX, they are
    slower.
    """
    attention = [node for node in _products(network) if not _stored_kind(node.input_value(1).get_node())]
    amx = has_amx()
    return Scheme([node.get_friendly_name() for node in attention] if amx else [], symmetric=amx)


def expose_output(network: openvino.Model, name: str) -> openvino.Model:
    """Return a network whose output is that of one of its operations.

    With several, OpenVINO 2026.4 computes an int8 network with a convolutional stem wrongly.
    """
    import openvino

    copy = network.clone()
    (found,) = (node for node in copy.get_ops() if node.get_friendly_name() == name)
    return openvino.Model([found.output(0)], copy.get_parameters())


def layers(network: openvino.Model) -> tuple[int, int]:
    """Return the number of products with weights, and how many of them are computed in int8."""
    kinds = [kind for node in _products(network) if (kind := _stored_kind(node.input_value(1).get_node()))]
    return len(kinds), sum(kind in ("i8", "u8") for kind in kinds)


def _stored_kind(node: openvino.Node) -> str:
    """Return the type of the constant that a factor of a product is made of; empty if it is not constant."""
    while node.get_type_name() in ("Convert", "Multiply", "Subtract", "FakeQuantize", "Reshape", "Transpose"):
        node = node.input_value(0).get_node()
    return str(node.get_element_type().get_type_name()) if node.get_type_name() == "Constant" else ""
