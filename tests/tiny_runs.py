"""Training runs of less than a second, how they are interrupted, and how a test looks at what they leave."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from vitrail.data.settings import Augment, Data
from vitrail.durations import Epochs, Steps
from vitrail.training import loop
from vitrail.training import step as stepping
from vitrail.training.checkpoints import checkpoint
from vitrail.training.guard import Interrupted
from vitrail.training.run import Average, Model, Optim, Run

SHORT: dict[str, Any] = dict(
    data=Data(path="digits", subset=64, test="none"),
    duration=Steps(4),
    evaluate_every=Steps(2),
    checkpoint_every=Steps(2),
    batch_size=16,
)
"""What makes `tiny_run` one epoch of four steps, with an evaluation and a save after every second one."""


def still_run(out: Path, data: Data, weights: Path, /, **changes: Any) -> Run:
    """Two steps from weights that hardly move, on images as evaluation sees them: what came before them shows."""
    run = Run(
        out=str(out),
        data=data,
        weights=str(weights),
        augment=Augment("center", flip=False),
        optim=Optim(lr=1e-9),
        duration=Steps(2),
        precision="float32",
        workers=0,
        device="cpu",
    )
    return replace(run, **changes)


def tiny_run(out: Path, **changes: Any) -> Run:
    """Four epochs of four steps on handwritten digits: everything random switched on."""
    run = Run(
        out=str(out),
        data=Data(path="digits", subset=140),
        model="Ti/4",
        vit=Model(width=16, depth=2, heads=2, mlp_dim=32, dropout=0.1, drop_path=0.1),
        augment=Augment(crop="pad", pad=1, mixup=0.5, cutmix=0.5, erasing=0.2),
        optim=Optim(lr=3e-3),
        average=Average(kind="ema", decay=0.9),
        duration=Epochs(4),
        batch_size=32,
        accumulate=2,
        precision="float32",
        workers=0,
        device="cpu",
    )
    return replace(run, **changes)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of a run's log of one kind."""
    found = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a run."""
    found = checkpoint.latest_valid(folder / "checkpoints")
    assert found is not None
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the last and the best model and everything in the newest checkpoint: "last NAME", "state NAME"."""
    files = [(path.parent.name, path) for path in sorted((folder / "model").glob("*/*.safetensors"))]
    files += [(path.stem, path) for path in sorted(newest(folder).glob("*.safetensors"))]
    return {f"{name} {key}": value for name, file in files for key, value in load_file(file).items()}


def assert_same_bits(first: Path, second: Path) -> None:
    """Two runs left the same tensors."""
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys()
    different = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    assert not different


def assert_same_log(first: Path, second: Path) -> None:
    """Two runs noted the same numbers of their steps and evaluations; times and memory are not those of the run."""
    volatile = {"time", "images_per_second", "waiting", "memory_gib", "joules"}
    for kind in ("train", "validation"):
        ours, theirs = (
            [{key: value for key, value in line.items() if key not in volatile} for line in lines(folder, kind)]
            for folder in (first, second)
        )
        assert ours == theirs


@contextmanager
def signal_at(step: int, number: int = signal.SIGTERM) -> Iterator[None]:
    """Context that sends this process a signal in the middle of optimiser step `step`, counted from 0."""
    original = stepping.seed_step

    def seed_step(seed: int, at: int, rank: int) -> None:
        if at == step:
            os.kill(os.getpid(), number)
        original(seed, at, rank)

    with patch.object(stepping, "seed_step", seed_step):
        yield


def interrupted(run: Run, step: int, *, resume: Path | None = None, **given: Any) -> Path:
    """Start a run, or go on with one, and stop it by SIGTERM within a step; return its folder."""
    with signal_at(step), pytest.raises(Interrupted) as caught:
        loop.fit(run, resume=resume, **given)
    assert caught.value.exit_code == 143
    folders = Path(run.out).glob(f"{run.name}-*")
    return resume or max(folders, key=lambda path: int(path.name.rpartition("-")[2]))
