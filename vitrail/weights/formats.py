"""The formats of other libraries: which one a file is in, and what a format must be able to say and do.

A format is recognised by what a file contains, names and shapes of tensors and `config.json`, never by how the
file is called: people rename files. Exactly one format must answer; two are a fault of ours and an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.errors import UsageError, WeightsError, did_you_mean
from vitrail.files import replacing
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.mapping import Conversion

MODULES = {
    "google": "flax.google",
    "big_vision": "flax.big_vision",
    "bit": "flax.bit",
    "timm": "timm.format",
    "hf": "hf.format",
    "torchvision": "torchvision",
    "deit": "deit",
}
"""Every foreign format's name, and the module below `vitrail.weights` that holds it as `FORMAT`."""
NAMES = tuple(MODULES)


@dataclass(frozen=True)
class ForeignModel:
    """What a format made of an archive, before any tensor is read."""

    card: Card
    """Config, preprocessing, class names, source, licence."""
    conversions: list[Conversion]
    """Where each tensor of the model comes from."""
    unused: dict[str, str] = field(default_factory=dict)
    """Foreign name: why it has no place here, such as "decoder of MAE pre-training"."""
    zeros: dict[str, str] = field(default_factory=dict)
    """Our names that the file lacks and that are zero by the format's definition: why."""
    assumptions: list[str] = field(default_factory=list)
    """What the file does not say, such as "12 heads assumed: width 768 / 64"."""


class Format(Protocol):
    """One library's way of writing a model into a file."""

    @property
    def name(self) -> str:
        """The word for `--format` and `vitrail.save(format=...)`."""

    def recognises(self, archive: Archive) -> bool:
        """Is the archive in this format? Decided by names, shapes and config.json alone."""

    def find(self, archive: Archive) -> ForeignModel:
        """Infer the model. Raises WeightsError for what cannot be expressed here, naming it."""

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write the model. Raises WeightsError with the reason where the format has no place for something."""


FORMATS: tuple[Format, ...]
"""All foreign formats, imported when they are first asked for: each of their modules imports this one."""


def __getattr__(name: str) -> tuple[Format, ...]:
    if name == "FORMATS":
        return tuple(format_named(one) for one in NAMES)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def format_named(name: str) -> Format:
    """Return a format by its name. Raises UsageError with the valid names."""
    if name not in NAMES:
        raise UsageError(f"no format is named {name!r}.{did_you_mean(name, NAMES)} Valid: {', '.join(NAMES)}")
    found: Format = import_module(f"vitrail.weights.{MODULES[name]}").FORMAT
    return found


def recognise(archive: Archive, among: Sequence[Format] | None = None) -> Format:
    """Return the format of an archive (of all by default). Raises WeightsError where none, or two, answer."""
    candidates = [format_named(name) for name in NAMES] if among is None else among
    found = [one for one in candidates if one.recognises(archive)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(one.name for one in found)
        raise WeightsError(f"{archive.path} could be in the format {names}: please report this file")
    sample = ", ".join(repr(name) for name in sorted(archive.names)[:3]) or "none at all"
    raise WeightsError(
        f"{archive.path} is in no format known here (vitrail's own, {', '.join(NAMES)}): it has "
        f"{len(archive.names)} tensors, named {sample}"
    )


def origin_of(card: Card, name: str) -> dict[str, Any]:
    """Return how the file that the model came from was laid out, {} where it was not of the format `name`."""
    origin = card.provenance.get("origin") or {}
    return dict(origin) if origin.get("format") == name else {}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors on the CPU, under our names."""
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def foreign_tensors(state: Mapping[str, Tensor], conversions: Iterable[Conversion], name: str) -> dict[str, Tensor]:
    """Return a model's tensors as the format's; parts of one array come together along its first axis, in order.

    Raises WeightsError for a tensor of the model that no entry takes: nothing is left out in silence.
    """
    conversions = list(conversions)
    if extra := sorted(state.keys() - {entry.ours for entry in conversions}):
        raise WeightsError(f"format {name!r} has no place for the tensor {extra[0]!r}; save as 'vitrail', which has")
    parts: dict[str, list[Tensor]] = {}
    for entry in conversions:
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
