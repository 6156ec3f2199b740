"""The formats of other libraries: their interface, recognising the format of a file, and what all formats share.

A format is recognised by the content of a file (names and shapes of tensors, `config.json`), never by the file's
name, because people rename files. Exactly one format must recognise a file; if two do, that is a bug in vitrail.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.errors import LONGEST_NAME, UsageError, WeightsError, did_you_mean
from vitrail.files import replacing, replacing_text
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.mapping import Conversion
from vitrail.words import shown

MODULES = {
    "google": "flax.vit.GOOGLE",
    "big_vision": "flax.vit.BIG_VISION",
    "bit": "flax.bit.FORMAT",
    "timm": "timm.format.FORMAT",
    "hf": "hf.format.FORMAT",
    "torchvision": "torchvision.FORMAT",
    "deit": "deit.FORMAT",
    "open_clip": "open_clip.FORMAT",
}
"""Every foreign format's name, and its place below `vitrail.weights`."""
NAMES = tuple(MODULES)


@dataclass(frozen=True)
class ForeignModel:
    """The model that a format inferred from an archive, before any tensor is read."""

    card: Card
    """Config, preprocessing, class names, source, licence."""
    conversions: list[Conversion]
    """How each tensor of the model is made from the file's."""
    unused: dict[str, str] = field(default_factory=dict)
    """Name in the file -> why the model does not use it, such as "decoder of MAE pre-training"."""
    zeros: dict[str, str] = field(default_factory=dict)
    """Name in the model -> why it is zero by the format's definition; the file lacks it."""
    assumptions: list[str] = field(default_factory=list)
    """What the file does not say and is assumed, such as "12 heads assumed: width 768 / 64"."""
    differences: list[str] = field(default_factory=list)
    """Those of the assumptions by which images are prepared otherwise than in the library that the file is from."""
    for_config: Callable[[ViTConfig], list[Conversion]] | None = None
    """Returns the conversions for a config with another image size, if the file computes positions for any grid. None:
    positions for another grid are resampled."""


