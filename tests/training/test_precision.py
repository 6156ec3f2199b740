"""Precision: which one a device gets, and float16 with a factor of the loss that overflows and is resumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.data.settings import Augment
from vitrail.device import compute_precision, float32_products
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.objective.settings import Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.training.guard import FiniteGuard
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import FIRST_SCALE, LossScale, build_optimizer, divisor_of_gradients
from vitrail.training.parallel import Parallel
from vitrail.training.run import Average, Optim, Run
from vitrail.training.step import FinishedStep, TrainingStep

CUDA = torch.device("cuda")
CONFIG = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=5)


@dataclass
class Images:
    images: Tensor
    labels: Tensor
    index: Tensor


def batch() -> Images:
    rng = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (8, 3, 16, 16), generator=rng, dtype=torch.uint8)
    return Images(pixels, torch.arange(8) % 5, torch.arange(8))


def training(precision: Any, clip: float | None = 1.0) -> tuple[TrainingStep, list[FinishedStep]]:
    torch.manual_seed(0)
    model = build(CONFIG)
    nn.init.normal_(model.head.weight, std=0.1)  # type: ignore[union-attr, arg-type]
    objective = SupervisedObjective(model, Supervised(), Augment(), 5, 0).train()
    run = Run(precision=precision, batch_size=8, accumulate=2, optim=Optim(clip=clip))
    done: list[FinishedStep] = []
    step = TrainingStep(
        run,
        Parallel(objective),
        build_optimizer(objective, run.optim),
        Averager(objective, Average(kind="none")),
        FiniteGuard(objective, 3),
        on_memory=lambda *_: None,
        on_done=done.append,
        own=dict,
        scale=LossScale(torch.device("cpu")) if precision == "fp16" else None,
    )
    return step, done


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5), (8, 0), (9, 0)])
def test_a_gpu_gets_the_fastest_precision_it_has(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    expected = {6: "float32", 7: "fp16"}.get(capability[0], "bf16")
    assert compute_precision(CUDA) == expected
    assert compute_precision(CUDA, "float32") == "float32"  # what is asked for is done
    if capability >= (8, 0):
        assert compute_precision(CUDA, "tf32") == "tf32"
    else:
        with pytest.raises(UsageError, match="tf32 needs an NVIDIA GPU from Ampere on"):
            compute_precision(CUDA, "tf32")


def test_tf32_is_set_only_where_it_is_asked_for() -> None:
    def now() -> tuple[str, str]:
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]

    before = now()
    with float32_products("float32"):
        assert now() == ("ieee", "ieee")
    with float32_products("tf32"):
        assert now() == ("tf32", "tf32")
    assert now() == before


@pytest.mark.parametrize("clip", [None, 0.1])
def test_float16_learns_as_float32_does(clip: float | None) -> None:
    losses: dict[str, list[float]] = {}
    for precision in ("float32", "fp16"):
        step, done = training(precision, clip)
        for number in range(12):
            step(batch(), number, rate=3e-3)
        losses[precision] = [one.sums.loss for one in done if one.finite]
        assert max(one.sums.norm for one in done if one.finite) < 100  # the factor is not in them
    found = losses["fp16"]  # the first factors overflow, and such a step changes nothing
    assert len(found) >= 6 and losses["float32"][5] < 0.8 * losses["float32"][0]
    assert found == pytest.approx(losses["float32"][: len(found)], rel=0.02)


def test_an_overflow_is_skipped_and_halves_the_factor() -> None:
    step, done = training("fp16")
    assert step.scale is not None
    step.scale.value.fill_(2.0**8)
    step(batch(), 0, rate=1e-3)
    before = {name: value.clone() for name, value in step.objective.state_dict().items()}
    step.scale.value.fill_(2.0**40)  # gradients of float16 overflow
    step(batch(), 1, rate=1e-3)
    assert [one.finite for one in done] == [True, False] and torch.isfinite(torch.tensor(done[1].sums.loss))
    assert step.scale.value == 2.0**39
    assert all(torch.equal(value, before[name]) for name, value in step.objective.state_dict().items())
    step.scale.value.fill_(2.0**8)
    step(batch(), 2, rate=1e-3)
    assert done[2].finite and step.scale.value == 2.0**8


def test_a_resumed_run_has_the_same_factor() -> None:
    scale, again = LossScale(torch.device("cpu")), LossScale(torch.device("cpu"))
    for finite in (True, False, True, True):
        scale.update(torch.tensor(finite))
    again.load_state_dict({name: value.clone() for name, value in scale.state_dict().items()})
    assert again.value == FIRST_SCALE / 2
    for _ in range(1998):
        scale.update(torch.tensor(True))
        again.update(torch.tensor(True))
    assert again.value == scale.value == FIRST_SCALE  # after 2,000 finite steps since the overflow


@pytest.mark.parametrize("max_norm", [None, 0.5, 100.0])
def test_the_factor_is_removed_before_gradients_are_clipped(max_norm: float | None) -> None:
    plain, scaled = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    plain.grad = torch.tensor([3.0, 4.0, 0.0])
    scaled.grad = plain.grad * 1024
    norm, divisor = divisor_of_gradients([scaled], max_norm, torch.tensor(1024.0))
    expected, clipping = divisor_of_gradients([plain], max_norm)
    assert norm == expected == 5 and divisor is not None
    torch.testing.assert_close(scaled.grad / divisor, plain.grad / (1 if clipping is None else clipping))
