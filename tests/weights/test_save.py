"""`vitrail.save`: every format, what is never lost, and what happens when something goes wrong halfway."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import vitrail
from vitrail.data.settings import Preprocess
from vitrail.errors import UsageError, WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights import save as save_module
from vitrail.weights.card import Card
from vitrail.weights.formats import NAMES, format_named
from vitrail.weights.load import load
from vitrail.weights.reference import outputs
from vitrail.weights.save import FORMATS, save

CLASSES = ["cat", "dog", "owl"]


def config(**changes: Any) -> ViTConfig:
    values = dict(width=128, depth=2, heads=2, mlp_dim=64, patch=8, image_size=(16, 16), classes=3)
    return ViTConfig.of(**{**values, **changes})


BIT = ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(64, 64))
TANH = dict(gelu="tanh")
CASES: list[tuple[str, str, ViTConfig | ResNetConfig]] = [
    ("vitrail", "model", config(positions="2d", registers=2)),
    ("vitrail", "model", BIT),
    ("google", "model.npz", config(**TANH, pre_logits=16)),
    ("big_vision", "model.npz", config(**TANH, pool="map", class_token=False)),
    ("bit", "model.npz", BIT),
    ("timm", "model", config(registers=2, layer_scale=0.1)),
    ("timm", "model.safetensors", config()),
    ("hf", "model", config(norm_eps=1e-12)),
    ("torchvision", "model.pth", config()),
    ("deit", "model.pth", config(layer_scale=0.1, cls_position=False)),
]


def made(wanted: ViTConfig | ResNetConfig, **card: Any) -> Any:
    torch.manual_seed(0)
    model: Any = build(wanted)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.card = Card(wanted, **{"preprocess": Preprocess(wanted.image_size), **card})
    return model.eval()


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_formats_are_those_that_were_promised() -> None:
    assert sorted(FORMATS) == [
        *("big_vision", "bit", "deit", "google", "hf", "open_clip", "timm", "torchvision", "vitrail")
    ]
    without_bias = {"open_clip"}  # its last layer is a projection: tests/weights/formats/test_open_clip.py
    assert {case[0] for case in CASES} | without_bias == set(FORMATS)


@pytest.mark.parametrize(("format", "name", "wanted"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_saved_computes_the_same_when_it_is_loaded(
    tmp_path: Path, format: str, name: str, wanted: ViTConfig | ResNetConfig
) -> None:
    model = made(wanted)
    saved = vitrail.save(model, tmp_path / name, format)
    loaded = load(tmp_path / name)
    assert loaded.load_report.format == format == saved.format
    images = torch.randn(2, 3, *wanted.image_size)
    with torch.inference_mode():
        ours, theirs = model(images), loaded(images)
    assert float((ours - theirs).abs().max() / ours.abs().max()) < 1e-5
    assert saved.error < 1e-5


@pytest.mark.parametrize(("format", "name", "wanted"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_nothing_is_replaced_unless_that_is_wanted(
    tmp_path: Path, format: str, name: str, wanted: ViTConfig | ResNetConfig
) -> None:
    first, second = made(wanted), made(wanted)
    with torch.no_grad():
        second.head.bias.add_(1)
    save(first, tmp_path / name, format)
    before = {file: (tmp_path / file).read_bytes() for file in listing(tmp_path)}
    with pytest.raises(WeightsError, match=f"{name} already exists"):
        save(second, tmp_path / name, format)
    assert {file: (tmp_path / file).read_bytes() for file in listing(tmp_path)} == before
    save(second, tmp_path / name, format, overwrite=True)
    assert torch.equal(load(tmp_path / name).head.bias, second.head.bias)
    assert listing(tmp_path) == sorted(before)


def test_a_model_may_replace_the_file_it_is_read_from(tmp_path: Path) -> None:
    save(made(config()), tmp_path / "m.safetensors", "timm")
    loaded = load(tmp_path / "m.safetensors")  # its tensors are mapped from the file
    expected = outputs(loaded)["logits"]
    save(loaded, tmp_path / "m.safetensors", "timm", overwrite=True)
    assert torch.equal(outputs(loaded)["logits"], expected)
    assert torch.equal(outputs(load(tmp_path / "m.safetensors"))["logits"], expected)


def test_other_files_of_a_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    save(made(config(norm_eps=1e-12)), tmp_path, "hf", overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert "config.json" in listing(tmp_path)


class Careless:
    """A format that loses something on the way into timm's."""

    name = "timm"

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        format_named("timm").write(self.change(copy.deepcopy(model)), card, path)


