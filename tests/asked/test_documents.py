"""What the commands of the documents decide is what the sentences beside them say: the settings, and the network."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from documents import ROOT, blocks, shell_commands
from painted import paint
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.config import from_yaml
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig, variant
from vitrail.training.run import Run

PAGES = [ROOT / "README.md", ROOT / "PAPER.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODELS = {"runs/train-1": 16, "runs/scratch-photos-1": 16,
          "runs/finetune-1": 16, "runs/mae-small-1": 16, "runs/cifar100-1": 8, "runs/base-1": 8,
          "google/vit-base-patch16-224-in21k": 16, "facebook/dinov3-vits16-pretrain-lvd1689m": 16, "RUN": 16,
          "timm/vit_small_patch16_224.augreg_in21k_ft_in1k": 16, "weights/vit-base-patch16-224-in21k": 16}  # fmt: skip
FOLDERS = {"photos": 256, "imagenet": 256, "flowers12": 64, "labelled": 64, "DIR": 64, "SET": 64, "land": 256,
           "cifar100": 32, "ten": 32, "DATA": 64, "packed": 64, "scans": 64, "new": 64}  # fmt: skip
"""Stand-ins for what the documents name: networks with their patch, folders of images with their size."""
ELSEWHERE = {  # commands that need what a stand-in does not have, and the tests that give it to them
    "--data.label-from": "tests/data/labels/test_label_from.py",
    "--data.group": "tests/data/test_image_groups.py",
    "--data.bits": "tests/data/bands/test_bands_run.py",
    "--data.channels": "tests/data/bands/test_bands_run.py",
    "--data.include": "tests/data/sources/test_selection.py",
    "--data.exclude": "tests/data/sources/test_selection.py",
    "--data.subset": "tests/data/sources/test_source.py",
    "--config": "tests/recipes/test_recipes.py",
    "examples.focal:Focal": "tests/doors/test_examples.py",
    "s3://": "tests/data/sources/test_remote.py",
    "https://": "tests/data/sources/test_remote.py",
    ".csv": "tests/training/test_several_labels.py",
    ".txt": "tests/data/sources/test_lists.py",
    ".npz": "tests/weights/formats/test_google.py",
    "fields/": "tests/data/bands/test_bands_run.py",
    "NAME": "tests/test_cli.py",
}
NOT_SETTINGS = {"--from", "--recipe", "--dry-run", "--nproc"}
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MEASURED = "--time-limit"  # fine-tuning for a time measures first how fast this machine is
SHORT = {"lr": "optim.lr", "epochs": "duration", "distill": "distill.kind"}


@cache
def commands() -> dict[tuple[str, ...], str]:
    """Each `vitrail train` and `vitrail finetune` of the documents, with the first page that has it."""
    found: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        words = [words for block in blocks(page) if block.language == "bash" for words in shell_commands(block.text)]
        words += [shlex.split(command) for command in re.findall(r"`(vitrail (?:train|finetune) [^`]+)`", text)]
        for command in words:
            whole = command[1:2] in (["train"], ["finetune"]) and not command[2].startswith("-")
            if whole and "--help" not in command and "--resume" not in command:
                found.setdefault(tuple(command[1:]), page.relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module", autouse=True)
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A current folder with everything that the commands name."""
    world = tmp_path_factory.mktemp("world")
    for name, side in FOLDERS.items():
        for number in range(6):
            place = world / name / "ab"[number % 2] / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((side, side, 3), 40 * number, np.uint8)).save(place)
    paint(world / "scenes", {"train": 4, "val": 2})
    for name, patch in MODELS.items():
        tiny = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=patch, image_size=(32, 32), classes=3)
        vitrail.save(build(tiny), world / name)
    before = Path.cwd()
    os.chdir(world)
    yield
    os.chdir(before)


