"""Averaged weights against sums written out, exact swapping and exact resuming."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from device_work import told
from torch import nn

from vitrail.durations import Steps
from vitrail.errors import CheckpointError
from vitrail.training.optim.average import Averager
from vitrail.training.run import Average

POLYAK = Average(kind="polyak", start=Steps(3))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def walk(model: nn.Module, step: int) -> None:
    """Move weights and BatchNorm statistics as training would, as a function of the step."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator))
        model.train()(torch.randn(8, 3, generator=generator))


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_ema_is_the_recurrence():
    model = network()
    averager = Averager(model, Average(kind="ema", decay=0.8))
    mean = model[0].weight.detach().double().numpy().copy()
    for n in range(40):
        walk(model, n)
        averager.update(n)
        decay = min(0.8, (1 + n) / (10 + n))
        mean = decay * mean + (1 - decay) * model[0].weight.detach().double().numpy()
    np.testing.assert_allclose(averager.state_dict()["mean"]["0.weight"], mean, rtol=1e-5, atol=1e-5)


def test_polyak_is_the_mean_of_the_steps_from_start_on():
    model = network()
    averager = Averager(model, POLYAK, start=3)
    seen = []
    for step in range(12):
        walk(model, step)
        averager.update(step)
        if step >= 3:
            seen.append(model[2].weight.detach().double().numpy().copy())
        assert averager.active == (step >= 3)
    with averager.swapped():
        np.testing.assert_allclose(model[2].weight.detach(), np.mean(seen, axis=0), rtol=1e-5, atol=1e-5)


def test_polyak_begins_anew_in_a_run_that_has_become_longer():
    model = network()
    short, longer = Averager(model, POLYAK, start=2), Averager(model, POLYAK, start=6)
    for step in range(4):
        walk(model, step)
        short.update(step)
    longer.load_state_dict(short.state_dict())
    seen = []
    for step in range(4, 9):
        walk(model, step)
        longer.update(step)
        assert longer.active == (step >= 6)
        seen += [model[2].weight.detach().double().numpy().copy()] * (step >= 6)
    np.testing.assert_allclose(longer.state_dict()["mean"]["2.weight"], np.mean(seen, axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("average", [POLYAK, Average(kind="ema", decay=0.5)])
def test_swapping_is_exact_and_ends_even_after_an_error(average):
    model = network()
    averager = Averager(model, average)
    for step in range(5):
        walk(model, step)
        averager.update(step)
    statistics = snapshot(model)
    walk(model, 99)  # not taken in: weights and statistics are ahead of the average
    own = snapshot(model)
    with pytest.raises(KeyboardInterrupt), averager.swapped():
        inside = snapshot(model)
        raise KeyboardInterrupt
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    mean = averager.state_dict()["mean"]
    assert all(torch.equal(mean[name], inside[name]) for name, _ in model.named_parameters())
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(inside[name], statistics[name])
        assert not torch.equal(inside[name], own[name])
    assert inside["1.num_batches_tracked"].dtype == torch.int64


def test_before_the_start_the_models_own_weights_stay():
    model = network()
    averager = Averager(model, POLYAK, start=3)
    walk(model, 0)
    averager.update(0)
    own = snapshot(model)
    with averager.swapped():
        assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("average", [POLYAK, Average(kind="ema", decay=0.8)])
def test_a_device_that_decides_skips_the_same_steps(average):
    """It counts a step before anybody knows whether it was finite; `skipped` takes that back before the next one."""
    here, there = network(), network()
    one, two = Averager(here, average, start=3), Averager(there, average, start=3)
    for step in range(12):
        finite = step not in (2, 3, 7, 8, 11)
        if finite:  # otherwise the step has changed nothing
            walk(here, step)
            walk(there, step)
        one.update(step, torch.tensor(finite))
        two.update(step, told(finite))
        if not finite:
            two.skipped(step)
        assert one.count == two.count and one.active == two.active
        for kind in ("mean", "buffers") if one.active else ():
            for name, value in one.state_dict()[kind].items():
                torch.testing.assert_close(two.state_dict()[kind][name], value, rtol=1e-6, atol=1e-6)


def test_none_does_nothing_and_holds_nothing():
    model = network()
    averager = Averager(model, Average(kind="none"))
    averager.update(0)
    assert not averager.active
    assert averager.state_dict() == {"count": 0, "mean": {}, "buffers": {}}
    averager.load_state_dict(averager.state_dict())


@pytest.mark.parametrize("average", [POLYAK, Average(kind="ema", decay=0.99)])
def test_resumed_is_bit_equal(average):
    whole, resumed = network(), network()
    one, two = Averager(whole, average, start=3), Averager(resumed, average, start=3)
    for step in range(10):
        if step == 6:
            state = copy.deepcopy(two.state_dict())
            two = Averager(resumed, average, start=3)
            two.load_state_dict(state)
        for model, averager in ((whole, one), (resumed, two)):
            walk(model, step)
            averager.update(step)
    for kind in ("mean", "buffers"):
        mine, theirs = one.state_dict()[kind], two.state_dict()[kind]
        assert mine and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_frozen_parameters_cost_nothing():
    model = network()
    model[0].requires_grad_(False)
    averager = Averager(model, Average(kind="ema"))
    assert not [name for name in averager.state_dict()["mean"] if name.startswith("0.")]


def test_bfloat16_weights_are_averaged_in_float32():
    """From 0 to 1 by 0.1 % a step: a bfloat16 average would soon stop, its own steps being larger."""
    model = nn.Linear(2, 2, bias=False).bfloat16()
    nn.init.zeros_(model.weight)
    averager = Averager(model, Average(kind="ema", decay=0.999))
    averager.count = 10**6  # past the ramp
    nn.init.ones_(model.weight)
    for n in range(3000):
        averager.update(n)
    expected = 1 - 0.999**3000
    assert averager.state_dict()["mean"]["weight"][0, 0].item() == pytest.approx(expected, rel=1e-4)
    with averager.swapped():
        assert model.weight.dtype == torch.bfloat16
        assert model.weight[0, 0].item() == pytest.approx(expected, rel=1e-2)
    assert torch.equal(model.weight, torch.ones(2, 2, dtype=torch.bfloat16))


def test_another_model_is_refused_by_name():
    averager = Averager(network(), Average(kind="ema"))
    state = averager.state_dict()
    state["mean"] = {**state["mean"], "9.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"9\.weight"):
        averager.load_state_dict(state)
    state = averager.state_dict()
    state["mean"]["0.weight"] = torch.zeros(7)
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        averager.load_state_dict(state)
