"""What learns and what does not, in every kind of network; and what a network that is frozen in part costs."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from vitrail.costs.count import kept_bytes
from vitrail.data.settings import Augment
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.objective.settings import Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.training import batch_size
from vitrail.training.batch_size import image_bytes, micro_batches
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer, divisor_of_gradients, update
from vitrail.training.optim.tune import check_tune, freeze_rest
from vitrail.training.parallel import prepare_model
from vitrail.training.run import Average, Optim, Run, Tune
from vitrail.training.step import backward
from vitrail.weights.assemble import skeleton

PARTS: tuple[Tune, ...] = ("attention", "attention+positions", "ffn", "head")
SIDE = 16
TINY: dict[str, Any] = dict(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(SIDE, SIDE), classes=3)
KINDS: dict[str, ViTConfig] = {
    "plain": ViTConfig.of(**TINY),
    "parallel": ViTConfig.of(**TINY, block="parallel", branches=3),
    "axial": ViTConfig.of(**TINY, block="axial", pool="gap", positions="relative"),
    "relative": ViTConfig.of(**TINY, positions="relative", place="shared"),
    "beit": ViTConfig.of(
        **TINY, positions="relative_bias", pool="gap", class_token=True, final_norm="pooled", layer_scale=0.1
    ),
    "map": ViTConfig.of(**TINY, pool="map"),
    "registers": ViTConfig.of(**TINY, pool="cls+gap", registers=2, register_positions=True),
    "distilled": ViTConfig.of(**TINY, distilled=True),
    "pre-logits": ViTConfig.of(**TINY, pre_logits=8),
    "swiglu": ViTConfig.of(**TINY, mlp="swiglu", layer_scale=0.1),
    "2d, every layer": ViTConfig.of(**TINY, positions="2d", place="every"),
    "hmlp": ViTConfig.of(**TINY, stem="hmlp", positions="sincos"),
    "hybrid": ViTConfig.of(**TINY, stem="resnet", stem_units=(1,)),
}
CLASSIFIER = r"(head|head_dist|pre_logits\.hidden)\.(weight|bias)"
ATTENTION = r"blocks\.\d+\.(row\.|column\.)?attentions\.\d+\.attention\.(qkv|out)\.(weight|bias)"
MLP = r"blocks\.\d+\.(row\.|column\.)?mlps\.\d+\.mlp\.fc[12]\.(weight|bias)"
LEARNS = {
    "attention": rf"{CLASSIFIER}|{ATTENTION}|pool\.(query|key_value|out)\.(weight|bias)",
    "attention+positions": rf"{CLASSIFIER}|{ATTENTION}|pool\.(query|key_value|out)\.(weight|bias)|positions\..*",
    "ffn": rf"{CLASSIFIER}|{MLP}|pool\.mlp\.fc[12]\.(weight|bias)",
    "head": CLASSIFIER,
}
LOGIT_POSITIONS = {"axial": "positions.embedding", "relative": "positions.embedding", "beit": "positions.bias"}

every = pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind in KINDS for part in PARTS])


def network(config: ViTConfig | ResNetConfig) -> nn.Module:
    torch.manual_seed(0)
    model = build(config)
    for parameter in model.parameters():  # nothing that starts at zero and so takes or gives no gradient
        nn.init.normal_(parameter, mean=0.0 if parameter.ndim > 1 else 0.5, std=0.2)
    return model


def pixels(count: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@dataclass
class Images:
    images: Tensor
    labels: Tensor
    index: Tensor


def batch(count: int = 6) -> Images:
    return Images(pixels(count), torch.arange(count) % 3, torch.arange(count))


def learning(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_every_part_is_tried() -> None:
    assert get_args(Tune) == ("all", *PARTS, "lora")  # which test_lora.py tries


@pytest.mark.parametrize("kind", KINDS)
def test_what_learns_is_what_its_name_says(kind: str) -> None:
    model = network(KINDS[kind])
    for part in PARTS:
        model.requires_grad_(True)
        freeze_rest(model, part)
        learns_what_its_name_says(model, kind, part)


def learns_what_its_name_says(model: nn.Module, kind: str, part: Tune) -> None:
    expected = {name for name, _ in model.named_parameters() if re.fullmatch(LEARNS[part], name)}
    expected |= {LOGIT_POSITIONS[kind]} if part == "attention" and kind in LOGIT_POSITIONS else set()
    assert learning(model) == expected
    assert {name for name in expected if re.fullmatch(CLASSIFIER, name)}  # the classifier always does


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_autograd_through_all_of_it(kind: str) -> None:
    """Against float64, which takes torch's own layers and fused attention, with nothing frozen."""
    whole = network(KINDS[kind]).eval()
    exact = copy.deepcopy(whole).double()
    labels = torch.arange(3)
    with attention_path("fused"):
        nn.functional.cross_entropy(exact(pixels()), labels).backward()
    expected = {name: parameter.grad for name, parameter in exact.named_parameters()}
    for part in PARTS:
        model = copy.deepcopy(whole)
        freeze_rest(model, part)
        nn.functional.cross_entropy(model(pixels()), labels).backward()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, (part, name)
                continue
            error = (parameter.grad.double() - expected[name]).norm()
            assert error <= 1e-4 * expected[name].norm() + 1e-7, (part, name)


