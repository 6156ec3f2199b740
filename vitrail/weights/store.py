"""A model on disk: `model.safetensors` holds tensors and card; `card.json` is a readable copy of the card.

The card sits in the header of the tensor file because one file can be replaced atomically and two cannot: a
process killed at any moment leaves the old model or the new one, never the tensors of one with the card of
the other. safetensors does not detect flipped bits, so the header also holds a checksum.

If only a part of a model was tuned, the file holds that part, and its header refers to the base model
(`vitrail.weights.base`). `vitrail.weights.load` combines the two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.errors import WeightsError
from vitrail.files import replacing
from vitrail.model.resnet.network import ResNet
from vitrail.model.variants import ResizeMode
from vitrail.model.vit import ViT
from vitrail.weights.assemble import LoadReport, Overrides, admit, assemble, check_finite, expected
from vitrail.weights.base import BaseWeights
from vitrail.weights.card import Card

WEIGHTS = "model.safetensors"
CARD = "card.json"
_PLACES = ("", "best", "last", "model/best", "model/last")

Complete = Callable[[BaseWeights, Path, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""(base, file that refers to it, {name: tensor of the right shape}) -> {name: tensor of the base}"""


def save_model(folder: Path | str, model: nn.Module, card: Card, base: BaseWeights | None = None) -> None:
    """Write `model.safetensors` and `card.json` into `folder`, which is created if missing; replace existing files.

    Pass the bare network, without the wrappers of DDP or torch.compile. With a `base`, the file leaves out the tensors
    shared with it and refers to it. Raises WeightsError if a tensor is not finite: a broken model never replaces a
    good one.
    """
    folder = Path(folder)
    left_out = frozenset() if base is None else base.shared
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    for name, tensor in tensors.items():
        check_finite(name, tensor, f"the model is not saved to {folder}")
    text = json.dumps(card.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
    # a class named after a folder may contain bytes that are not text; JSON has the same escapes
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as temporary:
        sums = {"sha256": checksum(tensors), "card_sha256": _digest(text)}
        if base is not None:
            reference = json.dumps(base.written_in(folder))
            sums |= {"base": reference, "base_sha256": _digest(reference)}
        save_file(tensors, temporary, metadata={"card": text, **sums, "format": "pt"})
    with replacing(folder / CARD) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def load_model(
    path: Path | str,
    *,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    resize_mode: ResizeMode | None = None,
    patch: int | None = None,
    complete: Complete | None = None,
) -> ViT | ResNet:
    """Return the model saved at `path`, in eval mode, with `model.card` and `model.load_report`.

    path is a model folder, its model.safetensors, or a run folder (its model/best, else model/last). `classes`
    replaces the head (pre-logits included) by a zero linear layer (paper, section 3.2), even if the number of classes
    does not change; the model then has no class names. `image_size`, in pixels, resamples the positions with
    `resize_mode` (default: the mode of the weights' origin). `patch` resamples the patch kernels and the positions.
    `complete` returns the missing tensors of a model whose file holds only the tuned part. Raises WeightsError, also
    for such a file without `complete`.
    """
    file = find_model(path)
    changes = Overrides(classes, image_size, resize_mode, patch)
    report = LoadReport(file)
    card, tensors = _read(file, report, complete)

    def source(wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        report.unused = {name: "replaced by a new head" for name in sorted(tensors.keys() - wanted)}
        return ((name, tensors[name]) for name in wanted)

    return assemble(card, source, report, changes)


def is_ours(path: Path) -> bool:
    """Return whether vitrail wrote the model at `path` (folder, run or file); only the header is read."""
    for place in [""] if path.is_file() else _PLACES:
        file = path if path.is_file() else path / place / WEIGHTS
        if file.is_file():
            try:
                with safe_open(file, framework="pt") as handle:
                    return "card" in (handle.metadata() or {})
            except (SafetensorError, OSError):
                return bool(place)  # damaged, but only a run has a model there
    return False


def find_model(path: Path | str) -> Path:
    """Return the model.safetensors that `path` refers to. Raises WeightsError that lists the places it looked in."""
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix != ".safetensors":
            raise WeightsError(
                f"{path} is not a vitrail model. Give the folder of a run or of a model (with {WEIGHTS})."
            )
        return path
    if not path.exists():
        raise WeightsError(f"there is nothing at {path}. Give the folder of a run or of a model.")
    for place in _PLACES:
        if (path / place / WEIGHTS).is_file():
            return path / place / WEIGHTS
    looked = ", ".join(str(Path(place) / WEIGHTS) for place in _PLACES)
    raise WeightsError(f"{path} holds no model. Looked for {looked} in it.")


def read_card(path: Path | str) -> Card:
    """Return the card of a model without reading its tensors. Raises WeightsError."""
    file = find_model(path)
    with _open(file) as (_, card, _header):
        return card


def _read(file: Path, report: LoadReport, complete: Complete | None) -> tuple[Card, dict[str, Tensor]]:
    """Return card and memory-mapped tensors of a file, after checking that they are complete, finite and undamaged."""
    with _open(file) as (handle, card, header):
        names = set(handle.keys())
        needed = expected(card.config, file)
        base = _base(header, file)
        for name, like in needed.items():
            shape = tuple(like.shape)
            if name not in names:
                if base is not None:
                    continue
                raise WeightsError(f"{file} lacks the tensor {name!r} of shape {shape}")
            found = tuple(handle.get_slice(name).get_shape())
            if found != shape:
                raise WeightsError(f"{file} has {name!r} in shape {found}; its card requires {shape}")
        if extra := sorted(names - needed.keys()):
            raise WeightsError(f"{file} holds the tensor {extra[0]!r}, which the model of its card does not have")
        tensors = {name: handle.get_tensor(name) for name in needed if name in names}
    if checksum(tensors) != header.get("sha256", ""):
        raise WeightsError(f"{file} is damaged: its tensors do not match their checksum. Restore a copy.")
    taken: set[int] = set()
    tensors = {name: admit(name, tensor, needed[name], file, taken) for name, tensor in tensors.items()}
    if base is None:
        return card, tensors
    if complete is None:
        raise WeightsError(
            f"{file} holds only the tuned part of a model. vitrail.load combines it with its base model."
        )
    rest = complete(base, file, {name: needed[name] for name in needed.keys() - names})
    report.base = f"{len(rest)} tensors from {base.source}"
    return card, tensors | dict(rest)


@contextmanager
def _open(file: Path) -> Iterator[tuple[safe_open, Card, dict[str, str]]]:
    """Yield an open tensor file, its card and its header. Raises WeightsError for any other file."""
    try:
        with safe_open(file, framework="pt") as handle:
            header = handle.metadata() or {}
            if "card" not in header:
                raise WeightsError(f"{file} was not written by vitrail: its header has no model card")
            if header.get("card_sha256", _digest(header["card"])) != _digest(header["card"]):
                raise WeightsError(f"{file} is damaged: its card does not match its checksum. Restore a copy.")
            try:
                card = Card.from_dict(json.loads(header["card"]))
            except (WeightsError, ValueError, RecursionError) as error:
                raise WeightsError(f"{file} has an unusable card: {error}") from error
            yield handle, card, header
    except (SafetensorError, OSError) as error:
        reason = f"truncated, damaged or of another kind ({error})"
        raise WeightsError(f"{file} cannot be read: {reason}") from error


def _base(header: dict[str, str], file: Path) -> BaseWeights | None:
    """Return the base model that a file refers to; None if the file should be complete. Raises WeightsError."""
    if (text := header.get("base")) is None:
        return None
    if header.get("base_sha256") != _digest(text):
        raise WeightsError(
            f"{file} is damaged: the reference to its base model does not match its checksum. Restore a copy."
        )
    try:
        return BaseWeights.read(json.loads(text), file)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} refers to its base model in an unknown way: {error}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names and bytes of CPU tensors, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
