"""A run whose labels are not in the names of folders: resume, evaluation, probe, report and lists find them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail import evaluate, finetune, probe, train
from vitrail.config import from_yaml
from vitrail.data.settings import Data
from vitrail.durations import Steps
from vitrail.errors import DataError, UsageError
from vitrail.training.run import Run
from vitrail.verbs.data.check import check, pack, stats
from vitrail.verbs.data.dedup import dedup

pytestmark = pytest.mark.train

COLOURS = {"blue": (0, 0, 200), "green": (0, 200, 0), "red": (200, 0, 0)}
FROM_NAMES = "name: ^(.+)_[0-9]+"
TINY: dict[str, Any] = dict(
    model="Ti/16",
    vit=dict(width=16, depth=1, heads=1, mlp_dim=16, patch=4),
    image_size=8,
    batch_size=8,
    workers=0,
    device="cpu",
    precision="float32",
)


def coloured(folder: Path, form: str, each: int = 6) -> Path:
    """Images of three colours, whose names tell the colour."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name, colour in COLOURS.items():
        for number in range(each):
            pixels = np.clip(rng.integers(0, 55, (8, 8, 3)) + colour, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / form.format(name=name, number=number))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on a flat folder of images, beside others."""
    root = tmp_path_factory.mktemp("labels")
    coloured(root / "flat", "{name}_{number}.png")
    coloured(root / "other", "{number}-{name}.png", each=2)
    settings = dict(data=dict(label_from=FROM_NAMES), out=str(root / "runs"), duration=Steps(2), **TINY)
    return Path(train(root / "flat", recipe="scratch-small", **settings).folder)


@pytest.mark.train
def test_evaluation_resume_probe_and_report_use_the_labels_of_the_run(run: Path) -> None:
    flat, other = run.parents[1] / "flat", run.parents[1] / "other"
    assert from_yaml(run / "config.yaml", Run()).data.label_from == FROM_NAMES
    assert evaluate(run, device="cpu").results.class_names == list(COLOURS)
    assert evaluate(run, f"{flat}/", device="cpu").results.count == 18  # the data of the run by another spelling
    assert evaluate(run, other, label_from="name: -(.+)[.]", device="cpu").results.count == 6
    with pytest.raises(DataError, match=r"add --data.label-from 'name: .* \(3 classes"):
        evaluate(run, other, device="cpu")
    assert train(resume=run, duration=Steps(3)).steps == 3
    assert "green" in (run / "report.html").read_text()
    assert probe.knn(run, k=(1,), device="cpu").classes == 3
    assert probe.knn(run, other, label_from="name: -(.+)[.]", k=(1,), device="cpu").classes == 3
    small = dict(duration=Steps(1), batch_size=3, workers=0, device="cpu", out=str(run.parent))
    tuned = finetune(other, weights=run, data=dict(label_from="name: -(.+)[.]"), **small)
    assert from_yaml(Path(tuned.folder) / "config.yaml", Run()).data.label_from == "name: -(.+)[.]"


def test_the_verbs_of_data(run: Path, tmp_path: Path) -> None:
    flat = run.parents[1] / "flat"
    assert stats(flat, label_from=FROM_NAMES).class_names == list(COLOURS)
    report = check(flat, label_from=FROM_NAMES, workers=1)
    assert report.stats.class_names == list(COLOURS) and not report.warnings
    dedup(flat, label_from=FROM_NAMES, keep_list=tmp_path / "kept.csv", workers=1)
    assert stats(tmp_path / "kept.csv").class_names == list(COLOURS)  # the list says where its labels are
    pack(flat, tmp_path / "packed", label_from=FROM_NAMES, short_side=8, workers=1)
    assert stats(tmp_path / "packed").class_names == list(COLOURS)


def test_settings_change_how_the_data_of_the_run_are_read(run: Path) -> None:
    whole, green = evaluate(run, device="cpu"), evaluate(run, exclude=("red*", "blue*"), split="", device="cpu")
    assert whole.results.class_names == list(COLOURS)
    assert green.results.count == 6 and set(green.results.label.tolist()) == {list(COLOURS).index("green")}


def test_labels_without_their_images_are_a_wrong_command(run: Path) -> None:
    with pytest.raises(UsageError, match="--protocol imagenet needs its folder, without --split and settings of data"):
        evaluate(run, "val", protocol="imagenet", label_from=FROM_NAMES)
    with pytest.raises(DataError, match="valid for a folder of images only"):
        Data(path="digits", label_from=FROM_NAMES).find()
