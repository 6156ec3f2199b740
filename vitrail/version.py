"""This distribution: its version, the packages that it declares, and the command that installs those of an extra.

The version equals the one in pyproject.toml; a test compares them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__version__ = "0.1.0"
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""Modules with another name than the distribution that brings them; "_" in place of "-" does not count."""

FOR_DEVELOPMENT = ("test", "docs")
"""Extras that no feature of vitrail needs."""


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


@contextmanager
def extras_named() -> Iterator[None]:
    """Context in which a package of an extra that is not installed is a UsageError. It names the extra's packages.

    It is around all verbs and public names, so that no import of a package of an extra needs a check of its own.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if (extra := extra_of(module)) is None:
            raise
        from vitrail.errors import UsageError  # slow: import vitrail does without

        raise UsageError(f"this needs the package {module}, which is not installed: {install_extra(extra)}") from error


def need(module: str) -> None:
    """Raise UsageError, as `extras_named` does, if a package is missing that is first used at the end of the work."""
    from importlib import import_module  # slow: import vitrail does without

    with extras_named():
        import_module(module)


def extra_of(module: str) -> str | None:
    """Return the first extra that brings a module: "train" for sklearn. None if no extra does."""
    wanted = _DISTRIBUTIONS.get(module, module).replace("_", "-").lower()
    owners = (owner for name, owner in requirements() if name_of(name).replace("_", "-").lower() == wanted)
    return next((owner for owner in owners if owner not in (None, *FOR_DEVELOPMENT)), None)


def name_of(requirement: str) -> str:
    """Return the name of the distribution that a requirement is for: "fsspec" for "fsspec[http]>=2025.3"."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
