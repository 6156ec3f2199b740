"""The script with a training loop of one's own, run as its first line says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
def test_a_loop_of_ones_own_learns_saves_loads_and_predicts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for channel, name in enumerate(("blue", "red")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 60, (40, 50, 3), dtype=np.uint8)
            pixels[..., 2 - 2 * channel] += 190
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    script = ROOT / "examples" / "own_loop.py"
    assert sum(bool(line.strip()) for line in script.read_text().split("import vitrail\n")[1].splitlines()) <= 16
    done = subprocess.run(
        [sys.executable, str(script), "photos", "model"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    predicted = [line.split() for line in done.stdout.splitlines() if line.startswith("photos")]
    assert len(predicted) == 24 and all(Path(path).parent.name == name for path, name, _ in predicted)
    assert vitrail.load(tmp_path / "model").card.class_names == ["blue", "red"]
