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

import psutil
import torch

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
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if torch.cuda.is_available():
        facts["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that was not installed
        return None
