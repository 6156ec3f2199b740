"""This distribution: its version, the packages that it declares, and the command that installs those of an extra.

The version equals the one in pyproject.toml; a test compares them.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path

__version__ = "0.1.0"


def requirements() -> list[tuple[str, str | None]]:
    """Return (requirement, extra) for each package that the installed vitrail declares: ("onnx>=1.18", "export").

    The extra is None for packages that are always needed. The list is empty if vitrail runs without being installed.
    """
    from importlib import metadata  # slow: --help does without

    declared: list[str] = []
    with suppress(metadata.PackageNotFoundError):
        declared = metadata.requires("vitrail") or []
    found = []
    for line in declared:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"](\w+)", marker)
        found.append((requirement.strip(), extra[1] if extra else None))
    return found


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, and its name: "pip install 'wandb>=0.27' (vitrail's extra wandb)".

    The command names the packages themselves. With the name of vitrail, pip would ask a package index for it, which may
    have none or another one, where this vitrail was installed from a copy of the repository. Without an installation,
    the command names the copy.
    """
    packages = [requirement for requirement, owner in requirements() if owner == extra]
    words = packages or ["-e", f"{Path(__file__).parents[1]}[{extra}]"]
    return f"{shlex.join(['pip', 'install', *words])} (vitrail's extra {extra})"