def swap_gelu(model: Any) -> Any:
    other = build(model.config.changed(gelu="erf", norm_eps=1e-6))
    other.load_state_dict(model.state_dict())
    return other


def forget_a_bias(model: Any) -> Any:
    with torch.no_grad():
        model.blocks[1].mlps[0].mlp.fc1.bias.zero_()
    return model


@pytest.mark.parametrize(
    ("wanted", "change", "said"),
    [
        (config(gelu="tanh", norm_eps=1e-2), swap_gelu, "norm_eps 0.01, gelu tanh"),
        (config(), forget_a_bias, "some part"),
    ],
)
def test_a_format_that_loses_something_is_caught(
    tmp_path: Path, wanted: ViTConfig, change: Callable[[Any], Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "format_named", lambda name: Careless(change))
    with pytest.raises(WeightsError, match=f"'timm' cannot express this model: .*{said}"):
        save(made(wanted), tmp_path / "m.safetensors", "timm")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_save_leaves_what_was_there_and_no_rubbish(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, model: nn.Module, card: Card, path: Path) -> None:
            path.write_bytes(b"half a file")
            raise error

    (tmp_path / "m.npz").write_bytes(b"what was there")
    monkeypatch.setattr(save_module, "format_named", lambda name: Full())
    raised = WeightsError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(raised, match="No space left" if isinstance(error, OSError) else None):
        save(made(config()), tmp_path / "m.npz", "google", overwrite=True)
    assert (tmp_path / "m.npz").read_bytes() == b"what was there"
    assert os.listdir(tmp_path) == ["m.npz"]


def test_what_a_format_has_no_place_for_beside_the_network_is_told(tmp_path: Path) -> None:
    model = made(
        config(mean=(0.1, 0.2, 0.3)),
        class_names=CLASSES,
        preprocess=Preprocess((16, 16), resize="squash"),
        licence="MIT",
    )
    saved = save(model, tmp_path / "m.pth", "torchvision")
    told = str(saved)
    for part in ("mean (0.1, 0.2, 0.3)", "squash", "the names of 3 classes", "MIT", "it does not hold"):
        assert part in told
    assert not save(model, tmp_path / "ours").left_out


def test_our_own_folder_keeps_the_card_and_a_reference_vector(tmp_path: Path) -> None:
    model = made(config(), class_names=CLASSES, licence="MIT", metrics={"top1": 0.5})
    save(model, tmp_path / "m")
    card = load(tmp_path / "m").card
    assert (card.class_names, card.licence, card.metrics) == (CLASSES, "MIT", {"top1": 0.5})
    values = card.reference["outputs"]["logits"]["values"]
    assert values == pytest.approx(outputs(model)["logits"].tolist(), rel=1e-6)


def test_a_new_head_has_no_old_names(tmp_path: Path) -> None:
    model = made(config(), class_names=CLASSES)
    model.reset_head(5)
    save(model, tmp_path / "m")
    card = load(tmp_path / "m").card
    assert (card.config.classes, card.class_names) == (5, [])
    assert card.reference["outputs"]["logits"]["values"] == [0.0] * 5


def test_a_model_without_a_card_gets_one(tmp_path: Path) -> None:
    model = vitrail.create("Ti/16", depth=1, image_size=32, classes=2)
    save(model, tmp_path / "m")
    assert load(tmp_path / "m").config == model.config


@pytest.mark.parametrize("size", [(32, 32), (16, 48)])
def test_the_preprocessing_of_a_new_card_is_for_the_networks_images(tmp_path: Path, size: tuple[int, int]) -> None:
    model = vitrail.create("Ti/16", depth=1, classes=2, patch=8, image_size=size)
    vitrail.save(model, tmp_path / "m")
    card = vitrail.load(tmp_path / "m").card
    image = Image.new("RGB", (100, 80))
    assert card.preprocess.image_size == size
    assert card.transform()(image).shape == vitrail.Card(model.config).transform()(image).shape == (3, *size)


def test_half_precision_is_written_in_float32(tmp_path: Path) -> None:
    model = made(config()).bfloat16()
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert next(loaded.parameters()).dtype == torch.float32
    assert torch.equal(loaded.head.weight, model.head.weight.float())
    assert next(model.parameters()).dtype == torch.bfloat16


def test_wrappers_are_looked_through(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = made(config())
    save(Wrapper(model), tmp_path / "m")
    assert torch.equal(load(tmp_path / "m").head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("format", "name", "said"),
    [
        ("tim", "m", "there is no format 'tim'. Did you mean 'timm'"),
        ("google", "m.safetensors", "format 'google' is a file that ends in .npz"),
        ("timm", "m.npz", "format 'timm' is a file that ends in .safetensors"),
        ("hf", "m.safetensors", "format 'hf' is a folder"),
        ("vitrail", "m.npz", "format 'vitrail' is a folder"),
        ("hf", "file", "'hf' is a folder, but .*file is a file"),
        ("bit", "m.npz", "ResNet"),
        ("torchvision", "m.pth", "GELU of kind 'tanh'"),
    ],
)
def test_wrong_places_and_formats(tmp_path: Path, format: str, name: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((UsageError, WeightsError), match=said):
        save(made(config(gelu="tanh")), tmp_path / name, format)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("format", ["vitrail", *NAMES])
def test_values_that_are_not_finite_go_nowhere(tmp_path: Path, format: str) -> None:
    model = made(BIT if format == "bit" else config())
    with torch.no_grad():
        model.head.bias[1] = float("nan")
    with pytest.raises(WeightsError, match=r"1 of 3 values of 'head\.bias' are NaN"):
        save(model, tmp_path / "m", format)
    assert not list(tmp_path.iterdir())


def test_only_models_of_ours_are_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a Linear"):
        save(nn.Linear(2, 2), tmp_path / "m")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for format in ("vitrail", "google"):
        with pytest.raises(WeightsError, match=r"cannot write .*file/m"):
            save(made(config(gelu="tanh")), tmp_path / "file" / "m", format)


SAVE_AGAIN = """
import json, sys, vitrail
for source, target, format in json.loads(sys.argv[1]):
    vitrail.save(vitrail.load(source), target, format)
"""


def test_the_header_keeps_every_character_of_a_class_name(tmp_path: Path) -> None:
    names = ["".join(map(chr, range(1, 0x300))), '"\\/\u2028\uffff', "\U0001f600"]
    save(made(config(), class_names=names), tmp_path / "m")
    assert load(tmp_path / "m").card.class_names == names


@pytest.mark.processes
def test_equal_models_make_equal_files(tmp_path: Path) -> None:
    """Several times in this process, because a random order may be right by chance; once in one with other hashes."""
    again = []
    for case, (format, name, wanted) in enumerate(CASES):
        place = tmp_path / str(case)
        save(made(wanted, metrics={"top1": 0.5, "nll": 1.0}, class_names=CLASSES), place / "source")
        model = load(place / "source")
        for number in (2, 3):
            save(model, place / str(number) / name, format)
        again.append([str(place / "source"), str(place / "4" / name), format])
    other_hashes = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", SAVE_AGAIN, json.dumps(again)], check=True, env=other_hashes)
    for case, (format, _, _) in enumerate(CASES):
        first, *others = (
            {file: (folder / file).read_bytes() for file in listing(folder)}
            for folder in (tmp_path / str(case) / str(number) for number in (2, 3, 4))
        )
        assert first and all(files == first for files in others), format


@pytest.mark.export
@pytest.mark.parametrize("kind", ["accelerate", "compiled block", "checkpointed block", "compiled twice"])
def test_wrappers_of_accelerate_and_of_blocks_are_looked_through(kind: str, tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    model: Any = ViT(ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=2)).eval()
    nn.init.normal_(model.head.weight)
    images = torch.rand(2, 3, 16, 16)
    expected, wrapped = model(images), model
    if kind == "accelerate":
        AcceleratorState._reset_state(True)  # of another test in this process, maybe without mixed precision
        wrapped = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    elif kind == "compiled twice":
        wrapped = torch.compile(nn.DataParallel(model))
    else:
        model.blocks[1] = (
            torch.compile(model.blocks[1]) if kind == "compiled block" else checkpoint_wrapper(model.blocks[1])
        )
    around = type(model.blocks[1]), vars(model).get("forward")
    vitrail.save(wrapped, tmp_path / "model")
    assert (type(model.blocks[1]), vars(model).get("forward")) == around  # the caller's network stays wrapped
    loaded: Any = vitrail.load(tmp_path / "model")
    assert torch.equal(loaded(images), expected)
