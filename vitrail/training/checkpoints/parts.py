"""Checkpoints in parts, one per process, through torch's distributed checkpointing (DCP) and without a pickle.

DCP decides which process writes which piece, reports a failure of one process to all, and finds out what to read for
another number of processes. Its Hugging Face storage reads the parts. It does not write them: its files have other
names, it copies a whole file in memory, and it does not return the sha256 of what it wrote, which the manifest needs.
So each process writes its own safetensors file in the same format, part-00001-of-00008.safetensors, whose header holds
the position of each piece in its tensor. The main process finishes the checkpoint (`checkpoints.checkpoint`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from vitrail.files import Written, write_durably
from vitrail.training.checkpoints.flatten import safetensors_pieces

PIECES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys under which torch's reader looks in the header for the position of a piece."""


def write_parts(
    tensors: Mapping[str, Tensor],
    begin: Callable[[int], Path],
    finish: Callable[[dict[str, Written]], None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this process's part of `tensors`, together with all other processes, and return when all have written.

    The main process calls `begin` with the total number of bytes, which returns the folder for the files, and at the
    end `finish` with file name -> what was written. The processes communicate through `group`. An exception in one
    process is raised in all.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _raising_the_cause():
        dcp.save(dict(tensors), storage_writer=_Writer(begin, finish), planner=planner, process_group=group)


def read_parts(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the parts in `folder`, on the CPU.

    like: name -> a sharded tensor. A tensor of that name and shape is sharded and placed in the same way, and this
    process reads only its part. The processes do not communicate.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    tensors = {name: _empty(about, like.get(name)) for name, about in stored.items()}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _raising_the_cause(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # reading alone is intended
        dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    return tensors


@contextmanager
def _raising_the_cause() -> Iterator[None]:
    """Raise the first process's exception in place of DCP's, a BaseException that holds those of all processes."""
    try:
        yield
    except dcp.api.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


def _empty(about: Any, like: Tensor | None) -> Tensor:
    """Return an empty tensor for what is stored, or for this process's part of it."""
    if like is not None and like.shape == about.size:
        return torch.empty_like(like, dtype=about.properties.dtype, requires_grad=False)
    return torch.empty(about.size, dtype=about.properties.dtype)


class _Writer(dcp.HuggingFaceStorageWriter):
    """Writes one file per process, durably and with its sha256."""

    def __init__(self, begin: Callable[[int], Path], finish: Callable[[dict[str, Written]], None]) -> None:
        super().__init__("", save_distributed=True)  # `begin` chooses the folder
        self._begin, self._finish = begin, finish

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged; torch's writer would make a folder."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, on the main process, and assign a file to each process."""
        folder = self._begin(sum(_size(item) for plan in plans for item in plan.items))
        numbers = accumulate(bool(plan.items) for plan in plans)
        count = sum(bool(plan.items) for plan in plans)  # a process may have nothing to write
        names = [f"part-{number:05d}-of-{count:05d}.safetensors" for number in numbers]
        return [replace(plan, storage_data=folder / name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file; every result carries the file's name, size and sha256."""
        results: Future[list[WriteResult]] = Future()
        if not plan.items:
            results.set_result([])
            return results
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            assert item.tensor_data is not None
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[item.index.fqn] = tensor.detach()
            offsets[item.index.fqn] = {OFFSETS: list(item.tensor_data.chunk.offsets)}
        path: Path = plan.storage_data
        written = path.name, write_durably(path, safetensors_pieces(tensors, {PIECES: json.dumps(offsets)}))
        results.set_result([WriteResult(item.index, _size(item), written) for item in plan.items])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finish the checkpoint, on the main process, when all files are written."""
        self._finish(dict(result.storage_data for of_process in results for result in of_process))


def _size(item: WriteItem) -> int:
    """Return the approximate number of bytes of a piece, header included."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize + 200
