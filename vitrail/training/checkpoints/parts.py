"""Checkpoints in parts, one a process, through torch's distributed checkpointing (DCP), without a pickle.

DCP decides who writes what, tells everybody when one fails, and finds out what to read for another number of processes.
Its own storage keeps that plan as a pickle, so the storage here is another: each process writes one safetensors file,
part-00001-of-00008.safetensors, in the form of torch's `HuggingFaceStorageWriter`, whose header says where in the whole
tensor each piece belongs. The main process finishes the checkpoint when all have written (`checkpoints.checkpoint`).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from vitrail.training.checkpoints.durable import Written, write_file
from vitrail.training.checkpoints.flat import DTYPES, safetensors_pieces

PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Where torch's own reader looks in the header for the place of a piece."""
_TYPES = {name: dtype for dtype, name in DTYPES.items()}


def write_parts(
    tensors: Mapping[str, Tensor],
    begin: Callable[[int], Path],
    finish: Callable[[dict[str, Written]], None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write `tensors`, of which this process has its part, together with all others; return when all is done.

    The main process calls `begin` with the bytes of all, which returns the folder for the files, and in the end
    `finish` with their names and what was written. The processes talk through `group`. What one raises, all raise.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.save(dict(tensors), storage_writer=_Writer(begin, finish), planner=planner, process_group=group)
    except dcp.api.CheckpointException as error:  # a BaseException with everybody's
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


def read_parts(folder: Path, prefixes: Mapping[str, str], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the .safetensors files of `folder`, on the CPU unless `like` says otherwise.

    prefixes: file name -> what goes in front of its names. like: name -> a sharded tensor; what has that name and shape
    comes as it is sharded, and no more of it is read than this process's part. Reads alone: the processes do not talk.
    """
    reader = _Reader(folder, prefixes)
    tensors = {name: _empty(about, like.get(name)) for name, about in reader.metadata.state_dict_metadata.items()}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no: it is not asked
            dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    except dcp.api.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from error
    return tensors


def _empty(about: Any, like: Tensor | None) -> Tensor:
    """Room for a tensor, or for this process's part of one."""
    if like is not None and like.shape == about.size:
        return torch.empty_like(like, dtype=about.properties.dtype, requires_grad=False)
    return torch.empty(about.size, dtype=about.properties.dtype)


class _Writer(dcp.StorageWriter):
    """One file a process, made durable as it is written."""

    def __init__(self, begin: Callable[[int], Path], finish: Callable[[dict[str, Written]], None]) -> None:
        self._begin, self._finish = begin, finish

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the main process: make the folder, and tell each process its file."""
        folder = self._begin(sum(_size(item) for plan in plans for item in plan.items))
        names = [f"part-{number:05d}-of-{len(plans):05d}.safetensors" for number in range(1, len(plans) + 1)]
        return [replace(plan, storage_data=folder / name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file; each result says what was written, all the same."""
        tensors: dict[str, Tensor] = {}
        places: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            assert item.tensor_data is not None
            found = planner.resolve_data(item)
            assert isinstance(found, Tensor)
            tensors[item.index.fqn] = found.detach()
            places[item.index.fqn] = {OFFSETS: list(item.tensor_data.chunk.offsets)}
        path: Path = plan.storage_data
        written = path.name, write_file(path, safetensors_pieces(tensors, {PLACES: json.dumps(places)}))
        results: Future[list[WriteResult]] = Future()
        results.set_result([WriteResult(item.index, _size(item), written) for item in plan.items])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the main process, when every file is there."""
        self._finish(dict(result.storage_data for of_one in results for result in of_one))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return it as it is."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is not chosen by the form of a path."""
        return False


def _size(item: WriteItem) -> int:
    """Bytes of a piece, about."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize + 200


class _Piece(NamedTuple):
    """Where a piece of a tensor is stored."""

    path: Path
    name: str


class _Reader(dcp.StorageReader):
    """Reads what `_Writer` wrote, and whole tensors."""

    def __init__(self, folder: Path, prefixes: Mapping[str, str]) -> None:
        self.metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta())
        for path in sorted(folder.glob("*.safetensors")):
            self._look(path, prefixes.get(path.name, ""))

    def _look(self, path: Path, prefix: str) -> None:
        with safe_open(path, framework="pt") as file:
            places = json.loads((file.metadata() or {}).get(PLACES, "{}"))
            for name in file.keys():  # noqa: SIM118
                piece = file.get_slice(name)
                shape = torch.Size(piece.get_shape())
                offsets = torch.Size(places[name][OFFSETS] if name in places else [0] * len(shape))
                end = [offset + length for offset, length in zip(offsets, shape, strict=True)]
                kind = TensorProperties(_TYPES[piece.get_dtype()])
                new = TensorStorageMetadata(kind, torch.Size(end), [])
                about = self.metadata.state_dict_metadata.setdefault(prefix + name, new)
                assert isinstance(about, TensorStorageMetadata)
                about.size = torch.Size(map(max, about.size, end))
                if shape.numel():
                    about.chunks.append(ChunkStorageMetadata(offsets, shape))
                    self.metadata.storage_data[MetadataIndex(prefix + name, offsets)] = _Piece(path, name)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the headers say."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this process wants."""
        for item in plan.items:
            piece: _Piece = self.metadata.storage_data[item.storage_index]
            with safe_open(piece.path, framework="pt") as file:
                stored = file.get_slice(piece.name)
                if not stored.get_shape():  # a scalar has no slices
                    part = file.get_tensor(piece.name)
                else:
                    ends = (start + length for start, length in zip(item.storage_offsets, item.lengths, strict=True))
                    part = stored[tuple(map(slice, item.storage_offsets, ends))]
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return them as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is not chosen by the form of a path."""
        return False
