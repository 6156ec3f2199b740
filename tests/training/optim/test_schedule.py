"""The learning rate against closed forms, and its properties for any run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import UsageError
from vitrail.training.run import learning_rate

SHAPES = ("cosine", "linear", "rsqrt", "constant")
totals = st.integers(2, 200_000)
fractions = st.floats(0, 0.9)
shapes = st.sampled_from(SHAPES)


def test_published_fine_tuning_schedule():
    """vit_jax: base * 0.5 (1 + cos(pi (step - warmup) / (total - warmup))) * min(1, step / warmup)."""
    for step in (0, 1, 250, 499, 500, 501, 5000, 9999, 10_000):
        progress = min(max((step - 500) / (10_000 - 500), 0), 1)
        expected = 0.03 * 0.5 * (1 + math.cos(math.pi * progress)) * min(1, step / 500)
        ours = learning_rate(step, 10_000, 0.03, shape="cosine", warmup=500)
        assert ours == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_published_pre_training_schedule():
    """vit_jax on ImageNet-21k: 1e-3 falls linearly to 1e-5, warmup 10k."""
    for step in (0, 5000, 10_000, 50_000, 90_000, 100_000):
        progress = min(max((step - 10_000) / 90_000, 0), 1)
        expected = (1e-5 + (1e-3 - 1e-5) * (1 - progress)) * min(1, step / 10_000)
        ours = learning_rate(step, 100_000, 1e-3, shape="linear", warmup=10_000, end=1e-5)
        assert ours == pytest.approx(expected, rel=1e-12)


def test_reciprocal_square_root():
    """big_vision: base / sqrt((step + timescale - warmup) / timescale) once warm."""
    for step in (1000, 1001, 11_000, 31_000, 99_999):
        expected = 8e-4 / math.sqrt((step + 10_000 - 1000) / 10_000)
        ours = learning_rate(step, 100_000, 8e-4, shape="rsqrt", warmup=1000, timescale=10_000)
        assert ours == pytest.approx(expected, rel=1e-12)
    half = learning_rate(1000 + 10_000, 100_000, 1.0, shape="rsqrt", warmup=1000, timescale=10_000)
    assert half == pytest.approx(1 / math.sqrt(2))
    assert learning_rate(1e5, 1e5, 1.0, shape="rsqrt", timescale=1.0, end=0.25) == 0.25


@given(shapes, totals, fractions)
def test_starts_at_zero_peaks_at_base_ends_at_end(shape, total, fraction):
    warmup = int(total * fraction)
    rate = [learning_rate(s, total, 0.5, shape=shape, warmup=warmup, end=0.01) for s in (0, warmup, total)]
    assert rate[0] == (0 if warmup else 0.5)
    assert rate[1] == pytest.approx(0.5)
    if shape in ("cosine", "linear") and warmup < total:
        assert rate[2] == pytest.approx(0.01)
    if shape == "constant":
        assert rate[2] == 0.5


@given(shapes, totals, fractions, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1e-3))
def test_bounded_and_rising_then_falling(shape, total, fraction, one, other, end):
    warmup = fraction * total
    early, late = sorted((one * total, other * total))
    first, second = (learning_rate(s, total, 1e-3, shape=shape, warmup=warmup, end=end) for s in (early, late))
    assert 0 <= first <= 1e-3 * (1 + 1e-12) and 0 <= second <= 1e-3 * (1 + 1e-12)
    if late <= warmup:
        assert first <= second * (1 + 1e-12)
    elif early >= warmup:
        assert first >= second * (1 - 1e-12) and second >= min(end, first) * (1 - 1e-9)


@given(shapes, fractions.filter(lambda f: f == 0 or f > 0.01), st.floats(0, 1))
def test_continuous(shape, fraction, at):
    """A millionth of the run changes the rate by no more than its steepest slope does."""
    near = learning_rate(at, 1.0, 1.0, shape=shape, warmup=fraction, timescale=0.1)
    next_ = learning_rate(min(at + 1e-6, 1.0), 1.0, 1.0, shape=shape, warmup=fraction, timescale=0.1)
    slope = max(1 / fraction if fraction else 0, math.pi / 2 / (1 - fraction), 1 / 0.2)
    assert abs(near - next_) <= 1.01e-6 * slope + 1e-12


@given(shapes, totals, fractions, st.floats(0, 1), st.floats(0.001, 1000))
def test_only_ratios_count(shape, total, fraction, at, unit):
    """Steps, seconds and fractions of a run give the same rate: this is how a time limit drives it."""
    steps = learning_rate(at * total, total, 1e-3, shape=shape, warmup=fraction * total, timescale=total / 7)
    other = learning_rate(at * unit, unit, 1e-3, shape=shape, warmup=fraction * unit, timescale=unit / 7)
    assert steps == pytest.approx(other, rel=1e-9, abs=1e-15)


def test_bits_steps():
    """bit_hyperrule.py: 0.003 with 500 steps of warmup, a tenth after 3000, 6000 and 9000 of 10,000 steps."""
    known = {0: 0.0, 250: 0.0015, 500: 0.003, 3000: 0.003, 3001: 3e-4, 6000: 3e-4, 6001: 3e-5, 9001: 3e-6}
    for step, expected in known.items():
        ours = learning_rate(step, 10_000, 0.003, shape="step", warmup=500, drops=(3000, 6000, 9000))
        assert ours == pytest.approx(expected, rel=1e-12)
    late = learning_rate(9500, 10_000, 0.003, shape="step", drops=(3000, 6000, 9000), end=1e-5)
    assert late == 1e-5
    assert learning_rate(0.31, 1.0, 0.003, shape="step", drops=(0.3,)) == pytest.approx(3e-4)


def test_past_the_end_stays_at_the_end():
    assert learning_rate(150, 100, 1.0, shape="cosine", end=0.1) == pytest.approx(0.1)


def test_warmup_may_fill_the_run():
    assert learning_rate(100, 100, 1.0, warmup=100) == 1.0
    assert learning_rate(50, 100, 1.0, warmup=100) == 0.5


@pytest.mark.parametrize(
    ("values", "word"),
    [
        (dict(total=100, warmup=101), "warmup of 101"),
        (dict(total=0), "run of 0"),
        (dict(total=10, warmup=-1), "warmup of -1"),
        (dict(total=10, shape="rsqrt", timescale=0), "timescale"),
        (dict(total=10, shape="stairs"), "Valid: cosine, linear"),
        (dict(total=10, shape="step", drops=(3, 11)), "drops"),
        (dict(total=10, shape="step", drops=(-1,)), "drops"),
    ],
)
def test_contradictions_are_usage_errors(values, word):
    with pytest.raises(UsageError, match=word):
        learning_rate(0, values.pop("total"), 1.0, **values)
