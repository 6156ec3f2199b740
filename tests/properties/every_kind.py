"""A tiny run of everything that is registered: a new objective, optimiser, sampler or part to tune adds a row here.

`REGISTERED` is taken from vitrail's own settings, and a test fails where a choice of it is in no row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from PIL import Image
from references import once, scenes, write_answers, write_levels, write_table
from tiny_runs import SHORT, tiny_run
from torch import nn

from tests.doors.own import EXAMPLES, importable
from vitrail.config import merge
from vitrail.data.settings import IGNORED, Augment, Data
from vitrail.durations import Percent, Steps
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.objective.settings import (
    DINO,
    MAE,
    BEiT,
    DINOv2,
    Distill,
    MaskedPatch,
    ObjectiveSettings,
    Regression,
    Segmentation,
    SeveralAnswers,
    Supervised,
    Tokenizer,
)
from vitrail.objective.tokenizer import ImageTokenizer
from vitrail.training import loop
from vitrail.training.run import Average, Model, Optim, Progressive, Run, Schedule
from vitrail.weights.card import Card
from vitrail.weights.save import save

DIGITS = Data(path="digits", subset=64, test="none")
ANSWERS = Data(answers=("colour", "tags", "level", "lit"), test="none")
STILL = Model(width=16, depth=1, heads=2, mlp_dim=32)
"""A network without anything random."""
PRETRAINED = dict(model="Ti/4", image_size=16, augment=Augment(scale=(0.5, 1.0), also=("rotate90", "noise")))
TOKENIZER = Tokenizer(codes=16, width=16, depth=1, features=4, decay=0.9)
VIEWS = DINO(outputs=32, hidden=32, bottleneck=8, view=1.5, local_crops=2, local_size=0.5, freeze_last_layer=Steps(1))
PATCHES = DINOv2(
    **{name: getattr(VIEWS, name) for name in ("outputs", "hidden", "bottleneck", "view", "local_crops", "local_size")},
    gram_weight=1.0,
    gram_refresh=Steps(2),
)
LORA: dict[str, Any] = dict(lora_rank=2, lora_alpha=4.0, lora_on="both")
BASE = ViTConfig(
    width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=7, stem="hmlp", layer_scale=0.1
)


def stirred(config: ViTConfig | ResNetConfig, seed: int = 0) -> nn.Module:
    """Return a network none of whose tensors is constant."""
    torch.manual_seed(seed)
    model = build(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.0 if parameter.ndim > 1 else 0.5, std=0.2)
    return model


def materials() -> Path:
    """A folder with what runs start from: a base, a teacher, a tokenizer, and images with several labels or numbers."""

    def make(place: Path) -> None:
        save(stirred(BASE), place / "base")
        teacher = stirred(replace(BASE, width=24, image_size=(16, 16), classes=10), 1)
        teacher.card = Card(teacher.config, [str(digit) for digit in range(10)])  # type: ignore[assignment, arg-type]
        save(teacher, place / "teacher")
        known = stirred(BASE, 2)
        known.card = Card(BASE, [*map(str, range(6)), "letter"])  # type: ignore[assignment, arg-type]
        save(known, place / "known")
        torch.manual_seed(0)
        ImageTokenizer(TOKENIZER, 4).save(place / "tokenizer")
        write_table(place / "labels.csv", [("path", "labels"), *scenes(place / "labels", 64, 64)])
        write_levels(place / "numbers", 72)
        write_answers(place / "answers")
        write_masks(place / "masks", 72)

    return once("materials", make)


def write_masks(place: Path, count: int) -> None:
    """Write pictures of noise, and masks of their left and right halves, whose first rows do not always count."""
    for folder in ("images", "masks"):
        (place / folder).mkdir(parents=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 12, 3), np.uint8)
        Image.fromarray(pixels).save(place / "images" / f"{number}.png")
        mask = np.repeat(np.arange(2, dtype=np.uint8)[None], 8, 0).repeat(6, 1)
        mask[: number % 5] = IGNORED
        Image.fromarray(mask).save(place / "masks" / f"{number}.png")


def tuned(tune: Any, **changes: Any) -> dict[str, Any]:
    return {"weights": str(materials() / "base"), "tune": tune, "vit": Model(dropout=0.1, drop_path=0.1), **changes}


def continued(objective: DINOv2, **changes: Any) -> dict[str, Any]:
    weights = {"weights": str(materials() / "base"), "vit": Model(dropout=0.1), "average": Average()}
    return {**PRETRAINED, "model": None, **weights, "objective": objective, **changes}


class Net(nn.Sequential):
    """A network that is not ours, with statistics of its own and noise."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 10)]
        super().__init__(*layers)


