"""Micro-batches that threads compute at the same time: one gradient, the same bits twice, and when one thread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import SHORT, lines, tiny_run
from torch import Tensor, nn

from tests.training.test_step import Images, data, make
from vitrail.data.settings import Augment
from vitrail.model.build import create
from vitrail.objective.settings import Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.training.given import Given
from vitrail.training.loop import fit
from vitrail.training.processes.threads import Threaded, concurrent
from vitrail.training.run import Model, Run
from vitrail.training.step import backward

THREADS = "vitrail.training.processes.threads"
IMAGE_WORK = 16 * 16**2
"""Tokens of an image times the square of the width, in these tests."""


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads compute steps of any size: the networks of these tests are tiny."""
    monkeypatch.setattr(f"{THREADS}.LEAST_WORK", 1)


def gradients(objective: SupervisedObjective, batch: Images, threads: int, parts: int = 1) -> list[Tensor | None]:
    network = Threaded(objective, threads)
    try:
        objective.zero_grad(set_to_none=True)
        sums = backward(objective, batch, step=0, parts=parts, autocast=False, network=network)
        assert sums.count == len(batch.labels)
        return [None if each.grad is None else each.grad.clone() for each in objective.parameters()]
    finally:
        network.close()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("threads", "parts", "count"), [(2, 1, 12), (3, 2, 11), (4, 1, 3)])
def test_threads_give_the_gradient_of_the_whole_batch_and_the_same_bits_twice(
    threads: int, parts: int, count: int
) -> None:
    objective, batch = make(), data(count)
    objective.model.cls.requires_grad_(False)
    objective.zero_grad(set_to_none=True)
    one = backward(objective, batch, step=0, parts=1, autocast=False)
    expected = [each.grad for each in objective.parameters()]
    first, second = (gradients(objective, batch, threads, parts) for _ in range(2))
    for a, b, c in zip(first, second, expected, strict=True):
        assert (a is None) == (b is None) == (c is None)
        if a is not None and b is not None:
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-6)
    assert one.count == count and first.count(None) == 1


@pytest.mark.usefixtures("always")
def test_threads_see_weights_that_changed_or_moved() -> None:
    objective, batch = make(), data()
    network = Threaded(objective, 2)
    for change in (lambda weight: weight.data.mul_(2), lambda weight: setattr(weight, "data", weight.data * 3)):
        change(objective.model.head.weight)
        objective.zero_grad(set_to_none=True)
        threaded = backward(objective, batch, step=0, parts=1, autocast=False, network=network)
        objective.zero_grad(set_to_none=True)
        assert threaded.loss == pytest.approx(
            backward(objective, batch, step=0, parts=1, autocast=False).loss, rel=1e-5
        )
    network.close()


@pytest.mark.usefixtures("always")
def test_an_error_of_a_thread_is_raised_and_leaves_no_gradient_in_a_copy() -> None:
    objective, batch = make(), data()
    network = Threaded(objective, 2)
    batch.labels[-1] = 99  # not a class: the second micro-batch fails
    with pytest.raises((IndexError, RuntimeError)):
        backward(objective, batch, step=0, parts=1, autocast=False, network=network)
    assert all(each.grad is None for one in network._copies for each in one.parameters())
    network.close()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("threads", "parts"), [(2, 1), (2, 3)])
def test_batchnorm_learns_in_threads_as_from_the_same_micro_batches_one_by_one(threads: int, parts: int) -> None:
    one, several, batch = make(stem="early"), make(stem="early"), data()
    network = Threaded(several, threads)
    for step in range(2):  # the second step starts from the statistics of the first
        for objective in (one, several):
            objective.zero_grad(set_to_none=True)
        backward(one, batch, step=step, parts=parts * threads, autocast=False)
        backward(several, batch, step=step, parts=parts, autocast=False, network=network)
    network.close()
    for (name, expected), found in zip(one.named_parameters(), several.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)
    statistics = {name: each for name, each in one.named_buffers() if "running" in name or "tracked" in name}
    assert len(statistics) == 6  # two BatchNorms
    for name, expected in statistics.items():
        torch.testing.assert_close(several.get_buffer(name), expected, rtol=1e-5, atol=1e-6, msg=name)


