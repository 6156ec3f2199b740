"""ONNX programs: torch.onnx writes them, ONNX Runtime reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.errors import ExportError, UsageError
from vitrail.exports.kinds import INPUT, ONNX_IR, OPSET, Opened, Scheme, errors_only, parse_description, reason
from vitrail.files import json_text

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx import ModelProto
    from onnxruntime import InferenceSession
    from torch.export import ExportedProgram


AVERAGE_POOL = 19
"""First opset whose AveragePool is that of torch at the border; ONNX Runtime up to 1.23 computes 18's differently."""


def write(traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Write `path`, with each entry of `about` as JSON in its metadata. Weights above 1.5 GB go to a file beside it.

    Raises ExportError, naming the operator, if the network has an operator that ONNX, or the version of its operators
    that `about` names, does not have.
    """
    opset = about["program"].get("opset", OPSET)
    try:
        with errors_only("onnxscript", "onnx_ir", "torch.onnx"):
            program = torch.onnx.export(
                traced,
                input_names=[INPUT],
                output_names=[about["output"]["name"]],
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ExportError(f"ONNX cannot express this network: {reason(error)}") from error
    assert program is not None
    if (written := program.model.opset_imports.get("")) != opset:  # torch only logs that it could not convert
        raise ExportError(
            f"torch cannot write this network with opset {opset}, only with {written}. Choose another opset"
        )
    if opset < AVERAGE_POOL and any(node.op_type == "AveragePool" for node in program.model.graph):
        raise ExportError(
            f"ONNX Runtime computes this network's average pooling wrongly in opset {opset}. Choose opset "
            f"{AVERAGE_POOL} or a later one"
        )
    if answers := about["output"].get("answers"):
        _add_answers(program.model.graph, answers)
    program.model.ir_version = ONNX_IR
    program.model.metadata_props.update({key: json_text(value) for key, value in about.items()})
    program.save(path)


def _add_answers(graph: ir.Graph, answers: Mapping[str, Any]) -> None:
    """Add an output for each of several answers, "logits.NAME": its columns of the first output, which stays."""
    import onnx_ir as ir

    (whole,) = graph.outputs
    assert whole.shape is not None  # torch writes it
    widths = [end - begin for begin, end in (answer["outputs"] for answer in answers.values())]
    outputs = [
        ir.Value(name=f"{whole.name}.{name}", type=whole.type, shape=ir.Shape([whole.shape[0], width]))
        for name, width in zip(answers, widths, strict=True)
    ]
    sizes = ir.node("Constant", [], {"value_ints": widths})
    graph.extend([sizes, ir.node("Split", [whole, sizes.outputs[0]], {"axis": 1}, outputs=outputs)])
    graph.outputs.extend(outputs)


def read(path: Path, device: str = "cpu") -> Opened:
    """Open `path` with ONNX Runtime on a device. Raises ExportError if ONNX Runtime rejects the program."""
    session = _session(path)
    metadata = session.get_modelmeta().custom_metadata_map
    about = parse_description(metadata) if "format" in metadata else {}
    if torch.device(device).type == "cpu":
        compute = _all_outputs(session)
    else:
        half = about.get("program", {}).get("precision") == "float16"
        compute = in_buckets(_all_outputs(_session(path, providers(device, path.parent, half=half))))
    return Opened(lambda images: compute(images)[0], about)


GPU_PROVIDERS = ("TensorrtExecutionProvider", "CUDAExecutionProvider")
"""ONNX Runtime's engines on an NVIDIA GPU, the fastest first; which of them there are depends on its installation."""
CPU_PROVIDER = "CPUExecutionProvider"
Provider = str | tuple[str, dict[str, Any]]


def providers(device: str, cache: Path, *, half: bool) -> list[Provider]:
    """Return the engines of ONNX Runtime on a GPU, in order: an operator that one does not know goes to the next.

    TensorRT stores what it builds in `cache`, and computes in float16 only with `half`. Raises UsageError if no
    installed engine computes on the device.
    """
    import onnxruntime

    place = torch.device(device)
    there = [name for name in GPU_PROVIDERS if name in onnxruntime.get_available_providers()]
    if place.type != "cuda" or not there:
        raise UsageError(
            f"this ONNX Runtime does not compute on {device}; it has {', '.join(onnxruntime.get_available_providers())}"
            ". Install onnxruntime-gpu in its place, or add --device cpu"
        )
    number = {"device_id": place.index or 0}
    stored = {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(cache), "trt_fp16_enable": half}
    return [*((name, number | (stored if name == GPU_PROVIDERS[0] else {})) for name in there), CPU_PROVIDER]


def in_buckets(run: Callable[[np.ndarray], list[np.ndarray]]) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Return `run` for batches that are filled up to a power of two, because engines are built for each batch size."""

    def filled(images: np.ndarray) -> list[np.ndarray]:
        count = len(images)
        missing = 2 ** max(count - 1, 0).bit_length() - count
        padded = np.concatenate([images, np.zeros((missing, *images.shape[1:]), images.dtype)]) if missing else images
        return [output[:count] for output in run(padded)]

    return filled


def _session(program: Path | bytes, chosen: Sequence[Provider] = (CPU_PROVIDER,)) -> InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: its warnings are about its own optimisations
    options.intra_op_num_threads = torch.get_num_threads()  # it does not know OMP_NUM_THREADS
    try:
        return onnxruntime.InferenceSession(program, options, providers=list(chosen))
    except Exception as error:  # its exceptions have no common base class
        raise ExportError(f"ONNX Runtime {onnxruntime.__version__} does not run it: {reason(error)}") from error


def _all_outputs(session: InferenceSession) -> Callable[[np.ndarray], list[np.ndarray]]:
    def run(images: np.ndarray) -> list[np.ndarray]:
        try:
            return [np.asarray(output) for output in session.run(None, argument(images))]
        except Exception as error:
            raise ExportError(f"ONNX Runtime does not run it: {reason(error)}") from error

    return run


def read_network(path: Path) -> ModelProto:
    """Return the network of a program."""
    import onnx

    return onnx.load(path)


def write_network(network: ModelProto, path: Path, about: dict[str, Any]) -> None:
    """Write a network and its description as a program."""
    import onnx

    onnx.helper.set_model_props(network, {key: json_text(value) for key, value in about.items()})
    onnx.save(network, path)


def function(network: ModelProto, precision: str = "float32") -> Callable[[np.ndarray], list[np.ndarray]]:
    """Return what a network computes on the CPU, for each precision the same.

    Raises ExportError, also for a network above 2 GB.
    """
    try:
        return _all_outputs(_session(network.SerializeToString()))
    except ValueError as error:
        raise ExportError(f"ONNX cannot hold this network in memory: {reason(error)}") from error


def argument(images: np.ndarray) -> dict[str, np.ndarray]:
    """Return images as the argument of a session."""
    return {INPUT: images}


PRODUCTS = ("MatMul", "Gemm", "Conv")
"""Operators of matrix products and convolutions."""


def products(network: ModelProto) -> list[str]:
    """Return the names of the matrix products and convolutions of a network, in its order."""
    return [node.name for node in network.graph.node if node.op_type in PRODUCTS]


def scheme(network: ModelProto) -> Scheme:
    """Return what of a network should be in int8: everything, because ONNX Runtime has no faster type."""
    return Scheme([], symmetric=False)


def expose_output(network: ModelProto, name: str) -> ModelProto:
    """Return a network whose output is that of one of its operations."""
    import onnx

    copy = type(network)()
    copy.CopyFrom(network)
    (found,) = (node.output[0] for node in copy.graph.node if node.name == name)
    del copy.graph.output[:]
    copy.graph.output.append(onnx.ValueInfoProto(name=found))
    return copy


def layers(network: ModelProto) -> tuple[int, int]:
    """Return the number of products with weights, and how many of them are computed in int8."""
    stored = {tensor.name for tensor in network.graph.initializer}
    made = {name: node for node in network.graph.node for name in node.output}
    total = quantised = 0
    for node in network.graph.node:
        if node.op_type in PRODUCTS:
            weight = made.get(node.input[1])
            total += node.input[1] in stored or (weight is not None and weight.input[0] in stored)
            quantised += weight is not None and weight.op_type == "DequantizeLinear" and weight.input[0] in stored
    return total, quantised