OWN = {
    "objective": {"class": "focal:Focal", "gamma": 1.5},
    "optim": "lion:Lion",
    "schedule": {"class": "cyclic:Cyclic", "cycles": 2},
    "vit": {
        "head": {"class": "cosine_head:Cosine", "scale": 8},
        "stem": {"class": "overlapping_stem:Overlapping", "overlap": 1},
        "positions": "alibi:Alibi",
        "attention": "qk_norm:QKNorm",
    },
}
"""The classes of examples/, as files name them."""


@dataclass(frozen=True)
class Row:
    """What differs from `tiny_run`, and what only Python can give."""

    changes: Callable[[], dict[str, Any]]
    given: Callable[[], dict[str, Any]] = dict

    def run(self, name: str, out: Path) -> Run:
        """Return the run of this row."""
        changes = {"name": name, **SHORT, **self.changes()}
        own = changes.pop("own", {})
        return merge(tiny_run(out, **changes), own, imports=True)  # type: ignore[no-any-return]

    def modules(self) -> AbstractContextManager[None]:
        """Context in which its classes can be imported."""
        return importable(EXAMPLES)


def pretraining(objective: ObjectiveSettings, **changes: Any) -> Row:
    return Row(lambda: {**PRETRAINED, "vit": replace(STILL, dropout=0.1), "objective": objective, **changes})


ROWS: dict[str, Row] = {
    "supervised": Row(dict),
    "rare classes": Row(
        lambda: {
            "objective": Supervised(class_weights="effective", logit_adjustment=0.5),
            "data": replace(DIGITS, sampler="sqrt"),
            "optim": Optim(name="sgd", lr=0.1),
            "average": Average(kind="polyak", start=Steps(1)),
            "schedule": Schedule(shape="linear", warmup=Steps(1)),
        }
    ),
    "layers": Row(  # a rate for each layer of a table of positions
        lambda: {
            "objective": Supervised(class_weights="balanced", loss="sigmoid"),
            "data": replace(DIGITS, sampler="balanced"),
            "vit": Model(width=16, depth=2, heads=2, mlp_dim=32, dropout=0.1, positions="relative_bias"),
            "optim": Optim(name="lamb", lr=3e-3, weight_decay_end=0.2, layer_decay=0.7),
            "schedule": Schedule(shape="rsqrt", warmup=Steps(1)),
        }
    ),
    "threads": Row(
        lambda: {
            "objective": Supervised(loss="bce"),
            "vit": STILL,
            "accumulate": 1,
            "optim": Optim(name="muon", lr=3e-3),
            "schedule": Schedule(shape="step", warmup=Steps(1)),
            "progressive": Progressive(0.5, Percent(75)),
            "augment": Augment(crop="random", mixup=0.5, randaugment=(2, 15), randaugment_form="big_vision"),
        }
    ),
    "several labels": Row(
        lambda: {
            "data": Data(path=str(materials() / "labels.csv"), holdout=0.2),
            "objective": Supervised(loss="asymmetric"),
            "schedule": Schedule(shape="constant", warmup=Steps(1)),
            "augment": Augment(crop="center", cutmix=0.5, randaugment=(1, 9), randaugment_form="timm", also=("hue",)),
            "workers": 1,
        }
    ),
    "numbers": Row(
        lambda: {
            "data": Data(path=str(materials() / "numbers" / "levels.csv"), label_columns=("level", "red"), test="none"),
            "objective": Regression(loss="huber"),
            "augment": Augment(crop="pad", pad=1),
        }
    ),
    "squares": Row(
        lambda: {
            "data": Data(path=str(materials() / "numbers" / "levels.csv"), label_columns=("level", "red"), test="none"),
            "objective": Regression(loss="mse"),
            "augment": Augment(crop="pad", pad=1, mixup=0.2, also=("elastic@0.5",)),
            **tuned("attention+positions"),
        }
    ),
    "answers": Row(
        lambda: {
            "data": replace(ANSWERS, path=str(materials() / "answers" / "answers.csv")),
            "objective": SeveralAnswers(answer_weights=("level=0.5",), smoothing=0.1),
            "augment": Augment(crop="pad", pad=1),
        }
    ),
    "answers, huber": Row(
        lambda: {
            "data": replace(ANSWERS, path=str(materials() / "answers" / "answers.csv"), subset=48),
            "objective": SeveralAnswers(number_loss="huber"),
            "augment": Augment(crop="pad", pad=1),
            "workers": 1,
        }
    ),
    "masks": Row(
        lambda: {
            "data": Data(path=str(materials() / "masks"), test="none"),
            "objective": Segmentation(),
            "vit": replace(STILL, segmentation="layers", dropout=0.1),
            "augment": Augment(scale=(0.5, 1.0), also=("rotate90",)),
        }
    ),
    "teacher": Row(
        lambda: {
            "teacher": str(materials() / "teacher"),
            "distill": Distill(kind="features", features="mse"),
            "objective": Supervised(focal_gamma=2.0),
            "augment": Augment(also=("torchvision.transforms.v2:GaussianNoise(sigma=0.2)@0.5",)),
        }
    ),
    "queries": Row(
        lambda: {
            "data": Data(path=str(materials() / "masks"), test="none"),
            "objective": Segmentation(),
            "vit": replace(STILL, depth=2, segmentation="queries", queries=3, drop_path=0.1),
            "augment": Augment(scale=(0.5, 1.0)),
        }
    ),
    "masked-patch": pretraining(MaskedPatch()),
    "masked-patch-small": pretraining(MaskedPatch(target="small"), optim=Optim(name="muon", lr=3e-3)),
    "masked-patch-pixels": pretraining(MaskedPatch(target="pixels"), knn=3),
    "mae": pretraining(MAE(decoder_width=16, decoder_depth=1, decoder_heads=2)),
    "beit": Row(
        lambda: {
            **PRETRAINED,
            "vit": replace(STILL, dropout=0.1),
            "objective": BEiT(smallest_block=2, tokenizer=str(materials() / "tokenizer")),
        }
    ),
    "tokenizer": pretraining(TOKENIZER),
    "dino": pretraining(VIEWS, average=Average()),  # whose teacher is an average
    "dino-sinkhorn": pretraining(replace(VIEWS, centring="sinkhorn"), average=Average()),
    "dinov2": Row(lambda: continued(PATCHES, knn=3)),
    "dinov2-shared": Row(lambda: continued(replace(PATCHES, patch_head="shared", centring="mean"), accumulate=1)),
    "attention": Row(lambda: tuned("attention", optim=Optim(lr=1e-2, weight_decay=0.1))),
    "ffn": Row(lambda: tuned("ffn", teacher=str(materials() / "teacher"), distill=Distill(kind="soft"))),
    "head": Row(
        lambda: tuned(
            "head", teacher=str(materials() / "teacher"), distill=Distill(kind="features"), optim=Optim("sgd", lr=0.1)
        )
    ),
    "lora": Row(lambda: tuned("lora", **LORA, teacher=str(materials() / "teacher"), distill=Distill(kind="hard"))),
    "more classes": Row(  # four digits are new, and no image shows a letter
        lambda: tuned("all", weights=str(materials() / "known"), classes=("add",), augment=Augment(mixup=0.2))
    ),
    "own classes": Row(lambda: {"own": OWN, "augment": Augment(crop="pad", pad=1), "model": "Ti/4", "vit": STILL}),
    "own network": Row(
        lambda: {"vit": Model(), "model": None, "average": Average(), "image_size": 8}, lambda: {"model": Net()}
    ),
}


