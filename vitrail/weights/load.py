"""`load`: a model from any weights, vitrail's or another library's, on disk or on the hub.

Before the first tensor is read, every tensor of the file must be accounted for: it is loaded, or there is a reason to
leave it out; otherwise the file is rejected. `model.load_report` records what happened.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor

from vitrail.errors import UsageError, WeightsError, did_you_mean
from vitrail.files import names_near, open_regular
from vitrail.model.build import Network
from vitrail.model.limits import ResizeMode
from vitrail.model.resnet import ResNet
from vitrail.model.variants import Config, Rotary, ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights import store
from vitrail.weights.archive import INDEX, SINGLE, SUFFIXES, Archive, open_archive
from vitrail.weights.assemble import HEAD, LoadReport, Overrides, admit, assemble, expected, said_of
from vitrail.weights.base import BaseWeights
from vitrail.weights.card import Card
from vitrail.weights.download import licence_beside
from vitrail.weights.formats import NAMES, ForeignModel, Format, format_named, recognise
from vitrail.weights.mapping import Conversion
from vitrail.weights.store import checksum, find_model, is_ours, load_model
from vitrail.words import shown

SHIPPED = Path(__file__).parent / "shipped"
"""Folder of the weights that are part of vitrail. Their names are vitrail/NAME, as if they were on the hub."""
MOST_BASES = 32
"""Maximum number of models that hold only a tuned part and follow each other."""


class Changes(TypedDict, total=False):
    """What `load` changes while it loads: the fields of `Overrides`."""

    classes: int | None
    image_size: int | tuple[int, int] | None
    resize_mode: ResizeMode | None
    patch: int | None
    channels: int | None
    drop_path: float | None


@overload
def load(source: Path | str, *, kind: type[Network], **changes: Unpack[Changes]) -> Network: ...
@overload
def load(source: Path | str, *, kind: None = None, **changes: Unpack[Changes]) -> ViT | ResNet: ...
def load(source: Path | str, *, kind: type[Any] | None = None, **changes: Unpack[Changes]) -> ViT | ResNet:
    """Return the model at `source`, in eval mode, with `model.card` and `model.load_report`.

    This is `vitrail.load` (`vitrail.exports.engine`) without exported programs; see there. A run that tuned only a part
    of a network (`Run.tune`) holds that part. The rest is read from the weights it started from, which must be
    unchanged and in the same place.

    Raises WeightsError, naming file and tensor, for a tensor that is missing, unexpected, of a wrong shape, not finite
    or unsafe, and for weights of another `kind`; UsageError for values that do not fit the model.
    """
    if kind not in (None, ViT, ResNet):
        raise UsageError(f"kind is {shown(kind)}; valid: vitrail.ViT, vitrail.ResNet, or None for both")
    model = _model(local_path(source), Overrides(**changes), ())
    if kind is not None and not isinstance(model, kind):
        raise WeightsError(
            f"{source} holds a {type(model).__name__}, and kind is {kind.__name__}. Give other weights, or call load "
            "without kind"
        )
    return model


def _model(path: Path, changes: Overrides, within: tuple[Path, ...]) -> ViT | ResNet:
    """Return the model at `path`; `within` are the files that are being completed from it, the nearest last."""
    if is_ours(path):
        return load_model(path, changes, complete=partial(_from_base, within=within))
    with open_archive(path) as opened:
        archive = unwrapped(opened)
        origin, found = describe(archive)
        report = LoadReport(archive.path, origin.name)
        found, changes = _at_size(found, changes, report)
        report.unused = {name: why for name, why in found.unused.items() if name in archive}
        report.missing = dict(found.zeros)
        report.assumptions = [*archive.notes, *found.assumptions]
        report.differences = found.differences
        for entry in found.conversions:
            if changes.classes is not None and entry.ours.startswith(HEAD):
                report.unused |= dict.fromkeys(entry.theirs, "replaced by a new head")
        source = partial(_tensors, archive, found, expected(found.card.config, archive.path))
        return assemble(found.card, source, report, changes)


def _from_base(
    base: BaseWeights, file: Path, needed: Mapping[str, Tensor], within: tuple[Path, ...]
) -> dict[str, Tensor]:
    """Return the tensors that `file` shares with its base, from the first place that has them unchanged.

    Raises WeightsError with the reason for each place.
    """
    within = (*within, file.resolve())
    if len(within) > MOST_BASES:
        raise WeightsError(
            f"{file} needs another base model, which is one more than the {MOST_BASES} that are followed"
        )
    places: list[Path | str] = [*base.places(file.parent)]
    tried: list[str] = []
    for place in [*places, base.source] if base.hub else places:
        if isinstance(place, Path) and not place.exists():
            tried.append(f"{place}: does not exist")
            continue
        try:
            path = local_path(place)
            if is_ours(path) and find_model(path).resolve() in within:
                tried.append(f"{place}: this model itself needs the tuned part as its base")
                continue
            state = _model(path, Overrides(), within).state_dict()
        except WeightsError as error:
            tried.append(f"{place}: {error}")
            continue
        found = {name: state[name] for name in needed if name in state and state[name].shape == needed[name].shape}
        if len(found) == len(needed) and checksum(found) == base.sha256:
            return found
        tried.append(f"{place}: the weights have changed since the tuning; their checksum (sha256) differs")
    raise WeightsError(base.unavailable(file, tried))


def read_card(source: Path | str) -> Card:
    """Return the card of what `load` would load, without reading a tensor. Raises WeightsError.

    A command asks for the card of its weights several times; unchanged files are read once.
    """
    path = local_path(source)
    try:
        stamps = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in _files(path)]
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}") from error
    return deepcopy(_card_at(path, *stamps))


@lru_cache(maxsize=16)
def _card_at(path: Path, *stamps: tuple[str, int, int]) -> Card:
    """Return the card of weights; `stamps` are names, times of change and sizes of their files."""
    if is_ours(path):
        return store.read_card(path)
    with open_archive(path) as archive:
        return describe(unwrapped(archive))[1].card


def local_path(source: Path | str) -> Path:
    """Return the path of `source` on this machine: a path, shipped weights, or a hub name, which is downloaded.

    An existing path is never taken for a name. Raises WeightsError if there is nothing.
    """
    path = Path(source).expanduser()
    if path.exists() or path.is_symlink():
        return path
    owner, _, name = str(source).partition("/")
    if owner == "vitrail" and (SHIPPED / name / store.WEIGHTS).is_file():
        return SHIPPED / name
    if isinstance(source, str):
        from vitrail.weights.download import is_hub_name, resolve

        if is_hub_name(source) or "://" in source:  # for an address, `resolve` raises an error that says what to do
            return resolve(source)
    raise WeightsError(
        f"there is nothing at {source}.{names_near(path)} Give a model or run folder, a weight file, "
        "vitrail/tiny, which vitrail ships, or a hub name such as google/vit-base-patch16-224-in21k."
    )


WRAPPERS = ("model", "net", "network", "backbone", "encoder", "vit", "timm_model", "module")
"""Names of attributes in which a class of the user's own holds a network."""


