"""Checkpoints that survive a kill at any moment, a full disk and a damaged file.

```
checkpoints/step-000120/
    model.safetensors    the tensors of state["model"], under their own names
    state.safetensors    every other tensor: optimiser, averages
    state.json           everything else, and where each tensor belongs
    manifest.json        step, and size and sha256 of each file; written last
```

With `--shard` each process writes its part, part-00001-of-00008.safetensors, in the place of the first two
(`vitrail.training.checkpoints.parts`); either kind can be gone on from by any number of processes, sharded or not.

A save writes `step-000120.tmp-<pid>`, makes it durable (fsync), and only then renames it; older checkpoints
go after that. A checkpoint is loaded only if every byte is as it was written. Nothing is pickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup

from vitrail import world
from vitrail.errors import CheckpointError, UsageError
from vitrail.training.checkpoints.durable import Written, sync_folder, write_file
from vitrail.training.checkpoints.flat import PART, flatten, restore, safetensors_pieces

SCHEMA = 1
MANIFEST, MODEL, STATE, STRUCTURE = "manifest.json", "model.safetensors", "state.safetensors", "state.json"

_NAME = re.compile(r"step-(?P<step>\d+)(?P<replaced>\.old-\d+)?")
_TEMPORARY = re.compile(r"step-\d+\.tmp-(?P<pid>\d+)")


class DiskFullError(CheckpointError):
    """The disk has no room for a checkpoint; those already there stay. `need` and `have` are bytes."""

    def __init__(self, folder: Path, need: int, have: int) -> None:
        super().__init__(f"disk full: need {_size(need)}, have {_size(have)} for a checkpoint in {folder}")
        self.need, self.have = need, have

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointError, (str(self),)


class Rejected(NamedTuple):
    """A checkpoint that is not as it was written, and why."""

    path: Path
    reason: str


def save(
    folder: Path, step: int, state: Mapping[str, Any], *, keep: int = 2, group: ProcessGroup | None = None
) -> Path:
    """Write `state` as folder/step-<step> and return its path once it is durable.

    `state` is what `flat.flatten` takes. One process calls it; or all of them, with their parts of the
    tensors, where some are sharded, and they talk through `group`. Of this checkpoint and those of earlier steps the
    newest `keep` stay. Raises DiskFullError or CheckpointError where it cannot be written; what was there before is
    then still there, so that the run can go on and try again later.
    """
    if keep < 1:
        raise UsageError(f"keep is {keep}; at least the newest checkpoint must be kept")
    structure, tensors = flatten(state)
    draft = _Draft(folder, step, json.dumps(structure, allow_nan=False).encode(), keep)
    try:
        if any(world.is_sharded(tensor) for tensor in tensors.values()):
            from vitrail.training.checkpoints.parts import write_parts  # brings all of torch's checkpointing

            write_parts(tensors, draft.begin, draft.finish, group)
        else:
            weights = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
            others = {name: t for name, t in tensors.items() if not name.startswith("model/")}
            place = draft.begin(sum(tensor.numel() * tensor.element_size() + 200 for tensor in tensors.values()))
            files = {
                MODEL: write_file(place / MODEL, safetensors_pieces(weights)),
                STATE: write_file(place / STATE, safetensors_pieces(others)),
            }
            draft.finish(files)
    except BaseException as error:
        draft.discard()
        if not isinstance(error, OSError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(folder, draft.need, shutil.disk_usage(folder).free) from error
        raise CheckpointError(f"cannot write a checkpoint in {folder}: {error.strerror or error}") from error
    return draft.final


class _Draft:
    """A checkpoint that is being written, by one process: `begin`, the files with tensors, `finish`."""

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
        if have < self.need + 2**16:  # some room for the file system's own blocks
            raise DiskFullError(self.folder, self.need, have)
        self.temporary.mkdir()
        return self.temporary

    def finish(self, files: Mapping[str, Written]) -> None:
        """Make it whole, and the newest checkpoint, once `files` are durable; then remove older ones."""
        files = {**files, STRUCTURE: write_file(self.temporary / STRUCTURE, [self.text])}
        manifest: dict[str, Any] = {"schema": SCHEMA, "step": self.step, "torch": torch.__version__, "files": files}
        manifest["sha256"] = _seal(manifest)
        write_file(self.temporary / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        sync_folder(self.temporary)
        _publish(self.temporary, self.final)
        _purge(self.folder, self.final, self.keep)

    def discard(self) -> None:
        """Leave nothing of it."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def latest_valid(folder: Path, on_reject: Callable[[Rejected], None] | None = None) -> Path | None:
    """Return the newest checkpoint in `folder` that is whole; None if nothing was ever saved there.

    Every newer one that is not whole goes to `on_reject`. Raises CheckpointError, naming each and why, if
    there are checkpoints but none is whole: a run never starts over in silence.
    """
    rejected = []
    for _, _, path in _checkpoints(folder):
        reason = problem(path)
        if reason is None:
            return path
        rejected.append(Rejected(path, reason))
        if on_reject:
            on_reject(rejected[-1])
    if rejected:
        lines = "\n".join(f"  {path.name}: {reason}" for path, reason in rejected)
        raise CheckpointError(f"no checkpoint in {folder} can be used:\n{lines}")
    return None


