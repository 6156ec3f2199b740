"""The folder `model/fast` can be deleted: networks of all families load, compute, learn and are frozen without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import alone
import flax_arrays
import hf_peers
import numpy as np
import pytest
import timm_peers
import torch
from torch import Tensor

import vitrail
from vitrail.model.build import create
from vitrail.model.compute import computed

PACKAGE = Path(vitrail.__file__).parent
TIMM = ("plain", "parallel", "DINOv2 with registers", "gated", "AIMv2", "PE", "EVA-02, E", "R26")
HF = ("beit-shared", "dinov3-gated", "internvl-6b")
TOLERANCE = {"bfloat16": 0.05, "bfloat16 frozen": 0.05, "frozen": 1e-4, "features": 1e-5}
"""Relative difference of outputs; of gradients and trained weights it is 1e-4."""


def write_weights(folder: Path) -> None:
    """Networks with random weights, in the formats of three libraries."""
    for name in TIMM:
        timm_peers.hub(timm_peers.peer(name), folder / f"timm {name}")
    for name in HF:
        hf_peers.saved(folder / f"transformers {name}", name)
    np.savez(folder / "google.npz", **flax_arrays.google())
    np.savez(folder / "BiT.npz", **flax_arrays.bit())
    torch.manual_seed(0)
    axial = create("axial-B/16", width=32, depth=2, heads=2, mlp_dim=48, image_size=32, classes=3)
    vitrail.save(axial, folder / "vitrail axial")
    relative = create("S18x2/16", width=32, depth=2, heads=2, mlp_dim=48, positions="relative", key_bias=False)
    vitrail.save(relative, folder / "vitrail parallel")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights, and `without/tensors.pt` of a process whose vitrail lacks the folder."""
    place = tmp_path_factory.mktemp("deleted")
    write_weights(place / "weights")
    shutil.copytree(PACKAGE, place / "copy/vitrail", ignore=shutil.ignore_patterns("fast", "__pycache__"))
    (place / "copy/vitrail/model/fast/__pycache__").mkdir(parents=True)  # as `git rm` leaves it
    (place / "without").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place / "copy"), str(PACKAGE.parent / "tests")])}
    words = [sys.executable, str(Path(alone.__file__)), str(place), str(place / "without")]
    done = subprocess.run(words, env=environment, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = torch.load(place / "without/tensors.pt")
    assert Path(written["file"]).is_relative_to(place / "copy") and written["fast"] == []
    return place


def without(place: Path) -> dict[str, dict[str, Tensor]]:
    """What the process without the folder computed."""
    return torch.load(place / "without/tensors.pt")["found"]  # type: ignore[no-any-return]


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The tensors that differ by more than their tolerance; small gradients are compared with the largest."""
    assert found.keys() == expected.keys()
    largest = max(float(value.norm()) for name, value in expected.items() if name not in TOLERANCE)
    sizes = {name: float(value.norm()) for name, value in expected.items()}
    sizes = {name: size if name in TOLERANCE else max(size, 0.01 * largest) for name, size in sizes.items()}
    return [
        name for name, size in sizes.items()
        if float((found[name] - expected[name]).norm()) > TOLERANCE.get(name, 1e-4) * size
    ]  # fmt: skip


@pytest.mark.processes
def test_networks_of_all_families_compute_the_same(place: Path) -> None:
    networks = {name: found for name, found in without(place).items() if name != "run"}
    fast = alone.every_network(place / "weights")
    assert fast.keys() == networks.keys() and len(fast) == len(TIMM) + len(HF) + 4
    assert {name: names for name, found in networks.items() if (names := far(fast[name], found))} == {}


@pytest.mark.processes
def test_the_bits_are_those_of_the_definition(place: Path) -> None:
    frozen = {"frozen", "bfloat16 frozen"}  # frozen blocks are there for speed
    with computed("definition"):
        definition = alone.every_network(place / "weights")
    found = without(place)
    different = [
        (name, key) for name, values in definition.items() for key, value in values.items()
        if key not in frozen and not torch.equal(value, found[name][key])
    ]  # fmt: skip
    assert different == []


@pytest.mark.processes
def test_a_run_learns_the_same(place: Path, tmp_path: Path) -> None:
    assert far(alone.trained(tmp_path), without(place)["run"]) == []