class Format(Protocol):
    """A library's file format for models."""

    @property
    def name(self) -> str:
        """Name of the format for `--format` and `vitrail.save(format=...)`."""

    def recognises(self, archive: Archive) -> bool:
        """Return whether an archive is in this format, judging by names, shapes and config.json only."""

    def find(self, archive: Archive) -> ForeignModel:
        """Infer the model. Raises WeightsError naming the part that vitrail cannot express."""

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write the model. Raises WeightsError with the reason if the format cannot express it."""


FORMATS: tuple[Format, ...]
"""All foreign formats. They are imported on first use, because each of their modules imports this one."""


def __getattr__(name: str) -> tuple[Format, ...]:
    if name == "FORMATS":
        return tuple(format_named(one) for one in NAMES)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def format_named(name: str) -> Format:
    """Return the format with this name. Raises UsageError that lists the valid names."""
    if name not in NAMES:
        raise UsageError(f"there is no format {name!r}.{did_you_mean(name, NAMES)} Valid: {', '.join(NAMES)}")
    module, _, place = MODULES[name].rpartition(".")
    found: Format = getattr(import_module(f"vitrail.weights.{module}"), place)
    return found


FAMILIES = (
    ("CaiT", r"^blocks_token_only\.", ""),
    ("Swin Transformer", r"^(\w+\.)?(encoder\.)?layers\.0\.blocks\.0\.(attn|attention)\.", ""),
    ("PiT", r"^transformers\.0\.blocks\.0\.", ""),
    (
        "LeViT",
        r"^(stem\.conv1\.linear|patch_embed\.0\.c|(\w+\.)?patch_embeddings\.embedding_layer_1\.\w+)\.weight$",
        "",
    ),
    ("TinyViT", r"^(patch_embed\.conv1\.conv|layers\.0\.blocks\.0\.conv1\.c)\.", r"^patch_embed\.conv3\."),
    ("ConvNeXt", r"^(\w+\.)?(encoder\.)?stages\.0\.(blocks|layers)?\.?0\.(conv_dw|dwconv)\.", r"\.xca\."),
    ("PVT", r"^(stages\.0\.blocks|block1)\.0\.attn\.sr\.", ""),
    ("Hiera", r"^(pos_embed_win|head\.fc\.weight)$", r"^(stages|neck|layers)\."),
    ("XCiT", r"^blocks\.0\.local_mp\.", ""),
    ("ConViT", r"^blocks\.0\.attn\.gating_param$", ""),
    ("MLP-Mixer", r"^blocks\.0\.mlp_tokens\.", ""),
    ("SAM", r"^blocks\.0\.attn\.rel_pos_h$", ""),
)
"""(family of networks, pattern of tensor names that it has, pattern of names that it has not), for families that look
like a Vision Transformer to a format and that vitrail does not support."""


def recognise(archive: Archive, among: Sequence[Format] | None = None) -> Format:
    """Return the format of an archive among these (default: all). Raises WeightsError if none, or two, recognise it."""
    for family, has, lacks in FAMILIES:
        there, absent = (any(re.search(each, name) for name in archive.names) for each in (has, lacks or "$^"))
        if there and not absent:
            raise WeightsError(f"{archive.path} is a {family}, which vitrail does not support")
    candidates = [format_named(name) for name in NAMES] if among is None else among
    found = [one for one in candidates if one.recognises(archive)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(one.name for one in found)
        raise WeightsError(f"{archive.path} could be in format {names}. Please report this file.")
    kind = archive.config.get("architecture") or archive.config.get("model_type")
    if isinstance(kind, str):
        raise WeightsError(
            f"{archive.path} is a network of type {shown(kind)} (config.json), which vitrail does not support: its "
            "tensors are not those of a plain Vision Transformer"
        )
    sample = ", ".join(repr(name) for name in sorted(archive.names)[:3]) or "none at all"
    raise WeightsError(
        f"{archive.path} is not in a known format (vitrail, {', '.join(NAMES)}). It has "
        f"{len(archive.names)} tensors, named {sample}."
    )


def origin_of(card: Card, name: str) -> dict[str, Any]:
    """Return the layout of the file that the model was loaded from, {} if that was not in the format `name`.

    Raises WeightsError for an entry that vitrail does not write: a card may come from anywhere.
    """
    origin = card.provenance.get("origin")
    if not isinstance(origin, Mapping) or origin.get("format") != name:
        return {}
    for entry, valid in _ORIGIN.items():
        if entry in origin and not valid(origin[entry]):
            raise WeightsError(
                f"provenance.origin.{entry} of the model's card is {shown(origin[entry])}, so the names in its "
                f"original file are not known. Convert the original file, or save in another format than {name!r}."
            )
    return dict(origin)


def _is_name(value: Any) -> bool:
    """Return whether a JSON value can be a name in a file."""
    return isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_NAME


_ORIGIN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("architecture", "prefix", "naming", "positions", "dtype"), _is_name),
    **dict.fromkeys(("scan", "beit", "relpos", "qkv_bias", "dense_bias"), lambda value: isinstance(value, bool)),
    **dict.fromkeys(("wide_norms", "mlp"), lambda value: isinstance(value, list) and all(map(_is_name, value))),
    **dict.fromkeys(
        ("numbered", "other_dtypes"), lambda value: isinstance(value, Mapping) and all(map(_is_name, value.values()))
    ),
    **dict.fromkeys(("layout", "config", "processor", "pretrained", "trunk"), lambda value: isinstance(value, Mapping)),
}
"""Entry of `provenance["origin"]` on a card -> whether a value is valid. The formats write them, and read them here."""


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors on the CPU, under vitrail's names."""
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def foreign_tensors(state: Mapping[str, Tensor], conversions: Iterable[Conversion], name: str) -> dict[str, Tensor]:
    """Return a model's tensors under the format's names. Parts of one array are joined along its first axis, in order.

    Raises WeightsError for a tensor of the model without a conversion: nothing is left out silently.
    """
    conversions = list(conversions)
    if extra := sorted(state.keys() - {entry.ours for entry in conversions}):
        raise WeightsError(f"format {name!r} cannot hold the tensor {extra[0]!r}; save as 'vitrail'")
    parts: dict[str, list[Tensor]] = {}
    for entry in conversions:
        for theirs, tensor in zip(entry.theirs, entry.written(state[entry.ours]), strict=True):
            parts.setdefault(theirs, []).append(tensor)
    return {theirs: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for theirs, tensors in parts.items()}


def for_channels(name: str, numbers: tuple[float, ...], channels: int, notes: list[str]) -> tuple[float, ...]:
    """Return a mean or std that fits the channels: the numbers, or their average with a note in `notes`."""
    if len(numbers) in (1, channels) or len(set(numbers)) == 1:
        return numbers
    average = sum(numbers) / len(numbers)
    notes.append(
        f"{name} {average:.4g} for each of {channels} channels, the average of the {len(numbers)} given numbers"
    )
    return (average,)


def refuse_folder(path: Path, example: str) -> None:
    """Raise WeightsError if `path` is a folder; it should be a file, such as `example`."""
    if path.is_dir():
        raise WeightsError(
            f"{path} is a folder; this format is a single file. Give its name, such as {path / example}."
        )


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], documents: Mapping[str, Any], weights: str = "model.safetensors"
) -> None:
    """Write a folder with a file of weights and JSON files. Raises WeightsError if `folder` is a file."""
    if folder.exists() and not folder.is_dir():
        raise WeightsError(f"{folder} is a file, but this format is a folder. Give the name of a folder.")
    write_tensors(folder / weights, tensors)
    for name, values in documents.items():
        with replacing_text(folder / name) as file:
            file.write(json.dumps(values, indent=2) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, under: str | None = None) -> None:
    """Write a safetensors file if `path` ends in .safetensors, else a PyTorch file (with `under`, nested in that key).

    The file is replaced atomically: other processes see the old file or the new one.
    """
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        if path.suffix == ".safetensors":
            save_file(whole, temporary, metadata={"format": "pt"})
        else:
            with open(temporary, "wb") as file:  # of a path torch does not tell why it cannot be written
                torch.save(whole if under is None else {under: whole}, file)
