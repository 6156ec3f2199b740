"""`open_archive`: the tensors of any weight file or folder by name, read only on request.

The kind of a file is recognised by its first bytes, not by its name. Nothing in a file is executed, and sizes that it
claims are compared with the file before anything is allocated: see `vitrail.data.npz.Npz`, `tensor_file.py` and
`torchfile.py`.

Tensors have memory of their own: training never writes to the file, and a file that is changed or removed later does
not change them. Only while a .pth file is open is it memory-mapped; if it is cut then, the process ends (SIGBUS).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.data.npz import Npz
from vitrail.errors import LONGEST_NAME, WeightsError, did_you_mean
from vitrail.files import open_regular, read_json_object
from vitrail.weights.tensor_file import TensorFile
from vitrail.weights.torchfile import read_torch
from vitrail.words import shown

ArchiveKind = Literal["npz", "safetensors", "torch"]
OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
SINGLE = ("model.safetensors", "pytorch_model.bin", *OPEN_CLIP)
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")
PROGRAMS = ("model.onnx", "model.xml", "model.pt2")
"""Files of the programs that `vitrail export` writes. They hold weights, but not as tensors with names."""
MOST_TENSORS = 100_000
"""Maximum number of tensors in a file, because names are compared with each other."""
MOST_DIMENSIONS = 8
"""Maximum number of dimensions of a tensor in a file."""


@dataclass
class Archive:
    """Named tensors of a weight file, and the JSON files next to it. Close it, or use it in a `with`."""

    path: Path
    """The file that is read; the folder if the tensors are spread over several files."""
    kind: ArchiveKind
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor, by its name in the file."""
    read: Callable[[str], Tensor]
    """Returns a tensor in the file's dtype, in memory of its own."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Metadata in a safetensors header."""
    config: dict[str, Any] = field(default_factory=dict)
    """Content of the folder's config.json, or of its open_clip_config.json for weights of OpenCLIP."""
    processor: dict[str, Any] = field(default_factory=dict)
    """Content of the folder's preprocessor_config.json."""
    notes: list[str] = field(default_factory=list)
    """Choices made while opening, such as which of two state dicts."""
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def names(self) -> frozenset[str]:
        """All names, as in the file."""
        return frozenset(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its values. Raises WeightsError if it does not exist."""
        self._check(name)
        return self.shapes[name]

    def without_memory(self, name: str) -> Tensor:
        """Return an empty tensor of the shape of `name`, on the meta device. Raises WeightsError if it cannot exist."""
        try:
            return torch.empty(self.shape(name), device="meta")
        except (RuntimeError, TypeError) as error:
            raise WeightsError(f"{self.path}: {shown(name)} has the impossible shape {self.shape(name)}") from error

    def __getitem__(self, name: str) -> Tensor:
        self._check(name)
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def without(self, prefix: str) -> Archive:
        """Return a view of the tensors whose names start with `prefix`, under names without it."""
        shapes = {name.removeprefix(prefix): shape for name, shape in self.shapes.items() if name.startswith(prefix)}
        return replace(self, shapes=shapes, read=lambda name: self.read(prefix + name))

    def _check(self, name: str) -> None:
        if name not in self.shapes:
            raise WeightsError(f"{self.path} lacks the tensor {name!r}.{did_you_mean(name, self.shapes)}")

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Tensors that were read stay valid."""
        self.stack.close()


def open_archive(path: Path | str) -> Archive:
    """Open a weight file, or the weight file in a folder, for reading.

    A folder may hold model.safetensors, pytorch_model.bin, an index of several of them, or a single weight file
    of any name, and config.json and preprocessor_config.json. Raises WeightsError for files that are missing,
    damaged, ambiguous or unsafe.
    """
    path = Path(path).expanduser()
    if path.is_file():
        archive = _open_index(path) if path.name in INDEX else _open_file(path)
        folder = path.parent if path.name in (*SINGLE, *INDEX) else None
    elif path.is_dir():
        archive, folder = _open_folder(path), path
    elif path.is_symlink():
        raise WeightsError(f"{path} is a broken link. Give the file itself.")
    else:
        what = "is neither a folder nor a regular file" if path.exists() else "does not exist"
        raise WeightsError(f"{path} {what}. Give a weight file, or a folder with one.")
    _check_shapes(archive)
    if folder is not None:  # a config.json next to a file of another name may belong to another model
        own = archive.path.name not in OPEN_CLIP and (folder / "config.json").exists()
        archive.config = _json(folder / ("config.json" if own else "open_clip_config.json"))
        archive.processor = _json(folder / "preprocessor_config.json")
    return archive


def _check_shapes(archive: Archive) -> None:
    """Raise WeightsError, and close the archive, if its names or shapes are larger than any model's."""
    problem = ""
    if len(archive) > MOST_TENSORS:
        problem = f"holds {len(archive):,} tensors; at most {MOST_TENSORS:,} are read"
    for name, shape in archive.shapes.items():
        if len(name) > LONGEST_NAME or len(shape) > MOST_DIMENSIONS:
            problem = f"holds the tensor {shown(name)} of {len(shape)} dimensions, with {len(name):,} letters; at most "
            problem += f"{MOST_DIMENSIONS} dimensions and {LONGEST_NAME:,} letters are read"
    if problem:
        archive.close()
        raise WeightsError(f"{archive.path} {problem}")


def _open_folder(folder: Path) -> Archive:
    names = [path.name for path in folder.iterdir() if path.is_file()]
    program = next((name for name in PROGRAMS if name in names), None)
    if program and not {*SINGLE, *INDEX}.intersection(names):
        raise WeightsError(
            f"{folder} holds an exported program ({program}), and here the weights of a network are needed. Give the "
            "model that it was exported from"
        )
    first = weight_files(names, str(folder), "Give one of them.")[0]
    return _open_index(folder / first) if first in INDEX else _open_file(folder / first)


def weight_files(names: Collection[str], where: str, several: str) -> list[str]:
    """Return which files of a folder or a repository are its weights: one file, or an index and its files.

    Raises WeightsError if there are none, or several models; the message then ends with `several`.
    """
    for name in (*SINGLE, *INDEX):
        if name in names:
            stem, _, suffix = name.removesuffix(".index.json").rpartition(".")
            return [name, *(file for file in names if name in INDEX and fnmatch(file, f"{stem}-*.{suffix}"))]
    found = sorted(name for name in names if "/" not in name and Path(name).suffix in SUFFIXES)
    if not found:
        raise WeightsError(
            f"{where} holds no weights. Looked for {', '.join((*SINGLE, *INDEX))} and for one file that ends in "
            f"{', '.join(SUFFIXES)}."
        )
    if len(found) > 1:
        raise WeightsError(f"{where} holds {len(found)} weight files ({', '.join(found[:5])}). {several}")
    return found


def _open_file(path: Path) -> Archive:
    """Open a file; its first bytes decide which kind it is."""
    try:
        with open_regular(path) as stream:
            head = stream.read(9)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}") from error
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40:
        file = TensorFile(path)
        archive = Archive(path, "safetensors", file.shapes, file.read, file.metadata)
        archive.stack.callback(file.close)
        return archive
    if head.startswith(b"PK") and _is_npz(path):
        return _open_npz(path)
    if head.startswith((b"PK", b"\x80")):
        tensors, notes = read_torch(path)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return Archive(path, "torch", shapes, lambda name: tensors[name].clone(), notes=notes)
    raise WeightsError(
        f"{path} cannot be read: truncated, damaged or of another kind (its first bytes are {head!r}, which is not a "
        "safetensors, .npz or PyTorch file)"
    )


