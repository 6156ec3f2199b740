"""A model on disk: `model.safetensors` holds tensors and card; `card.json` is a readable copy of the card.

The card sits in the header of the tensor file because one file can be replaced atomically and two cannot: a
process killed at any moment leaves the old model or the new one, never the tensors of one with the card of
the other. safetensors does not detect flipped bits, so the header also holds a checksum.

If only a part of a model was tuned, the file holds that part, and its header refers to the base model
(`vitrail.weights.base`). `vitrail.weights.load` combines the two. The part may be updates of low rank: their factors
(`vitrail.model.low_rank`) are added to the base's tensors when they are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.errors import WeightsError
from vitrail.files import names_near, parse_json, read_json_object, replacing, replacing_text
from vitrail.model.low_rank import misfit, separated, updated
from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT
from vitrail.weights.assemble import LoadReport, Overrides, admit, assemble, check_finite, expected, said_of
from vitrail.weights.base import BaseWeights
from vitrail.weights.card import Card
from vitrail.weights.rebuild import check_described
from vitrail.weights.tensor_file import TensorFile
from vitrail.words import shown

log = logging.getLogger("vitrail")
WEIGHTS = "model.safetensors"
CARD = "card.json"
RUN = "run.json"
"""File of every run folder. The model of a run has no card if its network was given to `fit` in Python."""
_PLACES = ("", "best", "last", "model/best", "model/last")

Complete = Callable[[BaseWeights, Path, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""(base, file that refers to it, {name: tensor of the right shape}) -> {name: tensor of the base}"""


