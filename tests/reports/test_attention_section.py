"""Attention distance and position similarity in the report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import Page

from vitrail.costs.count import macs
from vitrail.data.settings import Data, Preprocess
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError
from vitrail.inspection.distance import attention_distance
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.reports import attention
from vitrail.reports.attention import distance_figure, images_for, position_figure
from vitrail.reports.page import render
from vitrail.weights.card import Card

TINY: dict[str, Any] = dict(width=16, depth=3, heads=2, mlp_dim=32, patch=2, image_size=(8, 8), classes=10)


def network(config: ViTConfig | ResNetConfig) -> Any:
    torch.manual_seed(0)
    model = build(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.card = Card(config, preprocess=Preprocess(image_size=config.image_size, resize="squash"))
    return model


@pytest.fixture(scope="module")
def digits() -> Any:
    return open_data(Data("digits")).validation


def attended(model: Any, source: Any) -> str:
    return render("report/attention_distance.html", distances=distance_figure(model, source))


def positioned(model: Any) -> str:
    return render("report/positions.html", positions=position_figure(model))


def label(html: str) -> str:
    (text,) = [value for tag, name, value in Page(html).attributes if (tag, name) == ("svg", "aria-label")]
    return text


def test_distances_are_over_images_from_all_of_the_validation_set(digits: Any) -> None:
    model = network(ViTConfig.of(**TINY))
    rows = np.linspace(0, len(digits) - 1, 32).round().astype(int)
    stacked = torch.stack([torch.from_numpy(np.array(digits[int(i)].image)) for i in rows]).permute(0, 3, 1, 2)
    expected = attention_distance(model, [stacked])
    text = label(attended(model, digits))
    assert "in 3 layers over 32 images" in text
    for name, row in (("first", 0), ("last", 2)):
        assert f"{name} layer from {expected.mean[row].min():.1f} to {expected.mean[row].max():.1f}" in text
    assert f"it would be {expected.uniform.max():.1f}" in text


def test_a_large_network_sees_fewer_images(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(ViTConfig.of(**TINY))
    assert images_for(model, 1000) == 32 and images_for(model, 5) == 5
    monkeypatch.setattr(attention, "WORK", 2 * macs(model.config) * 20.5)
    assert images_for(model, 1000) == 20
    monkeypatch.setattr(attention, "WORK", 1.0)
    assert images_for(model, 1000) == 8


def test_positions_by_kind(digits: Any) -> None:
    learned = positioned(network(ViTConfig.of(**TINY)))
    assert "learned 1-D positions: 4 by 4 positions" in label(learned)
    assert "cosine similarity" in Page(learned).text
    none = positioned(network(ViTConfig.of(**{**TINY, "positions": "none"})))
    assert Page(none).tags["svg"] == 0 and "a bag of patches" in Page(none).text


@pytest.mark.parametrize(
    ("changes", "about", "said"),
    [
        ({"positions": "2d"}, "learned 2-D positions: 4 by 4", "one half for its row and one for its column"),
        ({"positions": "sincos"}, "fixed sine and cosine positions: 4 by 4", "nothing in them was learned"),
        ({"positions": "relative"}, "relative positions", "behind another in reading order"),
        ({"positions": "relative_bias"}, "bias, mean over heads: 4 by 4", "added to the attention logit"),
        ({"place": "every"}, "learned 1-D positions, layer 0: 4 by 4", "Every layer has its own"),
    ],
)
def test_what_is_said_fits_the_kind_of_positions(changes: dict[str, str], about: str, said: str) -> None:
    html = positioned(network(ViTConfig.of(**{**TINY, **changes})))
    assert about in label(html) and said in Page(html).text


def test_distances_along_lines_of_an_axial_network(digits: Any) -> None:
    html = attended(network(ViTConfig.of(**{**TINY, "block": "axial", "pool": "gap"})), digits)
    assert "it would be 2.5" in label(html)  # of 4 patches in a line, 2 px each: (6 x 1 + 4 x 2 + 2 x 3) / 16 x 2 px
    text = Page(html).text
    assert "rows" in text and "columns" in text and "measured along its line" in text


def test_distances_on_the_feature_map_of_a_hybrid(digits: Any) -> None:
    config = variant("R+Ti/16", classes=10, image_size=64, depth=1)
    html = attended(network(config), digits)
    # 4 cells of 32 px and the class token, at distance 0: (0 + 32 + 32 + 45.25 + 0) / 5
    assert "it would be 21.9" in label(html) and "in one layer over" in label(html)
    assert "a cell of the convolutions' output" in Page(html).text


def test_figures_take_the_ink_of_the_page_and_load_nothing(digits: Any) -> None:
    model = network(ViTConfig.of(**TINY))
    for html in (attended(model, digits), positioned(model)):
        page = Page(html)
        assert page.tags["svg"] == 1 and "currentColor" in html and "#000000" not in html
        for _, name, value in page.attributes:
            if name in ("src", "href", "xlink:href"):
                assert value.startswith(("data:image/", "#"))
        assert not re.search(r"url\((?!#)", html) and len(html) < 5e5


@pytest.mark.parametrize(
    "config",
    [
        ResNetConfig(units=(1,), width=8, classes=10, image_size=(16, 16)),
        ViTConfig.of(**{**TINY, "patch": 8}),  # the image is a single patch
    ],
)
def test_a_network_without_a_grid_has_neither(digits: Any, config: ViTConfig | ResNetConfig) -> None:
    model = network(config)
    assert distance_figure(model, digits) is None and position_figure(model) is None
    assert attended(model, digits).strip() == positioned(model).strip() == ""


def test_images_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.new("RGB", (8, 8), (25 * i, 0, 0)).save(tmp_path / name / f"{i}.png")
    source = open_data(Data(str(tmp_path))).validation
    for file in tmp_path.rglob("*.png"):
        file.unlink()
    with pytest.raises(DataError, match="no image to look into"):
        attended(network(ViTConfig.of(**TINY)), source)