def steps(model: nn.Module, optim: Optim, *, autocast: bool = False, parts: int = 1) -> tuple[Any, Averager]:
    """Three optimiser steps as the loop makes them, with an average."""
    objective = SupervisedObjective(model, Supervised(), Augment(mixup=0.5), 3, 0).train()
    optimizer = build_optimizer(objective, optim)
    average = Averager(model, Average(kind="ema", decay=0.5))
    for step in range(3):
        backward(objective, batch(), step=step, parts=parts, autocast=autocast)
        norm, divisor = divisor_of_gradients(objective.parameters(), optim.clip)
        update(optimizer, torch.isfinite(norm), divisor)
        average.update(step)
        optimizer.zero_grad(set_to_none=True)
    return optimizer, average


@pytest.mark.parametrize(
    ("kind", "part", "name"),
    [
        (kind, part, ("adamw", "sgd", "lamb")[(row + column) % 3])
        for row, kind in enumerate(KINDS)
        for column, part in enumerate(PARTS)
    ],
)
def test_frozen_bits_stay_and_have_no_state(kind: str, part: Tune, name: Any) -> None:
    model = network(replace(KINDS[kind], dropout=0.1, drop_path=0.1))
    freeze_rest(model, part)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer, average = steps(model, Optim(name=name, lr=0.1, weight_decay=0.1))
    names = learning(model)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) == (key not in names), key
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert set(optimizer.state) == held
    assert set(average.state_dict()["mean"]) == names


@pytest.mark.train
@pytest.mark.parametrize("part", PARTS)
def test_bf16_accumulation_and_activation_checkpointing_leave_the_frozen_alone(part: Tune) -> None:
    def trained(**how: Any) -> dict[str, Tensor]:
        model = network(KINDS["plain"])
        freeze_rest(model, part)
        prepare_model(model, Run(activation_checkpointing=how.pop("checkpointing", False)))
        steps(model, Optim(name="sgd", lr=0.01), **how)
        return model.state_dict()

    start, plain = network(KINDS["plain"]).state_dict(), trained()
    for other in (trained(parts=4), trained(checkpointing=True), trained(checkpointing=True, parts=2, autocast=True)):
        for key, value in other.items():
            torch.testing.assert_close(value, plain[key], rtol=0.05, atol=5e-3, msg=key)
            assert torch.equal(value, start[key]) == torch.equal(plain[key], start[key]), key


@pytest.mark.parametrize("part", PARTS)
def test_a_frozen_batchnorm_uses_its_statistics_and_keeps_them(part: Tune) -> None:
    model = network(KINDS["hmlp"])
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    for norm in norms:
        nn.init.normal_(norm.running_mean)
    freeze_rest(model, part)
    model.eval().train()  # an evaluation, and back
    assert model.training and not any(norm.training for norm in norms)
    together = model.stem(pixels(4).float())
    alone = torch.cat([model.stem(image[None]) for image in pixels(4).float()])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)  # of batch statistics it would not be
    again = copy.deepcopy(model).eval().train()
    assert not any(module.training for module in again.modules() if isinstance(module, nn.BatchNorm2d))
    freeze_rest(whole := network(KINDS["hmlp"]), "all")
    assert all(module.training for module in whole.train().modules())


# memory


def kept(config: ViTConfig | ResNetConfig, part: Tune, *, autocast: bool = False) -> float:
    """Bytes per image that a forward pass keeps for the backward pass, on this CPU."""
    model = network(config).train()
    freeze_rest(model, part)
    images = torch.rand(4, config.channels, *config.image_size)

    def forward(number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), attention_path("explicit"):
            return model(images[:number].clone())

    return kept_bytes(forward)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_keeps_less_than_the_whole_and_the_head_only_what_it_reads(kind: str) -> None:
    config = KINDS[kind]
    whole, attention, positions, ffn, head = (kept(config, part) for part in ("all", *PARTS))
    assert head < min(attention, ffn) <= max(attention, ffn) < whole
    assert attention <= positions < whole
    assert head == 4 * (config.pooled + (config.pre_logits or 0))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("branches", [1, 2])
