"""The licence of a model folder: what the header of its README.md says, as on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml


def licence_beside(path: Path) -> str:
    """Return the `license` in the YAML header of README.md in the folder `path`, or beside the file `path`.

    "" where there is no such file, header or entry: a licence is told, and never guessed.
    """
    folder = path if path.is_dir() else path.parent
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
        header = yaml.safe_load(text.split("\n---", 1)[0].removeprefix("---")) if text.startswith("---\n") else None
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    licence = header.get("license") if isinstance(header, Mapping) else None
    return licence if isinstance(licence, str) else ""
