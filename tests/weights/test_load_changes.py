"""`load(channels=, drop_path=, classes=, image_size=)` and what timm's `create_model` makes of the same file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import adapt_input_conv
from timm_peers import assert_equal, hub, images, peer, randomised
from tiny_networks import fresh, tiny
from torch import nn

import vitrail
from vitrail.errors import UsageError, WeightsError
from vitrail.model.own_part import OwnPart
from vitrail.model.resnet import ResNet
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.store import save_model


def built(folder: Path, **arguments: Any) -> nn.Module:
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **arguments).eval()


@pytest.mark.parametrize("kind", ["plain", "registers", "attention pooling", "root alone"])
def test_channels_of_a_vit(tmp_path: Path, kind: str) -> None:
    folder = hub(peer(kind), tmp_path)
    for channels in (1, 2, 3, 4, 7) if kind == "plain" else (1, 7):
        model = vitrail.load(folder, channels=channels)
        assert model.config.channels == model.card.config.channels == channels == len(model.config.mean)
        assert_equal(model.double(), built(folder, in_chans=channels).double(), images(model).double())


@pytest.mark.full_size
def test_channels_of_a_resnet(tmp_path: Path) -> None:
    folder = hub(randomised(timm.create_model("resnetv2_50x1_bit", num_classes=5)), tmp_path)
    for channels in (1, 5):
        model = vitrail.load(folder, channels=channels)
        theirs = built(folder, in_chans=channels)
        assert_equal(model.double(), theirs.double(), images(model, (40, 33)).double())


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        tiny(stem="levit", patch=4),
        tiny(stem="early", patch=4),
        tiny(stem="hmlp", patch=4),
        tiny(stem="linear+norm+gelu"),
        tiny(stem="resnet", stem_units=(), patch=4),
        ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(16, 16)),
    ],
)
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_channels_of_every_stem(tmp_path: Path, config: ViTConfig | ResNetConfig, channels: int) -> None:
    old = fresh(config)
    save_model(tmp_path, old, Card(config))
    state, changed = old.state_dict(), vitrail.load(tmp_path, channels=channels)
    different = [name for name, tensor in changed.state_dict().items() if tensor.shape != state[name].shape]
    assert different == list(changed.load_report.resampled) and len(different) == 1  # type: ignore[union-attr]
    expected = adapt_input_conv(channels, state[different[0]])
    assert torch.allclose(changed.state_dict()[different[0]], expected, atol=1e-7)
    changed(torch.randint(0, 256, (2, channels, 16, 16), dtype=torch.uint8))


def test_the_statistics_of_the_pixels_follow_the_channels(tmp_path: Path) -> None:
    config = tiny(mean=(0.1, 0.2, 0.6), std=(0.5, 0.25, 0.75))
    save_model(tmp_path, fresh(config), Card(config))
    assert vitrail.load(tmp_path, channels=3).config == config
    one, four = (vitrail.load(tmp_path, channels=channels).config for channels in (1, 4))
    assert one.mean == pytest.approx((0.3,)) and one.std == pytest.approx((0.5,))
    assert four.mean == (0.1, 0.2, 0.6, 0.1) and four.std == (0.5, 0.25, 0.75, 0.5)


def test_a_gray_image_gives_what_its_three_equal_channels_gave(tmp_path: Path) -> None:
    save_model(tmp_path, fresh(tiny()), Card(tiny()))
    gray = torch.randint(0, 256, (2, 1, 16, 16), dtype=torch.uint8)
    found, expected = vitrail.load(tmp_path, channels=1)(gray), vitrail.load(tmp_path)(gray.expand(-1, 3, -1, -1))
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("channels", [6, 9, 12])
def test_equal_bands_give_what_three_equal_channels_gave(tmp_path: Path, channels: int) -> None:
    """The kernels in turn, times 3 / channels, have the sum of the three kernels."""
    save_model(tmp_path, fresh(tiny()), Card(tiny()))
    gray = torch.randn(2, 1, 16, 16)  # normalised, as bands of any depth are
    found = vitrail.load(tmp_path, channels=channels)(gray.expand(-1, channels, -1, -1))
    assert torch.allclose(found, vitrail.load(tmp_path)(gray.expand(-1, 3, -1, -1)), atol=1e-5)


def test_drop_path_is_timms(tmp_path: Path) -> None:
    folder = hub(peer("plain"), tmp_path)
    model, theirs = vitrail.load(folder, drop_path=0.3), built(folder, drop_path_rate=0.3)
    assert isinstance(model, ViT) and model.config.drop_path == model.card.config.drop_path == 0.3
    ours = [block.mlps[0].residual.drop_path for block in model.blocks]  # type: ignore[union-attr, index]
    assert ours == pytest.approx([getattr(block.drop_path2, "drop_prob", 0.0) for block in theirs.blocks])
    assert torch.equal(model(images(model)), vitrail.load(folder)(images(model)))  # nothing is dropped in eval mode
    assert not torch.equal(model.train()(images(model)), model(images(model)))


def test_all_at_once(tmp_path: Path) -> None:
    folder = hub(peer("plain"), tmp_path)
    model = vitrail.load(folder, channels=4, drop_path=0.1, classes=7, image_size=48, resize_mode="timm")
    theirs = built(folder, in_chans=4, drop_path_rate=0.1, num_classes=7, img_size=48)
    assert model(images(model)).abs().max() == 0  # the new head starts at zero (section 3.2)
    model.head.load_state_dict(theirs.head.state_dict())  # type: ignore[union-attr]
    assert_equal(model, theirs, images(model))
    vitrail.save(model, tmp_path / "ours")
    again = vitrail.load(tmp_path / "ours")
    assert again.config == model.config and torch.equal(again(images(model)), model(images(model)))


def test_class_names_go_with_the_classes(tmp_path: Path) -> None:
    save_model(tmp_path, fresh(tiny()), Card(tiny(), class_names=["a", "b", "c"]))
    assert vitrail.load(tmp_path, channels=1, drop_path=0.1).card.class_names == ["a", "b", "c"]
    assert vitrail.load(tmp_path, channels=1, classes=3).card.class_names == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 0}, "channels is 0; valid: 1 to"),
        ({"channels": 10**9}, "channels is 1000000000"),
        ({"channels": 2.5}, "channels is 2.5"),
        ({"drop_path": 1.0}, "drop_path is 1.0; valid: 0 to 0.999"),
        ({"drop_path": "0.1"}, "drop_path is '0.1'"),
        ({"classes": -2}, "-2 classes"),
        ({"image_size": 0}, "image_size is 0"),
        ({"image_size": (16, 17)}, "16x17 is not divisible"),
    ],
)
def test_impossible_changes(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_model(tmp_path, fresh(tiny()), Card(tiny()))
    with pytest.raises(UsageError, match=message):
        vitrail.load(tmp_path, **change)


@dataclass(frozen=True)
class OwnStem(OwnPart):
    """A stem of the user's own: a convolution on the image, or on an image whose patches became channels."""

    unshuffled: bool = False

    def build(self, config: ViTConfig) -> nn.Module:
        """See the class."""
        if self.unshuffled:
            patch = config.patch
            return nn.Sequential(nn.PixelUnshuffle(patch), nn.Conv2d(config.channels * patch**2, config.width, 1))
        return nn.Sequential(nn.Conv2d(config.channels, config.width, config.patch, config.patch))


