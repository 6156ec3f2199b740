"""`vitrail doctor`: this installation and this machine, described for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from vitrail.ranges import checked
from vitrail.version import FOR_DEVELOPMENT, name_of, requirements
from vitrail.words import binary_size

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx_vnni", "asimd", "bf16")
"""Processor features that decide which matrix products are fast."""
VARIABLES = re.compile(r"(OMP|MKL|KMP|CUDA|TORCH|PYTORCH|HF|VITRAIL)_\w+")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


@checked
def doctor() -> dict[str, Any]:
    """Describe this installation and this machine, for a bug report.

    The home folder is shown as ~, and the values of secrets are hidden.
    """
    import torch

    from vitrail import device

    needed, optional = _requirements()
    cpu = torch.device("cpu")
    disk = shutil.disk_usage(Path.cwd())
    facts = {
        "vitrail": {name: _version(name) for name in ("vitrail", *needed)},
        "optional": {name: _version(name) for name in optional},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": {
            "platform": platform.platform(),
            "tested": sys.platform == "linux",  # see docs/start/install.md
            "terminal": sys.stderr.isatty(),
        },
        "cpu": {
            "model": device.processor(),
            "cores": device.available_cores(),
            "threads": torch.get_num_threads(),
            "has": " ".join(flag for flag in CPU_FLAGS if flag in device.cpu_field("flags", "Features").split()),
            "onednn": device.has_onednn(),
        },
        "memory": {"total": binary_size(device.total_memory()), "available": binary_size(device.free_memory(cpu))},
        "disk": {"folder": str(Path.cwd()), "free": binary_size(disk.free)},
        "accelerators": device.accelerators(),
        "environment": {k: _hide(k, v) for k, v in sorted(os.environ.items()) if VARIABLES.fullmatch(k)},
    }
    return dict(_without_home(facts))


def _requirements() -> tuple[list[str], list[str]]:
    """Return the packages that vitrail needs, and those of its extras and of `weights verify`, as it declares them."""
    needed: list[str] = []
    optional: list[str] = ["timm", "transformers", "torchvision"]
    for requirement, extra in requirements():
        name = name_of(requirement)
        if extra is None:
            needed.append(name)
        elif extra not in FOR_DEVELOPMENT and name not in needed + optional:
            optional.append(name)
    return needed, optional


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hide(name: str, value: str) -> str:
    return "(hidden)" if SECRET.search(name) else re.sub(r"//[^/@\s]+@", "//(hidden)@", value)


def _without_home(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_home(item) for name, item in value.items()}
    home = os.path.expanduser("~")
    return re.sub(rf"{re.escape(home)}(?=/|$)", "~", value) if isinstance(value, str) and len(home) > 1 else value


def show(result: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    lines = []
    for title, facts in result.items():
        there = {name: value for name, value in facts.items() if value not in (None, "")}
        lines += [title, *(f"  {name}: {value}" for name, value in there.items() or [("none", "")])]
        missing = [name for name in facts if facts[name] is None]
        lines += [f"  not installed: {', '.join(missing)}"] * bool(missing)
    return "\n".join(line.rstrip(": ") for line in lines)