def test_small_steps_are_computed_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{THREADS}.LEAST_WORK", 256 * IMAGE_WORK)
    objective, batch = make(), data(512)
    network = Threaded(objective, 2)
    prepared = objective.prepare(batch, step=0)
    assert [network.at_once(prepared, parts) for parts in (1, 2)] == [2, 1]
    assert network.at_once(replace(prepared, images=prepared.images[..., :12]), 1) == 1
    few = data()
    objective.zero_grad(set_to_none=True)
    backward(objective, few, step=0, parts=1, autocast=False)
    expected = [each.grad for each in objective.parameters()]
    objective.zero_grad(set_to_none=True)
    backward(objective, few, step=0, parts=1, autocast=False, network=network)
    network.close()
    assert not network._copies
    for one, same in zip(expected, objective.parameters(), strict=True):
        assert (one is None and same.grad is None) or torch.equal(one, same.grad)


class _OwnStem(nn.Conv2d):
    pass


def test_what_cannot_be_computed_at_the_same_time_is_not_and_the_decisions_say_why() -> None:
    def reason(objective: SupervisedObjective, given: Given | None = None, **run: object) -> str:
        asked = Run(batch_size=64, **run)
        assert concurrent(objective, asked, given or Given()) == (1, "")
        count, why = concurrent(objective, replace(asked, concurrent=2), given or Given())
        assert count == 1 and why.startswith("1, not 2: ")
        return why

    assert "dropout" in reason(make(dropout=0.1)) and "dropout" in reason(make(drop_path=0.1))
    averaging = make(stem="hmlp", patch=16)
    for norm in averaging.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = None
    assert "BatchNorm" in reason(averaging)
    assert "compile" in reason(make(), compile=True)
    assert "own" in reason(make(), Given(objective=lambda logits, targets: logits.sum(-1)))
    hooked, replaced = make(), make()
    hooked.model.head.register_forward_hook(lambda *_: None)
    replaced.model.head = _OwnStem(16, 5, 1)
    assert "hooks" in reason(hooked) and "parts of your own" in reason(replaced)


def test_the_default_follows_cores_batch_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def default(objective: SupervisedObjective, batch: int) -> int:
        return concurrent(objective, Run(batch_size=batch), Given())[0]

    with torch.device("meta"):
        large = create("B/16", classes=5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(f"{THREADS}.LEAST_WORK", 256 * IMAGE_WORK)
    assert [default(make(), batch) for batch in (511, 512, 768, 4096)] == [1, 2, 3, 4]
    assert concurrent(make(), Run(batch_size=512, accumulate=2), Given())[0] == 1
    small = create("R50x1", classes=5, units=(1, 1, 1, 1), width=16, image_size=64)
    residual = SupervisedObjective(small, Supervised(), Augment(), 5, seed=0)
    monkeypatch.setattr(f"{THREADS}.LEAST_WORK", 16 * 16**2 * 64**2)  # 16 images, whose first stage is 64 wide
    assert [default(residual, batch) for batch in (31, 32)] == [1, 2]
    monkeypatch.setattr(f"{THREADS}.LEAST_WORK", 1)
    assert [default(make(stem="early"), batch) for batch in (63, 64, 128)] == [1, 2, 4]
    monkeypatch.setattr(f"{THREADS}.hindrance", lambda *_: None)
    objective = make()
    objective.model = large
    assert default(objective, 512) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert default(make(), 512) == 1


@pytest.mark.train
@pytest.mark.usefixtures("always")
def test_a_run_with_threads_learns_the_same(tmp_path: Path) -> None:
    still = Model(width=16, depth=1, heads=2, mlp_dim=32)
    runs = [tiny_run(tmp_path, **{**SHORT, "vit": still, "concurrent": count}) for count in (1, 2)]
    one, two = ([line["loss"] for line in lines(fit(run).folder, "train")] for run in runs)
    assert two == pytest.approx(one, rel=1e-5) and len(one) == 4
