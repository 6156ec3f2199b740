"""Run folders as training leaves them, made up in no time, and their pages as a browser reads them."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.config import to_yaml
from vitrail.data.settings import Data, Preprocess
from vitrail.evaluation.classify import Classification
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.tasks.catalog import save_results
from vitrail.training.run import Run
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """What a browser would see: elements, attributes, text; and whether every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def answers(classes: list[str], images: int, seed: int = 0, labels: np.ndarray | None = None) -> Classification:
    """Made-up answers, about two thirds of them right."""
    rng = np.random.default_rng(seed)
    count = len(classes)
    label = rng.integers(0, count, images) if labels is None else labels
    logits = rng.normal(size=(images, count))
    logits[np.arange(images), label] += 0.5 + np.log(count)
    share = np.exp(logits)
    share /= share.sum(1, keepdims=True)
    top = np.argsort(-share, 1)[:, : min(5, count)]
    loss = -np.log(share[np.arange(images), label])
    kept = np.take_along_axis(share, top, 1).astype(np.float32)
    brier = np.square(share - np.eye(count)[label]).sum(1)
    return Classification(classes, np.arange(images), label, top, kept, loss, brier)


def run_folder(
    folder: Path, place: Data, found: Classification, *, run: Run | None = None, config: Any = None, **facts: Any
) -> Path:
    """What training leaves behind, with a network of random weights; `config` is that of another ViT."""
    folder.mkdir(parents=True)
    run = run or Run(data=place, model="Ti/2")
    (folder / "config.yaml").write_text(to_yaml(run), encoding="utf-8")
    known: dict[str, Any] = {
        "command": "vitrail train 'my <photos>'",
        "directory": str(folder.parent),
        "versions": {"python": "3.11.7", "torch": "2.15"},
        "machine": {"processor": "<AMD>", "cores": 2},
        "seed": 0,
        "data": {"path": place.path, "images": {"train": 1438, "validation": len(found.index)}, "notes": ["ignored 1"]},
        "decisions": {"image_size": "8 px: <median>"},
        "result": {"steps": 60, "epochs": 3.0, "seconds": 75.2, "ended": "all steps done", "test": None},
    }
    (folder / "run.json").write_text(json.dumps({**known, **facts}), encoding="utf-8")
    (folder / "classes.json").write_text(json.dumps(found.class_names), encoding="utf-8")
    lines = [
        {"kind": "train", "step": step, "epoch": step / 20, "loss": 2 / step, "lr": 1e-3 / step}
        for step in range(1, 61)
    ]
    lines += [{"kind": "validation", "step": step, "top1": step / 100, "nll": 3 / step} for step in (20, 40, 60)]
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + '\n{"kind": "tr', encoding="utf-8")  # torn by a kill
    save_results(folder / "evaluation.npz", found)
    Image.new("RGB", (32, 16), "red").save(folder / "batch.png")
    torch.manual_seed(0)
    config = config or ViTConfig(
        width=16, depth=2, heads=2, mlp_dim=32, patch=2, image_size=(8, 8), classes=len(found.class_names)
    )
    card = Card(config, found.class_names, Preprocess(image_size=config.image_size, resize="squash"))
    save_model(folder / "model" / "best", ViT(config), card)
    return folder
