"""Writing .npz: a model's tensors under a format's names, in the types they were found in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.files import Npz
from vitrail.weights.archive import Archive
from vitrail.weights.writing import refuse_folder

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16)}
DTYPES["bfloat16"] = torch.bfloat16


def found_dtypes(archive: Archive, names: Iterable[str]) -> dict[str, Any]:
    """Return the types of a file's arrays for a card: the most common one, and the names that differ."""
    kinds = _dtypes(archive, sorted(names))
    common = Counter(kinds.values()).most_common(1)[0][0]
    return {"dtype": common, "other_dtypes": {name: kind for name, kind in kinds.items() if kind != common}}


def _dtypes(archive: Archive, names: Iterable[str]) -> dict[str, str]:
    if archive.kind != "npz":  # memory-mapped: nothing is read
        return {name: str(archive[name].dtype).removeprefix("torch.") for name in names}
    npz = Npz(archive.path, WeightsError)  # reads only the headers
    npz.close()
    return {name: "bfloat16" if npz.is_bfloat16(name) else npz.headers[name].dtype.name for name in names}


def write_npz(path: Path, tensors: Mapping[str, Tensor], origin: Mapping[str, Any]) -> None:
    """Write the arrays, each in the type that `origin` names where that one holds its values.

    bfloat16 becomes NumPy's void of two bytes, as in released files. `vitrail.weights.save` checks what was written
    and moves it into its place. Raises WeightsError where `path` is a folder.
    """
    refuse_folder(path, "model.npz")
    others = origin.get("other_dtypes", {})
    arrays: dict[str, Any] = {
        name: _array(tensor, others.get(name, origin.get("dtype"))) for name, tensor in tensors.items()
    }
    with path.open("wb") as file:  # a file, as savez adds .npz to a name
        np.savez(file, **arrays)


def _array(tensor: Tensor, found: str | None) -> np.ndarray:
    """The tensor as an array of the type it was found in, or of its own type where that one is too narrow by now."""
    if found in DTYPES:
        narrow = tensor.to(DTYPES[found])
        if torch.equal(narrow.to(tensor.dtype), tensor):
            tensor = narrow
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()
