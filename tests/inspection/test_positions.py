from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny, uniform

from vitrail.errors import UsageError
from vitrail.inspection.positions import COSINE, position_tiles
from vitrail.model.record import attention_maps


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({}, "learned 1-D positions"),
        ({"registers": 2, "register_positions": True}, "learned 1-D positions"),
        ({"cls_position": False}, "learned 1-D positions"),
        ({"positions": "2d", "pool": "gap"}, "learned 2-D positions"),
        ({"positions": "sincos"}, "fixed sine and cosine positions"),
        ({"place": "every"}, "learned 1-D positions, layer 2"),
        ({"place": "shared"}, "learned 1-D positions"),
    ],
    ids=str,
)
def test_a_tile_compares_one_position_with_all(changes: dict[str, Any], about: str) -> None:
    model = tiny(**changes)
    found = position_tiles(model, layer=2)
    assert (found.about, found.quantity) == (about, COSINE)
    table = model.positions.table(2 % model.positions.copies, (3, 4))
    rows = table[0, -12:].detach().double().numpy()  # what is in front of the grid is left out
    for q in range(12):
        for k in range(12):
            here = found.values[(*divmod(q, 4), *divmod(k, 4))]
            assert here == pytest.approx(cosine(rows[q], rows[k]), abs=1e-5)


def test_what_2d_positions_share_shows() -> None:
    """Half of an embedding is its row's, half its column's: the whole follows from two small tables."""
    model = tiny(positions="2d")
    rows, columns = (table[0].detach().double().numpy() for table in (model.positions.rows, model.positions.columns))
    values = position_tiles(model).values
    for (r, c), (s, d) in (((0, 1), (2, 1)), ((1, 3), (0, 0))):
        whole = [np.concatenate([columns[j], rows[i]]) for i, j in ((r, c), (s, d))]
        assert values[r, c, s, d] == pytest.approx(cosine(*whole), abs=1e-5)


def test_relative_positions_compare_offsets() -> None:
    model = tiny(positions="relative", place="every")
    found = position_tiles(model, layer=-1)
    assert found.about == "relative positions, layer 2: each offset against offset 0"
    table = model.positions.embedding[2].detach().double().numpy()  # offsets -11 to 11
    for q in range(12):
        for k in range(12):
            expected = cosine(table[11 + q - k], table[11])
            assert found.values[(*divmod(q, 4), *divmod(k, 4))] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("changes", [{"pool": "gap"}, {"place": "shared"}, {}], ids=str)
def test_relative_biases_are_those_that_attention_gets(changes: dict[str, Any]) -> None:
    """Where queries are 0, the logarithm of a map is the bias but for a constant in each row."""
    model = uniform(tiny(positions="relative_bias", heads=1, **changes))
    found = position_tiles(model, layer=1)
    maps = next(one.maps for one in attention_maps(model, torch.randn(1, 3, 12, 16)) if one.layer == 1)
    logits = maps[0, 0, model.config.prefix :, model.config.prefix :].log().numpy()
    values = found.values.reshape(12, 12)
    own = np.arange(12)
    expected = logits - logits[own, own][:, None]
    np.testing.assert_allclose(values - values[own, own][:, None], expected, atol=1e-4)
    assert found.quantity == "added to the logit"


def test_an_embedding_of_zero_is_like_nothing() -> None:
    model = tiny()
    with torch.no_grad():
        model.positions.embedding.zero_()
    assert (position_tiles(model).values == 0).all()


def test_what_has_no_positions_says_so() -> None:
    with pytest.raises(UsageError, match="bag of patches"):
        position_tiles(tiny(positions="none"))
    with pytest.raises(UsageError, match="no layer 3: this model has 3"):
        position_tiles(tiny(), layer=3)
