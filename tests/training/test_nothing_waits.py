"""Nothing in a step waits for a GPU: counted for every objective on fake CUDA tensors, which need no driver.

Autograd refuses those, so the backward pass runs on CPU tensors, where the same operations count by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from device_work import DeviceWork
from torch import Tensor, nn

from vitrail.data.labels.numbers import TargetScale
from vitrail.data.settings import Augment
from vitrail.durations import Steps
from vitrail.model.build import build
from vitrail.model.low_rank import adapt
from vitrail.model.variants import ViTConfig
from vitrail.objective.base import Moment, Objective, RunFacts
from vitrail.objective.beit import BEiTObjective
from vitrail.objective.dino import DINOObjective
from vitrail.objective.dinov2 import DINOv2Objective
from vitrail.objective.distillation import DistillationObjective, Teacher
from vitrail.objective.mae import MAEObjective
from vitrail.objective.masked_patch import MaskedPatchObjective
from vitrail.objective.settings import DINO, MAE, BEiT, DINOv2, Distill, MaskedPatch, Regression, Supervised, Tokenizer
from vitrail.objective.supervised import RegressionObjective, SupervisedObjective
from vitrail.objective.tokenizer import ImageTokenizer, TokenizerObjective
from vitrail.torch_private import FakeTensorMode
from vitrail.training.guard import FiniteGuard
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer
from vitrail.training.parallel import Parallel
from vitrail.training.run import Average, Optim, Run
from vitrail.training.step import StepSums, TrainingStep, backward

CLASSES, BATCH = 5, 4
NETWORK = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=CLASSES)
HMLP = NETWORK.changed(stem="hmlp", layer_scale=0.1, drop_path=0.1, dropout=0.1)  # with statistics of BatchNorm
CODES = Tokenizer(codes=12, width=8, depth=1, features=4, decay=0.5)
PATCHES = DINOv2(outputs=24, hidden=32, bottleneck=12, local_crops=1, local_size=0.5, gram_weight=1.0)
VIEWS = DINO(outputs=24, hidden=32, bottleneck=12, local_crops=3, local_size=0.5, freeze_last_layer=Steps(0))


def network(config: ViTConfig = NETWORK, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(config.changed(**changes))


def supervised(settings: Supervised, augment: Augment | None = None, config: ViTConfig = NETWORK) -> Objective:
    return SupervisedObjective(network(config), settings, augment or Augment(), CLASSES, 0, [9.0, 3.0, 1.0, 5.0, 2.0])


def lora() -> Objective:
    objective = supervised(Supervised())
    adapt(objective.model, [objective.model.blocks], rank=2, scale=2.0)
    for name, parameter in objective.named_parameters():
        parameter.requires_grad = ".lora." in name or ".head." in name
    return objective


def distilled(distill: Distill, **changes: Any) -> Objective:
    """With a teacher of a larger input, which has two classes for one of ours and none for another."""
    teacher = Teacher(
        network(image_size=(20, 20)).eval().requires_grad_(False),
        "",
        None if "features" in distill.kind else [[4, 3], [2], [], [1], [0]],
    )  # type: ignore[arg-type]
    return DistillationObjective(network(**changes), Supervised(), RunFacts(classes=CLASSES), distill, teacher)


def beit(stem: str = "linear") -> Objective:
    model = network(classes=0, positions="relative_bias", place="shared", stem=stem)
    return BEiTObjective(model, BEiT(smallest_block=2), 0, ImageTokenizer(CODES, 4).requires_grad_(False))


PLAIN, SEVERAL, NUMBERS = (
    torch.arange(BATCH),
    torch.eye(BATCH, CLASSES, dtype=torch.int8),
    torch.arange(2.0 * BATCH).view(BATCH, 2).double(),
)
OBJECTIVES: dict[str, tuple[Callable[[], Objective], Tensor]] = {
    "mixup": (lambda: supervised(Supervised(smoothing=0.1), Augment(mixup=0.5)), PLAIN),
    "cutmix": (lambda: supervised(Supervised(loss="sigmoid"), Augment(cutmix=0.5), HMLP), PLAIN),
    "rare classes": (lambda: supervised(Supervised(class_weights="effective", logit_adjustment=0.5)), PLAIN),
    "several labels": (lambda: supervised(Supervised(loss="asymmetric"), Augment(mixup=0.5)), SEVERAL),
    "bce": (lambda: supervised(Supervised(loss="bce", bce_threshold=0.2), Augment(cutmix=0.5)), SEVERAL),
    "numbers": (
        lambda: RegressionObjective(
            network(classes=2), Regression(), Augment(mixup=0.5), TargetScale((0.5, 1.0), (1.0, 2.0)), 0
        ),
        NUMBERS,
    ),
    **{
        f"masked-patch, {target}": (
            lambda target=target: MaskedPatchObjective(network(classes=0), MaskedPatch(target=target), 0),
            PLAIN,
        )
        for target in ("colour", "small", "pixels")
    },
    "mae": (
        lambda: MAEObjective(network(classes=0, positions="sincos"), MAE(decoder_width=16, decoder_heads=2), 0),
        PLAIN,
    ),
    "mae, hmlp": (lambda: MAEObjective(network(HMLP, classes=0), MAE(decoder_width=16, decoder_heads=2), 0), PLAIN),
    "beit": (beit, PLAIN),
    "beit, hmlp": (lambda: beit("hmlp"), PLAIN),
    "tokenizer": (lambda: TokenizerObjective(ImageTokenizer(CODES, 4)), PLAIN),
    "dino": (lambda: DINOObjective(network(HMLP, classes=0), VIEWS, 0), PLAIN),
    "dino, sinkhorn": (lambda: DINOObjective(network(classes=0), replace(VIEWS, centring="sinkhorn"), 0), PLAIN),
    "dinov2": (lambda: DINOv2Objective(network(classes=0), PATCHES, 0), PLAIN),
    "dino, global crops": (lambda: DINOObjective(network(classes=0), replace(VIEWS, local_crops=0), 0), PLAIN),
    "soft teacher": (lambda: distilled(Distill(kind="soft")), PLAIN),
    "hard teacher": (lambda: distilled(Distill(kind="hard"), distilled=True), PLAIN),
    "teacher's features": (lambda: distilled(Distill(kind="features")), PLAIN),
    "lora": (lora, PLAIN),
}


def batch(labels: Tensor, side: int = 24) -> Any:
    pixels = torch.randint(
        0, 256, (BATCH, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return SimpleNamespace(images=pixels, labels=labels, index=torch.arange(BATCH))


@contextmanager
def fake_cuda(objective: Objective) -> Iterator[None]:
    """Context in which the objective is on a CUDA device that computes shapes only.

    There is no driver for what is no operation on tensors: events, and values that are read when a step is done.
    """
    event = SimpleNamespace(record=lambda *_: None, synchronize=lambda: None)

    def gradients(loss: Tensor, gradient: Tensor) -> None:
        for parameter in objective.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None

    with (
        patch.object(torch.cuda, "Event", lambda: event),
        patch.object(Tensor, "backward", gradients),
        patch.object(torch.autograd, "grad", lambda loss, value: (torch.empty_like(value),)),
        patch.object(StepSums, "numbers", property(lambda sums: dict.fromkeys(sums.names, 1.0))),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            for part in (objective, *owned(objective)):
                part.to("cuda")
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
        with patch.object(ImageTokenizer, "to", lambda tokenizer, device: tokenizer):  # it is there
            yield


def owned(objective: Objective) -> list[nn.Module]:
    """Return the frozen networks that an objective owns besides its parts."""
    if isinstance(objective, DistillationObjective):
        return [objective._teacher[0].network]
    return [objective._tokenizer[0]] if isinstance(objective, BEiTObjective) else []


def training_step(objective: Objective) -> TrainingStep:
    """With clipping and an average, in two micro-batches."""
    run = Run(batch_size=BATCH, accumulate=2, precision="float32", optim=Optim(lr=1e-3, clip=1.0))
    average = Averager(objective.model, Average("ema"))
    parts = (Parallel(objective), build_optimizer(objective, run.optim), average, FiniteGuard(objective, 3))
    return TrainingStep(run, *parts, on_memory=lambda *_: None, on_done=lambda _: None, own=lambda: {"elapsed": 0.0})


@pytest.mark.train
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_waits_for_no_device(name: str) -> None:
    make, labels = OBJECTIVES[name]
    objective = make().train()
    objective.at(Moment(done=0.3, total=10))
    loaded = batch(labels, 24 if "dino" in name else 16)
    with fake_cuda(objective):
        step = training_step(objective)
        assert step.late
        with DeviceWork("cuda"):
            step(loaded, 0, rate=0.1)  # constants go to the device once
        with DeviceWork("cuda") as work:
            step(loaded, 1, rate=0.1)
    assert work.found() == {}
    assert work.launches


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_backward_pass_waits_for_no_device(name: str) -> None:
    make, labels = OBJECTIVES[name]
    objective, original = make().train(), Tensor.backward
    found: list[dict[str, int]] = []

    def counted(loss: Tensor, gradient: Tensor) -> None:
        with DeviceWork("cpu") as work:
            original(loss, gradient)
        found.append(work.found())
        assert work.launches

    with patch.object(Tensor, "backward", counted):
        backward(objective, batch(labels, 24 if "dino" in name else 16), step=0, parts=2, autocast=False)
    assert found == [{}, {}]


@pytest.mark.train
def test_dino_starts_few_kernels_beside_its_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of S/16 may start 1,700, of which the passes of teacher and student take 1,450."""
    objective = DINOObjective(network(classes=0), DINO(), 0).train()
    outputs, loaded = objective.config.outputs, batch(PLAIN, 24)
    with fake_cuda(objective):
        monkeypatch.setattr(objective, "_taught", lambda near: torch.zeros(*near.shape[:2], outputs, device="cuda"))
        monkeypatch.setattr(
            objective,
            "_learned",
            lambda near, far: torch.zeros(len(near), 2 + far.shape[1], outputs, device="cuda", requires_grad=True),
        )
        with DeviceWork("cuda") as work:
            prepared = objective.before_step(objective.prepare(loaded, step=0), 1)
            objective.loss(prepared)
            objective.after_step(torch.ones((), dtype=torch.bool, device="cuda"))
    assert sum(work.launches.values()) <= 250, work.launches


def test_each_kind_of_wait_is_seen() -> None:
    """A count that finds nothing must be able to find something."""
    with FakeTensorMode(allow_non_fake_inputs=True), DeviceWork("cuda") as work:
        values, host = torch.zeros(4, device="cuda"), torch.zeros(4)
        values.sum().item()
        assert work.found() == {"item": 1}
        values[values > 0]
        values[values > 0] = 0.0
        assert work.found() == {"item": 1, "boolean index": 2}
        values.nonzero_static(size=2)
        torch.tensor([1.0, 2.0], device="cuda")
        host.to("cuda")
        assert work.waits["blocking copy"] == work.waits["pageable copy"] == 2
        host.to("cuda", non_blocking=True)
        values.cpu()
        assert (work.waits["blocking copy"], work.waits["pageable copy"]) == (3, 3)
        host.pin_memory().to("cuda", non_blocking=True)
        values.copy_(host.pin_memory(), non_blocking=True)
        values.to("cpu", non_blocking=True)
        assert (work.waits["blocking copy"], work.waits["pageable copy"]) == (3, 3)
