"""PyTorch's own files (.pth, .pt, .bin): pickles, read by an unpickler that knows only tensors and runs no code.

`torch.load(weights_only=True)` runs no code. The sizes that it trusts are checked here: torch maps a record without
checking that it is uncompressed and as long as the pickle says, and a tensor with a stride of 0 may claim
a size that no file holds.
"""

from __future__ import annotations

import argparse
import mmap
import pickle
import re
import sys
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import WeightsError

NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Keys of a training checkpoint that may hold the tensors; averaged weights first, as in timm."""
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DDP and torch.compile add to every name."""


def read_torch(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict of a file, memory-mapped if possible, and notes on the choices made.

    Raises WeightsError for pickles that ask for code, and for files that are damaged or hold no tensors.
    """
    sizes = _record_sizes(path)
    try:
        # DeiT's and timm's training checkpoints keep their flags next to the weights
        with torch.serialization.safe_globals([argparse.Namespace]), _private():
            if path.name.endswith(".safetensors"):  # which torch would believe
                with path.open("rb") as stream:
                    content = torch.load(stream, map_location="cpu", weights_only=True)
            else:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=sizes is not None)
    except pickle.UnpicklingError as error:
        raise WeightsError(_refusal(path, str(error))) from error
    except Exception as error:  # a damaged pickle raises anything
        raise WeightsError(
            f"{path} cannot be read: truncated, damaged or of another kind ({_first_line(error)})"
        ) from error
    tensors, notes = _unwrapped(path, content)
    for name, tensor in tensors.items():
        _check(path, name, tensor, sizes)
    return {name: tensor.detach() for name, tensor in tensors.items()}, notes


def _private() -> AbstractContextManager[None]:
    """Return a context in which maps are private: writing into a tensor never changes the file."""
    if sys.platform == "win32":  # always private there
        return nullcontext()
    return torch.serialization.set_default_mmap_options(mmap.MAP_PRIVATE)


def _record_sizes(path: Path) -> set[int] | None:
    """Return the lengths of the tensors' records, or None for an old file, which cannot be mapped."""
    try:
        if not zipfile.is_zipfile(path):
            return None
        with zipfile.ZipFile(path) as archive:
            records = [info for info in archive.infolist() if "/data/" in info.filename]
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{path} cannot be read: truncated or damaged ({error})") from error
    if any(info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size for info in records):
        raise WeightsError(f"{path} was packed again with compression, which torch never does; restore the original")
    return {info.file_size for info in records}


def _refusal(path: Path, message: str) -> str:
    asked = re.search(r"GLOBAL (\S+)", message)
    what = f"asks for {asked[1]}, which could run code" if asked else f"is refused ({message.splitlines()[0]})"
    return (
        f"{path} is a pickle that {what}; only tensors are read from such files. Save the state dict alone, best "
        "as .safetensors, with the software that made it"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _unwrapped(path: Path, content: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict inside a checkpoint, its names without wrappers, and a note on each choice."""
    notes = []
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__} rather than named tensors")
    present = [key for key in NESTED if isinstance(content.get(key), dict)]
    if present:
        others = sorted(str(key) for key in content if key != present[0])
        notes.append(f"the tensors are those under {present[0]!r}" + f"; not {', '.join(others)}" * bool(others))
        content = content[present[0]]
    if not content:
        raise WeightsError(f"{path} holds no tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise WeightsError(f"{path}: {name!r} is a {type(tensor).__name__} where a tensor should be")
    names = list(content)
    while wrapper := next((w for w in WRAPPERS if all(name.startswith(w) for name in names)), None):
        notes.append(f"names without their {wrapper!r}")
        names = [name.removeprefix(wrapper) for name in names]
    return dict(zip(names, content.values(), strict=True)), notes


def _check(path: Path, name: str, tensor: Tensor, sizes: set[int] | None) -> None:
    """Raise WeightsError unless the tensor is plain and the file holds all of its values."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise WeightsError(f"{path}: {name!r} is no plain tensor but {tensor.layout}, {tensor.dtype}, {tensor.device}")
    there, claimed = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
    if claimed > there or (sizes is not None and there and there not in sizes):
        raise WeightsError(
            f"{path}: {name!r} claims {tuple(tensor.shape)} in {claimed:,} bytes, and its record does not hold them"
        )
