"""Writing flax .npz files: rejecting models that the formats cannot express, and the arrays in their found types.

A flax file holds arrays and nothing else. Whatever names and shapes do not say is fixed by the program that reads
the file: it computes the tanh approximation of GELU, and LayerNorm with an epsilon of 1e-6. Another model could be
written without an error, but would compute something else (with the exact GELU, logits change by about 2e-4), so it
is rejected here. To accept that change, build the model with the approximation. `vitrail.weights.save` reports what
the file cannot hold besides the network: normalisation of pixels, resampling of positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.npz import Npz
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.archive import Archive
from vitrail.weights.flax.encoder import grid_of
from vitrail.weights.formats import refuse_folder
from vitrail.weights.parts import first_reason, without_place

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16)}
DTYPES["bfloat16"] = torch.bfloat16


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
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()


def expressible(model: nn.Module, name: str, has: str) -> ViTConfig:
    """Return the config of a model that the format `name` can hold. Raises WeightsError with the reason.

    `has` names the parts in `vitrail.weights.parts` for which the format has an array.
    """
    if not isinstance(model, ViT):
        raise WeightsError(
            f"format {name!r} holds Vision Transformers, not a {type(model).__name__}; a ResNetV2 goes into 'bit'"
        )
    config = model.config
    if part := without_place(config, f"{has} pool=gap tokenless pre_logits gelu norm_eps oblong"):
        raise WeightsError(f"format {name!r} has no place for {part}. Save as 'vitrail', which has.")
    if value := first_reason(_values_of_readers(config)):
        raise WeightsError(f"format {name!r} does not store {value}")
    return config


def _values_of_readers(config: ViTConfig) -> dict[str, bool]:
    """Return value -> whether the model's differs from the one that every reader of the format assumes."""
    hybrid, eps = config.stem == "resnet", config.origin.norm_eps
    return {
        "the kind of GELU, and every program that reads it computes the tanh approximation. The logits of this model, "
        "which has the exact GELU, would change by about 2e-4. Save as 'timm', 'hf' or 'vitrail', or build the model "
        "with gelu='tanh' to accept the change.": config.origin.gelu != "tanh",
        f"the epsilon of LayerNorm, and its readers use 1e-6. This model has {eps}.": eps != 1e-6,
        "how a hybrid standardises its kernels, and its readers use (w - mean) / (std + 1e-5) and a GroupNorm epsilon "
        f"of 1e-6. This model has the form {config.std_conv!r} and {config.group_norm_eps}.": hybrid
        and (config.std_conv, config.group_norm_eps) != ("hybrid", 1e-6),
    }


def check_grid(config: ViTConfig, name: str) -> None:
    """Raise WeightsError if a reader would infer another grid from the number of positions."""
    rows, columns = config.grid
    if (assumed := grid_of(rows * columns)) != config.grid:
        raise WeightsError(
            f"format {name!r} stores the number of positions but not the grid. A grid of {rows} x {columns} would be "
            f"read as {assumed[0]} x {assumed[1]}. Save as 'vitrail', or load the model with a square image_size first."
        )
