"""Numbers on a card belong to the outputs that they were measured on: changed weights are saved without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import vitrail
from vitrail.data.labels.numbers import TargetScale
from vitrail.exports.write import export_model
from vitrail.weights.answer import CardAnswer
from vitrail.weights.card import Card
from vitrail.weights.confidence import Confidence
from vitrail.weights.publish import prepare_upload
from vitrail.weights.save import save

RUN = {"run": "train-1", "step": 40, "data": "photos", "from": "google/vit-tiny"}


def trained(folder: Path, seed: int = 0, **card: Any) -> Any:
    """Return a network as a run leaves it, loaded from its folder."""
    torch.manual_seed(seed)
    model: Any = vitrail.create("Ti/16", width=64, depth=2, heads=1, mlp_dim=64, image_size=32, classes=3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    measured = dict(metrics={"validation top1": 0.7778}, confidence=Confidence(2.5), provenance=RUN)
    model.card = Card(model.config, ["cat", "dog", "owl"], **{**measured, **card})
    save(model, folder)
    return vitrail.load(folder)


def averaged(model: Any) -> None:
    """Average the weights with those of another network, as a soup does."""
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1).div_(2)


def stepped(model: Any) -> None:
    """Take one step of training."""
    model(torch.ones(1, 3, 32, 32)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.01).step()


@pytest.mark.parametrize("change", [averaged, stepped, lambda model: model.half(), lambda model: model.bfloat16()])
def test_changed_weights_lose_what_was_measured(
    tmp_path: Path, change: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = trained(tmp_path / "run")
    change(model)
    saved = save(model, tmp_path / "changed")
    card = vitrail.load(tmp_path / "changed").card
    assert isinstance(card, Card)
    assert (card.metrics, card.temperature, card.class_names) == ({}, 1.0, ["cat", "dog", "owl"])
    assert card.provenance == {"parents": [RUN]}
    text = str(saved)
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path / 'changed'} does not hold validation top1 0.7778, the temperature 2.5")
    assert "validation top1 0.7778" in text and "the temperature 2.5" in text and "outputs are others now" in text


def test_the_same_outputs_keep_what_was_measured(tmp_path: Path) -> None:
    for number, changes in enumerate(({}, {"drop_path": 0.2})):
        model = trained(tmp_path / f"run-{number}")
        saved = save(vitrail.load(tmp_path / f"run-{number}", **changes), tmp_path / f"same-{number}")
        card: Any = vitrail.load(tmp_path / f"same-{number}").card
        assert (card.metrics, card.temperature, card.provenance) == ({"validation top1": 0.7778}, 2.5, RUN)
        assert not saved.left_out and card.reference == model.card.reference


def test_weights_changed_after_loading_with_drop_path(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    model: Any = vitrail.load(tmp_path / "run", drop_path=0.1)
    averaged(model)
    save(model, tmp_path / "changed")
    assert vitrail.load(tmp_path / "changed").card.metrics == {}  # type: ignore[union-attr]


def other_size(folder: Path) -> Any:
    return vitrail.load(folder, image_size=48)


def same_classes(folder: Path) -> Any:
    return vitrail.load(folder, classes=3)


def reset(folder: Path) -> Any:
    return vitrail.reset_head(vitrail.load(folder, kind=vitrail.ViT), 3)


def other_head(folder: Path) -> Any:
    model: Any = vitrail.load(folder)
    model.head = nn.Linear(64, 5)
    return model


@pytest.mark.parametrize("adapt", [other_size, same_classes, reset, other_head])
def test_an_adapted_network_loses_them_too(tmp_path: Path, adapt: Callable[[Path], Any]) -> None:
    trained(tmp_path / "run")
    save(adapt(tmp_path / "run"), tmp_path / "adapted")
    card: Any = vitrail.load(tmp_path / "adapted").card
    assert (card.metrics, card.temperature, card.provenance) == ({}, 1.0, {"parents": [RUN]})


def test_chosen_thresholds_become_the_usual_ones(tmp_path: Path) -> None:
    model = trained(tmp_path / "run", thresholds=[0.2, 0.5, 0.9])
    averaged(model)
    assert "the thresholds of 3 labels" in str(save(model, tmp_path / "changed"))
    card: Any = vitrail.load(tmp_path / "changed").card
    assert card.several and card.thresholds == [0.5, 0.5, 0.5]


def test_a_network_of_numbers_keeps_its_unit_and_takes_another_head(tmp_path: Path) -> None:
    scale = TargetScale((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    model = trained(tmp_path / "run", scale=scale, confidence=None)
    averaged(model)
    save(model, tmp_path / "changed")
    card: Any = vitrail.load(tmp_path / "changed").card
    assert card.scale == scale and card.metrics == {}
    other: Any = vitrail.load(tmp_path / "run", classes=5)
    assert other.card.scale is None
    assert vitrail.reset_head(vitrail.load(tmp_path / "run", kind=vitrail.ViT), 7).card.scale is None


def test_another_head_of_a_network_of_several_answers_gives_none_of_them(tmp_path: Path) -> None:
    answers = [CardAnswer("colour", "classes", 2), CardAnswer("level", "numbers", 1, scale=TargetScale((1.0,), (2.0,)))]
    trained(tmp_path / "run", answers=answers, confidence=None)
    for classes in (3, 5):
        assert vitrail.load(tmp_path / "run", classes=classes).card.task == "classes"
        assert vitrail.reset_head(vitrail.load(tmp_path / "run", kind=vitrail.ViT), classes).card.task == "classes"
    model: Any = vitrail.load(tmp_path / "run")
    model.head = nn.Linear(64, 5)
    save(model, tmp_path / "other")
    assert vitrail.load(tmp_path / "other").card.answers == []


def test_a_soup_names_its_parents(tmp_path: Path) -> None:
    first, second = (trained(tmp_path / name, seed) for seed, name in enumerate(("a", "b")))
    other = second.state_dict()
    first.load_state_dict({name: (tensor + other[name]) / 2 for name, tensor in first.state_dict().items()})
    first.card = replace(first.card, provenance={"parents": ["runs/a", "runs/b"]})
    save(first, tmp_path / "soup")
    card: Any = vitrail.load(tmp_path / "soup").card
    assert card.provenance == {"parents": ["runs/a", "runs/b"]} and card.metrics == {}
    prepare_upload(first, tmp_path / "pushed", "owner/soup")
    text = (tmp_path / "pushed" / "README.md").read_text(encoding="utf-8")
    assert "- runs/a\n- runs/b" in text and "model-index" not in yaml.safe_load(text.split("---\n")[1])


@pytest.mark.export
def test_the_hub_and_exports_do_not_publish_old_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = trained(tmp_path / "run")
    prepare_upload(model, tmp_path / "true", "owner/name")
    assert "0.7778" in (tmp_path / "true" / "README.md").read_text(encoding="utf-8")
    averaged(model)
    prepare_upload(model, tmp_path / "pushed", "owner/name")
    readme = (tmp_path / "pushed" / "README.md").read_text(encoding="utf-8")
    assert "0.7778" not in readme and "train-1, step 40, trained on photos, from google/vit-tiny" in readme
    export_model(model, tmp_path / "program", "program", output="probabilities")
    about = json.loads((tmp_path / "program" / "card.json").read_text(encoding="utf-8"))
    assert about["metrics"] == {} and "confidence" not in about["card"]
    assert caplog.text.count("validation top1 0.7778") == 2
    assert model.card.metrics  # the model at hand is not changed


@pytest.mark.export
def test_an_export_of_logits_names_the_temperature(tmp_path: Path) -> None:
    model = trained(tmp_path / "run")
    logits = export_model(model, tmp_path / "logits", "program")
    assert "the temperature 2.5" in str(logits) and logits.temperature == 2.5
    probabilities = export_model(model, tmp_path / "probabilities", "program", output="probabilities")
    assert "temperature" not in str(probabilities)