def test_kept_bytes_by_hand(precision: str, branches: int) -> None:
    """Of T tokens of width D, M hidden features and A = heads x T^2 values of maps, each in two or four bytes.

    Everything: the pixels; per branch, what each norm reads and writes, q, k, v, maps, what the output projection
    reads, and what the MLP has before its GELU (in bf16 after it, too); two statistics for each norm and token.
    A frozen product does not keep what it reads. In front of the first tensor that needs a gradient nothing is kept.
    """
    block = {"block": "parallel", "branches": branches} if branches > 1 else {}
    config = ViTConfig.of(**{**TINY, "depth": 3}, pool="gap", **block)
    tokens, width, hidden, size = 16, 16, 32, 2 if precision == "bf16" else 4
    maps, row, statistics = 2 * tokens**2, tokens * width, 8 * tokens
    gelu = tokens * hidden * (2 if precision == "bf16" else 1)
    # a norm's input is shared by parallel branches, unless each casts it for itself
    inputs = row * (branches if precision == "bf16" else 1)
    norm = size * inputs + branches * statistics  # what it takes to differentiate the norms of one kind
    qkv = size * branches * (3 * row + maps)
    read = size * branches * row  # what the first, or the last, products of one kind read
    last = size * row + statistics + size * width  # the final norm, and what the classifier reads

    attention = norm + read + qkv + read + norm + size * branches * tokens * hidden
    ffn = norm + qkv + norm + read + size * branches * gelu
    whole = norm + read + qkv + read + norm + read + size * branches * gelu
    expected = {
        "all": size * 3 * SIDE**2 + 3 * whole + last,
        "attention": 3 * attention - norm + last,
        "attention+positions": 3 * attention + last,  # the positions are in front of the first norm
        "ffn": 3 * ffn - 2 * norm - qkv + last,
        "head": size * width,
    }
    assert {part: kept(config, part, autocast=size == 2) for part in ("all", *PARTS)} == expected


def test_with_the_head_alone_the_trunk_has_no_graph() -> None:
    for config in (*KINDS.values(), ResNetConfig(units=(1, 1), width=32, image_size=(32, 32), classes=3)):
        model = network(replace(config, pre_logits=None) if isinstance(config, ViTConfig) else config).train()
        freeze_rest(model, "head")
        images = torch.rand(2, 3, *config.image_size)
        features = model.features(images)
        assert features.grad_fn is None and not features.requires_grad
        assert model(images).requires_grad


def test_a_batch_of_a_frozen_network_is_cut_less_but_by_what_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a frozen trunk almost nothing is kept, and yet its layers need room while they compute."""
    config = ViTConfig(width=64, depth=4, heads=2, mlp_dim=256, patch=8, image_size=(64, 64), classes=3)
    monkeypatch.setattr(batch_size, "free_memory", lambda device: 15 * 2**20)

    def parts(part: Tune) -> int:
        model = network(config)
        freeze_rest(model, part)
        objective = SupervisedObjective(model, Supervised(), Augment(crop="center"), 3, 0).train()
        run = Run(batch_size=64, precision="float32", tune=part)
        return micro_batches(objective, run, config, image_bytes(objective, run, config))

    found = {part: parts(part) for part in ("all", *PARTS)}
    assert found["all"] > found["attention"] > found["head"] > 1


# sizes, and what is refused


@pytest.mark.parametrize("name", ["S36x1/16", "S18x2/16"])
def test_attention_is_a_third_of_a_vision_transformer(name: str) -> None:
    """4 D^2 + 4 D values in each of 36 attentions, side by side or in a row, of 12 D^2 + 13 D in each block."""
    config = variant(name, classes=0)
    model = skeleton(config)
    freeze_rest(model, "attention")
    tuned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert tuned == 36 * (4 * 384**2 + 4 * 384)
    assert tuned / count == pytest.approx(1 / 3, abs=0.01)  # 66 % need not be stored again


def test_only_what_is_there_can_be_tuned() -> None:
    vit, resnet = KINDS["plain"], ResNetConfig(units=(1, 1), width=32, classes=3)
    for part in PARTS:
        with pytest.raises(UsageError, match=r"no weights are given. Name them with --from WEIGHTS"):
            check_tune(Run(tune=part), vit)
        check_tune(Run(tune=part, weights="runs/x"), vit)
    check_tune(Run(), resnet)
    check_tune(Run(tune="head", weights="r50.npz"), resnet)
    for part, lacking in (("attention", "attention"), ("attention+positions", "attention"), ("ffn", "ffn")):
        with pytest.raises(UsageError, match=f"r50.npz is a ResNet.* no {lacking} layers"):
            check_tune(Run(tune=part, weights="r50.npz"), resnet)
