"""Small networks on disk, as `vitrail serve` gets them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.data.labels.numbers import TargetScale
from vitrail.data.settings import Preprocess
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.answer import CardAnswer
from vitrail.weights.card import Card
from vitrail.weights.confidence import Confidence
from vitrail.weights.load import load
from vitrail.weights.store import save_model

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
NAMES = (HOSTILE, 'quo"ted & <script>alert(1)</script>', "grün", "red")
TINY: dict[str, Any] = dict(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=len(NAMES))


def saved(folder: Path, config: ViTConfig | ResNetConfig | None = None, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = config or ViTConfig.of(**TINY)
    model = build(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_model(folder, model, Card(config, list(NAMES), Preprocess(image_size=config.image_size, crop=0.8)))
    return folder


def several(folder: Path) -> Path:
    """The same network for several labels: the second is predicted for every image, the others for none."""
    model = load(saved(folder))
    save_model(folder, model, replace(model.card, thresholds=[1.0, 0.0, 1.0, 1.0]))
    return folder


def of_answers(folder: Path) -> Path:
    """A network for several answers: a class of two, two labels of which the second is always predicted, a number."""
    model = build(config := ViTConfig.of(**{**TINY, "classes": 5}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    kind, tags = (
        CardAnswer("kind", "classes", 2, confidence=Confidence(2.0)),
        CardAnswer("tags", "labels", 2, (1.0, 0.0)),
    )
    answers = [kind, tags, CardAnswer("grams", "numbers", 1, scale=TargetScale((100.0,), (20.0,)))]
    names = [*(f"kind: {name}" for name in NAMES[:2]), "tags: x", "tags: y", "grams"]
    save_model(folder, model, Card(config, names, Preprocess(image_size=config.image_size), answers=answers))
    return folder


def of_numbers(folder: Path) -> Path:
    """A network for two numbers."""
    model = build(config := ViTConfig.of(**{**TINY, "classes": 2}))
    card = Card(
        config, ["age", "grams"], Preprocess(image_size=(16, 16)), scale=TargetScale((40.0, 100.0), (9.0, 20.0))
    )
    save_model(folder, model, card)
    return folder


def of_pixels(folder: Path, head: str = "layers", parts: tuple[str, ...] = ("linear",)) -> Path:
    """A network for the class of each pixel, which predicts several classes in one image."""
    torch.manual_seed(0)
    config = ViTConfig.of(**TINY, segmentation=head)
    model = build(config)
    for part in parts:
        torch.nn.init.normal_(model.get_submodule(f"head.{part}").weight)
    save_model(folder, model, Card(config, list(NAMES), Preprocess(config.image_size, "squash")))
    return folder


def resnet() -> ResNetConfig:
    return ResNetConfig(units=(1,), width=8, classes=len(NAMES), image_size=(16, 16))
