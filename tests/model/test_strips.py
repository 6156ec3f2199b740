"""Images of any shape in one batch: what the network computes for each is what it computes for that picture alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import vitrail
from vitrail.data.images.native import Patches, Strip, picture, pictures
from vitrail.data.images.ops import eval_transform, shown_transform, train_transform, views
from vitrail.data.settings import Augment, Bands, Preprocess
from vitrail.errors import UsageError
from vitrail.model.build import freeze
from vitrail.model.compute import computed
from vitrail.model.variants import NATIVE_POSITIONS
from vitrail.model.vit import ViT
from vitrail.strip import longest_side, strip_size

PATCH, SIDE = 8, 48
NATIVE = Preprocess((SIDE, SIDE), resize="native", patch=PATCH)
SHAPES = ((100, 100), (100, 30), (33, 200), (300, 50), (10, 20), (64, 48))
RANDOM = np.random.default_rng(0)
NETWORKS: dict[str, dict[str, Any]] = {
    **{kind: dict(positions=kind) for kind in NATIVE_POSITIONS},
    **{f"1d, {mode}": dict(resize_mode=mode) for mode in ("timm", "hf", "torchvision", "naflex")},
    **{f"pool {pool}": dict(pool=pool) for pool in ("gap", "map", "probe", "cls+gap")},
    "registers, read by the pool": dict(pool="map", pool_prefix=True, registers=2, layer_scale=0.1),
    "registers with positions": dict(registers=2, register_positions=True, cls_position=False),
    "every layer": dict(place="every", pool="gap"),
    "parallel": dict(block="parallel", branches=2, qk_norm="head"),
}


def network(**changes: Any) -> ViT:
    torch.manual_seed(0)
    small: dict[str, Any] = dict(width=32, depth=3, heads=2, mlp_dim=64, image_size=SIDE, classes=5, native=True)
    model = vitrail.create(f"Ti/{PATCH}", **small | changes).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def photographs(count: int = len(SHAPES)) -> list[np.ndarray]:
    return [RANDOM.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in SHAPES[:count]]


def batch(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def alone(model: nn.Module, image: np.ndarray) -> Tensor:
    """The logits of the picture, which is resized as `shown_transform` does, and given as an ordinary image."""
    return model(batch([np.ascontiguousarray(shown_transform(NATIVE)(image, RANDOM))]))[0]


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("kind", NETWORKS)
@torch.no_grad()
def test_each_image_of_a_batch_has_the_logits_that_it_has_alone(kind: str) -> None:
    model, images = network(**NETWORKS[kind]), photographs()
    strips = batch([eval_transform(NATIVE)(image, RANDOM) for image in images])
    expected = torch.stack([alone(model, image) for image in images])
    assert len(set(map(tuple, expected.round(decimals=3).tolist()))) == len(images)
    assert error(model(strips), expected) < 1e-5
    assert error(model(model.normalise(strips)), expected) < 1e-5  # as floats, like card.transform() makes them
    with computed("definition"):
        assert error(model(strips), expected) < 1e-5
    assert error(freeze(model)(strips), expected) < 1e-5


def test_gradients_are_those_of_the_pictures_alone() -> None:
    model, images = network(pool="map"), photographs(4)
    strips = batch([eval_transform(NATIVE)(image, RANDOM) for image in images])
    model(strips).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for image in images:
        alone(model, image).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and found[name] is not None
        assert (found[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


@torch.no_grad()
def test_heads_survive_bfloat16() -> None:
    model, images = network(), photographs()
    strips = batch([eval_transform(NATIVE)(image, RANDOM) for image in images])
    grids = model.grids(model.normalise(strips).bfloat16())
    assert [list(map(int, side)) for side in grids[:2]] == [list(map(int, side)) for side in model.grids(strips)[:2]]
    with torch.autocast("cpu", torch.bfloat16):
        assert error(model(strips).float(), torch.stack([alone(model, image) for image in images]).float()) < 0.05


@torch.no_grad()
def test_heads_of_noise_are_harmless() -> None:
    model = network(pool="map")
    noise = torch.from_numpy(RANDOM.integers(0, 256, (8, 3, *NATIVE.size), dtype=np.uint8))
    assert model(noise).isfinite().all() and freeze(model)(noise).isfinite().all()


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 700), st.sampled_from([4, 14, 16]))
def test_a_grid_is_the_largest_of_its_shape(height: int, width: int, tokens: int, patch: int) -> None:
    rows, columns = Patches(patch, tokens).grid(height, width)
    assert 1 <= rows * columns <= tokens and max(rows, columns) <= longest_side(tokens)
    # at some scale the sides, rounded up to whole patches, are these, and at any larger one there are too many
    low = max((rows - 1) / height, (columns - 1) / width)
    high = min(rows / height, columns / width)
    assert low <= high + 1e-12
    more = rows + (rows / height <= high), columns + (columns / width <= high)
    assert more[0] * more[1] > tokens or max(more) > longest_side(tokens)


def test_grids_are_those_of_siglip_2() -> None:
    module = pytest.importorskip("transformers.models.siglip2.image_processing_siglip2")
    differ = 0
    for _ in range(500):
        height, width = RANDOM.integers(20, 3000, 2).tolist()
        tokens, patch = int(RANDOM.choice([64, 196, 256, 576])), int(RANDOM.choice([14, 16]))
        if max(height, width) < 7 * min(height, width):
            theirs = module.get_image_size_for_max_num_patches(height, width, patch, tokens)
            differ += tuple(theirs) != Patches(patch, tokens).size(height, width)
    assert differ <= 1  # they search for the scale up to 1e-5, and ours is exact


@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_a_strip_holds_the_picture(rows: int, columns: int, floats: bool) -> None:
    image = RANDOM.integers(0, 256, (rows * PATCH, columns * PATCH, 3), dtype=np.uint8)
    given_image = (image.astype(np.float32) - 100) / 50 if floats else image
    strip = Strip(Patches(PATCH, 36))(given_image, RANDOM)
    assert strip.shape == (*strip_size((SIDE, SIDE), PATCH), 3)
    assert np.array_equal(picture(strip), given_image)


def test_training_and_views_make_strips() -> None:
    (image,) = photographs(1)
    for crop in ("inception", "center", "pad"):
        strip = train_transform(Augment(crop=crop), NATIVE)(image, RANDOM)
        assert strip.shape == (*NATIVE.size, 3) and picture(strip).any()
    both = views("flip", NATIVE, eval_transform(NATIVE))(image, RANDOM)
    assert both.shape == (2 * NATIVE.size[0], PATCH, 3)
    straight, mirrored = (picture(half) for half in np.split(both, 2))
    assert np.array_equal(straight[:, ::-1], mirrored)
    with pytest.raises(UsageError, match="keep their proportions"):
        views("crops", NATIVE, eval_transform(NATIVE))
    with pytest.raises(UsageError, match=r"augment.crop random cuts one size"):
        train_transform(Augment(crop="random"), NATIVE)


@pytest.mark.parametrize("augment", [Augment("inception"), Augment("center", also=("rotate90",)), Augment("pad")])
def test_cached_images_of_one_shape_become_strips_of_many(augment: Augment) -> None:
    image, transform = RANDOM.integers(0, 256, (24, 40, 3), dtype=np.uint8), train_transform(augment, NATIVE)
    strips = transform.batch(np.stack([image] * 20), [np.random.default_rng(seed) for seed in range(20)])
    alone = np.stack([transform(image, np.random.default_rng(seed)) for seed in range(20)])
    assert np.array_equal(strips, alone)
    assert len({picture(strip).shape for strip in strips}) > 1 or augment.crop == "pad"


def test_tokens_of_strips_are_refused() -> None:
    with pytest.raises(UsageError, match="grids of different shapes"):
        network().intermediate(torch.zeros(1, 3, *NATIVE.size, dtype=torch.uint8))


def test_pictures_of_strips_are_shown_side_by_side() -> None:
    strips = np.stack([eval_transform(NATIVE)(image, RANDOM) for image in photographs(3)])
    shown = pictures(strips)
    assert len(shown) == 3
    for one, strip in zip(shown, strips, strict=True):
        image = picture(strip)
        top, left = (shown.shape[1] - image.shape[0]) // 2, (shown.shape[2] - image.shape[1]) // 2
        assert np.array_equal(one[top : top + image.shape[0], left : left + image.shape[1]], image)


def test_other_bands_have_strips_too() -> None:
    bands = Bands(bits="16", mean=(100.0,), std=(50.0,), display=(1,), low=(0.0,), high=(200.0,))
    model = network(channels=1, mean=(0.5,), std=(0.5,))
    image = RANDOM.standard_normal((40, 90, 1)).astype(np.float32)
    preprocess = Preprocess((SIDE, SIDE), resize="native", patch=PATCH, bands=bands)
    with torch.no_grad():
        strip = model(batch([eval_transform(preprocess)(image, RANDOM)]))
        whole = model(batch([np.ascontiguousarray(shown_transform(preprocess)(image, RANDOM))]))
    assert error(strip, whole) < 1e-5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(stem="early"), "need the stem linear, and this network has early"),
        (dict(positions="relative"), "need positions of kind none, 1d, 2d, sincos, and this network has relative"),
        (dict(block="axial", pool="gap"), "this network has axial ones"),
    ],
)
def test_networks_that_cannot_take_strips_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        network(**changes)


@pytest.mark.parametrize(
    ("size", "patch", "reason"),
    [((32, 32), 2, "need patches of 4 pixels or more"), ((2048, 2048), 16, r"at most 8,128 patches, and 2048 x 2048")],
)
def test_strips_that_cannot_be_are_refused(size: tuple[int, int], patch: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        strip_size(size, patch)


@pytest.mark.export
def test_a_program_takes_strips(tmp_path: Path) -> None:
    import onnxruntime

    from vitrail.exports.write import export_model
    from vitrail.weights.card import Card

    model, images = network(), photographs()
    model.card = Card(model.config, list("abcde"), NATIVE)
    with pytest.raises(UsageError, match="takes images of any shape already"):
        export_model(model, tmp_path / "any", to="onnx", any_size=True)
    export_model(model, tmp_path / "program", to="onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "program" / "model.onnx"))
    strips = batch([eval_transform(NATIVE)(image, RANDOM) for image in images])
    (found,) = session.run(None, {session.get_inputs()[0].name: strips.contiguous().numpy()})
    with torch.no_grad():
        assert error(torch.from_numpy(found), torch.stack([alone(model, image) for image in images])) < 1e-4
