"""`vitrail.save` after a model was changed by hand: what is written can be read, or nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from random_inputs import MANY
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import vitrail
from vitrail.errors import UsageError, WeightsError
from vitrail.model.own_part import OwnPart
from vitrail.weights.save import save

NAMES = ["cat", "dog", "owl"]


def made(name: str = "Ti/16", **changes: Any) -> Any:
    torch.manual_seed(0)
    small = {} if name.startswith("R") else dict(width=64, depth=2, heads=1, mlp_dim=64)
    model: Any = vitrail.create(name, **{**small, "image_size": 32, "classes": 3, **changes}).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def named(tmp_path: Path, **changes: Any) -> Any:
    """Return a loaded model whose classes have names."""
    model = made(**changes)
    save(model, tmp_path / "first")
    model = vitrail.load(tmp_path / "first")
    model.card = replace(model.card, class_names=NAMES)
    return model


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("format", ["vitrail", "timm", "hf", "torchvision"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_replaced_linear_head(tmp_path: Path, format: str, bias: bool) -> None:
    model = named(tmp_path, norm_eps=1e-12 if format == "hf" else 1e-6)
    model.head = nn.Linear(64, 5, bias=bias)
    place = tmp_path / ("new.pth" if format == "torchvision" else "new")
    saved = save(model, place, format)
    loaded = vitrail.load(place)
    assert torch.allclose(loaded(IMAGES), model(IMAGES), atol=1e-5)
    assert loaded.config.classes == 5 and not {*NAMES} & {*loaded.card.class_names}
    assert "the 3 class names, because the head has 5 outputs now" in str(saved)


def test_names_stay_with_as_many_classes(tmp_path: Path) -> None:
    model = named(tmp_path)
    model.head = nn.Linear(64, 3)
    save(model, tmp_path / "new")
    assert vitrail.load(tmp_path / "new").card.class_names == NAMES


@pytest.mark.parametrize("classes", [0, 3])
def test_heads_come_and_go(tmp_path: Path, classes: int) -> None:
    model = made(classes=classes)
    model.head = nn.Identity() if classes else nn.Linear(64, 4)
    save(model, tmp_path / "new")
    loaded = vitrail.load(tmp_path / "new")
    assert torch.allclose(loaded(IMAGES), model(IMAGES), atol=1e-5)
    assert loaded.config.classes == (0 if classes else 4)


def test_a_resnet_and_a_distilled_model(tmp_path: Path) -> None:
    resnet = made("R50x1", units=(1, 1), width=32)
    resnet.head = nn.Linear(resnet.config.features, 2)
    save(resnet, tmp_path / "resnet")
    assert torch.allclose(vitrail.load(tmp_path / "resnet")(IMAGES), resnet(IMAGES), atol=1e-4)
    model = made(distilled=True)
    model.head = nn.Linear(64, 5)
    with pytest.raises(WeightsError, match=r"'head_dist.weight' in shape \(5, 64\).*reset_head\(classes\)"):
        save(model, tmp_path / "half")
    model.head_dist = nn.Linear(64, 5)
    save(model, tmp_path / "whole")
    assert torch.allclose(vitrail.load(tmp_path / "whole")(IMAGES), model(IMAGES), atol=1e-5)


def test_a_linear_head_in_the_place_of_a_part_of_the_users_own(tmp_path: Path) -> None:
    model = made(head=Doubled())
    save(model, tmp_path / "own")
    assert torch.allclose(vitrail.load(tmp_path / "own")(IMAGES), model(IMAGES), atol=1e-5)
    model.head = nn.Linear(64, 5)
    save(model, tmp_path / "new")
    loaded = vitrail.load(tmp_path / "new")
    assert torch.allclose(loaded(IMAGES), model(IMAGES), atol=1e-5) and loaded.config.head is None


class Twice(nn.Linear):
    """A layer with the tensors of another."""

    def forward(self, input: Tensor) -> Tensor:
        """Return twice the result."""
        return 2 * super().forward(input)


@dataclass(frozen=True)
class Doubled(OwnPart):
    """A head of the user's own."""

    def build(self, config: Any) -> nn.Module:
        """Return the layer."""
        return Twice(config.head_width, config.classes)


def twice(model: Any) -> None:
    old, model.head = model.head, Twice(64, 3)
    model.head.load_state_dict(old.state_dict())


def first_patch(model: Any) -> None:
    model.pool = type("First", (nn.Module,), {"reads": None, "forward": lambda self, tokens, prefix: tokens[:, 1]})()


def fc2(model: Any) -> Any:
    return model.blocks[1].mlps[0].mlp.fc2


FORMATS = ("vitrail", "timm")
CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: setattr(m, "head", nn.Sequential(nn.Dropout(0.1), nn.Linear(64, 5))), r"model\.head is a Sequential"),
    (lambda m: setattr(m, "head", nn.Linear(32, 3)), r"'head.weight' in shape \(3, 64\).*reset_head\(classes\)"),
    (lambda m: setattr(m, "stem", nn.Conv2d(3, 64, 8, 8)), "'stem.weight' in shape.*torch.save"),
    (lambda m: parametrizations.weight_norm(fc2(m)), r"remove_parametrizations\(model.get_submodule\("),
    (lambda m: nn.utils.weight_norm(fc2(m)), r"remove_weight_norm\("),
    (lambda m: nn.utils.spectral_norm(fc2(m)), r"remove_spectral_norm\("),
    (lambda m: prune.l1_unstructured(fc2(m), "weight", amount=0.5), r"prune.remove\("),
    (lambda m: peft.get_peft_model(m, peft.LoraConfig(target_modules=["fc2"])), "merge_and_unload"),
    (lambda m: m.blocks.pop(-1), "'blocks.1.*it has none"),
    (lambda m: m.add_module("extra", nn.Linear(2, 2)), "none with this name"),
    (lambda m: m.to("meta"), "meta device"),
    (twice, "it does not hold the Twice at head"),
    (first_patch, "it does not hold the First at pool"),
    (lambda m: m.head.register_forward_hook(lambda module, inputs, output: output + 1), "some part of this model"),
]


@pytest.mark.parametrize(
    ("change", "said", "format"),
    [(*case, form) for n, case in enumerate(CHANGES) for form in (FORMATS if MANY else [FORMATS[n % 2]])],
)
def test_anything_else_is_refused(tmp_path: Path, change: Callable[[Any], Any], said: str, format: str) -> None:
    model = made()
    save(model, tmp_path / "m", format)
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    change(model)
    with pytest.raises(WeightsError, match=said):
        save(model, tmp_path / "m", format, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert os.listdir(tmp_path) == ["m"]


def test_the_calls_that_are_named_work(tmp_path: Path) -> None:
    model = made()
    nn.utils.weight_norm(fc2(model))
    expected = model(IMAGES)
    torch.nn.utils.remove_weight_norm(model.get_submodule("blocks.1.mlps.0.mlp.fc2"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["fc2"]))
    with pytest.raises(UsageError, match=r"not a PeftModel\. Save what its merge_and_unload"):
        save(adapted, tmp_path / "m")
    save(adapted.merge_and_unload(), tmp_path / "m")
    assert torch.allclose(vitrail.load(tmp_path / "m")(IMAGES), expected, atol=1e-5)
    changed = made()
    changed.head = nn.Sequential(nn.Linear(64, 5))
    torch.save(changed.state_dict(), tmp_path / "state.pth")
    again = made()
    again.head = nn.Sequential(nn.Linear(64, 5))
    again.load_state_dict(torch.load(tmp_path / "state.pth"))
    assert torch.equal(again(IMAGES), changed(IMAGES))
