from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import KINDS, identity, maps_alive, tiny, uniform

from vitrail.errors import UsageError
from vitrail.inspection.distance import attention_distance, grid_distances
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.record import attention_maps
from vitrail.model.variants import ResNetConfig


@given(rows=st.integers(1, 7), columns=st.integers(1, 7), patch=st.sampled_from([1, 14, 32]), prefix=st.integers(0, 3))
def test_distances_between_patch_centres(rows: int, columns: int, patch: int, prefix: int) -> None:
    found = grid_distances((rows, columns), patch, prefix).numpy()
    expected = np.zeros((prefix + rows * columns,) * 2)
    for q in range(rows * columns):
        for k in range(rows * columns):
            down, across = q // columns - k // columns, q % columns - k % columns
            expected[prefix + q, prefix + k] = patch * math.sqrt(down**2 + across**2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@given(count=st.integers(2, 9), registers=st.integers(0, 2))
def test_uniform_attention_along_a_line_has_its_closed_form(count: int, registers: int) -> None:
    # the mean of |i - j| over all pairs of n points is (n^2 - 1) / 3n; the prefix takes its share of attention
    model = uniform(tiny(depth=1, image_size=(4, 4 * count), registers=registers))
    found = attention_distance(model, [torch.randn(1, 3, 4, 4 * count)])
    expected = 4 * (count**2 - 1) / (3 * count) * count / (count + 1 + registers)
    np.testing.assert_allclose(found.mean, expected, rtol=1e-5)
    np.testing.assert_allclose(found.uniform, expected, rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"pool": "gap", "block": "axial"}], ids=str)
def test_the_dashed_line_is_what_uniform_attention_gives(changes: dict[str, Any]) -> None:
    found = attention_distance(uniform(tiny(**changes)), [torch.randn(1, 3, 12, 16)])
    np.testing.assert_allclose(found.mean, np.repeat(found.uniform[:, None], 2, axis=1), rtol=1e-5)
    if "block" in changes:  # lines of 4 and of 3 patches
        np.testing.assert_allclose(found.uniform, [4 * 15 / 12, 4 * 8 / 9] * 3)


def test_attention_to_oneself_reaches_nowhere() -> None:
    found = attention_distance(identity(), [torch.randn(2, 3, 12, 16)])
    assert found.mean.shape == (3, 2) and (found.mean == 0).all() and (found.spread == 0).all()


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_mean_and_spread_over_images_are_those_of_plain_loops(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    rows, columns = 3, 4
    images = torch.randn(5, 3, 12, 16)
    found = attention_distance(model, [images[:2], images[2:]])
    assert found.images == 5 and len(found.places) == len(attention_maps(model, images))
    for place, one in enumerate(attention_maps(model, images)):
        maps, prefix = one.maps.double().numpy(), model.config.prefix
        shape = {None: (rows, columns), "row": (1, columns), "column": (rows, 1)}[one.axis]
        lines = maps.reshape(5, -1, *maps.shape[1:])  # of an axial block; otherwise one
        values = np.zeros((5, maps.shape[1]))
        for q in range(shape[0] * shape[1]):
            for k in range(shape[0] * shape[1]):
                far = 4 * math.dist(divmod(q, shape[1]), divmod(k, shape[1]))
                values += far * lines[:, :, :, prefix + q, prefix + k].mean(axis=1) / (shape[0] * shape[1])
        assert found.places[place] == (one.layer, one.branch, one.axis)
        np.testing.assert_allclose(found.mean[place], values.mean(axis=0), rtol=1e-4)
        np.testing.assert_allclose(found.spread[place], values.std(axis=0), rtol=1e-2, atol=1e-4)
        assert np.ptp(values) > 0.01  # the comparison means something


def test_maps_are_dropped_as_they_come_on_either_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = tiny(), torch.randn(4, 3, 12, 16)
    with maps_alive(monkeypatch) as alive:
        with attention_path("explicit"):
            explicit = attention_distance(model, images.split(1))
        with attention_path("fused"):
            fused = attention_distance(model, images.split(1))
    assert len(alive) == 2 * 4 * 3 and max(alive) == 0
    np.testing.assert_allclose(explicit.mean, fused.mean, rtol=1e-4)


def test_images_of_several_shapes_and_of_none() -> None:
    model = tiny().train()
    batches = [torch.randn(1, 3, 8, 20), torch.randn(3, 3, 16, 16)]
    both = attention_distance(model, batches)
    apart = [attention_distance(model, [batch]) for batch in batches]
    np.testing.assert_allclose(both.mean, (apart[0].mean + 3 * apart[1].mean) / 4)
    np.testing.assert_allclose(both.uniform, (apart[0].uniform + 3 * apart[1].uniform) / 4)
    assert model.training
    with pytest.raises(UsageError, match="there are none"):
        attention_distance(model, [])
    with pytest.raises(UsageError, match="Vision Transformer"):
        attention_distance(build(ResNetConfig(units=(1,), width=8)), [])  # type: ignore[arg-type]
