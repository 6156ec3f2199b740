"""The script of docs/speedrun.md learns, and its network is a Vision Transformer of the allowed size."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "speedrun.py"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Return what the script defines."""
    return runpy.run_path(str(SCRIPT))


def test_it_is_short() -> None:
    assert sum(bool(line.strip()) for line in SCRIPT.read_text().splitlines()) <= 160


def test_each_block_attends_to_all_patches(names: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block = names["Block"]()
    torch.nn.init.normal_(block.out)  # it begins as zero
    patches = torch.randn(1, 8, 8, names["WIDTH"], requires_grad=True)
    corner = block(patches)[0, 0, 0].sum()
    (gradient,) = torch.autograd.grad(corner, patches)
    assert (gradient.abs().sum(-1) > 0).all()


def test_a_network_for_100_classes_has_patches_of_four_pixels_and_at_most_six_million_parameters(
    names: dict[str, Any],
) -> None:
    network = names["Network"](100)
    assert sum(weights.numel() for weights in network.parameters()) <= 6_000_000
    assert network.body(torch.zeros(2, 32, 24, 3)).shape == (2, 8, 6, names["WIDTH"])
    assert network(torch.full((2, 32, 32, 3), 128.0)).abs().max() == 0  # the classifier begins as zero


def test_muon_gets_the_matrices_and_adamw_everything_else(names: dict[str, Any]) -> None:
    network = names["Network"](10)
    by_parts = {
        group["parts"]: {id(weights) for weights in group["params"]}
        for group in names["optimiser"](network).param_groups
    }
    of = {name: id(weights) for name, weights in network.named_parameters()}
    assert by_parts[3] == {of[name] for name in of if name.endswith(".qkv")}
    assert by_parts[1] == {of[name] for name in of if name.rpartition(".")[2] in ("kernel", "out", "up", "down")}
    assert by_parts[0] == set(of.values()) - by_parts[1] - by_parts[3]


def test_views_are_crops_of_the_padded_image_or_of_its_mirror_image(names: dict[str, Any]) -> None:
    torch.manual_seed(0)
    padded = torch.randint(256, (1, 12, 12, 3), dtype=torch.uint8)
    crops = [padded[0, top:, left:][:8, :8] for top in range(5) for left in range(5)]
    known = {crop.float().numpy().tobytes() for crop in [*crops, *(crop.flip(1) for crop in crops)]}
    drawn = {
        view.contiguous().numpy().tobytes() for view in names["views"](padded, torch.zeros(500, dtype=torch.long), 8, 8)
    }
    assert drawn <= known and len(drawn) > 45


@pytest.mark.train
def test_two_processes_learn_digits() -> None:
    words = ["digits", "--size", "16", "--holdout", "0.2", "--epochs", "12", "--processes", "2"]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=600, check=True)
    found = re.search(r"^([\d.]+) % of 287 images .*\n[\d,]+ parameters, [\d.]+ minutes\n\Z", done.stdout, re.MULTILINE)
    assert found and float(found[1]) > 70
