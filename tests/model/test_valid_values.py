"""Values of configs are checked where they are declared, and images where they enter a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

import vitrail
from vitrail.errors import UsageError
from vitrail.model.limits import RANGES
from vitrail.model.variants import Origin, ResNetConfig, ViTConfig, flat, variant
from vitrail.ranges import Range, limits, ranged_types
from vitrail.training.run import Model

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"gelu": "relu"}, r"gelu is 'relu'; valid: 'erf', 'tanh', 'quick'\.$"),
    ({"gelu": "tan"}, r"gelu is 'tan'; .* Did you mean 'tanh'\?"),
    ({"depth": 0}, "depth is 0; valid: 1 to 1,000"),
    ({"norm_eps": -1}, "norm_eps is -1; valid: 0 to 1"),
    ({"norm_eps": float("nan")}, "norm_eps is nan"),
    ({"final_norm": "x"}, "final_norm is 'x'; valid: 'tokens', 'pooled'"),
    ({"positions": "rope"}, r"positions is 'rope'; valid: .*, your own OwnPart\.$"),
    ({"positions": "sincos2d"}, "Did you mean 'sincos'"),
    ({"positions": ["1d"]}, r"positions is \['1d'\]"),
    ({"pool": "mean"}, "pool is 'mean'; .* Did you mean 'gap'"),
    ({"pool": "avg"}, "Did you mean 'gap'"),
    ({"pool": None}, "pool is None; valid: 'cls'"),
    ({"distilled": "yes"}, "distilled is 'yes'; valid: True, False"),
    ({"distilled": None}, "distilled is None; valid: True, False"),
    ({"class_token": 2}, "class_token is 2; valid: True, False, None"),
    ({"classes": True}, "classes is True; valid: 0 to"),
    ({"depth": True}, "depth is True; valid: 1 to 1,000"),
    ({"mean": None}, "mean is None; valid: -1e"),
    ({"image_size": None}, "image_size is None; valid: 1 to 4,096"),
    ({"head": "linear"}, "head is 'linear'; valid: None, your own OwnPart"),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_wrong_values_are_refused_with_the_valid_ones(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ViTConfig.of(**values)
    with pytest.raises(UsageError, match=f"model Ti/16: .*{said}"):
        vitrail.create("Ti/16", **values)


def test_fields_of_the_origin_go_by_their_names_too() -> None:
    config = ViTConfig.of(width=64, heads=2, qk_norm="head", norm_eps=1e-5)
    assert config == ViTConfig(width=64, heads=2, origin=Origin(qk_norm="head", norm_eps=1e-5))
    deeper = ViTConfig(width=64, heads=2, depth=3, origin=Origin(qk_norm="head"))
    assert config.changed(depth=3, norm_eps=1e-6) == deeper
    assert config.changed(origin=Origin(), gelu="tanh").origin == Origin(gelu="tanh")
    assert flat(config) == flat(ViTConfig()) | dict(width=64, heads=2, qk_norm="head", norm_eps=1e-5)
    assert variant("Ti/16", qk_norm="head").origin == Origin(qk_norm="head")  # type: ignore[union-attr]


def test_a_single_number_stands_for_all_channels_and_both_sides() -> None:
    config = ViTConfig(mean=0.25, std=0.5, image_size=32)
    assert config == ViTConfig(mean=(0.25, 0.25, 0.25), std=(0.5, 0.5, 0.5), image_size=(32, 32))
    assert ResNetConfig(mean=0, channels=2).mean == (0, 0)


@pytest.mark.parametrize(("kind", "least"), [(ViTConfig, 8), (Origin, 7), (ResNetConfig, 1)])
def test_every_word_of_a_config_is_checked(kind: type, least: int) -> None:
    """Every field with a list of words refuses another word, so that none is forgotten in a new field."""
    hints = get_type_hints(kind)
    worded = [
        item.name
        for item in fields(kind)
        if any(get_origin(part) is Literal for part in (hints[item.name], *get_args(hints[item.name])))
    ]
    assert len(worded) >= least
    for name in worded:
        with pytest.raises(UsageError, match=f"{name} is 'another'"):
            kind(**{name: "another"})


@pytest.fixture(params=["vit", "hmlp", "resnet"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    if request.param == "resnet":
        network: Any = vitrail.create("R50x1", units=(1, 1), width=32, classes=3, image_size=32)
    else:
        stem = "linear" if request.param == "vit" else "hmlp"
        network = vitrail.create("Ti/16", width=64, depth=1, heads=2, classes=3, image_size=32, stem=stem)
    return network.eval()


IMAGES = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x[0], r"shape \(3, 32, 32\).*\[batch, channels, height, width\].*images\[None\]"),
        (lambda x: x[0, 0], r"shape \(32, 32\)"),
        (lambda x: x[None], r"shape \(1, 2, 3, 32, 32\)"),
        (lambda x: x.long(), r"images are int64.*images\.to\(torch\.uint8\)"),
        (lambda x: x.int(), "images are int32"),
        (lambda x: x > 127, "images are bool"),
        (lambda x: x.numpy(), r"images are a ndarray; .*torch\.from_numpy\(images\)"),
        (lambda x: x.permute(0, 2, 3, 1), r"32 channels and this model needs 3; .*permute\(0, 3, 1, 2\)"),
        (lambda x: x[..., :0], r"shape \(2, 3, 32, 0\): they have no pixels"),
        (lambda x: x[:, :, :0].float(), r"shape \(2, 3, 0, 32\): they have no pixels"),
        (lambda x: x[:, :1], r"1 channels and this model needs 3; load\(channels=N\)"),
    ],
)
def test_images_of_another_shape_or_type_are_refused(model: Any, change: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        model(change(IMAGES))
    with pytest.raises(UsageError, match=said):
        model.features(change(IMAGES))


def test_the_named_calls_convert_images(model: Any) -> None:
    """By the formula of torchvision's ToTensor and Normalize, whose images timm's networks take."""
    expected = model((IMAGES / 255 - 0.5) / 0.5)
    unit = IMAGES / 255
    for images in (IMAGES, IMAGES.long().to(torch.uint8), model.normalise(255 * unit), model.normalise(IMAGES.float())):
        assert torch.allclose(model(images), expected, atol=1e-4)


@pytest.mark.export
def test_checks_end_no_trace(model: Any) -> None:
    images = model.normalise(IMAGES)
    expected = model(images)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(images), expected, atol=1e-5)
    assert torch.allclose(torch.jit.trace(model, images)(images), expected, atol=1e-5)
    assert torch.allclose(torch.export.export(model, (images,)).module()(images), expected, atol=1e-5)
    each = torch.func.vmap(lambda image: model(image[None])[0])(images)
    assert torch.allclose(each, expected, atol=1e-4)


def test_a_setting_has_the_range_of_the_config() -> None:
    """What a flag accepts is no surprise for the network: one number is the limit of both."""
    settings = ranged_types(Model)
    assert {"width", "depth", "heads", "mlp_dim", "patch", "registers", "pre_logits"} <= settings.keys() & RANGES.keys()
    for name in settings.keys() & RANGES.keys() - {"dropout", "layer_scale"}:
        (limit,) = (limit for limit in limits(settings[name]) if isinstance(limit, Range))
        assert (limit.least, limit.most) == RANGES[name], name
