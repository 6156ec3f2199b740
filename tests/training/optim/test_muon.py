"""Muon against torch's own, its polynomial against singular values in float64, and what of a network it trains."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from forked import in_two_processes
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from vitrail import world
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.low_rank import adapt
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.objective.mae import MAEObjective
from vitrail.objective.settings import MAE
from vitrail.training.optim import rules
from vitrail.training.optim.optimizer import (
    build_optimizer,
    set_learning_rate,
    split_parameters,
    stacked_matrices,
    update,
)
from vitrail.training.optim.rules import Muon, newton_schulz, orthogonalise_
from vitrail.training.optim.tune import freeze_rest
from vitrail.training.processes import in_process_group
from vitrail.training.run import Optim

SIZES: dict[str, Any] = dict(width=24, depth=2, heads=2, mlp_dim=64, patch=8, image_size=(16, 16), classes=3)
STACKED = {"qkv": 3, "out": 1, "fc1": 1, "fc2": 1}
"""Number of matrices that each dense layer of a block stores."""

SHARDED = Optim(name="muon", lr=0.01, weight_decay=0.3, layer_decay=0.7)


def network(**changes: Any) -> Any:
    torch.manual_seed(0)
    return build(ViTConfig.of(**{**SIZES, **changes}))


def layer_of(name: str) -> str:
    return name.split(".")[-2]


def peers(model: nn.Module, optim: Optim, rates: dict[str, float]) -> tuple[dict[str, list[nn.Parameter]], list[Any]]:
    """Copies of the matrices and other parameters of `model`, and torch's Muon and AdamW of each, at its own rate."""
    kernels, others = split_parameters(model)
    copies, optimizers = {}, []
    for name, parameter in {**kernels, **others}.items():
        parts = STACKED[layer_of(name)] if name.startswith("blocks.") and name in kernels else 0
        pieces = [nn.Parameter(piece.detach().clone()) for piece in parameter.chunk(parts or 1)]
        decay, rate = optim.weight_decay if name in kernels else 0.0, rates.get(name, optim.lr)
        if parts:
            made: Any = torch.optim.Muon(pieces, rate, decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        else:
            made = torch.optim.AdamW(pieces, rate, optim.betas, optim.eps, decay, fused=True)
        copies[name] = pieces
        optimizers.append(made)
    return copies, optimizers


def in_step(model: nn.Module, optimizer: Any, copies: dict[str, list[nn.Parameter]], others: list[Any]) -> None:
    """Take one step of all with the same random gradients."""
    for name, parameter in model.named_parameters():
        parameter.grad = torch.randn_like(parameter)
        for piece, gradient in zip(copies[name], parameter.grad.chunk(len(copies[name])), strict=True):
            piece.grad = gradient.clone()
    for each in (optimizer, *others):
        each.step()


@pytest.mark.parametrize("layer_decay", [None, 0.7])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_network_moves_as_with_torchs_muon_and_adamw(
    steps: int, layer_decay: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The AdamW part to the bit; the rest within the rounding of bfloat16, in which torch computes."""
    monkeypatch.setattr(rules, "fast_bf16", lambda device: True)  # on every processor, as torch does
    model = network()
    optim = Optim(name="muon", lr=0.01, weight_decay=0.3, layer_decay=layer_decay)
    decay = layer_decay or 1.0
    depths = {name: int(name.split(".")[1]) + 1 for name, _ in model.named_parameters() if name.startswith("blocks.")}
    depths |= {name: 0 for name, _ in model.named_parameters() if name.startswith(("stem", "cls", "positions"))}
    rates = {name: 0.01 * decay ** (3 - depth) for name, depth in depths.items()}
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    copies, others = peers(model, optim, rates)
    optimizer = build_optimizer(model, optim)
    for _ in range(steps):
        in_step(model, optimizer, copies, others)
    matrices = 0
    for name, value in model.named_parameters():
        expected = torch.cat(list(copies[name]))
        if name.startswith("blocks.") and value.ndim == 2:
            matrices += 1
            error = (value - expected).norm() / (expected - before[name]).norm()
            assert error < 0.01, (name, error)
        else:
            assert torch.equal(value, expected), name
    assert matrices == 8


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 40), (2, 40, 8)])
def test_singular_values_follow_the_published_polynomial(shape: tuple[int, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(rules, "fast_bf16", lambda device: False)
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    left, values, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    expected = left @ torch.diag_embed(values) @ right
    torch.testing.assert_close(newton_schulz(matrices).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16)])
def test_an_update_is_as_long_as_adamws_usually_is(shape: tuple[int, int]) -> None:
    """A matrix with singular values 1 has min(rows, columns) of them, so its root mean square is 0.2 here."""
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    orthogonalise_([matrix])
    assert 0.2 * 0.7 < matrix.square().mean().sqrt() < 0.2 * 1.2


def test_matrices_of_all_shapes_are_computed_each_on_its_own() -> None:
    torch.manual_seed(0)
    mixed = [torch.randn(shape) for shape in ((8, 8), (16, 8), (8, 16), (8, 8), (16, 8))]
    mixed.append(torch.zeros(8, 16))
    alone = [matrix.clone() for matrix in mixed]
    orthogonalise_(mixed)
    for one, other in zip(mixed, alone, strict=True):
        orthogonalise_([other])
        torch.testing.assert_close(one, other, rtol=2e-2, atol=5e-3)
    assert torch.equal(mixed[-1], torch.zeros(8, 16))


def test_only_dense_layers_of_blocks_are_matrices() -> None:
    model = network(mlp="swiglu", pool="map", registers=2, positions="relative", pre_logits=8)
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = {
        f"blocks.{block}.{layer}.weight": parts
        for block in range(2)
        for layer, parts in (
            ("attentions.0.attention.qkv", 3),
            ("attentions.0.attention.out", 1),
            ("mlps.0.mlp.fc1", 2),
            ("mlps.0.mlp.fc2", 1),
        )
    }
    assert {names[parameter]: parts for parameter, parts in stacked_matrices(model).items()} == expected


def test_axial_and_parallel_blocks_and_foreign_attention_have_matrices() -> None:
    axial = network(block="axial", pool="gap", positions="relative")
    assert len(stacked_matrices(axial)) == 2 * 2 * 4
    parallel = network(block="parallel", branches=2)
    assert len(stacked_matrices(parallel)) == 2 * 2 * 4
    model = network()
    model.blocks[0].attentions[0].attention = nn.MultiheadAttention(24, 2)
    attention = model.blocks[0].attentions[0].attention
    found = stacked_matrices(model)
    assert (found[attention.in_proj_weight], found[attention.out_proj.weight]) == (3, 1)


def test_the_blocks_of_a_decoder_count() -> None:
    model = network(classes=0)
    objective = MAEObjective(model, MAE(decoder_width=16, decoder_depth=1, decoder_heads=2), 0)
    assert len(stacked_matrices(objective)) == 2 * 4 + 4


def test_what_trains_no_matrix_is_a_usage_error() -> None:
    resnet = build(ResNetConfig(units=(1, 1, 1, 1), width=16, image_size=(64, 64), classes=3))
    head, low_rank = network(), network()
    freeze_rest(head, "head")
    adapt(low_rank, list(low_rank.blocks), 2, 1.0)
    freeze_rest(low_rank, "lora")
    for model in (resnet, head, low_rank, nn.Linear(2, 2)):
        with pytest.raises(UsageError, match=r"optim\.name is muon.*use adamw"):
            build_optimizer(model, Optim(name="muon"))


def test_frozen_layers_stay_out() -> None:
    model = network()
    freeze_rest(model, "attention")
    optimizer = build_optimizer(model, Optim(name="muon"))
    found = {parameter: group["parts"] for group in optimizer.param_groups for parameter in group["params"]}
    assert isinstance(optimizer, Muon) and all(parameter.requires_grad for parameter in found)
    assert sorted(found.values(), reverse=True)[:4] == [3, 3, 1, 1]


def test_weight_decay_set_for_a_step_falls_on_kernels_alone() -> None:
    """Without gradients a step multiplies kernels by 1 - rate * decay."""
    model = network()
    kernels, _ = split_parameters(model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = build_optimizer(model, Optim(name="muon", weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.01, 0.7)
    optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), before[name] * (1 - 0.007 * (name in kernels)), msg=name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_muon_update_that_is_not_finite_changes_nothing(bad: float) -> None:
    disturbed, calm = network(), network()
    optim = Optim(name="muon", lr=0.1, weight_decay=0.3)
    ours, theirs = build_optimizer(disturbed, optim), build_optimizer(calm, optim)
    for step, factor in enumerate((1.0, bad, 0.25, bad, bad, -1.0)):
        finite = math.isfinite(factor)
        for model, optimizer in ((disturbed, ours), *([(calm, theirs)] if finite else [])):
            give_gradients(model, step, factor)
            update(optimizer, torch.tensor(finite))
    for name, value in disturbed.state_dict().items():
        assert torch.equal(value, calm.state_dict()[name]), name


def give_gradients(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * factor


def test_a_parameter_without_gradient_stays_and_may_get_one_later() -> None:
    """It then moves as one does in its first step."""
    late, fresh = network(), network()
    optim = Optim(name="muon", weight_decay=0.5)
    ours, theirs = build_optimizer(late, optim), build_optimizer(fresh, optim)
    weights: list[Tensor] = [model.blocks[0].mlps[0].mlp.fc1.weight for model in (late, fresh)]
    before = weights[0].detach().clone()
    give_gradients(late, 0)
    weights[0].grad = None
    ours.step()
    assert torch.equal(weights[0], before)
    give_gradients(late, 1)
    give_gradients(fresh, 1)
    ours.step()
    theirs.step()
    assert torch.equal(weights[0], weights[1])


def test_restored_state_continues_with_the_same_bits() -> None:
    whole, resumed = network(), network()
    optim = Optim(name="muon", lr=0.01)
    one, two = build_optimizer(whole, optim), build_optimizer(resumed, optim)
    for step in range(6):
        if step == 3:
            state, two = two.state_dict(), build_optimizer(resumed, optim)
            two.load_state_dict(state)
            assert all(group["fused"] for group in two.param_groups)
        for model, optimizer in ((whole, one), (resumed, two)):
            give_gradients(model, step)
            optimizer.step()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def in_group(out: Path) -> NoReturn:
    """Take steps with two processes: with whole parameters, and sharded so that borders cut queries, keys and values.

    Write the parameters, and how many matrices each process made orthogonal.
    """
    compute, counts = rules.newton_schulz, list[int]()

    def counting(matrices: Tensor) -> Tensor:
        counts.append(len(matrices))
        return compute(matrices)

    rules.newton_schulz = counting
    with in_process_group():
        for way in ("whole", "sharded"):
            model = network()
            for part in (*model.blocks, model) if way == "sharded" else ():
                fully_shard(part)
            optimizer = build_optimizer(model, SHARDED)
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                for parameter in model.parameters():
                    whole = torch.randn(parameter.shape, generator=generator)
                    like = parameter if world.is_sharded(parameter) else None
                    parameter.grad = world.copied_like(whole, like)
                update(optimizer, torch.tensor(step != 1))
            found = {
                name: getattr(parameter, "full_tensor", lambda kept=parameter: kept)()
                for name, parameter in model.named_parameters()
            }
            save_file(found, out / f"{way}-{world.rank()}.safetensors")
        (out / f"counts-{world.rank()}.json").write_text(json.dumps(counts))
    world.leave(0)


@pytest.mark.processes
def test_two_processes_move_parameters_as_one_does_and_share_the_products(tmp_path: Path) -> None:
    assert in_two_processes(in_group, tmp_path) == [0, 0]
    model = network()
    optimizer = build_optimizer(model, SHARDED)
    for step in range(3):
        give_gradients(model, step)
        update(optimizer, torch.tensor(step != 1))
    for way, rank in product(("whole", "sharded"), range(2)):
        found = load_file(tmp_path / f"{way}-{rank}.safetensors")
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-5, atol=1e-7, msg=name)
    # of 2 blocks: query, key, value and output are 24 x 24, and the dense layers of the MLP have two other shapes
    for rank in range(2):
        assert json.loads((tmp_path / f"counts-{rank}.json").read_text()) == [4, 1, 1] * 6
