"""The origin of a run, needed to understand its results later: command, versions, commit and machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vitrail.device import accelerators, available_cores, processor, total_memory

PACKAGES = ("vitrail", "torch", "torchvision", "numpy", "pillow", "simplejpeg", "safetensors")


def provenance() -> dict[str, Any]:
    """Return command, working directory, versions, commit of this source tree and machine, as JSON values."""
    return {
        "command": command(),
        "directory": os.getcwd(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "commit": commit(),
        "machine": machine(),
    }


def command() -> str:
    """Return the command line of this process, quoted for a shell."""
    as_module = sys.argv[0] == str(Path(__file__).resolve().parents[1] / "__main__.py")
    start = [sys.executable, "-m", "vitrail"] if as_module else sys.argv[:1]
    return shlex.join([*start, *sys.argv[1:]])


def commit() -> str | None:
    """Return the git commit of this source tree, with "-dirty" if files differ; None if it is not a clone."""
    root = Path(__file__).resolve().parents[2]
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() if (root / ".git").exists() else None


def machine() -> dict[str, Any]:
    """Return host, system, processors, memory in GiB and accelerators."""
    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(total_memory() / 2**30, 1),
    }
    if found := accelerators():
        facts["accelerators"] = list(found.values())
    return facts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that was not installed
        return None
