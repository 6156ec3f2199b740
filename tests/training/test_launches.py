"""The launches of a training step of S/16 in bfloat16 on a GPU, and the bytes that they move.

The forward pass runs on fake CUDA tensors. autograd refuses those without a driver, so the backward pass and the update
run on CPU tensors, with the computations of a GPU, and are counted by name.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from like_a_gpu import like_a_gpu
from torch import Tensor

from vitrail.costs.count import FusedAttention, fake, fake_autocast
from vitrail.data.settings import Augment
from vitrail.model.build import create
from vitrail.model.compute import attention_path, computed
from vitrail.objective.base import Prepared
from vitrail.objective.dino import DINOObjective
from vitrail.objective.settings import DINO, Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.torch_private import TorchDispatchMode, tree_leaves
from vitrail.training.optim.optimizer import build_optimizer, divisor_of_gradients, update
from vitrail.training.run import Optim
from vitrail.training.step import backward

IMAGES = 2
FREE = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "_unsafe_view", "_reshape_alias",
        "detach", "lift_fresh", "device", "promote_types", "is_same_size", "_record_function_enter_new",
        "_record_function_exit"}  # fmt: skip
"""Operations that are not views and launch nothing."""


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel, by name, and the bytes of their inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in FREE:
            self.names[name] += 1
            self.bytes += sum(each.nbytes for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor))
        return result

    @property
    def total(self) -> int:
        return sum(self.names.values())


def batch(device: str) -> Prepared:
    labels = torch.zeros(IMAGES, dtype=torch.int64, device=device)
    pixels = torch.zeros(IMAGES, 3, 224, 224, dtype=torch.uint8, device=device)
    return Prepared(pixels, labels, torch.arange(IMAGES), labels)


def objective(model: Any) -> SupervisedObjective:
    return SupervisedObjective(model.train(), Supervised(), Augment(), 1000, 0)


@pytest.mark.full_size
def test_the_launches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the budget: 813 launches and 1.60 GB for two images, most of them of parameters and the optimiser."""
    like_a_gpu(monkeypatch)
    with (
        fake(lambda: objective(create("S/16", classes=1000))) as ours,
        computed("fast"),
        FusedAttention("cuda"),
        Launches() as forward,
        fake_autocast("cuda", "bf16"),
    ):
        ours.loss(batch("cuda"))
    torch.manual_seed(0)
    ours = objective(create("S/16", classes=1000))
    optimizer = build_optimizer(ours, Optim())
    with attention_path("fused"):
        for _ in range(2):  # the first step makes the optimiser's state
            with Launches() as on_cpu, torch.autocast("cpu", torch.bfloat16):
                ours.loss(batch("cpu"))
            with Launches() as both:
                backward(ours, batch("cpu"), step=0, parts=1, autocast=True)
                norm, divisor = divisor_of_gradients(ours.parameters(), 1.0)
                update(optimizer, torch.isfinite(norm), divisor)
            optimizer.zero_grad()
    assert abs(on_cpu.total - forward.total) <= 5  # the CPU computes what a GPU would
    assert forward.names["native_layer_norm"] == 25 and forward.names["_to_copy"] < 35  # no parameter on its own
    assert forward.total + both.total - on_cpu.total <= 540
    assert forward.bytes + both.bytes - on_cpu.bytes < 1.37e9


@pytest.mark.full_size
def test_the_launches_of_a_step_of_dino(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two global and eight local crops; before the budget: 2,191, most of them of parameters."""
    like_a_gpu(monkeypatch)
    torch.manual_seed(0)
    ours = DINOObjective(create("S/16", classes=0), DINO(), 0).train()
    optimizer = build_optimizer(ours, Optim())
    photographs = torch.randint(0, 256, (IMAGES, 3, 448, 448), dtype=torch.uint8)
    loaded: Any = SimpleNamespace(images=photographs, labels=torch.zeros(IMAGES), index=torch.arange(IMAGES))
    with attention_path("fused"):
        for step in range(2):  # the first makes the optimiser's state
            with Launches() as launches:
                backward(ours, loaded, step=step, parts=1, autocast=True)
                norm, divisor = divisor_of_gradients(ours.parameters(), 3.0)
                finite = torch.isfinite(norm)
                update(optimizer, finite, divisor)
                ours.after_step(finite)
            optimizer.zero_grad()
    assert launches.total <= 1700, launches.names
