"""Model soups: the uniform one is numpy's mean of the files' tensors, the greedy one never loses on its images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import draw, once
from safetensors.numpy import load_file
from tiny_runs import tiny_run
from torch import Tensor, nn

import vitrail
from vitrail import cli
from vitrail.data.settings import Data, Preprocess
from vitrail.durations import Epochs
from vitrail.errors import UsageError, WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.training.loop import fit
from vitrail.training.run import Optim
from vitrail.transfer.soup import greedy, uniform
from vitrail.verbs.average import average
from vitrail.weights.card import Card

SIZES: dict[str, Any] = dict(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=2)


def network(folder: Path, seed: int, *, names: tuple[str, ...] = ("blue", "red"), **changes: Any) -> Path:
    torch.manual_seed(0)
    resize = changes.pop("resize", "squash")
    card = {key: changes.pop(key) for key in ("thresholds",) if key in changes}
    model: Any = build(ViTConfig(**{**SIZES, **changes, "classes": len(names)}))
    torch.manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and "normalise" not in name:
            nn.init.uniform_(tensor, 0.05, 0.4) if "running" in name else nn.init.normal_(tensor, std=0.3)
    patch = model.config.patch if resize == "native" else None
    model.card = Card(model.config, list(names), Preprocess((16, 16), resize=resize, patch=patch), **card)
    vitrail.save(model, folder)
    return folder


@pytest.fixture(scope="module")
def photos() -> Path:
    return once("photos-18", lambda place: draw(place / "photos", side=18)) / "photos"


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Networks with BatchNorm in their stem."""
    place = tmp_path_factory.mktemp("soups")
    return [network(place / name, seed, stem="hmlp") for seed, name in enumerate("abc")]


def run(*argv: object) -> int:
    return cli.main([str(word) for word in argv])


def test_networks_for_any_shape_are_measured_on_strips(photos: Path, tmp_path: Path) -> None:
    both = [network(tmp_path / name, seed, resize="native", native=True) for seed, name in enumerate("ab")]
    assert run("weights", "average", *both, "--on", photos, "--out", tmp_path / "soup") == 0
    assert vitrail.load(tmp_path / "soup").card.preprocess.resize == "native"


def test_the_uniform_soup_is_the_mean_of_the_files(networks: list[Path], photos: Path, tmp_path: Path) -> None:
    to = ("--out", tmp_path / "soup", "--kind", "uniform")
    assert run("weights", "average", *networks, *to, "--on", photos) == 0
    found = load_file(tmp_path / "soup" / "model.safetensors")
    files = [load_file(one / "model.safetensors") for one in networks]
    assert found.keys() == files[0].keys() and any("running_var" in name for name in found)
    for name, tensor in found.items():
        mean = np.mean([file[name].astype(np.float64) for file in files], axis=0)
        np.testing.assert_array_equal(tensor, mean.astype(tensor.dtype))
    assert run("weights", "verify", tmp_path / "soup") == 0