def save_model(
    folder: Path | str,
    model: nn.Module,
    card: Card,
    base: BaseWeights | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `model.safetensors` and `card.json` into `folder`, which is created if missing; replace existing files.

    Pass the bare network, without the wrappers of DDP or torch.compile. With a `base`, the file leaves out the tensors
    shared with it and refers to it, and may hold updates of low rank. `dtype` is the type of the numbers in the file,
    such as torch.float16 (default: the model's own). Equal models make equal files, byte for byte.
    Raises WeightsError if a tensor is not finite, or if the tensors are not those of the card: a broken model never
    replaces a good one.
    """
    folder = Path(folder)
    left_out = frozenset() if base is None else base.shared
    state, factors = separated(model) if base is not None else (model.state_dict(), {})
    check_described(model, card.config, state)
    state |= factors
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in state.items()
        if name not in left_out
    }
    for name, tensor in tensors.items():
        check_finite(name, tensor, f"the model is not saved to {folder}")
    _write(folder, tensors, card, {} if base is None else _reference(base, folder))


def replace_header(folder: Path, *, card: Card | None = None, base: BaseWeights | None = None) -> None:
    """Give the model in `folder` another card of the same network, or the new place of its base. Raises WeightsError.

    The tensors stay; they were checked when the file was last read.
    """
    with _open(folder / WEIGHTS) as (opened, found):
        tensors = {name: opened.read(name) for name in opened.shapes}
        kept = ("base", "base_sha256")
        reference: dict[str, str] = {name: opened.metadata[name] for name in kept if name in opened.metadata}
    _write(folder, tensors, card or found, reference if base is None else _reference(base, folder))


def _reference(base: BaseWeights, folder: Path) -> dict[str, str]:
    """Return the part of the header of a file in `folder` that is about its base."""
    text = json.dumps(base.written_in(folder))
    return {"base": text, "base_sha256": _digest(text)}


def _write(folder: Path, tensors: dict[str, Tensor], card: Card, reference: Mapping[str, str]) -> None:
    """Write the files of a model. `reference` is the part of the header that is about its base."""
    text = json.dumps(card.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
    # a class named after a folder may contain bytes that are not text; JSON has the same escapes
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    with replacing(folder / WEIGHTS) as temporary:
        sums = {"sha256": checksum(tensors), "card_sha256": _digest(text), **reference}
        save_file(tensors, temporary, metadata={"card": text, **sums, "format": "pt"})
        _sort_header(temporary)
    with replacing_text(folder / CARD) as file:
        file.write(text + "\n")


def _sort_header(file: Path) -> None:
    """Sort the metadata of a safetensors file in place. safetensors writes them in the random order of a hash table."""
    with file.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length  # Python and safetensors escape the same characters
        stream.seek(8)
        stream.write(text.ljust(length))


def load_model(
    path: Path | str,
    changes: Overrides | None = None,
    *,
    complete: Complete | None = None,
) -> ViT | ResNet:
    """Return the model saved at `path`, in eval mode, with `model.card` and `model.load_report`.

    path is a model folder, its model.safetensors, or a run folder (its model/best, else model/last). `changes` are
    described at `vitrail.load`. `complete` returns the missing tensors of a model whose file holds only the tuned part.
    Raises WeightsError, also for such a file without `complete`.
    """
    file = find_model(path)
    report = LoadReport(file)
    card, tensors = _read(file, report, complete)

    def source(wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        report.unused = {name: "replaced by a new head" for name in sorted(tensors.keys() - wanted)}
        return ((name, tensors[name]) for name in wanted)

    return assemble(card, source, report, changes or Overrides())


def _warn_of_another_card(file: Path, card: str) -> None:
    """Log a warning if card.json, the copy of a card for people, is not the `card` of the file, which alone counts."""
    copy = file.with_name(CARD)
    if file.name != WEIGHTS or not copy.is_file():
        return
    try:
        told = read_json_object(copy, WeightsError)
        used = parse_json(card)
        differ = [name for name in {**used, **told} if used.get(name) != told.get(name)]
        what = f"differs from the card in the header of {file.name} ({', '.join(map(shown, differ[:3]))})"
    except WeightsError:
        differ, what = [CARD], f"cannot be read, unlike the card in the header of {file.name}"
    if differ:
        log.warning(
            "%s %s. It is only a copy: the header counts. To change the card, load the model in Python, change "
            "model.card (dataclasses.replace), and save the model with vitrail.save",
            copy, what,
        )  # fmt: skip


def is_ours(path: Path) -> bool:
    """Return whether vitrail wrote the model at `path` (folder, run or file); only the header is read."""
    for place in [""] if path.is_file() else _PLACES:
        file = path if path.is_file() else path / place / WEIGHTS
        if file.is_file():
            try:
                with safe_open(file, framework="pt") as handle:
                    written = "card" in (handle.metadata() or {})
                return written or (bool(place) and (path / RUN).is_file())
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
        raise WeightsError(f"there is nothing at {path}.{names_near(path)} Give the folder of a run or of a model.")
    for place in _PLACES:
        if (path / place / WEIGHTS).is_file():
            return path / place / WEIGHTS
    looked = ", ".join(str(Path(place) / WEIGHTS) for place in _PLACES)
    raise WeightsError(f"{path} holds no model. Looked for {looked} in it.")


def read_card(path: Path | str) -> Card:
    """Return the card of a model without reading its tensors. Raises WeightsError."""
    file = find_model(path)
    with _open(file) as (_, card):
        return card


def _read(file: Path, report: LoadReport, complete: Complete | None) -> tuple[Card, dict[str, Tensor]]:
    """Return card and tensors of a file, after checking that they are complete, finite and undamaged."""
    with _open(file) as (opened, card):
        header, names = opened.metadata, set(opened.shapes)
        _warn_of_another_card(file, header["card"])
        needed = expected(card.config, file)
        base = _base(header, file)
        for name, like in needed.items():
            shape = tuple(like.shape)
            if name not in names:
                if base is not None:
                    continue
                raise WeightsError(
                    f"{file} lacks the tensor {name!r} of shape {shape}, which its card requires "
                    f"({said_of(name, card.config)})"
                )
            found = opened.shapes[name]
            if found != shape:
                raise WeightsError(
                    f"{file} has {name!r} in shape {found}; its card requires {shape} ({said_of(name, card.config)})"
                )
        extra = {name: opened.shapes[name] for name in sorted(names - needed.keys())}
        if strange := misfit(extra, needed) if base is not None else next(iter(extra), ""):
            raise WeightsError(
                f"{file} holds the tensor {shown(strange)}, which the model of its card does not have "
                f"({said_of(strange, card.config)})"
            )
        tensors, digest, hashed = {}, hashlib.sha256(), []
        with ThreadPoolExecutor(1) as behind:  # hashing takes as long as reading, so it follows in a thread of its own
            for name in sorted(names & {*needed, *extra}):
                tensors[name] = opened.read(name)
                hashed.append(behind.submit(_add, digest, name, tensors[name]))
        for added in hashed:
            added.result()  # raises what stopped it: with too little memory it is not the file that is damaged
    if digest.hexdigest() != header.get("sha256", ""):
        raise WeightsError(f"{file} is damaged: its tensors do not match their checksum. Restore a copy.")
    taken: set[int] = set()
    real = torch.empty(0)
    tensors = {name: admit(name, tensor, needed.get(name, real), file, taken) for name, tensor in tensors.items()}
    if base is None:
        return card, tensors
    if complete is None:
        raise WeightsError(
            f"{file} holds only the tuned part of a model. vitrail.load combines it with its base model."
        )
    rest = complete(base, file, {name: needed[name] for name in needed.keys() - names})
    report.base = f"{len(rest)} tensors from {base.source}"
    if extra:
        report.base += f", {len(extra) // 2} of them with an update of low rank"
    return card, updated({**tensors, **rest}, extra)


@contextmanager
def _open(file: Path) -> Iterator[tuple[TensorFile, Card]]:
    """Yield an open tensor file and its card. Raises WeightsError for any other file."""
    with TensorFile(file) as opened:
        header = opened.metadata
        if "card" not in header:
            raise WeightsError(
                f"{file} has no model card: it holds the tensors of a network that fit was given in Python, or was not "
                "written by vitrail. Build the network and call network.load_state_dict("
                "safetensors.torch.load_file(PATH))"
            )
        if header.get("card_sha256", _digest(header["card"])) != _digest(header["card"]):
            raise WeightsError(f"{file} is damaged: its card does not match its checksum. Restore a copy.")
        try:
            card = Card.from_dict(parse_json(header["card"]))
        except (WeightsError, ValueError) as error:
            raise WeightsError(f"{file} has an unusable card: {error}") from error
        yield opened, card


def _base(header: dict[str, str], file: Path) -> BaseWeights | None:
    """Return the base model that a file refers to; None if the file should be complete. Raises WeightsError."""
    if (text := header.get("base")) is None:
        return None
    if header.get("base_sha256") != _digest(text):
        raise WeightsError(
            f"{file} is damaged: the reference to its base model does not match its checksum. Restore a copy."
        )
    try:
        return BaseWeights.read(parse_json(text), file)
    except ValueError as error:
        raise WeightsError(f"{file} refers to its base model in an unknown way: {error}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names and bytes of CPU tensors, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        _add(digest, name, tensors[name])
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(name.encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
