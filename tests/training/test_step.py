"""The gradient of a step, whatever the micro-batches, wrappers and processes; and the plan of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from vitrail.data.settings import Augment
from vitrail.durations import Epochs, Examples, Percent, Steps
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.objective.base import Moment, Prepared
from vitrail.objective.settings import Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.training.parallel import prepare_model
from vitrail.training.run import Average, Optim, Run, Schedule
from vitrail.training.step import backward, seed_step
from vitrail.training.timetable import Timetable
from vitrail.words import time_span

CONFIG = ViTConfig(width=16, depth=3, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=5)


@dataclass
class Images:
    images: Tensor
    labels: Tensor
    index: Tensor


def data(count: int = 12) -> Images:
    rng = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, 3, 16, 16), generator=rng, dtype=torch.uint8)
    return Images(pixels, torch.randint(0, 5, (count,), generator=rng), torch.arange(count))


def make(augment: Augment | None = None, **changes: object) -> SupervisedObjective:
    torch.manual_seed(0)
    model = build(CONFIG.changed(**changes))
    torch.nn.init.normal_(model.head.weight)
    return SupervisedObjective(model, Supervised(), augment or Augment(), 5, 0).train()


def gradients(objective: SupervisedObjective, batch: Images, parts: int = 1) -> dict[str, Tensor]:
    objective.zero_grad(set_to_none=True)
    backward(objective, batch, step=3, parts=parts, autocast=False)
    return {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("parts", [2, 5, 12, 50])
@pytest.mark.parametrize("mixing", [Augment(), Augment(mixup=1.0, cutmix=1.0)])
def test_accumulation_gives_the_gradient_of_the_whole_batch(parts: int, mixing: Augment) -> None:
    objective = make(mixing)
    whole, cut = gradients(objective, data()), gradients(objective, data(), parts)
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_the_gradient_is_that_of_the_mean() -> None:
    objective = make()
    ours = gradients(objective, data(), parts=3)
    objective.zero_grad(set_to_none=True)
    batch = data()
    torch.nn.functional.cross_entropy(objective.model(batch.images), batch.labels).backward()
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


class _CountsTriples(SupervisedObjective):
    """An objective whose examples are not images."""

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        loss, count, metrics = super().loss(prepared)
        return loss, 3 * count, metrics


def test_the_gradient_is_that_of_the_mean_over_what_an_objective_counts() -> None:
    images, triples = make(), make()
    triples.__class__ = _CountsTriples
    expected, found = gradients(images, data(), parts=2), gradients(triples, data(), parts=2)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value / 3, rtol=1e-5, atol=1e-8, msg=name)


def test_outcomes_are_sums_and_means_over_all_parts() -> None:
    objective = make()
    batch = data()
    outcome = backward(objective, batch, step=0, parts=5, autocast=False)
    logits = objective.model(batch.images)
    assert outcome.count == 12
    assert outcome.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, batch.labels).item(), rel=1e-5)
    assert outcome.metrics == {"top1": float((logits.argmax(1) == batch.labels).sum())}


def test_reduced_precision_is_near_and_leaves_float32_gradients() -> None:
    objective = make()
    exact = gradients(objective, data())
    objective.zero_grad(set_to_none=True)
    backward(objective, data(), step=3, parts=1, autocast=True)
    grads = {name: parameter.grad for name, parameter in objective.named_parameters()}
    assert all(grad is not None and grad.dtype == torch.float32 for grad in grads.values())
    whole = torch.cat([exact[name].flatten() for name in grads])  # one small tensor alone may be off by more
    difference = torch.cat([(grads[name] - exact[name]).flatten() for name in grads])
    assert torch.linalg.vector_norm(difference) < 0.05 * torch.linalg.vector_norm(whole)


def test_randomness_is_a_function_of_seed_step_and_rank() -> None:
    def draw(*words: int) -> float:
        seed_step(*words)
        return float(torch.rand(()))

    assert draw(0, 5, 0) == draw(0, 5, 0)
    assert len({draw(s, t, r) for s in (0, 1, -1) for t in range(3) for r in range(2)}) == 18


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_activation_checkpointing_changes_neither_gradients_nor_names(drop: float) -> None:
    plain, wrapped = make(dropout=drop, drop_path=drop), make(dropout=drop, drop_path=drop)
    prepare_model(wrapped.model, Run(activation_checkpointing=True))
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    assert all(block.recompute for block in wrapped.model.blocks)  # each on its own
    seed_step(0, 0, 0)
    expected = gradients(plain, data())
    seed_step(0, 0, 0)
    for name, value in gradients(wrapped, data()).items():
        assert torch.equal(value, expected[name]), name


def test_activation_checkpointing_keeps_less() -> None:
    def kept(run: Run) -> int:
        objective, total = make(), 0
        prepare_model(objective.model, run)

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor.detach()  # a result that its own operation keeps would be a cycle that is never freed

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            objective(data(), step=0)
        return total

    assert kept(Run(activation_checkpointing=True)) < 0.3 * kept(Run())


# the plan


def plan(**changes: object) -> Timetable:
    run = Run(
        duration=Epochs(10),
        batch_size=100,
        optim=Optim(lr=1.0),
        schedule=Schedule(warmup=Percent(10)),
        average=Average(start=Percent(75)),
    )
    return Timetable(replace(run, **changes), per_epoch=20)


def test_durations_become_steps_once() -> None:
    found = plan(evaluate_every=Examples(500), checkpoint_every=Epochs(0.5))
    assert (found.total, found.warmup, found.average_start) == (200, 20, 150)
    assert (found.evaluate_every, found.checkpoint_every) == (5, 10)
    assert [step for step in range(31) if found.saves(step)] == [10, 20, 30]
    assert found.over(199, 1e9) == "" and found.over(200, 0.0) == "all steps done"
    assert all(found.logs(step) for step in range(1, 201))
    many = plan(duration=Steps(10_000), evaluate_every=Steps(4_999))  # and 2,000 lines
    assert [step for step in range(4_991, 5_006) if many.logs(step)] == [4_995, 4_999, 5_000, 5_005]
    fast = plan(duration=None, time_limit=1.0)  # 20,000 steps in a minute, of a schedule of 600
    assert 600 <= sum(fast.logs(step, 60 * step / 20_000) for step in range(1, 20_001)) <= 2_000


def test_a_time_limit_stretches_the_schedule_over_the_time() -> None:
    free, limited = plan(), plan(time_limit=1.0)
    for share in (0.0, 0.05, 0.1, 0.5, 0.99):
        assert limited.learning_rate(0, 60 * share) == pytest.approx(free.learning_rate(round(200 * share), 0.0))
    assert limited.learning_rate(100, 1.0) == free.learning_rate(100, 1e9)  # ahead of its time: by steps
    assert limited.learning_rate(100, 60.0) == pytest.approx(0.0, abs=1e-12)
    assert limited.over(10, 60.0) == "time limit" and limited.left(10, 45.0) == 15.0
    assert limited.left(190, 45.0) == pytest.approx(10 * 45 / 190)  # all steps are done before


def test_without_a_duration_the_time_limit_is_the_length() -> None:
    found = plan(duration=None, time_limit=1.0, evaluate_every=Percent(10), checkpoint_every=Epochs(1))
    assert found.over(10**6, 30.0) == "" and found.over(10**6, 60.0) == "time limit"
    assert found.done(10**6, 30.0) == 0.5 and found.left(10**6, 45.0) == 15.0
    free = plan(duration=Epochs(30))
    for share in (0.05, 0.5, 0.99):
        assert found.learning_rate(7, 60 * share) == pytest.approx(
            free.learning_rate(round(600 * share), 0.0), rel=0.02
        )
    with pytest.raises(UsageError, match="the run has no end"):
        plan(duration=None)


def test_a_percentage_of_a_time_limit_is_one_of_its_time() -> None:
    found = plan(duration=None, time_limit=1.0, evaluate_every=Percent(10), checkpoint_every=Epochs(1))
    seconds = [step * 0.7 for step in range(86)]
    due = [step for step, now in enumerate(seconds) if found.evaluates(step, now)]
    assert due == [next(step for step, now in enumerate(seconds) if now >= 6 * part) for part in range(1, 10)]
    assert [step for step, now in enumerate(seconds) if found.saves(step, now)] == [20, 40, 60, 80]


def test_a_limit_that_changes_a_little_repeats_no_evaluation() -> None:
    found = plan(duration=None, time_limit=1.0, evaluate_every=Percent(50))
    due = []
    for step, limit in enumerate([60.0, 60.0, 60.0, 64.0, 58.0, 64.0]):
        found.limit = limit
        due.append(found.evaluates(step, 10.5 * step))
    assert due == [False, False, False, False, True, False]


def test_the_last_step_ends_as_near_to_the_limit_as_possible() -> None:
    found = plan(duration=None, time_limit=1.0)
    assert found.over(10, 56.9) == "" and found.over(10, 57.5) == "time limit"  # steps of 5.7 seconds
    assert found.expected(2, 12.0) is None and found.expected(10, 30.0) == 20
    assert plan().expected(1, 0.0) == 200


def test_weight_decay_follows_half_a_cosine_and_stays_where_no_end_is_given() -> None:
    changing = plan(optim=Optim(weight_decay=0.04, weight_decay_end=0.4))
    for done in (0, 0.25, 0.5, 1):
        wanted = 0.4 + (0.04 - 0.4) * (1 + math.cos(math.pi * done)) / 2
        assert changing.weight_decay(round(done * changing.total), 0.0) == pytest.approx(wanted, abs=1e-3)
    assert {plan(optim=Optim(weight_decay=0.3)).weight_decay(step, 0.0) for step in (0, 13, 99)} == {0.3}


def test_objectives_are_told_how_far_a_run_is() -> None:
    made = plan()
    moment = made.moment(made.total // 2, 0.0)
    assert moment.past(Steps(made.total)) == pytest.approx(0.5, abs=0.01)
    assert moment.past(Percent(50)) == 1.0 and moment.past(Percent(100)) == pytest.approx(0.5, abs=0.01)
    assert moment.past(Steps(0)) == 1.0 and Moment().past(Steps(5)) == 0.0
    assert Moment(0.5, total=40, per_epoch=10).past(Epochs(4)) == 0.5
    assert Moment(0.5, total=40, batch_size=8).past(Examples(8 * 80)) == 0.25


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(UsageError, match="duration is 0 steps; it must be greater than 0"):
        plan(duration=Steps(0))
    with pytest.raises(UsageError, match="warmup"):
        plan(schedule=Schedule(warmup=Steps(201)))
    with pytest.raises(UsageError, match="percentage"):
        plan(duration=Percent(5))
    with pytest.raises(UsageError, match="time_limit"):
        plan(time_limit=0.0)


def test_time_spans_read_well() -> None:
    assert [time_span(s) for s in (0.4, 59.4, 185, 7385)] == ["0.4 s", "59 s", "3 min 5 s", "2 h 3 min"]
