"""Which part of a photograph a pretrained network sees (`vitrail.transfer.framing`)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.item import IndexedSource
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.recipes.finetune_by_data import WEIGHTS
from vitrail.recipes.registry import recipe
from vitrail.training.assemble import Setup
from vitrail.transfer import framing
from vitrail.transfer.framing import ALIKE, STRENGTHS, WAYS, hardly_stretched, leave_one_out_accuracy


def test_left_out_is_as_if_each_image_had_been_left_out() -> None:
    random = np.random.default_rng(0)
    labels = random.permutation(np.arange(60) % 3)
    features = (random.normal(size=(60, 8)) + 0.6 * np.eye(3, 8)[labels]).astype(np.float32)
    x = (features - features.mean(0)) / features.std(0)
    wanted = np.eye(3)[labels]
    accuracies = []
    for strength in STRENGTHS:
        right = 0
        for out in range(60):
            rest = np.arange(60) != out
            design = np.column_stack([x[rest], np.ones(59)])  # the penalty is not for the bias
            penalty = strength * 60 * np.diag([1.0] * 8 + [0.0])
            weight = np.linalg.solve(design.T @ design + penalty, design.T @ wanted[rest])
            right += int((np.append(x[out], 1) @ weight).argmax() == labels[out])
        accuracies.append(right / 60)
    assert leave_one_out_accuracy(features, labels) == pytest.approx(max(accuracies))
    assert 1 / 3 < max(accuracies) < 1


def test_skewed_classes_count_alike() -> None:
    labels = np.array([0] * 100 + [1] * 5)
    assert leave_one_out_accuracy(
        np.random.default_rng(0).normal(size=(105, 2)).astype(np.float32), labels
    ) == pytest.approx(0.5, abs=0.1)


def test_photographs_of_the_inputs_proportions_need_no_trial() -> None:
    wide = (64, 128)
    assert hardly_stretched([(100, 200), (50, 101)], wide) and not hardly_stretched([(100, 200), (100, 100)], wide)
    assert ALIKE > 1


def _wide(folder: Path, images: int) -> Path:
    """Write wide photographs whose class is a mark at the left border, which the central square does not show."""
    random = np.random.default_rng(0)
    for number in range(images):
        pixels = random.integers(100, 156, (64, 192, 3), dtype=np.uint8)
        kind = number % 2
        pixels[:, :48] = (220, 40, 40) if kind else (40, 40, 220)
        (folder / f"kind{kind}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"kind{kind}" / f"{number}.png")
    return folder


@pytest.mark.full_size
def test_a_class_at_the_border_asks_for_the_whole_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(recipe("finetune-by-data"), weights=WEIGHTS, data=Data(str(_wide(tmp_path, 40))), workers=0)
    splits = open_data(run.data, seed=0)
    found = framing.framing(replace(run, image_size=64), splits)
    assert found is not None
    way, reason = found
    assert way in (WAYS["the whole image, squashed"], WAYS["the whole image, padded"])
    assert "with the central square" in reason

    rounds = []

    def counted(setup: Setup, train: IndexedSource, rows: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        rounds.append(len(rows))
        time.sleep(0.2)
        labels = np.arange(len(rows)) % 2
        return {name: (np.eye(2, dtype=np.float32)[labels], labels) for name in WAYS}

    monkeypatch.setattr(framing, "ROUND", 10)
    monkeypatch.setattr(framing, "_round", counted)
    framing.framing(replace(run, image_size=64, time_limit=0.01), splits)
    assert rounds == [10]  # a twentieth of 0.6 seconds is over