def unwrapped(archive: Archive) -> Archive:
    """Return an archive without the prefix that all its names share, if no format recognises it with the prefix.

    A class that holds a network as `self.model` saves it so. A note for the load report says what was taken off.
    """
    taken = ""
    inner = archive
    while not any(one.recognises(inner) for one in map(format_named, NAMES)):
        first = {name.partition(".")[0] for name in inner.names}
        prefix = first.pop() if len(first) == 1 else ""
        if prefix not in WRAPPERS:
            return archive
        taken += f"{prefix}."
        inner = inner.without(f"{prefix}.")
    if taken:
        inner.notes = [*inner.notes, f"the prefix {taken!r} of all tensors' names was taken off"]
    return inner


def describe(archive: Archive) -> tuple[Format, ForeignModel]:
    """Return the format of an archive and the model in it. Every tensor is accounted for, but none is read.

    Raises WeightsError naming a tensor that is missing, unexpected, given twice or of a wrong shape.
    """
    origin = recognise(archive)
    try:
        found = origin.find(archive)
    except UsageError as error:  # values that contradict each other, in a file rather than in a flag
        raise WeightsError(f"{archive.path} ({origin.name}) does not describe a model: {error}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise WeightsError(f"{archive.path} ({origin.name}) does not describe a model: {shown(error)}") from error
    _account(archive, origin, found)
    if archive.config and not found.card.licence:  # a folder from the hub: its README is about these weights
        found = replace(found, card=replace(found.card, licence=licence_beside(archive.path)))
    return origin, _with_terms(found)


DINOV3 = Rotary(base=100.0, coordinates="centred", pairs="halves")
"""The rotary positions that DINOv3 alone has among published networks."""
DINOV3_LICENCE = "dinov3-license"
DINOV3_TERMS = (
    f"{DINOV3_LICENCE}: Meta's published DINOv3 weights, and models made from them, may be used under Meta's terms "
    "only: https://ai.meta.com/resources/models-and-libraries/dinov3-license"
)


def _with_terms(found: ForeignModel) -> ForeignModel:
    """Put the licence of the published weights on the card of a DINOv3 without a licence, and its terms in a note."""
    config, licence = found.card.config, found.card.licence or DINOV3_LICENCE
    if not isinstance(config, ViTConfig) or config.origin.rotary != DINOV3 or licence != DINOV3_LICENCE:
        return found
    how = "licence" if found.card.licence else "licence (the file names none)"
    notes = [*found.assumptions, f"{how} {DINOV3_TERMS}"]
    return replace(found, card=replace(found.card, licence=licence), assumptions=notes)


def _account(archive: Archive, origin: Format, found: ForeignModel) -> None:
    """Check that each tensor of the file is used or has a reason not to be, and each of the model's has one source."""
    used = {name for entry in found.conversions for name in entry.theirs}
    what = f"this {origin.name} model"
    if lacking := sorted(used - archive.names):
        hint = did_you_mean(lacking[0], archive.names - used)
        raise WeightsError(f"{archive.path} lacks the tensor {lacking[0]!r} of {what}.{hint}")
    if extra := sorted(archive.names - used - found.unused.keys()):
        shape, hint = archive.shape(extra[0]), did_you_mean(extra[0], used)
        raise WeightsError(
            f"{archive.path} holds the tensor {extra[0]!r} of shape {shape}, which does not belong to {what}.{hint}"
        )
    needed = expected(found.card.config, archive.path)
    names = needed.keys()
    sources = Counter([entry.ours for entry in found.conversions] + list(found.zeros))
    wrong = sorted(name for name in names | sources.keys() if (name in names) != (sources[name] == 1))
    if wrong:
        raise WeightsError(
            f"{archive.path}: {what} has {sources[wrong[0]]} sources for {wrong[0]!r}, and its network has "
            f"{int(wrong[0] in names)} tensors with that name. Please report this file."
        )
    for entry in found.conversions:
        parts = [archive.without_memory(name) for name in entry.theirs]
        _converted(archive, entry, parts, needed[entry.ours], found.card.config)


def _at_size(found: ForeignModel, changes: Overrides, report: LoadReport) -> tuple[ForeignModel, Overrides]:
    """Return model and changes so that positions which the file computes are those of the new grid, if it changes."""
    config = found.card.config
    if found.for_config is None or not isinstance(config, ViTConfig):
        return found, changes
    new = changes.apply(config)
    if not isinstance(new, ViTConfig) or new.grid == config.grid:
        return found, changes
    rows, columns = new.grid
    at_grid = replace(config, image_size=(rows * config.patch, columns * config.patch))
    entries = found.for_config(at_grid)
    computed = [entry.ours for entry in entries if entry.ours.startswith("positions.")]
    report.resampled |= dict.fromkeys(computed, f"computed for the grid of {rows} x {columns} patches")
    found = replace(found, card=replace(found.card, config=at_grid), conversions=entries)
    return found, replace(changes, image_size=new.image_size)


def _tensors(
    archive: Archive, found: ForeignModel, needed: dict[str, Tensor], wanted: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each wanted tensor. A foreign tensor that holds several, such as all layers' kernels, is read once."""
    taken: set[int] = set()
    names: tuple[str, ...] = ()
    parts: list[Tensor] = []
    for entry in sorted(found.conversions, key=lambda entry: entry.theirs):
        if entry.ours not in wanted:
            continue
        if entry.theirs != names:
            parts = []  # free them before the next ones are read
            names, parts = entry.theirs, [archive[name] for name in entry.theirs]
        tensor = _converted(archive, entry, parts, needed[entry.ours], found.card.config)
        yield entry.ours, admit(" + ".join(entry.theirs), tensor, needed[entry.ours], archive.path, taken)
    for name in found.zeros:
        if name in wanted:
            yield name, torch.zeros(needed[name].shape, dtype=needed[name].dtype)


def _converted(archive: Archive, entry: Conversion, parts: list[Tensor], like: Tensor, config: Config) -> Tensor:
    """Return the model's tensor that a conversion makes of foreign tensors, in the shape of `like`."""
    tensor: Tensor | None = None
    problem = ""
    try:
        tensor = entry.read(*parts)
        if entry.reshape and tensor.numel() == like.numel():
            tensor = tensor.reshape(like.shape)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        problem = f" ({(str(error) or type(error).__name__).splitlines()[0]})"
    if problem or tensor is None or tensor.shape != like.shape:
        shapes = ", ".join(
            f"{name!r} of shape {tuple(part.shape)}" for name, part in zip(entry.theirs, parts, strict=True)
        )
        raise WeightsError(
            f"{archive.path}: {shapes} does not fit the model's {entry.ours!r}, which is {tuple(like.shape)}{problem}: "
            f"{said_of(entry.ours, config)}"
        )
    return tensor


def weights_fingerprint(source: Path | str) -> str:
    """Return a hash, 16 hex digits, of the weight files that `load(source)` would read and of the JSON next to them.

    A copy in another place has the same hash. Raises WeightsError if there is nothing, or it cannot be read.
    """
    path = local_path(source)
    total = hashlib.blake2b(digest_size=8)
    try:
        for file in _files(path):
            total.update(f"{file.suffix}\0".encode())
            with open_regular(file) as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}") from error
    return total.hexdigest()


def _files(path: Path) -> list[Path]:
    if is_ours(path):
        return [find_model(path)]
    if path.is_file() and path.name not in (*SINGLE, *INDEX):  # `load` reads no other file
        return [path]
    folder = path if path.is_dir() else path.parent
    return sorted(file for file in folder.iterdir() if file.suffix in (*SUFFIXES, ".json") and file.is_file())
