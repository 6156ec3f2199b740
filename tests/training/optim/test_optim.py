"""Which parameters decay, and each update against its closed form in float64 (and against timm for LAMB)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import timm.optim
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.training.optim.optimizer import (
    build_optimizer,
    divisor_of_gradients,
    global_norm,
    set_learning_rate,
    split_parameters,
    update,
)
from vitrail.training.run import Optim

TINY = dict(width=16, depth=2, heads=2, mlp_dim=32, patch=8, image_size=(16, 16), classes=3)


def tiny_models() -> list[ViTConfig | ResNetConfig]:
    """Every option that adds parameters, alone and crossed where they meet."""
    configs: list[ViTConfig | ResNetConfig] = [
        ViTConfig.of(**TINY, positions=positions, place=place, pool=pool, registers=registers)
        for positions, place, pool, registers in itertools.product(
            ("none", "1d", "2d", "relative", "sincos"),
            ("input", "every", "shared"),
            ("cls", "gap", "map"),
            (0, 2),
        )
        if not (positions in ("none", "sincos") and place == "every")
    ]
    configs.append(ViTConfig.of(**TINY, layer_scale=1e-4, pre_logits=8, cls_position=False))
    configs.append(ViTConfig.of(**TINY, block="parallel", branches=2, layer_scale=1e-4))
    configs.append(ViTConfig.of(**TINY, distilled=True, mlp="swiglu"))
    configs.append(ViTConfig.of(**TINY, pool="cls+gap", registers=2, register_positions=True, final_norm="pooled"))
    configs.append(ViTConfig.of(**TINY, pool="gap", class_token=True, positions="relative_bias"))
    configs.append(ViTConfig.of(**TINY, block="axial", pool="gap", positions="relative"))
    for stem, norm in itertools.product(("levit", "early", "hmlp"), ("batch", "layer")):
        configs.append(ViTConfig.of(**{**TINY, "patch": 16, "image_size": (32, 32)}, stem=stem, stem_norm=norm))
    hybrid = {**TINY, "patch": 32, "image_size": (64, 64)}
    configs.append(ViTConfig.of(**hybrid, stem="resnet", stem_units=(1, 1, 1, 1)))
    configs.append(ViTConfig.of(**hybrid, stem="resnet", stem_units=()))
    for axial in (False, True):
        configs.append(ResNetConfig(units=(1, 1, 1, 1), width=16, image_size=64, classes=3, axial=axial))
    return configs


class RecordKernels(TorchFunctionMode):
    """Collects the parameters that the weights of linear maps and convolutions are computed from.

    This is what a kernel is, whatever the layer is called; standardised or rescaled weights are traced back
    through the autograd graph.
    """

    def __init__(self):
        super().__init__()
        self.leaves: set[torch.Tensor] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (F.linear, F.conv2d, torch.conv2d):
            self._trace(args[1] if len(args) > 1 else kwargs["weight"])
        return function(*args, **kwargs)

    def _trace(self, weight):
        if weight.is_leaf:
            self.leaves.add(weight)
            return
        nodes = [weight.grad_fn]
        while nodes:
            node = nodes.pop()
            if hasattr(node, "variable"):
                self.leaves.add(node.variable)
            nodes += [parent for parent, _ in node.next_functions if parent is not None]


def label(config: ViTConfig | ResNetConfig) -> str:
    if isinstance(config, ResNetConfig):
        return "axial-resnet" if config.axial else "resnet"
    return f"{config.stem}-{config.block}-{config.positions}-{config.place}-{config.pool}"


@pytest.mark.full_size
@pytest.mark.parametrize("config", tiny_models(), ids=label)
def test_decay_falls_on_what_multiplies_the_input(config):
    model = build(config).eval().double()  # in float64 every product goes through torch's own functions
    kernels, others = split_parameters(model)
    assert set(kernels) | set(others) == {name for name, _ in model.named_parameters()}
    assert not set(kernels) & set(others)
    with RecordKernels() as record:
        model(torch.randn(2, config.channels, *config.image_size, dtype=torch.float64))
    assert set(kernels) == {name for name, p in model.named_parameters() if p in record.leaves}


def test_frozen_and_shared_parameters():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Embedding(4, 3), nn.MultiheadAttention(4, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    kernels, others = split_parameters(model)
    assert set(kernels) == {"0.weight", "3.in_proj_weight", "3.out_proj.weight"}
    assert set(others) == {"1.bias", "2.weight", "3.in_proj_bias", "3.out_proj.bias"}


def test_layernorm_over_two_dimensions_does_not_decay():
    kernels, others = split_parameters(nn.LayerNorm((3, 4)))
    assert not kernels and set(others) == {"weight", "bias"}


class Small(nn.Module):
    """One kernel and one bias in float64, driven with gradients of our choice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4).double()


