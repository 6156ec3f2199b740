"""ExecuTorch programs for phones: XNNPACK computes what it knows of them on the CPU, ExecuTorch's own code the rest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.errors import ExportError
from vitrail.exports.kinds import Opened, description_beside, one_at_a_time, reason, without_chatter

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def write(traced: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Write `path`. Its description stays in the card beside it.

    Raises ExportError if the network has an operator that ExecuTorch does not have.
    """
    try:
        with without_chatter():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            program = to_edge_transform_and_lower(traced, partitioner=[XnnpackPartitioner()]).to_executorch()
    except Exception as error:  # each of its passes has exceptions of its own
        raise ExportError(f"ExecuTorch cannot express this network: {reason(error)}") from error
    path.write_bytes(program.buffer)


def read(path: Path, device: str = "cpu") -> Opened:
    """Open `path` on the CPU. Raises ExportError if ExecuTorch rejects it."""
    try:
        with without_chatter():
            from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
            from executorch.runtime import Runtime

            _unsafe_reset_threadpool(torch.get_num_threads())
            method = Runtime.get().load_program(path).load_method("forward")
    except Exception as error:  # its native code raises RuntimeError, and loading may fail in other ways
        raise ExportError(f"ExecuTorch does not read it: {reason(error)}") from error

    def run(image: np.ndarray) -> np.ndarray:
        try:
            (output,) = method.execute([torch.from_numpy(image)])
        except RuntimeError as error:
            raise ExportError(f"ExecuTorch does not run it: {reason(error)}") from error
        return np.array(output)  # the next image overwrites its memory

    return Opened(one_at_a_time(run), description_beside(path))