def test_channels_of_a_stem_of_ones_own(tmp_path: Path) -> None:
    old = fresh(tiny(stem=OwnStem()))
    save_model(tmp_path / "a", old, Card(tiny(stem=OwnStem())))
    kernel = vitrail.load(tmp_path / "a", channels=5).state_dict()["stem.0.weight"]
    assert torch.allclose(kernel, adapt_input_conv(5, old.state_dict()["stem.0.weight"]), atol=1e-7)
    config = tiny(stem=OwnStem(unshuffled=True))
    save_model(tmp_path / "b", fresh(config), Card(config))
    with pytest.raises(WeightsError, match=r"'stem.1.weight' .* from 3 to 5 channels; keep 3"):
        vitrail.load(tmp_path / "b", channels=5)


def test_a_resnet_has_no_layers_to_drop(tmp_path: Path) -> None:
    config = ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(16, 16))
    save_model(tmp_path, fresh(config), Card(config))
    with pytest.raises(UsageError, match=r"drop_path .* leave it out"):
        vitrail.load(tmp_path, drop_path=0.1)
    assert isinstance(vitrail.load(tmp_path, drop_path=None), ResNet)


def test_the_kind_of_a_network_may_be_required(tmp_path: Path) -> None:
    vitrail.save(vitrail.create("Ti/16", depth=1, classes=2), tmp_path / "vit")
    save_model(tmp_path / "resnet", fresh(config := ResNetConfig(units=(1,), width=8, classes=2)), Card(config))
    assert type(vitrail.load(tmp_path / "vit", kind=ViT)) is ViT
    assert type(vitrail.load(tmp_path / "resnet", kind=ResNet, classes=3)) is ResNet
    with pytest.raises(
        WeightsError, match=r"holds a ResNet, and kind is ViT\. Give other weights, or call load without"
    ):
        vitrail.load(tmp_path / "resnet", kind=ViT)
    with pytest.raises(UsageError, match=r"kind is 'vit'; valid: vitrail.ViT, vitrail.ResNet, vitrail.Engine, or None"):
        vitrail.load(tmp_path / "vit", kind="vit")