def _open_npz(path: Path) -> Archive:
    npz = Npz(path, WeightsError)

    def read(name: str) -> Tensor:
        tensor = torch.from_numpy(npz.read(name))
        return tensor.view(torch.bfloat16) if npz.is_bfloat16(name) else tensor

    archive = Archive(path, "npz", {name: header.shape for name, header in npz.headers.items()}, read)
    archive.stack.callback(npz.close)
    return archive


def _is_npz(path: Path) -> bool:
    """Is this zip NumPy's rather than PyTorch's? One that cannot be opened counts as what its suffix says."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return path.suffix == ".npz"


def _open_index(index: Path) -> Archive:
    """A model in several files; `weight_map` says which of them, in the same folder, holds a tensor."""
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise WeightsError(f'{index} lacks "weight_map", which says in which file each tensor is')
    stack = ExitStack()
    shards: dict[str, Archive] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for name, file in places.items():
            if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\\0") or len(file) > 255:
                raise WeightsError(
                    f"{index} places {shown(name)} in {shown(file)}: only files of its own folder are read"
                )
            if file not in shards:
                if not (index.parent / file).is_file():
                    raise WeightsError(f"{index} names the file {shown(file)}, which is not there")
                shards[file] = stack.enter_context(_open_file(index.parent / file))
            shapes[name] = shards[file].shape(name)
        for file, shard in shards.items():
            if extra := sorted(shard.names - {name for name, place in places.items() if place == file}):
                raise WeightsError(f"{index.parent / file} holds the tensor {extra[0]!r}, which {index.name} lacks")
    except BaseException:
        stack.close()
        raise
    first = next(iter(shards.values()))
    notes = [note for shard in shards.values() for note in shard.notes]
    return Archive(
        index.parent,
        first.kind,
        shapes,
        lambda name: shards[places[name]][name],
        first.metadata,
        notes=notes,
        stack=stack,
    )


def _json(path: Path) -> dict[str, Any]:
    """Return a JSON object next to the weights, {} if there is no such file."""
    return read_json_object(path, WeightsError) if path.is_file() else {}
