"""What the .npz files of flax and TensorFlow have in common: named axes, numbered units, and arrays in their types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.npz import Npz
from vitrail.errors import WeightsError
from vitrail.weights.archive import Archive
from vitrail.weights.formats import refuse_folder
from vitrail.weights.mapping import count

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16)}
DTYPES["bfloat16"] = torch.bfloat16


def named_axes(archive: Archive, name: str, *axes: str) -> tuple[int, ...]:
    """Return the shape of a required tensor with these axes. Raises WeightsError if it does not fit."""
    if name not in archive:
        raise WeightsError(f"{archive.path} lacks the tensor {name!r} ({', '.join(axes)})")
    shape = tuple(archive.shape(name))
    if len(shape) != len(axes) or 0 in shape:
        raise WeightsError(f"{archive.path} has {name!r} in shape {shape}; it should be ({', '.join(axes)})")
    return shape


def stage_units(archive: Archive, names: Iterable[str], prefix: str) -> tuple[int, ...]:
    """Return the number of units in each stage of a ResNet, () if it has none; `names` start with the prefix.

    Stages and units count from 1: "block1/unit1/". Raises WeightsError for a gap in the numbers.
    """
    names = list(names)
    stages = range(1, 1 + count(archive, f"{prefix}block", "/", 1, names))
    return tuple(count(archive, f"{prefix}block{stage}/unit", "/", 1, names) for stage in stages)


def found_dtypes(archive: Archive, names: Iterable[str]) -> dict[str, Any]:
    """Return the dtypes of a file's arrays for a card: the most common one, and the arrays that differ."""
    if archive.kind == "npz":
        npz = Npz(archive.path, WeightsError)  # reads only the headers
        npz.close()
        kinds = {name: "bfloat16" if npz.is_bfloat16(name) else npz.headers[name].dtype.name for name in sorted(names)}
    else:
        kinds = {name: str(archive[name].dtype).removeprefix("torch.") for name in sorted(names)}
    common = Counter(kinds.values()).most_common(1)[0][0]
    return {"dtype": common, "other_dtypes": {name: kind for name, kind in kinds.items() if kind != common}}


def write_npz(path: Path, tensors: Mapping[str, Tensor], origin: Mapping[str, Any]) -> None:
    """Write the arrays, each in the dtype that `origin` names, if that dtype holds its values exactly.

    bfloat16 becomes NumPy's void of two bytes, as in released files. `vitrail.weights.save` checks the written file
    and moves it into place. Raises WeightsError if `path` is a folder.
    """
    refuse_folder(path, "model.npz")
    others = origin.get("other_dtypes", {})
    arrays: dict[str, Any] = {
        name: _array(tensor, others.get(name, origin.get("dtype"))) for name, tensor in tensors.items()
    }
    with path.open("wb") as file:  # a file, as savez adds .npz to a name
        np.savez(file, **arrays)


def _array(tensor: Tensor, found: str | None) -> np.ndarray:
    """Return a tensor as an array in the dtype of its file, or in its own dtype if that one is too narrow."""
    if found in DTYPES:
        narrow = tensor.to(DTYPES[found])
        if torch.equal(narrow.to(tensor.dtype), tensor):
            tensor = narrow
    tensor = tensor.contiguous()
    return tensor.view(torch.int16).numpy().view("V2") if tensor.dtype == torch.bfloat16 else tensor.numpy()
