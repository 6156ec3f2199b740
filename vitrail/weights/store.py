"""A model on disk: `model.safetensors`, which holds tensors and card, and `card.json`, the same card to read.

The card sits in the header of the tensor file because one file can be replaced atomically and two cannot: a
process killed at any moment leaves the old model or the new one, never the tensors of one with the card of
the other. safetensors accepts a file in which bits have flipped, so the header also holds a checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.config import ResizeMode, ResNetConfig, ViTConfig
from vitrail.model.resize import resize_line, resize_positions
from vitrail.weights.card import Card

WEIGHTS = "model.safetensors"
CARD = "card.json"
HEAD = ("head.", "pre_logits.")
_PLACES = ("", "best", "last", "model/best", "model/last")


@dataclass
class LoadReport:
    """What happened to each tensor on the way from the file into the model, by name."""

    path: Path
    loaded: list[str] = field(default_factory=list)
    resampled: dict[str, str] = field(default_factory=dict)
    """Name: what was done, such as "14 x 14 -> 24 x 24, official"."""
    reset: list[str] = field(default_factory=list)
    """Started anew, at zero: the classifier."""
    dropped: list[str] = field(default_factory=list)
    """In the file, but with no place in this model: the old head."""

    def __str__(self) -> str:
        parts = [f"loaded {len(self.loaded)} tensors from {self.path}"]
        parts += [f"resampled {name} ({how})" for name, how in self.resampled.items()]
        parts += [f"reset to zero: {', '.join(self.reset)}"] * bool(self.reset)
        parts += [f"left out: {', '.join(self.dropped)}"] * bool(self.dropped)
        return "; ".join(parts)


def save_model(folder: Path | str, model: nn.Module, card: Card) -> None:
    """Write `model.safetensors` and `card.json` into `folder` (made if missing), replacing what is there.

    Pass the bare network, without the wrappers of DDP or torch.compile. Raises WeightsError if a tensor is
    not finite: a broken model never takes the place of a good one.
    """
    folder = Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    _check_finite(tensors, f"not saving to {folder}")
    text = json.dumps(card.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
    # a class named after a folder may hold bytes that are no text; their escapes are JSON's own
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    with _replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"card": text, "sha256": _checksum(tensors), "format": "pt"})
    with _replacing(folder / CARD) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def load_model(
    path: Path | str,
    *,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    resize_mode: ResizeMode | None = None,
) -> nn.Module:
    """Return the model saved at `path`, in eval mode, with `model.card` and `model.load_report`.

    path is a model folder, its model.safetensors, or a run folder (its model/best, else model/last).
    `classes` replaces the head (pre-logits included) by a zero linear layer (paper, section 3.2), even where
    the number stays the same; the class names are then unknown. `image_size`, in pixels, resamples the
    positions, in the way of the weights' origin unless `resize_mode` says otherwise. Raises WeightsError.
    """
    file = find_model(path)
    card, tensors = _read(file)
    old = card.config
    config = _adapted(old, image_size, resize_mode)
    model = build(config)
    if classes is not None:
        model.reset_head(classes)
        config = model.config
        card = replace(card, config=config, class_names=[])
    if image_size is not None:
        preprocess = replace(card.preprocess, image_size=config.image_size)
        card = replace(card, config=config, preprocess=preprocess)
    report = LoadReport(file)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if classes is not None and name.startswith(HEAD):
                report.reset.append(name)
                continue
            report.loaded.append(name)
            source = tensors.pop(name)
            if source.shape != tensor.shape:
                source = _resample(name, source, tensor.shape, old, config)
                report.resampled[name] = _how(old, config)
            tensor.copy_(source)
    report.dropped = sorted(tensors)
    model.card, model.load_report = replace(card, config=config), report  # type: ignore[assignment]
    return model.eval()


def find_model(path: Path | str) -> Path:
    """Return the model.safetensors that `path` means. Raises WeightsError saying where it was looked for."""
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix != ".safetensors":
            raise WeightsError(
                f"{path} is not a vitrail model: give the folder of a run or of a model (with {WEIGHTS})"
            )
        return path
    if not path.exists():
        raise WeightsError(f"there is nothing at {path}: give the folder of a run or of a model")
    for place in _PLACES:
        if (path / place / WEIGHTS).is_file():
            return path / place / WEIGHTS
    looked = ", ".join(str(Path(place) / WEIGHTS) for place in _PLACES)
    raise WeightsError(f"{path} holds no model: looked for {looked} in it")


def read_card(path: Path | str) -> Card:
    """Return the card of a model without reading its tensors. Raises WeightsError."""
    file = find_model(path)
    with _open(file) as (_, card, _sha256):
        return card


def _read(file: Path) -> tuple[Card, dict[str, Tensor]]:
    """Card and tensors of a file that is whole, finite and exactly what its config asks for."""
    with _open(file) as (handle, card, sha256):
        names = set(handle.keys())
        expected = _expected(card.config)
        for name, shape in expected.items():
            if name not in names:
                raise WeightsError(f"{file} lacks the tensor {name!r} of shape {shape}")
            found = tuple(handle.get_slice(name).get_shape())
            if found != shape:
                raise WeightsError(f"{file} has {name!r} in shape {found}; its card asks for {shape}")
        if extra := sorted(names - expected.keys()):
            raise WeightsError(f"{file} holds the tensor {extra[0]!r}, which its card's model does not have")
        tensors = {name: handle.get_tensor(name) for name in expected}
    if _checksum(tensors) != sha256:
        raise WeightsError(f"{file} is damaged: its tensors do not match their checksum; restore a copy")
    _check_finite(tensors, f"{file} is unusable")
    return card, tensors


@contextmanager
def _open(file: Path) -> Iterator[tuple[safe_open, Card, str]]:
    """An open tensor file with its card and checksum; raises WeightsError for a file of another kind."""
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            if "card" not in metadata:
                raise WeightsError(f"{file} was not written by vitrail: its header has no model card")
            try:
                card = Card.from_dict(json.loads(metadata["card"]))
            except (WeightsError, ValueError) as error:
                raise WeightsError(f"{file} has an unusable card: {error}") from error
            yield handle, card, metadata.get("sha256", "")
    except (SafetensorError, OSError) as error:
        reason = f"truncated, damaged or of another kind ({error})"
        raise WeightsError(f"{file} cannot be read: {reason}") from error


def _expected(config: ViTConfig | ResNetConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model, without making the tensors."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in build(config).state_dict().items()}


def _adapted(
    config: ViTConfig | ResNetConfig, image_size: int | tuple[int, int] | None, resize_mode: ResizeMode | None
) -> ViTConfig | ResNetConfig:
    if resize_mode is not None and isinstance(config, ViTConfig):
        config = replace(config, resize_mode=resize_mode)
    if image_size is not None:
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        config = replace(config, image_size=(height, width))
    return config


def _resample(
    name: str, tensor: Tensor, shape: torch.Size, old: ViTConfig | ResNetConfig, new: ViTConfig | ResNetConfig
) -> Tensor:
    """A position table at the resolution of `new`."""
    if isinstance(old, ViTConfig) and isinstance(new, ViTConfig) and name.startswith("positions."):
        if old.positions == "1d":
            return resize_positions(tensor, old.grid, new.grid, new.resize_mode)
        return resize_line(tensor, shape[1])
    raise WeightsError(
        f"{name!r} of shape {tuple(tensor.shape)} cannot be resampled to {tuple(shape)} for images of "
        f"{new.image_size[0]} x {new.image_size[1]} pixels; keep {old.image_size[0]} x {old.image_size[1]}"
    )


def _how(old: ViTConfig | ResNetConfig, new: ViTConfig | ResNetConfig) -> str:
    sizes = [f"{config.image_size[0]} x {config.image_size[1]}" for config in (old, new)]
    return f"{sizes[0]} -> {sizes[1]} px, {getattr(new, 'resize_mode', 'linear')}"


def _check_finite(tensors: dict[str, Tensor], what: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            count = int((~tensor.isfinite()).sum())
            raise WeightsError(f"{what}: {count} of {tensor.numel()} values of {name!r} are NaN or infinite")


def _checksum(tensors: dict[str, Tensor]) -> str:
    """sha256 over names and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write in the place of `path`, which it takes on leaving; on an error it is removed."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