def newest(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in `folder` that looks whole, without a look at its contents."""
    return next((step for step, _, path in _checkpoints(folder) if problem(path, contents=False) is None), None)


def load(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, bit for bit as it was saved, on the CPU.

    Raises CheckpointError if there is none at `path` or a byte of it has changed.
    """
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: give a folder such as checkpoints/step-000120")
    reason = problem(path)
    if reason is not None:
        raise CheckpointError(f"{path} cannot be used: {reason}")
    return read(path)


def read(path: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Return the state in a checkpoint that has been found whole (`latest_valid`).

    like: name -> a sharded tensor; of what is read under that name this process wants the same part
    (`training.checkpoints.parts`). Other tensors are read whole. Raises CheckpointError where it cannot be read.
    """
    try:
        if like or not (path / MODEL).is_file():
            from vitrail.training.checkpoints.parts import read_parts

            tensors = read_parts(path, {MODEL: "model/"}, like or {})
        else:
            # copies: the library maps the file into memory, and a run would hold on to a checkpoint long purged
            tensors = {f"model/{name}": value.clone() for name, value in load_file(path / MODEL).items()}
            tensors |= {name: value.clone() for name, value in load_file(path / STATE).items()}
        return restore(json.loads((path / STRUCTURE).read_bytes()), tensors)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def problem(path: Path, *, contents: bool = True) -> str | None:
    """Return why the checkpoint at `path` cannot be used, or None; without `contents` only sizes count."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if _seal(manifest) != manifest["sha256"]:
            return f"{MANIFEST} is damaged"
        if manifest["schema"] != SCHEMA:
            return f"its format is number {manifest['schema']}, this version reads {SCHEMA}"
        for name in _names(manifest["files"]):
            written = manifest["files"][name]
            size = (path / name).stat().st_size
            if size != written["bytes"]:
                return f"{name} has {size} bytes instead of {written['bytes']}"
            if contents:
                with (path / name).open("rb") as file:
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
    """The files that a checkpoint of this manifest must have. Raises ValueError where they make none."""
    parts = sorted(name for name in files if PART.fullmatch(name))
    last = PART.fullmatch(parts[-1]) if parts else None
    if last is not None and int(last["of"]) != len(parts):
        raise ValueError("parts are missing")
    return [*(parts or (MODEL, STATE)), STRUCTURE]


def _publish(temporary: Path, final: Path) -> None:
    """Give a finished checkpoint its name. One of the same step, from before a resume, makes way for it.

    The replaced one keeps a name that `latest_valid` knows until the new one is in place.
    """
    replaced = final.with_name(f"{final.name}.old-{os.getpid()}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync_folder(final.parent)


def _purge(folder: Path, newest: Path, keep: int) -> None:
    """Remove what `newest`, now durable, has made superfluous: failing to is no reason to stop.

    Checkpoints of later steps are of a run that was resumed from before them: the damaged ones go, since they
    would be found first ever after. Damaged earlier ones do not count as kept.
    """
    step = int(newest.name.removeprefix("step-"))
    kept = 1
    for other, replaced, path in _checkpoints(folder):
        if path == newest:
            continue
        if other > step:
            superfluous = problem(path) is not None
        else:
            superfluous = replaced or kept >= keep or problem(path, contents=False) is not None
            kept += not superfluous
        if superfluous:
            # under a temporary name first: half a checkpoint never looks like a damaged one
            gone = folder / f"step-{other:06d}.tmp-{os.getpid()}"
            with suppress(OSError):
                os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _checkpoints(folder: Path) -> list[tuple[int, bool, Path]]:
    """Return (step, has it been replaced, path) of every checkpoint, newest first."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    found = [(int(match["step"]), bool(match["replaced"]), path) for match, path in matches if match]
    return sorted(found, key=lambda item: (-item[0], item[1], item[2]))


def _remove_stale(folder: Path) -> None:
    """Remove what saves of dead processes (or an earlier one with our number) left unfinished."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and (int(match["pid"]) == os.getpid() or not _alive(int(match["pid"]))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _seal(manifest: Mapping[str, Any]) -> str:
    """The hash of a manifest without its own "sha256"."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _size(count: int) -> str:
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"
