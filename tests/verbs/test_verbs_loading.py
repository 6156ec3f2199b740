"""A batch size or number of threads that cannot be used is an error of usage, whichever verb it is given to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail import cli
from vitrail.data.loading import prefetch
from vitrail.data.settings import Preprocess
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=2)
COMMANDS = (
    ["predict", "MODEL", "PICTURES"],
    ["predict", "MODEL", "PICTURES", "--out", "OUT.csv"],
    ["predict", "MODEL", "PICTURES", "--out", "OUT"],
    ["evaluate", "MODEL", "PICTURES"],
    ["embed", "MODEL", "PICTURES", "--out", "OUT.npz"],
    ["embed", "MODEL", "PICTURES", "--out", "OUT"],
)
BATCH_SIZE = "--batch-size is {}; it must be at least 1"
WORKERS = "--workers is {}; it must be from 0 to 1,024 (0: no threads)"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The word of a command -> the network of two classes, or a folder with two pictures of each."""
    root = tmp_path_factory.mktemp("loading")
    torch.manual_seed(0)
    save_model(root / "model", ViT(CONFIG), Card(CONFIG, ["a", "b"], Preprocess((16, 16), resize="squash")))
    rng = np.random.default_rng(0)
    for name in ("a/1", "a/2", "b/1", "b/2"):
        (root / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(root / "pictures" / f"{name}.png")
    return {"MODEL": root / "model", "PICTURES": root / "pictures"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command[0]} {command[-1]}")
@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--batch-size", 0, BATCH_SIZE),
        ("--batch-size", -1, BATCH_SIZE),
        ("--workers", -1, WORKERS),
    ],
)
def test_impossible_numbers_are_refused(
    command: list[str], flag: str, value: int, said: str,
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(prefetch, "TIMEOUT", 2.0)  # a test that fails must not wait for threads that are not there
    words = [str(places.get(word, tmp_path / word if word.startswith("OUT") else word)) for word in command]
    assert cli.main([*words, flag, str(value)]) == 2
    shown = capsys.readouterr()
    assert said.format(value) in shown.err
    assert "Traceback" not in shown.err and shown.out == ""
    assert not (tmp_path / "OUT.csv").exists() and not (tmp_path / "OUT.npz").exists()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command[0]} {command[-1]}")
def test_the_smallest_numbers_are_accepted(command: list[str], places: dict[str, Path], tmp_path: Path) -> None:
    words = [str(places.get(word, tmp_path / word if word.startswith("OUT") else word)) for word in command]
    assert cli.main([*words, "--batch-size", "1", "--workers", "0"]) == 0
