"""PyTorch's own files (.pth, .pt, .bin): pickles, read by an unpickler that knows only tensors and runs no code.

`torch.load(weights_only=True)` runs no code. The sizes that it trusts are checked here: torch maps a record without
checking that it is uncompressed and as long as the pickle says, and a tensor with a stride of 0 may claim
a size that no file holds.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import pickle
import pickletools
import re
import sys
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.words import listing, shown

NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Keys of a training checkpoint that may hold the tensors; averaged weights first, as in timm."""
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DDP and torch.compile add to every name."""
BOMBS = (("builtins", "bytearray"), ("__builtin__", "bytearray"), ("_codecs", "encode"))
"""Functions that torch lets a pickle call. A few bytes are enough for them to allocate any amount of memory."""
MOST_SCALAR = 64
"""Maximum number of characters by which a pickle states the bytes of a scalar of NumPy."""
MOST_PICKLED = 16 * 2**20
"""Maximum bytes of a file that are pickled rather than tensors. A tensor's name, shape and place take about 150 bytes,
so this is enough for 100,000 tensors; objects of Python take up to 75 times the bytes of their pickle."""
PICKLES = 5
"""Number of pickles in a file of torch before 1.6, in front of its tensors."""
MOST_WRAPPERS = 4
"""Maximum number of prefixes that are removed from the names."""


def read_torch(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict of a file, memory-mapped if possible, and notes on the choices made.

    Raises WeightsError for pickles that ask for code, and for files that are damaged or hold no tensors.
    """
    sizes = _record_sizes(path)
    _refuse_bombs(path)
    try:
        # DeiT's and timm's training checkpoints keep their flags next to the weights, others the paths of a run
        with torch.serialization.safe_globals([argparse.Namespace, PosixPath, PurePosixPath, *_SCALARS]), _private():
            if path.name.endswith(".safetensors"):  # which torch would believe
                with path.open("rb") as stream:
                    content = torch.load(stream, map_location="cpu", weights_only=True)
            else:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=sizes is not None)
    except pickle.UnpicklingError as error:
        raise WeightsError(_refusal(path, _asked(str(error)))) from error
    except Exception as error:  # a damaged pickle raises anything
        raise WeightsError(
            f"{path} cannot be read: truncated, damaged or of another kind ({_first_line(error)})"
        ) from error
    tensors, notes = _unwrapped(path, content)
    for name, tensor in tensors.items():
        _check(path, name, tensor, sizes)
    _check_total(path, tensors)
    return {name: tensor.detach() for name, tensor in tensors.items()}, notes


