"""Nested training state <-> JSON and flat tensors <-> bytes: what a checkpoint stores instead of a pickle."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail import world

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors can hold, under its own names."""

PART = re.compile(r"part-(?P<part>\d{5,})-of-(?P<of>\d{5,})\.safetensors")
"""What the files are called where each process writes its part of the tensors."""

_RESERVED = "__metadata__"  # safetensors keeps this name for itself


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return (structure, tensors): `structure` is plain JSON in which {"$tensor": name} stands for a tensor.

    `state` nests mappings, lists, tuples, tensors, str, int, float, bool and None. Names are paths,
    "optimizer/state/0/exp_avg". A tensor that appears twice is stored once, and appears twice again after
    `restore`. Raises TypeError, naming the path, for anything else.
    """
    flattener = _Flattener()
    return flattener.encode(state, ()), flattener.tensors


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Tensor):
            return {"$tensor": self._name(value, path)}
        if isinstance(value, list):
            return self._encode_items(value, path)
        if isinstance(value, tuple):
            return {"$tuple": self._encode_items(value, path)}
        if isinstance(value, Mapping):
            plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
            items = [[self._key(key, path), self.encode(item, (*path, str(key)))] for key, item in value.items()]
            return dict(items) if plain else {"$dict": items}
        raise TypeError(f"{'/'.join(path)} is a {type(value).__name__}, which a checkpoint cannot store")

    def _encode_items(self, values: list[Any] | tuple[Any, ...], path: tuple[str, ...]) -> list[Any]:
        return [self.encode(value, (*path, str(index))) for index, value in enumerate(values)]

    def _key(self, key: Any, path: tuple[str, ...]) -> Any:
        if key is None or isinstance(key, bool | int | float | str):
            return self.encode(key, path)
        raise TypeError(f"{'/'.join(path)} has a {type(key).__name__} as a key, which a checkpoint cannot store")

    def _name(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            kind = f"{tensor.layout} tensor of {tensor.dtype}"
            raise TypeError(f"{'/'.join(path)} is a {kind}, which a checkpoint cannot store")
        where: tuple[Any, ...] = path  # an empty tensor has no memory to share
        if tensor.numel() and not world.is_sharded(tensor):  # of which this process may have nothing
            where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if where not in self.names:
            name = "/".join(path) or "tensor"
            while name in self.tensors or name.rsplit("/", 1)[-1] == _RESERVED:
                name += "~"
            self.names[where] = name
            self.tensors[name] = tensor.detach()
        return self.names[where]


def restore(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `flatten` took apart; mappings come back as dicts."""
    if isinstance(structure, list):
        return [restore(value, tensors) for value in structure]
    if not isinstance(structure, dict):
        return structure
    if "$tensor" in structure:
        return tensors[structure["$tensor"]]
    if "$float" in structure:
        return float(structure["$float"])
    if "$tuple" in structure:
        return tuple(restore(structure["$tuple"], tensors))
    if "$dict" in structure:
        return {restore(key, tensors): restore(value, tensors) for key, value in structure["$dict"]}
    return {key: restore(value, tensors) for key, value in structure.items()}


def nbytes(state: Any) -> int:
    """Return the bytes of the tensors in `state`, or of this process's parts of them."""
    return sum(world.local(tensor).nbytes for tensor in flatten(state)[1].values())


def copied(state: Any, room: dict[str, Tensor]) -> Any:
    """Return `state` with copies of its tensors in main memory, which are kept in `room` and used again."""
    structure, tensors = flatten(state)
    for name in room.keys() - tensors.keys():
        del room[name]
    for name, tensor in tensors.items():
        mine = room.get(name)
        if mine is None or (mine.shape, mine.dtype) != (tensor.shape, tensor.dtype):
            mine = room[name] = torch.empty_like(tensor, device="cpu")
        mine.copy_(tensor)
    return restore(structure, room)


def safetensors_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterable[bytes | memoryview]:
    """Yield a safetensors file in pieces, one tensor in memory at a time; `metadata` goes into its header.

    The library's own writer neither hashes, nor syncs, nor says that the disk is full, and refuses tensors
    that share memory. Larger elements come first, which keeps each tensor aligned.
    """
    header: dict[str, Any] = {_RESERVED: {"format": "pt", **(metadata or {})}}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.numel():
            plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
            yield plain.view(-1).view(torch.uint8).numpy().data
