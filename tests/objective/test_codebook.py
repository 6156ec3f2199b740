"""The codebook against k-means of scikit-learn, plain loops and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from device_work import Elsewhere
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from vitrail.objective.tokenizer import Codebook


def book(codes: int, features: int, decay: float = 0.0) -> Codebook:
    torch.manual_seed(codes)
    return Codebook(codes, features, decay)


def step(found: Codebook, vectors: torch.Tensor) -> torch.Tensor:
    codes = found.nearest(vectors)
    found.move(found.tally(vectors, codes))
    return codes


@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 20))
def test_the_nearest_code_is_the_one_at_the_smallest_distance(codes: int, features: int, count: int) -> None:
    found = book(codes, features)
    vectors = torch.randn(count, 2, features, generator=torch.Generator().manual_seed(count))
    far = ((vectors[:, :, None] - found.vectors) ** 2).sum(-1).numpy()
    chosen = found.nearest(vectors).numpy()
    assert chosen.shape == (count, 2)
    reached = np.take_along_axis(far, chosen[..., None], -1)[..., 0]
    np.testing.assert_allclose(reached, far.min(-1), rtol=1e-4, atol=1e-5)


def test_without_memory_a_step_is_one_of_k_means() -> None:
    found = book(5, 3)
    vectors = torch.randn(400, 3)
    start = found.vectors.clone()
    codes = step(found, vectors)
    assert torch.bincount(codes, minlength=5).min() > 0.05 * 80  # all in use: none is moved elsewhere
    theirs = KMeans(5, init=start.numpy(), n_init=1, max_iter=1, algorithm="lloyd").fit(vectors.numpy())
    np.testing.assert_allclose(found.vectors.numpy(), theirs.cluster_centers_, rtol=1e-5, atol=1e-6)


def test_codes_are_moving_averages_of_what_they_stand_for() -> None:
    found = book(3, 2, decay=0.8)
    found.vectors.copy_(torch.tensor([[-5.0, 0.0], [0.0, 5.0], [5.0, 0.0]]))
    generator = np.random.default_rng(0)
    sums, counts = np.zeros((3, 2)), np.zeros(3)
    for number in range(6):
        around = generator.normal(0, 0.3, (90, 2)) + found.vectors.numpy()[generator.permutation(np.arange(90) % 3)]
        codes = step(found, torch.from_numpy(around).float()).numpy()
        decay = 0.8 if number else 0.0
        for code in range(3):
            sums[code] = decay * sums[code] + (1 - decay) * around[codes == code].sum(0)
            counts[code] = decay * counts[code] + (1 - decay) * (codes == code).sum()
        np.testing.assert_allclose(found.vectors.numpy(), sums / counts[:, None], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.counts.numpy(), counts, rtol=1e-5)


def test_what_parts_of_a_batch_tell_adds_up() -> None:
    found, vectors = book(4, 3), torch.randn(30, 3)
    codes = found.nearest(vectors)
    parts = [found.tally(v, c) for v, c in zip(vectors.split(7), codes.split(7), strict=True)]
    torch.testing.assert_close(sum(parts), found.tally(vectors, codes), rtol=1e-12, atol=1e-12)


def test_unused_codes_are_put_where_there_is_something_to_stand_for() -> None:
    found = book(16, 2, decay=0.5)
    found.vectors += 100.0  # all beside the point: at first, one stands for everything
    centres = torch.tensor([[0.0, 0.0], [0.0, 8.0], [8.0, 0.0], [8.0, 8.0]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        vectors = centres.repeat(50, 1) + 0.2 * torch.randn(200, 2, generator=generator)
        codes = step(found, vectors)
    used = torch.bincount(codes, minlength=16)
    assert (used > 0).sum() >= 14
    of_centres = torch.cdist(found.vectors, centres).argmin(1)
    assert set(of_centres[used > 0].tolist()) == {0, 1, 2, 3}
    assert float((vectors - found.vectors[codes]).square().mean()) < 0.2**2  # less than of 4 codes, one a centre


def test_unused_codes_find_places_without_asking_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the noise of a GPU, a fixed table, which is normal and another at every update."""
    drawn, original = [], Codebook._noise

    def noise(found: Codebook, rows: torch.Tensor) -> torch.Tensor:
        drawn.append(original(found, rows.as_subclass(Elsewhere)))
        return drawn[-1]

    monkeypatch.setattr(Codebook, "_noise", noise)
    test_unused_codes_are_put_where_there_is_something_to_stand_for()
    assert len(drawn) > 1 and not torch.equal(drawn[0], drawn[1])
    table = book(512, 16).normal
    assert table.mean().abs() < 0.05 and table.std() == pytest.approx(1, abs=0.05)


def test_a_step_that_was_not_finite_moves_no_code() -> None:
    found, vectors = book(6, 3, decay=0.5), torch.randn(50, 3)
    step(found, vectors)
    before = {name: value.clone() for name, value in found.state_dict().items()}
    vectors[3] = float("nan")
    found.move(found.tally(vectors, found.nearest(vectors)), torch.tensor(False))
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())


@pytest.mark.parametrize(("counts", "use"), [((1, 1, 1, 1), 1.0), ((0, 3, 0, 0), 0.25), ((2, 2, 0, 0), 0.5)])
def test_use_is_the_perplexity_over_the_number_of_codes(counts: tuple[int, ...], use: float) -> None:
    found = book(4, 1)
    found.counts.copy_(torch.tensor(counts))
    assert float(found.use) == pytest.approx(use)
    found.counts.copy_(torch.tensor([1.0, 2, 3, 4]))
    shares = [0.1, 0.2, 0.3, 0.4]
    assert float(found.use) == pytest.approx(math.prod(share**-share for share in shares) / 4)