class _Skipped:
    """What takes the place of a scalar of NumPy and of its type. Nothing of NumPy is called."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


_SCALARS = [
    (_Skipped, name) for name in ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype")
]
"""The functions that make scalars, such as the epoch and the best accuracy beside the tensors."""


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
            members = archive.infolist()
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{path} cannot be read: truncated or damaged ({error})") from error
    if any(info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size for info in members):
        raise WeightsError(f"{path} was packed again with compression, which torch never does; restore the original")
    return {info.file_size for info in members if "/data/" in info.filename}


def _refuse_bombs(path: Path) -> None:
    """Raise WeightsError for a pickle that names a function which may fill the memory, although it runs no code."""
    texts: list[bytes | mmap.mmap]
    try:
        with path.open("rb") as stream:
            if stream.read(2) == b"PK":
                with zipfile.ZipFile(stream) as archive:
                    records = [info for info in archive.infolist() if "/data/" not in info.filename]
                    pickled = sum(info.file_size for info in records)
                    texts = [archive.read(info) for info in records] if pickled <= MOST_PICKLED else []
            else:  # an old file, in which the pickles stand before and between the tensors
                texts = [mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)]
                pickled = _pickled(texts[0])
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{path} cannot be read: truncated or damaged ({error})") from error
    if pickled > MOST_PICKLED:
        raise WeightsError(
            f"{path} has more than {MOST_PICKLED / 2**20:g} MiB beside its tensors, which could fill the memory. Save "
            "the state dict alone, best as .safetensors, with the software that made it"
        )
    for text, (module, name) in product(texts, BOMBS):
        if text.find(f"c{module}\n{name}\n".encode()) < 0:
            continue
        # an old file has several pickles, of which `_states_scalars` would see the first
        if name != "encode" or not isinstance(text, bytes) or not _states_scalars(text):
            raise WeightsError(_refusal(path, f"asks for {module}.{name}, which could fill the memory"))


def _states_scalars(text: bytes) -> bool:
    """Return whether a pickle calls _codecs.encode only as Python does for a few bytes: with a short text and latin1.

    Other codecs, and results that are encoded again, could double a text with every call.
    """
    memo: dict[Any, Any] = {}
    pushed: Any = None
    call: list[Any] = []
    try:
        for code, value, _ in pickletools.genops(text):
            name = code.name
            if name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[value] = pushed
                continue
            if name in ("MEMOIZE", "DUP", "STACK_GLOBAL"):
                return False
            pushed = memo.get(value) if name.endswith("GET") else value if name.endswith("UNICODE") else None
            if name == "GLOBAL" and value == "_codecs encode":
                pushed = _skipped_encode
            if not call and pushed is not _skipped_encode:
                continue
            call.append(pushed if pushed is not None else name)
            if len(call) == len(_SHORT_CALL):
                if not all(fits(part) for fits, part in zip(_SHORT_CALL, call, strict=True)):
                    return False
                call = []
    except (ValueError, IndexError, UnicodeDecodeError):
        return False
    return not call


_skipped_encode = object()
_SHORT_CALL: tuple[Callable[[Any], bool], ...] = (
    lambda part: part is _skipped_encode,
    lambda part: isinstance(part, str) and len(part) <= MOST_SCALAR,
    lambda part: part == "latin1",
    lambda part: part == "TUPLE2",
    lambda part: part == "REDUCE",
)


def _pickled(text: Any) -> int:
    """Return the bytes of the pickles in front of a mapped old file's tensors; if there are too many, a larger number.

    Anything but a pickle ends the count: torch says what is wrong with it.
    """
    with contextlib.suppress(ValueError, IndexError, UnicodeDecodeError):
        for _ in range(PICKLES):
            if any((place or 0) > MOST_PICKLED for _, _, place in pickletools.genops(text)):
                break
    count = text.tell()
    text.seek(0)
    return count


def _asked(message: str) -> str:
    """Return what a pickle does that torch rejected with this message."""
    asked = re.search(r"GLOBAL (\S+)", message)
    return f"asks for {asked[1]}, which could run code" if asked else f"is refused ({message.splitlines()[0]})"


def _refusal(path: Path, what: str) -> str:
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
        others = sorted(key if isinstance(key, str) else shown(key) for key in content if key != present[0])
        notes.append(
            f"the tensors are those under {present[0]!r}" + f"; not {listing(others, quoted=False)}" * bool(others)
        )
        content = content[present[0]]
    if not content:
        raise WeightsError(f"{path} holds no tensors")
    states = {key: value for key, value in content.items() if isinstance(value, dict) and value}
    networks = [
        key
        for key, state in states.items()
        if isinstance(key, str) and all(isinstance(t, Tensor) for t in state.values())
    ]
    if len(networks) > 1:
        raise WeightsError(
            f"{path} holds {len(networks)} networks, {listing(networks)}. Save the one that you want in a file of its "
            f"own: torch.save(torch.load(PATH, weights_only=True)[{networks[0]!r}], NEW)"
        )
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise WeightsError(f"{path}: {shown(name)} is a {type(tensor).__name__} where a tensor should be")
    names = list(content)
    for _ in range(MOST_WRAPPERS):
        if wrapper := next((w for w in WRAPPERS if all(name.startswith(w) for name in names)), None):
            notes.append(f"names without their {wrapper!r}")
            names = [name.removeprefix(wrapper) for name in names]
    return dict(zip(names, content.values(), strict=True)), notes


def _check_total(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise WeightsError if the tensors have more memory than the file has bytes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    if (total := sum(storages.values())) > path.stat().st_size:
        raise WeightsError(f"{path} claims {total:,} bytes of tensors, more than it has")


def _check(path: Path, name: str, tensor: Tensor, sizes: set[int] | None) -> None:
    """Raise WeightsError unless the tensor is plain and the file holds all of its values."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise WeightsError(f"{path}: {name!r} is no plain tensor but {tensor.layout}, {tensor.dtype}, {tensor.device}")
    there, claimed = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
    if claimed > there or (sizes is not None and there and there not in sizes):
        raise WeightsError(
            f"{path}: {name!r} claims {tuple(tensor.shape)} in {claimed:,} bytes, and its record does not hold them"
        )