def run(optim: Optim, steps: int = 7, seed: int = 0):
    """Take `steps` updates with random gradients and rates; return start, gradients, rates and end."""
    rng = np.random.default_rng(seed)
    model = Small()
    weight, bias = model.layer.weight, model.layer.bias
    start = [p.detach().numpy().copy() for p in (weight, bias)]
    gradients = [[rng.normal(size=tuple(p.shape)) for p in (weight, bias)] for _ in range(steps)]
    rates = rng.uniform(0.001, 0.1, steps)
    optimizer = build_optimizer(model, optim)
    for gradient, rate in zip(gradients, rates, strict=True):
        weight.grad, bias.grad = (torch.from_numpy(g.copy()) for g in gradient)
        set_learning_rate(optimizer, float(rate))
        optimizer.step()
    return start, gradients, rates, [p.detach().numpy() for p in (weight, bias)]


def test_adamw_is_the_original_codes_chain():
    """scale_by_adam -> * lr -> + wd * lr on kernels -> * schedule -> * -1, with wd = decay * base rate."""
    optim = Optim(name="adamw", lr=0.1, weight_decay=0.3, betas=(0.9, 0.99), eps=1e-8)
    start, gradients, rates, ours = run(optim)
    for i, decayed in enumerate((True, False)):
        p, m, v = start[i].copy(), 0.0, 0.0
        for t, rate in enumerate(rates, start=1):
            g = gradients[t - 1][i]
            m = 0.9 * m + 0.1 * g
            v = 0.99 * v + 0.01 * g**2
            update = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
            update = optim.lr * update + (optim.weight_decay * optim.lr) * p * decayed
            p = p - (rate / optim.lr) * update
        np.testing.assert_allclose(ours[i], p, rtol=1e-12)


def test_sgd_is_the_original_codes_chain():
    """trace(momentum) -> * lr -> + wd * lr on kernels -> * schedule -> * -1."""
    optim = Optim(name="sgd", lr=0.1, weight_decay=0.3, momentum=0.9)
    start, gradients, rates, ours = run(optim)
    for i, decayed in enumerate((True, False)):
        p, trace = start[i].copy(), 0.0
        for t, rate in enumerate(rates):
            trace = gradients[t][i] + 0.9 * trace
            p = p - (rate / optim.lr) * (optim.lr * trace + optim.weight_decay * optim.lr * p * decayed)
        np.testing.assert_allclose(ours[i], p, rtol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
def test_a_parameter_may_get_its_first_gradient_later(name):
    """It then moves as one does in its first step, and the others as if it were not there."""
    late, alone, fresh = Small(), Small(), Small()
    for model in (alone, fresh):
        model.load_state_dict(late.state_dict())
    gradient = torch.ones_like(late.layer.weight), torch.full_like(late.layer.bias, -2.0)
    optimizers = [build_optimizer(model, Optim(name=name, weight_decay=0.0)) for model in (late, alone, fresh)]
    for step in range(2):
        late.layer.weight.grad = gradient[0] if step else None
        late.layer.bias.grad = alone.layer.bias.grad = gradient[1]
        for optimizer in optimizers[:2]:
            optimizer.step()
    fresh.layer.weight.grad = gradient[0]
    optimizers[2].step()
    assert torch.equal(late.layer.bias, alone.layer.bias)
    assert torch.equal(late.layer.weight, fresh.layer.weight)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
def test_weight_decay_set_for_a_step_falls_on_kernels_alone(name):
    """A step without gradient to speak of shrinks kernels by 1 - rate * decay; LAMB makes the decay its update."""
    changed, fixed = Small(), Small()
    fixed.load_state_dict(changed.state_dict())
    before = {key: value.clone() for key, value in changed.state_dict().items()}
    ours, theirs = (
        build_optimizer(model, Optim(name=name, weight_decay=d)) for model, d in ((changed, 0.1), (fixed, 0.7))
    )
    for model, optimizer in ((changed, ours), (fixed, theirs)):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        set_learning_rate(optimizer, 0.01, 0.7 if model is changed else None)
        optimizer.step()
    assert torch.equal(changed.layer.weight, fixed.layer.weight)
    assert torch.equal(changed.layer.bias, before["layer.bias"])
    if name != "lamb":
        torch.testing.assert_close(changed.layer.weight, before["layer.weight"] * (1 - 0.01 * 0.7))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_changes_nothing(name, bad):
    """Neither weights nor what later updates depend on: a run with such a step ends with the bits of one without."""
    torch.manual_seed(0)
    disturbed, calm = Small(), Small()
    disturbed.load_state_dict(calm.state_dict())
    optim = Optim(name=name, lr=0.1, weight_decay=0.3)
    ours, theirs = build_optimizer(disturbed, optim), build_optimizer(calm, optim)
    for gradient in (0.5, bad, 0.25, bad, bad, -1.0):
        finite = math.isfinite(gradient)
        for model, optimizer in ((disturbed, ours), *([(calm, theirs)] if finite else [])):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, gradient)
            update(optimizer, torch.tensor(finite))
    for name, value in disturbed.state_dict().items():
        assert torch.equal(value, calm.state_dict()[name]), name