def test_without_images_nothing_is_measured(
    networks: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [network(tmp_path / name, seed) for seed, name in enumerate("ab")]
    found = average(*plain, out=tmp_path / "soup", kind="uniform")
    assert found.results is None and vitrail.load(found.path).card.confidence is None  # type: ignore[union-attr]
    assert run("weights", "average", *networks, "--out", tmp_path / "other", "--kind", "uniform") == 2
    assert "running statistics of their BatchNorm" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@given(st.lists(st.integers(-4, 4), min_size=2, max_size=6), st.data())
def test_the_greedy_soup_is_never_below_the_best(values: list[int], data: st.DataObject) -> None:
    """One weight for each network, and a score of the weight that nothing restricts."""
    scores: dict[float, float] = {}

    def measure(tensors: Mapping[str, Tensor]) -> Any:
        weight = float(tensors["w"])
        score = scores.setdefault(weight, data.draw(st.sampled_from([0.1, 0.5, 0.9])))
        return SimpleNamespace(headline="top1", top1=score, metrics=lambda: {"nll": 0.0})

    loads = {str(n): lambda value=value: {"w": torch.tensor(float(value))} for n, value in enumerate(values)}
    tensors, tried = greedy(loads, measure)  # type: ignore[arg-type]
    assert scores[float(tensors["w"])] >= max(scores[float(value)] for value in values)
    kept = [values[int(one.name)] for one in tried if one.kept]
    assert float(tensors["w"]) == pytest.approx(np.mean(kept))
    assert [one.name for one in tried] == sorted(loads, key=lambda n: -scores[values[int(n)]])
    everything, all_of_them = uniform(loads)  # type: ignore[arg-type]
    assert float(everything["w"]) == pytest.approx(np.mean(values)) and len(all_of_them) == len(values)


def test_the_greedy_soup_of_networks(
    networks: list[Path], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("weights", "average", *networks, "--out", tmp_path / "soup", "--on", photos, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    alone = {one.name: vitrail.evaluate(one, photos).results for one in networks}
    for name, found in printed["networks"].items():
        assert found["alone"]["top1"] == alone[name].top1  # type: ignore[attr-defined]
    soup: Any = vitrail.evaluate(tmp_path / "soup", photos)
    assert soup.results.top1 == printed["metrics"]["top1"] >= max(one.top1 for one in alone.values())  # type: ignore[attr-defined]
    kept = [name for name, one in printed["networks"].items() if one["kept"]]
    files = [load_file(networks[0].parent / name / "model.safetensors") for name in kept]
    found = load_file(tmp_path / "soup" / "model.safetensors")["head.weight"]
    np.testing.assert_allclose(found, np.mean([file["head.weight"] for file in files], axis=0), atol=1e-7)
    card: Any = vitrail.load(tmp_path / "soup").card
    assert card.metrics["validation top1"] == printed["metrics"]["top1"]
    assert [parent["run"] for parent in card.provenance["parents"]] == kept and card.source.startswith("greedy soup")
    assert card.confidence is not None and card.confidence.images == soup.results.count
    assert run("weights", "average", *networks, "--out", tmp_path / "soup", "--on", photos) == 1
    assert "already exists" in capsys.readouterr().err


def test_labels_get_thresholds_of_their_own(photos: Path, tmp_path: Path) -> None:
    both = [network(tmp_path / name, seed, thresholds=[0.1, 0.9]) for seed, name in enumerate("ab")]
    found = average(*both, out=tmp_path / "soup", on=photos)
    card: Any = vitrail.load(found.path).card
    assert card.several and card.thresholds != [0.1, 0.9]
    assert found.results is not None and found.results.headline == "map"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"width": 32}, "differ in width: 16 and 32"),
        ({"depth": 2}, "differ in depth: 1 and 2"),
        ({"names": ("blue", "rose")}, "differ in class_names: class 1 is 'red' and 'rose'"),
        ({"names": ("red", "blue")}, "class 0 is 'blue' and 'red'"),
        ({"names": ("blue", "red", "rose")}, "differ in classes: 2 and 3"),
        ({"resize": "pad"}, "differ in preprocess"),
        ({"thresholds": [0.5, 0.5]}, "different kinds"),
    ],
)
def test_networks_that_differ_have_no_mean(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    both = [network(tmp_path / "a", 1), network(tmp_path / "b", 2, **other)]
    with pytest.raises(WeightsError, match=said):
        average(*both, out=tmp_path / "soup", kind="uniform")
    assert not (tmp_path / "soup").exists()


def test_images_that_must_not_choose_are_refused(networks: list[Path], photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no run, so it has no validation images\. Name images"):
        average(*networks, out=tmp_path / "soup")
    with pytest.raises(UsageError, match="one network has no mean"):
        average(networks[0], out=tmp_path / "soup")
    with pytest.raises(UsageError, match="needs a folder"):
        average(*networks)
    (tmp_path / "split").mkdir()
    for name in ("train", "test"):
        (tmp_path / "split" / name).symlink_to(photos)
    with pytest.raises(UsageError, match="Test images must not choose anything"):
        average(*networks, out=tmp_path / "soup", on=tmp_path / "split")
    assert not (tmp_path / "soup").exists()


@pytest.mark.train
def test_the_runs_own_validation_images(tmp_path: Path) -> None:
    runs = []
    for rate in (1e-3, 3e-3):
        run = tiny_run(tmp_path / "runs", duration=Epochs(1), data=Data(path="digits", subset=64), optim=Optim(lr=rate))
        runs.append(fit(run).folder)
    found = average(*runs, out=tmp_path / "soup")
    validation: Any = found.results
    assert found.data == "the validation images of digits" and validation.count > 0
    assert {one.alone.count for one in found.ingredients if one.alone} == {validation.count}
    other = fit(replace(run, seed=5)).folder
    with pytest.raises(UsageError, match="may have been trained on the validation images"):
        average(runs[0], other, out=tmp_path / "soup-2")
    both = [runs[0], other]
    for networks, test, warned in ((runs, "none", False), (both, "none", True), (both, "test", False)):
        notes = vitrail.evaluate(networks, test=test).notes
        assert any(f"may be training images of {other}: it held out other" in note for note in notes) == warned
    (note,) = (note for note in vitrail.evaluate([runs[0], tmp_path / "soup"], test="none").notes if "warning" in note)
    assert f"{tmp_path / 'soup'}: it is not known which images it held out" in note
