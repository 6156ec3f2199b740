"""preprocessor_config.json: what it becomes here, against the processors of transformers themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hf_peers import saved
from PIL import Image

from vitrail.data.images.ops import eval_transform
from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.hf.processor import read_processor, write_processor
from vitrail.weights.load import load

IMAGENET = dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
OLD_DEIT = dict(feature_extractor_type="DeiTFeatureExtractor", size=256, do_center_crop=True, crop_size=224, resample=3)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (dict(size=224, resample=2), Preprocess((224, 224), "squash")),
        (dict(size=dict(height=224, width=192), resample=3), Preprocess((224, 192), "squash", interpolation="bicubic")),
        (OLD_DEIT, Preprocess((224, 224), "squash-crop", 0.875, "bicubic")),
        (
            dict(size=dict(shortest_edge=256), do_center_crop=True, crop_size=dict(height=224, width=224), resample=3),
            Preprocess((224, 224), "small", 0.875, "bicubic"),
        ),
        (dict(size=384, crop_size=384, do_center_crop=True), Preprocess((384, 384), "squash")),
        (dict(image_processor_type="BitImageProcessor", size=224), Preprocess((224, 224), "small", 1.0)),
        (dict(do_resize=False), Preprocess((64, 32), "squash")),
        ({}, Preprocess((64, 32), "squash")),
    ],
)
def test_sizes_and_crops(values: dict[str, Any], expected: Preprocess) -> None:
    assert read_processor(values, (64, 32), "file").preprocess == expected


@pytest.mark.parametrize(
    ("values", "mean", "std"),
    [
        (IMAGENET, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        (dict(do_normalize=False), (0.0,), (1.0,)),
        (dict(image_mean=0.5, image_std=0.25), (0.5,), (0.25,)),
        # pixels of 0 to 255 are normalised as they are
        (dict(do_rescale=False, image_mean=[127.5], image_std=[127.5]), (0.5,), (0.5,)),
        # pixels of 0 to 2
        (dict(rescale_factor=2 / 255, image_mean=[1.0], image_std=[1.0]), (0.5,), (0.5,)),
    ],
)
def test_mean_and_std_are_of_pixels_up_to_1(values: dict[str, Any], mean: Any, std: Any) -> None:
    processing = read_processor(values, (32, 32), "file")
    assert processing.mean == pytest.approx(mean)
    assert processing.std == pytest.approx(std)


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (dict(size=dict(shortest_edge=224)), "keep the aspect ratio"),
        (dict(do_resize=False), "although do_resize is false"),
    ],
)
def test_where_we_differ_is_told(values: dict[str, Any], note: str) -> None:
    assert any(note in text for text in read_processor(values, (32, 32), "file").notes)


@pytest.mark.parametrize("values", [dict(size="large"), dict(size=[3]), dict(size=0), dict(image_mean="half")])
def test_nonsense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(WeightsError, match=r"file: .* in preprocessor_config.json is"):
        read_processor(values, (32, 32), "file")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (dict(resample=0), "resample is 0, which vitrail does not have"),
        (dict(size=[64, 48], crop_size=[32, 32], do_center_crop=True), r"resized to \(64, 48\).*cropped to \(32, 32\)"),
    ],
)
def test_what_vitrail_does_not_have_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(WeightsError, match=told):
        read_processor(values, (32, 32), "file")


PROCESSORS = [
    ("DeiTImageProcessor", dict(size=dict(height=40, width=40), crop_size=dict(height=32, width=32), resample=3)),
    ("ViTImageProcessor", dict(size=dict(height=32, width=32))),
    ("ViTImageProcessor", dict(size=dict(height=32, width=48), resample=3, **IMAGENET)),
    ("BitImageProcessor", dict(size=dict(shortest_edge=40), crop_size=dict(height=32, width=32), **IMAGENET)),
]


def picture() -> Image.Image:
    """Smooth waves, which every good way to resize makes alike."""
    y, x = np.mgrid[:90, :135]  # 40 x 60 without a rest, which transformers cuts off and we round
    waves = [np.sin(x / 9), np.cos(y / 7), np.sin((x + y) / 11)]
    return Image.fromarray((127.5 + 127.5 * np.stack(waves, axis=2)).astype(np.uint8))


def ours(image: Image.Image, preprocess: Preprocess, mean: Any, std: Any) -> np.ndarray:
    pixels = eval_transform(preprocess)(np.asarray(image), np.random.default_rng(0)) / 255.0
    return ((pixels - np.array(mean)) / np.array(std)).transpose(2, 0, 1)


@pytest.mark.parametrize(("kind", "values"), PROCESSORS)
def test_the_network_sees_what_it_would_see_there(tmp_path: Path, kind: str, values: dict[str, Any]) -> None:
    saved(tmp_path, "vit")
    processor = getattr(transformers, kind)(**values)
    processor.save_pretrained(tmp_path)
    card = load(tmp_path).card
    expected = processor(picture(), return_tensors="np")["pixel_values"][0]
    found = ours(picture(), card.preprocess, card.config.mean, card.config.std)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 4 / 255 / 0.22  # levels


@pytest.mark.parametrize(
    "preprocess",
    [
        Preprocess((32, 48), "squash", interpolation="bicubic"),
        Preprocess((32, 32), "small", 0.8),
        Preprocess((32, 48), "squash-crop", 0.8),
        Preprocess((32, 32), "small", 1.0, "bicubic"),
    ],
)
def test_what_is_written_does_the_same_there(tmp_path: Path, preprocess: Preprocess) -> None:
    config = ViTConfig(width=32, depth=1, heads=2, patch=8, image_size=(32, 32), mean=(0.4,) * 3, std=(0.3,) * 3)
    values = write_processor(preprocess, config)
    back = read_processor(values, (32, 32), "file")
    assert (back.preprocess, back.mean, back.std) == (preprocess, config.mean, config.std)
    kind = getattr(transformers, values.pop("image_processor_type"))
    expected = kind(**values)(picture(), return_tensors="np")["pixel_values"][0]
    found = ours(picture(), preprocess, config.mean, config.std)
    assert np.abs(found - expected).max() < 4 / 255 / 0.3


def test_padding_is_not_written_as_something_else() -> None:
    config = ViTConfig(width=32, depth=1, heads=2, patch=8, image_size=(32, 32))
    with pytest.raises(WeightsError, match="transformers cannot pad"):
        write_processor(Preprocess((32, 32), "pad"), config)
