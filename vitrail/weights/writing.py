"""A model on its way into another library's file: its tensors under their names, and the file itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.errors import WeightsError
from vitrail.files import replacing
from vitrail.weights.card import Card
from vitrail.weights.mapping import Entry


def origin_of(card: Card, name: str) -> dict[str, Any]:
    """Return how the file that the model came from was laid out, {} where it was not of the format `name`."""
    origin = card.provenance.get("origin") or {}
    return dict(origin) if origin.get("format") == name else {}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors on the CPU, under our names."""
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def foreign_tensors(state: Mapping[str, Tensor], entries: Iterable[Entry], name: str) -> dict[str, Tensor]:
    """Return a model's tensors as the format's; parts of one array come together along its first axis, in order.

    Raises WeightsError for a tensor of the model that no entry takes: nothing is left out in silence.
    """
    entries = list(entries)
    if extra := sorted(state.keys() - {entry.ours for entry in entries}):
        raise WeightsError(f"format {name!r} has no place for the tensor {extra[0]!r}; save as 'vitrail', which has")
    parts: dict[str, list[Tensor]] = {}
    for entry in entries:
        for theirs, tensor in zip(entry.theirs, entry.write(state[entry.ours]), strict=True):
            parts.setdefault(theirs, []).append(tensor)
    return {theirs: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for theirs, tensors in parts.items()}


def refuse_folder(path: Path, example: str) -> None:
    """Raise WeightsError where `path`, which is to be a file such as `example`, is a folder."""
    if path.is_dir():
        raise WeightsError(f"{path} is a folder; this format is one file: give its name, such as {path / example}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, under: str | None = None) -> None:
    """Write a safetensors file where `path` ends so, else one of PyTorch's, its dictionary inside another if `under`.

    It takes the place of `path` when it is whole: the tensors may be mapped from the file that is replaced.
    """
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        if path.suffix == ".safetensors":
            save_file(whole, temporary, metadata={"format": "pt"})
        else:
            torch.save(whole if under is None else {under: whole}, temporary)
