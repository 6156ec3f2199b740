"""What an earlier vitrail wrote is still read.

`written-before.tar.xz` holds runs that commit 4f9e835 trained on scikit-learn's digits: networks of width 16 and depth
2, each once whole (12 steps) and once stopped by SIGTERM after step 8. `shared` is one run of two processes with
--shard: of its copy that is resumed, all that came after step 8 was removed. The expected weights of a resumed run
are those that the old code reached without interruption.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import vitrail
from vitrail import cli

HERE = Path(__file__).resolve().parent
RUNS = ("labels", "masked", "dino", "lamb", "tuned", "shared")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that was written before, which is also the working directory."""
    with tarfile.open(HERE / "written-before.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "last" / "model.safetensors")


@pytest.mark.train
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_resumed_and_ends_where_the_old_code_ended(name: str, written: Path) -> None:
    folder = written / "runs" / f"{name}-1"
    extra = ["--from", "runs/labels-whole-1/model/last"] if name == "tuned" else []
    verb = "finetune" if name == "tuned" else "train"
    subject = ["digits"] if name == "tuned" else []
    assert cli.main([verb, *subject, "--resume", str(folder), "--quiet", *extra]) == 0
    ours, theirs = weights(folder), weights(written / "runs" / f"{name}-whole-1")
    assert ours.keys() == theirs.keys()
    # the same bits on the machine that wrote them; on others, the same up to rounding
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", RUNS)
def test_a_configuration_is_read_and_means_the_same(name: str, written: Path) -> None:
    text = (written / "runs" / f"{name}-whole-1" / "config.yaml").read_text(encoding="utf-8")
    run = vitrail.from_yaml(text, vitrail.Run())
    old, new = yaml.safe_load(text), yaml.safe_load(vitrail.to_yaml(run))
    assert old.keys() & {*vitrail.Run.gone}
    old = {name: value for name, value in old.items() if name not in vitrail.Run.gone}
    assert among(new, old) == old


def among(new: Any, old: Any) -> Any:
    """The settings of `new` that `old` has, too: later versions add some, at their defaults."""
    return {key: among(new[key], old[key]) for key in old} if isinstance(old, dict) else new


@pytest.mark.parametrize("name", ["labels", "lamb"])
def test_models_are_loaded_and_predict(name: str, written: Path) -> None:
    model = vitrail.load(written / "runs" / f"{name}-whole-1" / "model" / "last").eval()
    logits = model(torch.zeros(1, 3, 8, 8))
    assert logits.shape == (1, 10) and bool(logits.isfinite().all())


def test_features_and_packed_images_are_read(written: Path) -> None:
    with np.load(written / "features.npz") as file:
        stored = file["features"]
    vitrail.embed("runs/labels-whole-1/model/last", "photos", out="again.npz")
    with np.load(written / "again.npz") as file:
        np.testing.assert_allclose(file["features"], stored, rtol=0.02, atol=0.02)  # bfloat16
    assert stored.shape == (6, 16)
    assert cli.main(["data", "stats", "packed", "--quiet"]) == 0


@pytest.mark.train
def test_a_run_is_extended(written: Path) -> None:
    result = vitrail.train(resume=written / "runs" / "labels-1", duration=vitrail.Steps(16))
    assert (result.steps, result.ended) == (16, "all steps done")
