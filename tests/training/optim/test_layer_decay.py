"""Layer-wise decay of the rate: whose is what, against timm and published code; what steps make of it; whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch
from references import copy_of
from timm.models.beit import Beit
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from tiny_runs import assert_same_bits, lines
from torch import nn

from tests.properties.every_kind import ROWS, whole
from vitrail.cli import main
from vitrail.config import from_yaml
from vitrail.errors import CheckpointError, UsageError
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.objective.beit import BEiTObjective
from vitrail.objective.dino import DINOObjective
from vitrail.objective.mae import MAEObjective
from vitrail.objective.settings import DINO, MAE, BEiT, Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer, TokenizerObjective
from vitrail.training import loop
from vitrail.training.checkpoints.state import differing
from vitrail.training.optim.optimizer import build_optimizer, layer_factors, set_learning_rate, split_parameters
from vitrail.training.optim.rules import LAMB, SGD
from vitrail.training.optim.tune import freeze_rest
from vitrail.training.run import Model, Optim, Run
from vitrail.weights.save import save
from vitrail.weights.timm.names import Naming, conversions

DECAY, DEPTH = 0.5, 3
SIZES = dict(width=16, depth=DEPTH, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=3)
TIMMS: dict[str, Any] = dict(embed_dim=16, depth=DEPTH, num_heads=2, mlp_ratio=2)
TIMMS |= dict(patch_size=4, img_size=8, num_classes=3)
TWINS: dict[str, tuple[ViTConfig, Any]] = {
    "class token": (ViTConfig.of(**SIZES, registers=2), lambda: VisionTransformer(**TIMMS, reg_tokens=2)),
    "average": (
        ViTConfig.of(**SIZES, pool="gap", final_norm="pooled", class_token=True, layer_scale=0.1),
        lambda: VisionTransformer(**TIMMS, global_pool="avg", init_values=0.1),
    ),
    "attention pool": (
        ViTConfig.of(**SIZES, pool="map"),
        lambda: VisionTransformer(**TIMMS, global_pool="map", class_token=False),
    ),
    "parallel": (
        ViTConfig.of(**SIZES, block="parallel", branches=2),
        lambda: VisionTransformer(**TIMMS, block_fn=ParallelThingsBlock),
    ),
    "BEiT, a table for each layer": (
        ViTConfig.of(**SIZES, positions="relative_bias", layer_scale=0.1),
        lambda: Beit(**TIMMS, use_rel_pos_bias=True, use_abs_pos_emb=False, init_values=0.1, global_pool="token"),
    ),
    "BEiT, one table": (
        ViTConfig.of(**SIZES, positions="relative_bias", place="shared", layer_scale=0.1),
        lambda: Beit(
            **TIMMS, use_shared_rel_pos_bias=True, use_abs_pos_emb=False, init_values=0.1, global_pool="token"
        ),
    ),
}
STACKED = ViTConfig.of(**SIZES, positions="relative_bias", block="parallel", branches=2)


def published(name: str) -> int:
    """The depth of a parameter in MAE's util/lr_decay.py and BEiT's optim_factory.py, by timm's name.

    Neither had registers, which are to the network what the class token is.
    """
    part, number, *_ = [*name.split("."), ""]
    if part in ("cls_token", "reg_token", "pos_embed", "patch_embed"):
        return 0
    return int(number) + 1 if part == "blocks" else DEPTH + 1


@pytest.mark.parametrize("kind", TWINS)
def test_factors_are_those_of_published_code_and_but_for_two_timms(kind: str) -> None:
    config, make = TWINS[kind]
    model, peer = build(config), make()
    names = {parameter: name for name, parameter in peer.named_parameters()}
    theirs = {
        names[parameter]: group["lr_scale"]
        for group in timm.optim.param_groups_layer_decay(peer, layer_decay=DECAY)
        for parameter in group["params"]
    }
    factors, parameters = layer_factors(model, DECAY), dict(model.named_parameters())
    assert factors.keys() == set(parameters.values())
    seen = []
    for entry in conversions(config, Naming(beit="BEiT" in kind)):
        ours = factors[parameters[entry.ours]]
        for number, name in enumerate(entry.theirs):
            factor = ours[number] if len(ours) > 1 else ours[0]
            assert factor == DECAY ** (DEPTH + 1 - published(name)), name
            if name.startswith("norm."):
                assert (factor, theirs[name]) == (1, DECAY)  # timm: with the last block
            elif name.startswith("rel_pos_bias."):
                assert (factor, theirs[name]) == (1, DECAY ** (DEPTH + 1))  # timm: with the patch embedding
            else:
                assert factor == pytest.approx(theirs[name], rel=1e-12), name
            seen.append(name)
    assert sorted(seen) == sorted(names.values())


@pytest.mark.parametrize(
    ("settings", "depths"),
    [
        (dict(positions="1d"), [0]),
        (dict(positions="1d", place="every"), [1, 2, 3]),
        (dict(positions="2d", place="every"), [1, 2, 3]),
        (dict(positions="2d", place="shared"), [4]),
        (dict(positions="relative"), [1, 2, 3]),
        (dict(positions="relative", place="shared"), [4]),
        (dict(positions="relative", block="axial", pool="gap"), [1, 2, 3]),
        (dict(stem="hmlp", stem_norm="layer", pool="gap"), [0]),
        (dict(stem="resnet", stem_units=(1, 1), patch=16, image_size=(32, 32)), [0]),
    ],
)
def test_positions_have_the_depth_of_the_layer_that_uses_them(settings: dict[str, Any], depths: list[int]) -> None:
    model = build(ViTConfig.of(**{**SIZES, **settings}))
    factors = layer_factors(model, DECAY)
    expected = tuple(DECAY ** (DEPTH + 1 - depth) for depth in depths)
    assert {factors[parameter] for parameter in model.positions.parameters()} == {expected}
    assert {factors[parameter] for parameter in model.stem.parameters()} == {(DECAY ** (DEPTH + 1),)}
    for number, block in enumerate(model.blocks):
        assert {factors[parameter] for parameter in block.parameters()} == {(DECAY ** (DEPTH - number),)}


def test_what_an_objective_owns_besides_learns_at_the_full_rate() -> None:
    def network() -> Any:
        return build(replace(ViTConfig.of(**SIZES), classes=0))

    tokenizer = ImageTokenizer(Tokenizer(codes=5, width=8, depth=1), 4)
    mae = MAEObjective(network(), MAE(decoder_width=16, decoder_depth=2, decoder_heads=2), 0)
    beit = BEiTObjective(network(), BEiT(smallest_block=1), 0, tokenizer)
    dino = DINOObjective(network(), DINO(outputs=16, hidden=16, bottleneck=8, local_crops=2), 0)
    for objective in (mae, beit, dino):
        factors = layer_factors(objective, DECAY)
        inside = layer_factors(objective.model, DECAY)
        assert len(set(inside.values())) == DEPTH + 2
        besides = {name: factors[p] for name, p in objective.named_parameters() if p not in inside}
        assert besides.pop("mask", (DECAY ** (DEPTH + 1),)) == (DECAY ** (DEPTH + 1),)
        assert besides and set(besides.values()) == {(1.0,)}
        assert all(factors[parameter] == inside[parameter] for parameter in inside)
    held = [p for group in build_optimizer(dino, Optim(layer_decay=DECAY)).param_groups for p in group["params"]]
    assert not set(held) & set(dino.teacher.parameters())
    for objective in (TokenizerObjective(tokenizer.requires_grad_(True)), build(ResNetConfig(units=(1,), width=8))):
        with pytest.raises(UsageError, match=r"optim\.layer_decay is 0\.5.* a (ImageTokenizer|ResNet) has none"):
            build_optimizer(objective, Optim(layer_decay=DECAY))


@pytest.mark.parametrize("same", [None, 1.0])
def test_without_decay_the_groups_are_what_they_were(same: float | None) -> None:
    model = build(STACKED)
    groups = build_optimizer(model, Optim(lr=0.1, weight_decay=0.3, layer_decay=same)).param_groups
    sides = [list(side.values()) for side in split_parameters(model)]
    assert [group["name"] for group in groups] == ["kernels", "others"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    for group, side in zip(groups, sides, strict=True):
        assert "factor" not in group and group["lr"] == 0.1
        assert all(ours is theirs for ours, theirs in zip(group["params"], side, strict=True))


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5])
def test_impossible_values_are_usage_errors(value: float) -> None:
    with pytest.raises(UsageError, match=r"optim\.layer_decay is .* greater than 0 and at most 1"):
        build_optimizer(build(STACKED), Optim(layer_decay=value))


def test_an_sgd_step_is_factor_times_rate_times_gradient() -> None:
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)  # from now on torch calls hooks in the inherited step, too
    model = build(STACKED).double()
    optimizer = build_optimizer(model, Optim(name="sgd", lr=9.0, momentum=0.9, weight_decay=0.0, layer_decay=DECAY))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        set_learning_rate(optimizer, 0.1)
        optimizer.step()
    for name, value in model.named_parameters():
        part, number, *_ = [*name.split("."), ""]
        depth = {"stem": 0, "cls": 0}.get(part, int(number) + 1 if part == "blocks" else DEPTH + 1)
        factor: Any = DECAY ** (DEPTH + 1 - depth)
        if part == "positions":  # [layer, offset, head]
            factor = DECAY ** torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)[:, None, None]
        moved = 0.1 * factor * (1 + 1.9) * 0.25
        torch.testing.assert_close(before[name] - value, moved * torch.ones_like(value), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
@pytest.mark.parametrize("part", ["all", "attention"])
def test_each_parameter_moves_as_with_an_optimiser_of_its_own(name: Any, part: Any) -> None:
    """One for each parameter, and for each row of a table of all layers, at its own rate; some of it may be frozen."""
    torch.manual_seed(0)
    model = build(STACKED).double()
    freeze_rest(model, part)
    optimizer = build_optimizer(model, Optim(name=name, lr=0.1, weight_decay=0.3, layer_decay=DECAY))
    assert all(group["params"] for group in optimizer.param_groups)
    factors, (kernels, others) = layer_factors(model, DECAY), split_parameters(model)
    apart: dict[str, list[tuple[nn.Parameter, torch.optim.Optimizer]]] = {}
    for key, parameter in {**kernels, **others}.items():
        rows = parameter.detach().split(1) if len(factors[parameter]) > 1 else [parameter.detach()]
        for row, factor in zip(rows, factors[parameter], strict=True):
            own = nn.Parameter(row.clone())
            decay = 0.3 if key in kernels else 0.0
            alone: Any = {
                "adamw": lambda group: torch.optim.AdamW([group]),
                "sgd": lambda group: SGD([group], momentum=0.9),
                "lamb": lambda group: LAMB([group], eps=1e-8),
            }[name]({"params": [own], "lr": 0.1 * factor, "weight_decay": decay, "adapt": key in kernels})
            apart.setdefault(key, []).append((own, alone))
    assert any(len(rows) > 1 for rows in apart.values())
    for _ in range(3):
        for key, parameter in {**kernels, **others}.items():
            parameter.grad = torch.randn_like(parameter)
            rows = parameter.grad.split(1) if len(apart[key]) > 1 else [parameter.grad]
            for (own, alone), gradient in zip(apart[key], rows, strict=True):
                own.grad = gradient.clone()
                alone.step()
        optimizer.step()
    for key, parameter in {**kernels, **others}.items():
        expected = torch.cat([own for own, _ in apart[key]]) if len(apart[key]) > 1 else apart[key][0][0]
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-12, msg=key)


# whole runs


@pytest.mark.train
def test_a_run_is_logged_with_the_largest_rate_and_resumed_with_its_decay_only(tmp_path: Path) -> None:
    """The row has a table of positions for each layer; that it is resumed exactly, test_resumed.py tests."""
    folder = copy_of(whole("layers"), tmp_path)
    assert max(line["lr"] for line in lines(folder, "train")) == 3e-3
    run = ROWS["layers"].run("layers", tmp_path)
    run = replace(run, optim=replace(run.optim, layer_decay=None))
    with pytest.raises(CheckpointError, match=r"optim\.layer_decay: 0\.7 there, None here"):
        loop.fit(run, resume=folder)
    with pytest.raises(AssertionError):
        assert_same_bits(folder, loop.fit(run).folder)


def test_a_checkpoint_from_before_there_was_a_decay_is_of_the_same_run() -> None:
    assert differing({"optim": {"lr": 0.1}}, {"optim": {"lr": 0.1, "layer_decay": None}}) == []


@pytest.mark.train
@pytest.mark.parametrize("name", ["mae-finetune", "beit-finetune"])
def test_the_recipes_decay_by_layers_from_the_command_line(name: str, tmp_path: Path) -> None:
    """He et al.'s FINETUNE.md and BEiT's command for a B/16 that nothing has tuned yet: 0.65 both."""
    positions = dict(positions="relative_bias", place="shared") if name == "beit-finetune" else dict(positions="sincos")
    base = save(build(ViTConfig.of(**{**SIZES, **positions, "classes": 0})), tmp_path / "base").path
    command = ["finetune", "digits", "--recipe", name, "--from", str(base), "--image-size", "8", "--out", str(tmp_path)]
    command += ["--preprocess.image-size", "8", "8", "--duration", "2 steps", "--batch-size", "4", "--workers", "0"]
    command += ["--data.subset", "40", "--accumulate", "1", "--schedule.warmup", "0 steps"]
    assert main([*command, "--dry-run"]) == 0
    assert main([*command, "--dry-run", "--optim.layer-decay", "2"]) == 2
    assert not list(tmp_path.glob("*-1"))
    assert main(command) == 0
    recorded = from_yaml(tmp_path / f"{name}-1" / "config.yaml", Run())
    assert recorded.optim.layer_decay == 0.65 and recorded.vit == Model(drop_path=0.1, init=name.split("-")[0])
