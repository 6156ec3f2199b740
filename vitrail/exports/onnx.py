"""ONNX programs: torch.onnx writes them, ONNX Runtime reads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.errors import ExportError
from vitrail.exports.kinds import INPUT, Opened, reason

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def write(traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Write `path`, with each entry of `about` as JSON in its metadata. Weights above 1.5 GB go to a file beside it.

    Raises ExportError, naming the operator, if the network has an operator that ONNX does not have.
    """
    try:
        with _errors_only("onnxscript", "onnx_ir", "torch.onnx"):
            program = torch.onnx.export(
                traced, input_names=[INPUT], output_names=[about["output"]["name"]], dynamo=True, verbose=False
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ExportError(f"ONNX cannot express this network: {reason(error)}") from error
    assert program is not None
    program.model.metadata_props.update({key: json.dumps(value, ensure_ascii=False) for key, value in about.items()})
    program.save(path)


@contextmanager
def _errors_only(*names: str) -> Iterator[None]:
    """Let these loggers log errors only. The parity check finds any difference that they would warn about."""
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def read(path: Path) -> Opened:
    """Open `path` with ONNX Runtime on the CPU. Raises ExportError if ONNX Runtime rejects the program."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: its warnings are about its own optimisations
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common base class
        raise ExportError(f"ONNX Runtime {onnxruntime.__version__} does not run it: {reason(error)}") from error

    def run(images: np.ndarray) -> np.ndarray:
        try:
            return np.asarray(session.run(None, {INPUT: images})[0])
        except Exception as error:
            raise ExportError(f"ONNX Runtime {onnxruntime.__version__} does not run it: {reason(error)}") from error

    metadata = session.get_modelmeta().custom_metadata_map
    return Opened(run, {key: json.loads(text) for key, text in metadata.items()} if "format" in metadata else {})