def test_lamb_is_algorithm_2():
    optim = Optim(name="lamb", lr=0.1, weight_decay=0.3, betas=(0.9, 0.99), eps=1e-6)
    start, gradients, rates, ours = run(optim)
    for i, kernel in enumerate((True, False)):
        p, m, v = start[i].copy(), 0.0, 0.0
        for t, rate in enumerate(rates, start=1):
            g = gradients[t - 1][i]
            m = 0.9 * m + 0.1 * g
            v = 0.99 * v + 0.01 * g**2
            u = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-6) + 0.3 * p * kernel
            trust = np.linalg.norm(p) / np.linalg.norm(u) if kernel else 1.0
            p = p - rate * trust * u
        np.testing.assert_allclose(ours[i], p, rtol=1e-10)


def test_lamb_equals_timms():
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, Optim(name="lamb", lr=0.02, weight_decay=0.1, eps=1e-6))
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    peer = timm.optim.Lamb(groups, lr=0.02, eps=1e-6, max_grad_norm=None)
    for _ in range(20):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        peer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_lamb_moves_a_zero_head_by_the_plain_update():
    """A zero-initialised head has norm 0: a ratio of 0 would keep it there forever."""
    layer = nn.Linear(4, 2)
    nn.init.zeros_(layer.weight)
    optimizer = build_optimizer(layer, Optim(name="lamb", lr=0.5, weight_decay=0.0, eps=1e-12))
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), torch.full((2, 4), -0.5))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
def test_interrupted_and_uninterrupted_are_bit_equal(name):
    def grads(model, step):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)

    torch.manual_seed(1)
    whole, resumed = nn.Linear(4, 3), nn.Linear(4, 3)
    resumed.load_state_dict(whole.state_dict())
    optim = Optim(name=name, lr=0.01)
    one, two = build_optimizer(whole, optim), build_optimizer(resumed, optim)
    for step in range(6):
        if step == 3:
            three = build_optimizer(resumed, optim)
            three.load_state_dict(two.state_dict())
            two = three
        for model, optimizer in ((whole, one), (resumed, two)):
            grads(model, step)
            optimizer.step()
    assert torch.equal(whole.weight, resumed.weight) and torch.equal(whole.bias, resumed.bias)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_cpu_runs_the_fused_kernel(name):
    optimizer = build_optimizer(nn.Linear(2, 2), Optim(name=name))
    assert all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
def test_a_parameter_without_gradient_stays(name):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = model[1].weight.detach().clone()
    optimizer = build_optimizer(model, Optim(name=name, lr=1.0, weight_decay=0.5))
    model[0](torch.ones(1, 2)).sum().backward()
    first = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[1].weight, before)
    assert not torch.equal(model[0].weight, first)


def test_clipping_against_the_closed_form():
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([1.0, 2.0, 2.0]), torch.full((2, 2), 2.0)
    norm, divisor = divisor_of_gradients(iter(parameters), 2.5)  # sqrt(9 + 16) = 5: everything is halved
    assert norm.item() == pytest.approx(5.0) and divisor.item() == pytest.approx(2.0)
    assert divisor_of_gradients(parameters, 100.0)[1] == 1
    assert divisor_of_gradients(parameters, None) == (global_norm(parameters), None)
    assert torch.equal(parameters[1].grad, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_have_no_finite_norm(bad):
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([bad, 3.0])
    norm, divisor = divisor_of_gradients([p], 1.0)
    assert not torch.isfinite(norm) and divisor == 1


def test_clipping_zero_gradients_and_none():
    p = nn.Parameter(torch.zeros(2))
    assert divisor_of_gradients([p], 1.0) == (0, 1)
    p.grad = torch.zeros(2)
    assert divisor_of_gradients([p], 1.0) == (0, 1)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon"])
def test_an_update_divides_the_gradients(name):
    def trained(divide):
        torch.manual_seed(0)
        model = build(ViTConfig.of(**TINY))
        nn.init.normal_(model.head.weight)
        optimizer = build_optimizer(model, Optim(name, lr=0.1, weight_decay=0.1, momentum=0.5))
        for step in range(3):
            images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(step))
            model(images).square().sum().backward()
            divisor = torch.tensor(2.0**step)
            if divide:
                for p in model.parameters():
                    p.grad /= divisor
            update(optimizer, torch.tensor(True), None if divide else divisor)
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(trained(False), trained(True))


def test_norm_of_bfloat16_gradients_is_float32():
    p = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 1.0)
    assert global_norm([p]).dtype == torch.float32
    assert global_norm([p]).item() == 64.0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (dict(lr=-1.0), "optim.lr"),
        (dict(weight_decay=-0.1), "optim.weight_decay"),
        (dict(weight_decay_end=-0.1), "optim.weight_decay_end"),
        (dict(betas=(0.9, 1.0)), "optim.betas"),
        (dict(momentum=1.5), "optim.momentum"),
        (dict(eps=0.0), "optim.eps"),
        (dict(clip=0.0), "optim.clip"),
        (dict(name="adam"), "adamw"),
    ],
)
def test_impossible_values_are_usage_errors(change, word):
    with pytest.raises(UsageError, match=word):
        build_optimizer(nn.Linear(2, 2), Optim(**change))


def test_nothing_to_train_is_a_usage_error():
    with pytest.raises(UsageError, match="frozen"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), Optim())
