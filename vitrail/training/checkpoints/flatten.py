"""Nested training state as JSON and named tensors, and tensors as bytes: the checkpoint format without pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail import world
from vitrail.weights.tensor_file import DTYPES

_RESERVED = "__metadata__"  # the name of safetensors' own header entry


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return (structure, tensors): `structure` is plain JSON in which {"$tensor": name} stands for a tensor.

    `state` nests mappings, lists, tuples, tensors, str, int, float, bool and None. Names are paths such as
    "optimizer/state/0/exp_avg". A tensor that appears twice is stored once and appears twice again after
    `restore`. Raises TypeError with the path for any other value.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}

    def encode(value: Any, path: tuple[str, ...]) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Tensor):
            return {"$tensor": name_of(value, path)}
        if isinstance(value, list | tuple):
            listed = [encode(item, (*path, str(index))) for index, item in enumerate(value)]
            return listed if isinstance(value, list) else {"$tuple": listed}
        if not isinstance(value, Mapping):
            raise TypeError(f"{'/'.join(path)} is a {type(value).__name__}, which a checkpoint cannot store")
        for key in value:
            if key is not None and not isinstance(key, bool | int | float | str):
                raise TypeError(
                    f"{'/'.join(path)} has a {type(key).__name__} as a key, which a checkpoint cannot store"
                )
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        items = [[encode(key, path), encode(item, (*path, str(key)))] for key, item in value.items()]
        return dict(items) if plain else {"$dict": items}

    def name_of(tensor: Tensor, path: tuple[str, ...]) -> str:
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            kind = f"{tensor.layout} tensor of {tensor.dtype}"
            raise TypeError(f"{'/'.join(path)} is a {kind}, which a checkpoint cannot store")
        where: tuple[Any, ...] = path  # an empty tensor has no memory to share
        if tensor.numel() and not world.is_sharded(tensor):  # a process may hold an empty part
            where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if where not in names:
            name = "/".join(path) or "tensor"
            while name in tensors or name.rsplit("/", 1)[-1] == _RESERVED:
                name += "~"
            names[where] = name
            tensors[name] = tensor.detach()
        return names[where]

    return encode(state, ()), tensors


def restore(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `flatten` was given, with dicts for all mappings."""
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


def nbytes(state: Any, share: Collection[str] | None = None) -> int:
    """Return the number of bytes of the tensors in `state`; of sharded tensors, of this process's part.

    share: Names of the tensors that count; None for all.
    """
    tensors = flatten(state)[1]
    return sum(world.local_part(tensors[name]).nbytes for name in (tensors if share is None else share))


def shares(tensors: Mapping[str, Tensor], alike: Collection[str], count: int) -> list[list[str]]:
    """Divide the names of `tensors` among `count` processes by their bytes; the first has all that are not `alike`.

    alike: Names of tensors that are the same in all processes, each of which returns the same lists.
    """
    found: list[list[str]] = [[name for name in tensors if name not in alike], *([] for _ in range(1, count))]
    sizes = [sum(tensors[name].nbytes for name in names) for names in found]
    for name in sorted(tensors.keys() & {*alike}, key=lambda name: (-tensors[name].nbytes, name)):
        least = sizes.index(min(sizes))
        found[least].append(name)
        sizes[least] += tensors[name].nbytes
    return found


def copied(state: Any, buffers: dict[str, Tensor], share: Collection[str] | None = None) -> Any:
    """Return `state` with copies of its tensors in main memory; `buffers` holds the copies for reuse.

    share: Names of the tensors to copy; None for all.
    """
    structure, every = flatten(state)
    tensors = every if share is None else {name: every[name] for name in share}
    for name in buffers.keys() - tensors.keys():
        del buffers[name]
    for name, tensor in tensors.items():
        copy = buffers.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = buffers[name] = torch.empty_like(tensor, device="cpu")
        copy.copy_(tensor)
    return restore(structure, {**every, **buffers})


def safetensors_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterable[bytes | memoryview]:
    """Yield a safetensors file in pieces, with one tensor in memory at a time; `metadata` goes into its header.

    The library's own writer does not hash, sync or report a full disk, and it rejects tensors that share memory.
    Tensors with larger elements come first, which keeps every tensor aligned.
    """
    header: dict[str, Any] = {_RESERVED: {"format": "pt", **(metadata or {})}}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.numel():
            plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
            yield plain.view(-1).view(torch.uint8).numpy().data
