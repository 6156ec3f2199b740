"""The tensors of a .safetensors file, read into memory.

A memory-mapped file that is cut while it is in use ends the process (SIGBUS), and one that is overwritten changes the
model. safetensors returns mapped tensors, so here it checks only the header, and the values are read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.disk import is_utf8
from vitrail.errors import WeightsError
from vitrail.files import open_regular
from vitrail.words import shown

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
"""The types that safetensors can hold, and its names for them."""
_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class TensorFile:
    """An open .safetensors file. Close it, or use it in a `with`. Raises WeightsError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_utf8(path):
            raise WeightsError(f"{path} cannot be read: a name on the way is not UTF-8. Rename it")
        try:
            self._stream = open_regular(path)
            with safe_open(path, framework="pt"):  # checks the file, which may be another one by now
                pass
            length = int.from_bytes(self._stream.read(8), "little")
            entries = json.loads(self._stream.read(length))
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise WeightsError(f"{path} cannot be read: truncated, damaged or of another kind ({error})") from error
        self._start = 8 + length
        # of the file whose tensors are read: a run in progress replaces its best model at any moment
        self.metadata: dict[str, str] = entries.get("__metadata__") or {}
        self._entries = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(e["shape"]) for name, e in self._entries.items()}

    def read(self, name: str) -> Tensor:
        """Return a tensor in memory of its own. Raises WeightsError if the file no longer holds it."""
        entry, shape = self._entries[name], self.shapes[name]
        (begin, end), dtype = entry["data_offsets"], _TYPES.get(entry["dtype"])
        if dtype is None:
            raise WeightsError(f"{self.path}: {shown(name)} cannot be read: its type {entry['dtype']} is not known")
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise WeightsError(f"{self.path}: {shown(name)} cannot be read: the file has changed. Try again")
        try:
            self._stream.seek(self._start + begin)
            tensor = torch.empty(shape, dtype=dtype)
            done = self._stream.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"{self.path}: {shown(name)} cannot be read ({error})") from error
        if done != end - begin:
            raise WeightsError(
                f"{self.path} was cut while it was read: {done:,} of {end - begin:,} bytes of {shown(name)} are there. "
                "Restore a copy."
            )
        return tensor

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Tensors that were read stay valid."""
        self._stream.close()
