"""The settings that verbs share: what they refuse, where they arrive, and where their help comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.data.item import IndexedSource
from vitrail.data.settings import Preprocess
from vitrail.device import available_cores
from vitrail.errors import UsageError
from vitrail.evaluation import features
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.verbs.data.dedup import dedup
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.declared import flags_of
from vitrail.verbs.inspect import InspectionInputs, inspected_network
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of two classes."""
    torch.manual_seed(0)
    card = Card(CONFIG, ["a", "b"], Preprocess((16, 16), resize="squash"))
    folder = tmp_path_factory.mktemp("compute") / "model"
    save_model(folder, ViT(CONFIG), card)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of five pictures."""
    root = tmp_path_factory.mktemp("compute")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (root / name).mkdir()
        for number in range(5):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(root / name / f"{number}.png")
    return root


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"image_size": 0}, "image_size is 0; it must be from 1 to 4,096"),
        ({"batch_size": -3}, "batch_size is -3; it must be at least 1"),
        ({"workers": -1}, r"workers is -1; it must be from 0 to 1,024 \(0: no threads\)"),
        ({"precision": "half"}, "no precision is called 'half'. Valid: auto, bf16, fp16, tf32, float32"),
        ({"device": "cdua"}, "device 'cdua' cannot be used here"),
    ],
)
def test_each_value_is_checked(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Compute(**settings)


@pytest.mark.parametrize("verb", [vitrail.evaluate, vitrail.probe.knn])
def test_an_image_size_of_0_is_an_error_of_usage(verb: Any, model: Path, pictures: Path) -> None:
    with pytest.raises(UsageError, match="image_size is 0"):
        verb(model, pictures, image_size=0)


def test_unknown_precisions_are_refused_everywhere(pictures: Path) -> None:
    with pytest.raises(UsageError, match="no precision is called 'half'"):
        vitrail.bench("Ti/16", precision="half")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no precision is called 'half'"):
        dedup(pictures, precision="half")  # type: ignore[arg-type]


def test_threads_leave_half_of_the_cores_to_a_network() -> None:
    assert Compute().threads() == available_cores() // 2
    assert Compute().threads(alone=True) == available_cores()
    assert Compute(workers=3).threads() == Compute(workers=3).threads(alone=True) == 3


def test_inspect_computes_features_in_the_batches_asked_for(
    model: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, sizes = features.collect, []

    def recorded(embed: Any, *rest: Any) -> Any:
        def counted(images: torch.Tensor) -> torch.Tensor:
            sizes.append(len(images))
            return embed(images)

        return collect(counted, *rest)

    monkeypatch.setattr(features, "collect", recorded)
    compute = Compute(batch_size=3, workers=0, device="cpu", precision="float32")
    inputs = InspectionInputs([inspected_network(model, "model", compute)], model, [], pictures, None, compute)
    source: IndexedSource = inputs.data_set
    assert inputs.features(source)[0].shape == (10, CONFIG.width)
    assert sizes == [3, 3, 3, 1]


@pytest.mark.parametrize(
    ("argv", "settings"),
    [
        (["predict", "--top", "1"], {"verb": "predict", "top": 1, "precision": "auto"}),
        (["embed"], {"verb": "embed", "prepare": "model", "image_size": None, "precision": "auto"}),
    ],
    ids=str,
)
def test_a_job_is_recognised_by_the_keys_it_always_had(
    argv: list[str], settings: dict[str, Any], model: Path, pictures: Path, tmp_path: Path
) -> None:
    # with other keys or values, a job that an earlier version began would be refused as another job
    assert cli.main([argv[0], str(model), str(pictures), *argv[1:], "--out", str(tmp_path / "out")]) == 0
    job = json.loads((tmp_path / "out" / "job.json").read_text())
    assert isinstance(job.pop("data"), str)
    assert isinstance(job.pop("weights"), str)
    assert job == {**settings, "parts": 1, "images": 10}


def test_help_texts_stand_once() -> None:
    _, evaluate = cli.VERBS["evaluate"].load()
    _, serve = cli.VERBS["serve"].load()
    texts, other = ({flag.name: flag.text for flag in flags_of(verb)} for verb in (evaluate, serve))
    assert (
        texts["device"]
        == other["device"]
        == ("Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available).")
    )
    own = "Maximum number of images that are computed together (default: 8 on a CPU, 64 on an accelerator)."
    assert other["batch_size"] == own
