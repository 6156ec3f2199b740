"""Code of a user outside of the package: modules written into a folder, and the examples that we ship."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import torch
import yaml
from safetensors.torch import load_file

from vitrail import cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = (
    *("--recipe", "digits", "--duration", "6 steps", "--vit.width", "16", "--vit.depth", "1", "--vit.heads", "2"),
    *("--vit.mlp-dim", "16", "--device", "cpu", "--workers", "0", "--average.kind", "none", "--batch-size", "64"),
    *("--precision", "float32", "--checkpoint-every", "3 steps", "--accumulate", "1", "--schedule.warmup", "0 steps"),
    "--quiet",
)


@contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """Context in which modules of these folders can be imported; after it they are gone."""
    before = set(sys.modules)
    sys.path[:0] = [str(folder) for folder in folders]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        del sys.path[: len(folders)]
        own = [name for name in set(sys.modules) - before if _stands_in(name, folders)]
        for name in own:
            del sys.modules[name]


def _stands_in(name: str, folders: tuple[Path, ...]) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and any(Path(file).is_relative_to(folder) for folder in folders)


def write(folder: Path, name: str, text: str) -> Path:
    """Write a module of the user and return its folder."""
    (folder / f"{name}.py").write_text(dedent(text), encoding="utf-8")
    return folder


def train(out: Path, *words: str) -> Path:
    """Train on the digits in this process, and return the run folder."""
    assert cli.main(["train", "digits", "--out", str(out), *SMALL, *words]) == 0
    return out / "digits-1"


def command(folder: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, in `folder`, with `path` on PYTHONPATH."""
    found = os.pathsep.join(str(each) for each in (ROOT, path) if each is not None)
    code = "import sys; from vitrail.cli import main; sys.exit(main(sys.argv[1:]))"
    # -P: like the installed command, whose first folder is not the current one
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": found},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def weights(run: Path, which: str = "last") -> dict[str, torch.Tensor]:
    """Return the tensors of a run's model."""
    return load_file(run / "model" / which / "model.safetensors")


def config(run: Path) -> dict:
    """Return a run's config.yaml, read by another reader than ours."""
    found: dict = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    return found
