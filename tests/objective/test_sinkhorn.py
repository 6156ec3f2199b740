"""Sinkhorn-Knopp against its definition in NumPy in float64, and DINO's steps by it against theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dino_cases import BALANCED, make, taught
from masked_cases import TRUE, Images, batch
from torch import Tensor

from vitrail.objective.base import Prepared
from vitrail.objective.dino import DINOObjective, balancing_centre
from vitrail.training.step import backward


def divided(answers: Tensor, temperature: float, turns: int = 3) -> np.ndarray:
    """SwAV's appendix, in float64: all sums to 1, columns to 1 / outputs, rows to 1 / rows, and rows to 1 again."""
    q = np.exp(answers.double().numpy() / temperature)
    q /= q.sum()
    for _ in range(turns):
        q /= q.sum(0, keepdims=True) * q.shape[1]
        q /= q.sum(1, keepdims=True) * q.shape[0]
    return q * q.shape[0]


def targets(answers: Tensor, temperature: float, parts: int = 1, turns: int = 3) -> Tensor:
    centre = balancing_centre(answers.tensor_split(parts), temperature, turns)
    return ((answers - centre) / temperature).softmax(-1)


def cosines(rows: int, outputs: int, common: float = 0.0) -> Tensor:
    """Answers that have a direction in `common`: some outputs win nearly everywhere."""
    torch.manual_seed(0)
    one = torch.nn.functional.normalize(torch.randn(rows, 8) + common * torch.randn(8), dim=1)
    return one @ torch.nn.functional.normalize(torch.randn(outputs, 8), dim=1).T


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize(("rows", "outputs"), [(30, 12), (12, 70)])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_targets_are_the_definition(rows: int, outputs: int, parts: int, scale: float) -> None:
    answers = scale * cosines(rows, outputs, common=1.0)
    expected = divided(answers, 0.025)
    assert (answers / 0.025).softmax(-1).sub(torch.from_numpy(expected)).abs().max() > 0.5  # it matters
    np.testing.assert_allclose(targets(answers, 0.025, parts).numpy(), expected, rtol=0, atol=1e-4)


def test_after_many_turns_all_shares_are_equal() -> None:
    found = targets(cosines(40, 10).double(), 0.1, turns=1000)
    torch.testing.assert_close(found.sum(1), torch.ones(40).double())
    torch.testing.assert_close(found.sum(0), torch.full((10,), 4.0).double(), rtol=1e-6, atol=0)


def test_no_answer_is_too_large_or_too_small() -> None:
    """Exponentials of 40,000 are no numbers; the reference works with logarithms."""
    answers = 1000 * cosines(9, 5, common=1.0)
    answers[:, 2] = -1000  # an output that nobody chooses
    logs = answers.double().numpy() / 0.025
    for _ in range(3):
        logs = logs - np.logaddexp.reduce(logs, axis=0, keepdims=True)
        logs = logs - np.logaddexp.reduce(logs, axis=1, keepdims=True)
    found = targets(answers.double(), 0.025, parts=2)
    np.testing.assert_allclose(found.numpy(), np.exp(logs), rtol=0, atol=1e-6)
    assert bool(targets(answers, 0.025).isfinite().all())
    alike = targets(torch.full((4, 6), 0.3), 0.025)
    torch.testing.assert_close(alike, torch.full((4, 6), 1 / 6))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_step_is_its_definition(parts: int) -> None:
    """However it is cut, the targets are those of all crops together."""
    ours = make(config=BALANCED)
    prepared = ours.prepare(batch(5), step=2)
    answers = taught(ours, prepared)
    target = torch.from_numpy(divided(answers, 0.025)).view(5, 2, 24)
    known = ours.before_step(prepared, parts).precomputed
    assert known is not None and known.dtype == torch.float32
    torch.testing.assert_close(known.double(), target, rtol=0, atol=1e-4)
    assert known.element_size() * known.numel() == 5 * ours.precomputed_bytes
    with torch.no_grad():
        shown = ours.crops(prepared)
        student = (ours._learned(*shown).double() / 0.07).log_softmax(-1)
    pairs = [(g, v) for g in range(2) for v in range(5) if g != v]
    expected = -np.mean([(target[:, g] * student[:, v]).sum(-1).mean() for g, v in pairs])

    before = ours.centre.clone()
    outcome = backward(ours, batch(5), step=2, parts=parts, autocast=False)
    assert outcome.loss == pytest.approx(expected, abs=2e-4)
    assert torch.equal(ours.centre, before)  # not before the step is done
    ours.after_step(TRUE)
    found = before + 10 * (ours.centre - before)  # the momentum is 0.9
    running = ((answers - found) / 0.025).softmax(-1).view(5, 2, 24).double()
    torch.testing.assert_close(running, target, rtol=0, atol=1e-3)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_teacher_sees_each_micro_batch_once_in_the_precision_of_the_loss(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, seen = make(config=BALANCED), []
    original, count = ours.teacher.features, DINOObjective.loss

    def features(images: Tensor) -> Tensor:
        seen.append((len(images), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return original(images)

    def loss(self: DINOObjective, prepared: Prepared) -> Any:
        seen.append(len(prepared))
        return count(self, prepared)

    monkeypatch.setattr(ours.teacher, "features", features)
    monkeypatch.setattr(DINOObjective, "loss", loss)
    backward(ours, batch(7), step=0, parts=3, autocast=autocast)
    assert seen == [*((2 * images, autocast, False) for images in (3, 2, 2)), 3, 2, 2]


def test_an_evaluation_does_not_depend_on_what_is_evaluated_together() -> None:
    ours = make(config=BALANCED).eval()
    before, data = ours.centre.clone(), batch(4)
    whole = float(ours(data, step=-1)[0].detach())
    single = sum(
        float(ours(Images(*(part[n : n + 1] for part in (data.images, data.labels, data.index))), step=-1)[0].detach())
        for n in range(4)
    )
    assert whole == pytest.approx(single, rel=1e-4)
    ours.after_step(TRUE)
    assert torch.equal(ours.centre, before)