def whole(name: str) -> Path:
    """Return the folder of the run of a row that was never interrupted. It is a reference: copy it before you write."""
    row = ROWS[name]

    def make(place: Path) -> None:
        with row.modules():
            loop.fit(row.run(name, place), **row.given())

    return next(once(f"whole-{name}", make).glob(f"{name}-1"))


# what is registered


def choices(section: str, settings: type, only: str = "") -> set[str]:
    """Return every name that a setting of a section can have: "optim.name adamw"."""
    found = set()
    for name, annotation in get_type_hints(settings).items():
        for one in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]:
            if get_origin(one) is Literal and (not only or name == only):
                found |= {f"{section}.{name} {choice}" for choice in get_args(one)}
    return found


def registered() -> set[str]:
    """Return what the runs of `ROWS` are to have, each at least once."""
    objectives = [each for each in get_args(get_type_hints(Run)["objective"]) if each is not ObjectiveSettings]
    found = set().union(*(choices("objective", each) for each in objectives))
    sections = {"optim": Optim, "schedule": Schedule, "average": Average, "distill": Distill, "augment": Augment}
    found = found.union(*(choices(name, settings) for name, settings in sections.items()))
    return found | choices("data", Data, "sampler") | choices("run", Run, "tune")


SECTIONS = ("objective", "optim", "schedule", "average", "augment", "data")


def used(run: Run) -> set[str]:
    """Return the names that the settings of a run have."""
    parts = {"run": run, **{name: getattr(run, name) for name in SECTIONS}}
    parts |= {"distill": run.distill} if run.teacher else {}
    return {f"{part}.{each.name} {getattr(its, each.name)}" for part, its in parts.items() for each in fields(its)}
