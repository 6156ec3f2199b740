"""Which weights are these? A hash of the files that loading would read, wherever they lie."""

from __future__ import annotations

import hashlib
from pathlib import Path

from vitrail.errors import WeightsError
from vitrail.weights.archive import INDEX, SINGLE, SUFFIXES
from vitrail.weights.load import local
from vitrail.weights.store import find_model, is_ours


def weights_fingerprint(source: Path | str) -> str:
    """Return a hash of the weights that `load(source)` would read, and of the JSON beside them; 16 hex digits.

    The place does not matter: a copy has the same one. Raises WeightsError where there is nothing, or it cannot be
    read.
    """
    path = local(source)
    total = hashlib.blake2b(digest_size=8)
    try:
        for file in _files(path):
            total.update(f"{file.suffix}\0".encode())
            with file.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}") from error
    return total.hexdigest()


def _files(path: Path) -> list[Path]:
    if is_ours(path):
        return [find_model(path)]
    if path.is_file() and path.name not in (*SINGLE, *INDEX):  # nothing beside it is looked at
        return [path]
    folder = path if path.is_dir() else path.parent
    return sorted(file for file in folder.iterdir() if file.suffix in (*SUFFIXES, ".json") and file.is_file())
