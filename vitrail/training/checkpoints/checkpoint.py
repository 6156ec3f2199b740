"""Checkpoints that survive a kill at any moment, a full disk and a damaged file.

```
checkpoints/step-000120/
    model.safetensors    the tensors of state["model"], under their own names
    state.safetensors    all other tensors: optimiser, averages
    state.json           everything else, and the place of each tensor in it
    manifest.json        step, and size and sha256 of each file; written last
```

Several processes write parts, part-00001-of-00008.safetensors, instead of the first two files
(`vitrail.training.checkpoints.parts`): with `--shard` each its part of every tensor, else an equal share of the
tensors. Any number of processes, sharded or not, can resume from either kind.

A save writes `step-000120.tmp-<pid>`, makes it durable (fsync), and only then renames it; older checkpoints are removed
after that. A checkpoint is loaded only if every byte is as it was written. Nothing is pickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup

from vitrail import world
from vitrail.disk import writing
from vitrail.errors import CheckpointError, UsageError
from vitrail.files import Written, open_regular, parse_json, read_bytes, sync, write_durably
from vitrail.training.checkpoints.flatten import flatten, restore, safetensors_pieces

SCHEMA = 1
MANIFEST, MODEL, STATE, STRUCTURE = "manifest.json", "model.safetensors", "state.safetensors", "state.json"

_PART = re.compile(r"part-(?P<part>\d{5,})-of-(?P<of>\d{5,})\.safetensors")
_NAME = re.compile(r"step-(?P<step>\d+)(?P<replaced>\.old-\d+)?")
_TEMPORARY = re.compile(r"step-\d+\.tmp-(?P<pid>\d+)")


class DiskFullError(CheckpointError):
    """The disk has no room for a checkpoint; the existing ones stay. `need` and `have` are bytes."""

    def __init__(self, folder: Path, need: int, have: int) -> None:
        needed, free = _size(need), _size(have)
        if needed == free and need > have:  # different only in later digits
            needed, free = f"{need:,} B", f"{have:,} B"
        text = f"disk full: need {needed}, have {free} for a checkpoint in {folder}"
        if need <= have:  # measured after the unfinished checkpoint was removed
            text = (
                f"disk full: the space ended while a checkpoint of {needed} was written in {folder}, where {free} are "
                "free now. Another program or a quota took it"
            )
        super().__init__(text)
        self.need, self.have = need, have

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointError, (str(self),)


class RejectedCheckpoint(NamedTuple):
    """A checkpoint that is damaged or incomplete, and the reason."""

    path: Path
    reason: str


def save(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int = 2,
    share: Collection[str] | None = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Write `state` as folder/step-<step> and return its path once it is durable.

    `state` is what `flatten.flatten` takes. One process calls it; if tensors are sharded, all processes call it with
    their parts of them and communicate through `group`. So they do with a `share`: the names of the tensors that this
    process writes. The newest `keep` checkpoints up to this step stay. Raises
    DiskFullError or CheckpointError if the checkpoint cannot be written; the earlier ones are then still there.
    """
    if keep < 1:
        raise UsageError(f"keep is {keep}. It must be at least 1, so that the newest checkpoint stays.")
    structure, tensors = flatten(state)
    draft = _Draft(folder, step, json.dumps(structure, allow_nan=False).encode(), keep)
    try:
        if share is not None or any(world.is_sharded(tensor) for tensor in tensors.values()):
            from vitrail.training.checkpoints.parts import write_parts  # imports all of DCP

            mine = tensors if share is None else {name: tensors[name] for name in share}
            write_parts(mine, draft.begin, draft.finish, group)
        else:
            weights = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
            others = {name: t for name, t in tensors.items() if not name.startswith("model/")}
            place = draft.begin(sum(tensor.nbytes + 200 for tensor in tensors.values()))
            files = {
                MODEL: write_durably(place / MODEL, safetensors_pieces(weights)),
                STATE: write_durably(place / STATE, safetensors_pieces(others)),
            }
            draft.finish(files)
    except BaseException as error:
        draft.discard()
        if not isinstance(error, OSError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(folder, draft.need, shutil.disk_usage(folder).free) from error
        with writing(folder, CheckpointError, task=f"write a checkpoint in {folder}"):
            raise
    return draft.final


class _Draft:
    """A checkpoint that is being written: call `begin`, write the files with tensors, call `finish`."""

    def __init__(self, folder: Path, step: int, text: bytes, keep: int) -> None:
        self.folder, self.step, self.text, self.keep = folder, step, text, keep
        self.need = len(text)
        self.final = folder / f"step-{step:06d}"
        self.temporary = folder / f"{self.final.name}.tmp-{os.getpid()}"

    def begin(self, need: int) -> Path:
        """Return the folder for files of `need` bytes. Raises DiskFullError and OSError."""
        self.need += need
        self.folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(self.folder)
        have = shutil.disk_usage(self.folder).free
        room = self.need + 2**16  # some room for the file system's own blocks
        if have < room:
            raise DiskFullError(self.folder, room, have)
        self.temporary.mkdir()
        return self.temporary

    def finish(self, files: Mapping[str, Written]) -> None:
        """Write structure and manifest beside the durable `files`, publish the checkpoint and remove older ones."""
        files = {**files, STRUCTURE: write_durably(self.temporary / STRUCTURE, [self.text])}
        manifest: dict[str, Any] = {"schema": SCHEMA, "step": self.step, "torch": torch.__version__, "files": files}
        manifest["sha256"] = _seal(manifest)
        write_durably(self.temporary / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        sync(self.temporary)
        _publish(self.temporary, self.final)
        _purge(self.folder, self.final, self.keep)

    def discard(self) -> None:
        """Remove the unfinished checkpoint."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def latest_valid(folder: Path, on_reject: Callable[[RejectedCheckpoint], None] | None = None) -> Path | None:
    """Return the newest intact checkpoint in `folder`; None if nothing was ever saved there.

    `on_reject` receives each newer checkpoint that is damaged or incomplete. Raises CheckpointError with all reasons if
    there are checkpoints but none is intact: a run never starts over silently.
    """
    rejected = []
    for _, _, path in _checkpoints(folder):
        reason = problem(path)
        if reason is None:
            return path
        rejected.append(RejectedCheckpoint(path, reason))
        if on_reject:
            on_reject(rejected[-1])
    if rejected:
        lines = "\n".join(f"  {path.name}: {reason}" for path, reason in rejected)
        raise CheckpointError(f"no checkpoint in {folder} can be used:\n{lines}")
    return None


def newest(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in `folder` with files of the right sizes, without reading them."""
    return next((step for step, _, path in _checkpoints(folder) if problem(path, contents=False) is None), None)


def load(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, bit for bit as it was saved, on the CPU.

    Raises CheckpointError if there is none at `path` or a byte of it has changed.
    """
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}. Give a folder such as checkpoints/step-000120.")
    reason = problem(path)
    if reason is not None:
        raise CheckpointError(f"{path} cannot be used: {reason}")
    return read(path)


def read(path: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Return the state in a checkpoint that is known to be intact (`latest_valid`), on the CPU.

    like: name -> a sharded tensor. A tensor of that name and shape comes sharded and placed in the same way, with only
    this process's part. Raises CheckpointError if the checkpoint cannot be read.
    """
    like = like or {}
    try:
        if (path / MODEL).is_file():
            stored = {f"model/{name}": tensor for name, tensor in load_file(path / MODEL).items()}
            stored |= load_file(path / STATE)
            tensors = {name: world.copied_like(tensor, like.get(name)) for name, tensor in stored.items()}
        else:
            from vitrail.training.checkpoints.parts import read_parts

            tensors = read_parts(path, like)
        return restore(json.loads((path / STRUCTURE).read_bytes()), tensors)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def problem(path: Path, *, contents: bool = True) -> str | None:
    """Return why the checkpoint at `path` cannot be used, or None; without `contents` only sizes are checked."""
    try:
        manifest = parse_json(read_bytes(path / MANIFEST).decode("utf-8"))
        if _seal(manifest) != manifest["sha256"]:
            return f"{MANIFEST} is damaged"
        if manifest["schema"] != SCHEMA:
            return f"its format has number {manifest['schema']}; this version reads format {SCHEMA}"
        for name in _names(manifest["files"]):
            written = manifest["files"][name]
            size = (path / name).stat().st_size
            if size != written["bytes"]:
                return f"{name} has {size} bytes instead of {written['bytes']}"
            if contents:
                with open_regular(path / name) as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != written["sha256"]:
                        return f"the contents of {name} have changed (sha256)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def _names(files: Mapping[str, Any]) -> list[str]:
    """Return the files that a checkpoint with this manifest needs. Raises ValueError if parts are missing."""
    parts = sorted(name for name in files if _PART.fullmatch(name))
    last = _PART.fullmatch(parts[-1]) if parts else None
    if last is not None and int(last["of"]) != len(parts):
        raise ValueError("parts are missing")
    return [*(parts or (MODEL, STATE)), STRUCTURE]


def _publish(temporary: Path, final: Path) -> None:
    """Give a finished checkpoint its name, and rename one of the same step from before a resume.

    `latest_valid` still finds the renamed one until the new one is in place.
    """
    replaced = final.with_name(f"{final.name}.old-{os.getpid()}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync(final.parent)


def _purge(folder: Path, newest: Path, keep: int) -> None:
    """Remove checkpoints that are no longer needed now that `newest` is durable; a failure to remove is ignored.

    Checkpoints of later steps belong to a run that was resumed from before them. The damaged ones of these are
    removed, because they would be found first from now on. Damaged earlier ones do not count towards `keep`.
    """
    step = int(newest.name.removeprefix("step-"))
    kept = 1
    for other, replaced, path in _checkpoints(folder):
        if path == newest:
            continue
        if other > step:
            unneeded = problem(path) is not None
        else:
            unneeded = replaced or kept >= keep or problem(path, contents=False) is not None
            kept += not unneeded
        if unneeded:
            # renamed first, so that a half-removed checkpoint does not look like a damaged one
            gone = folder / f"step-{other:06d}.tmp-{os.getpid()}"
            with suppress(OSError):
                os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _checkpoints(folder: Path) -> list[tuple[int, bool, Path]]:
    """Return (step, whether it has been replaced, path) of every checkpoint, newest first."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    found = [(int(match["step"]), bool(match["replaced"]), path) for match, path in matches if match]
    return sorted(found, key=lambda item: (-item[0], item[1], item[2]))


def _remove_stale(folder: Path) -> None:
    """Remove unfinished checkpoints of processes that have ended, and of an earlier one with this process's id."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and (int(match["pid"]) == os.getpid() or not _alive(int(match["pid"]))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    with suppress(OverflowError):
        return psutil.pid_exists(pid)
    return False


def _seal(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its entry "sha256"."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _size(count: int) -> str:
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"