@pytest.fixture
def decided(capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command line decides: the configuration that it prints, as a person reads it and as a run."""

    def decide(words: tuple[str, ...]) -> tuple[dict[str, Any], Run]:
        assert cli.main([*(word for word in words if word != "--dry-run"), "--print-config"]) == 0
        text = capsys.readouterr().out
        return yaml.load(text, Loader=LOADER), from_yaml(text, Run())

    return decide


def asked(words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The settings that a command names, as (name in config.yaml, value)."""
    flags = [number for number, word in enumerate(words) if word.startswith("--")]
    for start, end in pairwise([*flags, len(words)]):
        flag, values = words[start], [yaml.safe_load(word) for word in words[start + 1 : end]]
        if flag in NOT_SETTINGS:
            continue
        name = flag.removeprefix("--").replace("-", "_")
        section, _, last = name.rpartition(".")
        negated = last.startswith("no_")
        name = f"{section}.{last.removeprefix('no_')}" if negated else SHORT.get(name, name)
        value = values[0] if len(values) == 1 else values or not negated
        if flag == "--epochs":
            value = f"{value} epochs"
        yield name, value


def at(config: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config


def same(found: Any, wanted: Any) -> bool:
    """Whether a value of a configuration is what was written on the command line: 0.003 and 3e-3, [a] and a."""
    if isinstance(found, list) and not isinstance(wanted, list):
        return bool(found) and all(same(one, wanted) for one in found)  # a size of one number is a square
    if isinstance(found, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(found, int | float) and not isinstance(found, bool):
        return float(found) == float(str(wanted).removesuffix("min"))
    return str(found).replace(" ", "").lower() == str(wanted).replace(" ", "").lower()


def ignored(words: tuple[str, ...], config: dict[str, Any]) -> list[str]:
    """Settings that a command names and its run does not have."""
    return [
        f"{name}: {value} is {at(config, name)}" for name, value in asked(words) if not same(at(config, name), value)
    ]


def test_what_is_tested_elsewhere_is() -> None:
    for part, file in ELSEWHERE.items():
        assert (ROOT / file).exists(), file
        assert any(part in " ".join(words) for words in commands()), f"no command of the documents has {part}"


@dataclass(frozen=True)
class Sentence:
    """A command, the words of the documents that say what it is for, and what follows from them."""

    command: str
    page: str
    words: str
    settings: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] = field(default_factory=dict)
    millions: float | None = None  # parameters for 1,000 classes, as the papers print them


PAPER = {"optim.betas": (0.9, 0.999), "batch_size": 4096, "image_size": 224}
BASE = dict(width=768, depth=12, heads=12, mlp_dim=3072, patch=16, stem="linear", pool="cls")
SMALL = dict(width=384, depth=12, heads=6, mlp_dim=1536, patch=16)
TUNED = {"optim.name": "sgd", "optim.momentum": 0.9, "optim.weight_decay": 0.0, "schedule.shape": "cosine",
         "batch_size": 512, "optim.clip": 1.0}  # fmt: skip
TOUVRON = {"optim.name": "lamb", "objective.loss": "bce", "batch_size": 2048, "image_size": 224, "augment.repeats": 3}
SENTENCES = [
    # "An Image is Worth 16x16 Words", Table 3 (rates, decay, dropout), Table 1 (sizes), section 4.1
    Sentence("train photos/ --recipe paper/vit-b16-imagenet", "PAPER.md", "Adam with decay on kernels",
             {**PAPER, "optim.lr": 3e-3, "optim.weight_decay": 0.3, "vit.dropout": 0.1, "duration": "300 epochs",
              "schedule.shape": "cosine", "optim.clip": 1.0}, BASE, 86.57 + 0.59),  # and the head's hidden layer
    Sentence("train photos/ --recipe paper/vit-l16-imagenet21k", "PAPER.md", "what can be done without JFT-300M",
             {**PAPER, "optim.lr": 1e-3, "optim.weight_decay": 0.03, "vit.dropout": 0.1, "schedule.shape": "linear"},
             dict(width=1024, depth=24, heads=16, mlp_dim=4096, patch=16), 304.33 + 1.05),
    Sentence("train photos/ --recipe paper/vit-b16-imagenet --vit.pool gap --lr 3e-4", "PAPER.md",
             "at another learning rate", {"optim.lr": 3e-4, "optim.weight_decay": 0.3}, {**BASE, "pool": "gap"}),
    Sentence("train photos/ --recipe paper/vit-b16-imagenet --vit.positions 2d --vit.place shared", "PAPER.md",
             "positional embedding", {"optim.lr": 3e-3}, {**BASE, "positions": "2d", "place": "shared"}),
    Sentence("train photos/ --recipe paper/vit-b32-imagenet --vit.depth 8 --vit.width 1024 --vit.heads 16 "
             "--vit.mlp_dim 2048", "PAPER.md", "Transformer shape", {}, dict(patch=32, depth=8, width=1024)),
    # Table 4: SGD with momentum 0.9, no decay, batches of 512, steps of each set; 0.9999 at 512 pixels (section 4.1)
    Sentence("finetune photos/ --from runs/train-1 --recipe paper/finetune-cifar100", "PAPER.md",
             "hyper-parameters of fine-tuning", {**TUNED, "duration": "10000 steps", "image_size": 384}),
    Sentence("finetune imagenet/ --from runs/train-1 --recipe paper/finetune-imagenet-512", "PAPER.md",
             "0.9999, ImageNet at 512 and 518 px", {**TUNED, "image_size": 512, "average.kind": "ema",
              "average.decay": 0.9999, "duration": "20000 steps"}),
    Sentence("finetune photos/ --from runs/train-1 --image-size 384", "PAPER.md",
             "same patch, longer sequence", {"image_size": 384}),
    # section B.1.2: half of the patches corrupted, the mean of 3 bits a channel predicted
    Sentence("train photos/ --recipe masked-patch", "PAPER.md", "masked patch prediction",
             {"objective.kind": "masked-patch", "objective.target": "colour"}),
    Sentence("train photos/ --recipe masked-patch --objective.target small", "PAPER.md",
             "50 % corrupted: 80 % mask, 10 % other, 10 % kept", {"objective.target": "small"}),
    # section B.1: sigmoid cross-entropy; a bias of the head that begins at -10
    Sentence("train photos/ --objective.loss sigmoid --objective.head_bias -10", "PAPER.md", "sigmoid cross-entropy",
             {"objective.loss": "sigmoid", "objective.head_bias": -10.0}),
    Sentence("train photos/ --model R50x1 --optim.name sgd", "PAPER.md", "SGD or Adam for ResNets",
             {"optim.name": "sgd", "optim.momentum": 0.9}, {}, 25.5),
    # "Three things everyone should know about Vision Transformers", section 2.2 and Table 1
    Sentence("train photos/ --recipe three-things/vit-s16-300", "PAPER.md", "learning rates 4e-3 and 3e-3",
             {**TOUVRON, "optim.lr": 4e-3, "vit.drop_path": 0.05, "duration": "300 epochs"}, SMALL, 22.0),
    Sentence("train photos/ --recipe three-things/vit-s16-400-ls", "PAPER.md", "400 with LayerScale",
             {**TOUVRON, "optim.lr": 4e-3, "duration": "400 epochs"}, {**SMALL, "layer_scale": 1e-4}),
    Sentence("train photos/ --recipe three-things/vit-s18x2-300", "PAPER.md", "side by side", TOUVRON,
             dict(width=384, depth=18, branches=2), 64.6),
    Sentence("train photos/ --recipe three-things/vit-b16-300 --vit.stem hmlp --vit.stem_norm layer", "PAPER.md",
             "hMLP with BN or LN", {**TOUVRON, "optim.lr": 3e-3}, {**BASE, "stem": "hmlp", "stem_norm": "layer"}),
    Sentence("finetune photos/ --from runs/train-1 --recipe three-things/finetune", "PAPER.md",
             "fine-tuning attention is all you need", {"tune": "attention"}),
    Sentence("train photos/ --recipe dino-small --knn 20", "PAPER.md", "self-distillation between crops",
             {"objective.kind": "dino", "knn": 20}),
    Sentence("train photos/ --recipe beit --objective.tokenizer runs/tokenizer-1", "PAPER.md",
             "masked self-supervision, with a tokenizer", {"objective.kind": "beit"}),
    # DeiT III's S/16 needs another decay than DeiT's: Table 9 of "Training data-efficient image transformers"
    Sentence("train imagenet/ --recipe deit/vit-s16 --dry-run", "docs/cookbook/published-number.md", "deit/vit-s16",
             {"optim.name": "adamw", "batch_size": 1024, "optim.lr": 1e-3, "optim.weight_decay": 0.05,
              "duration": "300 epochs", "schedule.warmup": "5 epochs"}, SMALL, 22.1),
    Sentence("train photos/ --model H/14 --nproc 8 --shard", "docs/scale.md", "--shard", {"shard": True},
             dict(width=1280, depth=32, heads=16, mlp_dim=5120, patch=14), 632.0),
    Sentence("train photos/ --model S/16 --teacher runs/finetune-1", "docs/cookbook/distillation.md", "teacher", {},
             SMALL, 22.1),
    Sentence("finetune photos/ --time-limit 3min", "README.md", "three minutes",
             {"weights": "vitrail/tiny", "time_limit": 3.0}),
    Sentence("train cifar100/ --recipe scratch-small --time-limit 10 --data.holdout 0.02 --data.test none",
             "docs/tasks/from-scratch.md", "ten minutes on a machine", {"time_limit": 10.0}),
    Sentence("finetune photos/ --from runs/scratch-photos-1 --tune attention", "docs/three-things.md", "attention",
             {"tune": "attention", "weights": "runs/scratch-photos-1"}),
]  # fmt: skip


@pytest.mark.parametrize(
    "sentence",
    [
        pytest.param(each, id=each.command, marks=[pytest.mark.train] if MEASURED in each.command else [])
        for each in SENTENCES
    ],
)
def test_a_command_does_what_the_sentence_beside_it_says(sentence: Sentence, decided: Any) -> None:
    words = tuple(shlex.split(sentence.command))
    assert words in commands(), "the documents have another command"
    assert sentence.words in " ".join((ROOT / sentence.page).read_text(encoding="utf-8").split())
    config, run = decided(words)
    assert ignored(words, config) == []
    found = {name: attrgetter(name)(run) for name in sentence.settings}
    assert {name: str(value) for name, value in found.items()} == {n: str(v) for n, v in sentence.settings.items()}
    network: Any = variant(run.model, **{**run.vit.changes(), "classes": 1000}) if words[0] == "train" else None
    assert {name: getattr(network, name) for name in sentence.network} == sentence.network
    if sentence.millions is not None:
        with torch.device("meta"):
            count = sum(weight.numel() for weight in build(network).parameters())
        assert count / 1e6 == pytest.approx(sentence.millions, abs=0.06)


OTHERS = [
    words
    for words in commands()
    if not any(part in " ".join(words) for part in (*ELSEWHERE, MEASURED))
    and " ".join(words) not in {each.command for each in SENTENCES}
    and any(asked(words))
]


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_every_setting_that_a_command_names_is_that_of_its_run(words: tuple[str, ...], decided: Any) -> None:
    config, run = decided(words)
    assert ignored(words, config) == []
    if "--from" in words:
        assert run.weights == words[words.index("--from") + 1]


def test_every_recipe_of_a_paper_that_a_command_names_has_a_sentence() -> None:
    recipes = {words[words.index("--recipe") + 1] for words in commands() if "--recipe" in words}
    said = {words[words.index("--recipe") + 1] for s in SENTENCES if "--recipe" in (words := shlex.split(s.command))}
    assert {name for name in recipes if "/" in name} <= said
