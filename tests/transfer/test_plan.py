"""What `vitrail plan` recommends, and how it comes from a few timed steps to a whole run: rules and arithmetic."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.costs.count import training_flops
from vitrail.data.settings import Augment, Data
from vitrail.data.sources.open import open_data
from vitrail.durations import Epochs, Steps
from vitrail.errors import UsageError
from vitrail.model.variants import ViTConfig
from vitrail.recipes.paper_finetune import finetune
from vitrail.recipes.registry import recipe
from vitrail.training.batch_size import default_batch
from vitrail.training.batches import Sizes
from vitrail.training.run import Model, Optim, Progressive, Run, Schedule
from vitrail.training.timetable import Timetable
from vitrail.transfer import timing
from vitrail.transfer.protocol import finetune_run
from vitrail.transfer.recommend import (
    MEASURED,
    METHODS,
    TUNES,
    Method,
    Option,
    Situation,
    best_tuned,
    expectation,
    recommend,
)
from vitrail.transfer.timing import Rehearsal, Speeds, training_seconds
from vitrail.words import time_span

SMALL: dict[str, Any] = {
    "model": "Ti/4",
    "vit": Model(width=16, depth=1, heads=2, mlp_dim=16),
    "augment": Augment(crop="pad", pad=1),
    "schedule": Schedule(warmup=Steps(1)),
    "accumulate": 1,
}
NAMES = METHODS
CONFIG = ViTConfig(width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=(64, 64), classes=5)


def option(name: Method, seconds: float = 60.0, memory: int = 2**30, **more: Any) -> Option:
    return Option(name, f"vitrail {name}", seconds, memory, 100.0, 500, **more)


ALL = [option(name) for name in NAMES]


# the rule


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "adviser.jsonl"


def test_the_table_has_the_means_that_were_measured() -> None:
    measured: dict[tuple[int, str], list[float]] = {}
    for line in RESULTS.read_text().splitlines():
        row = json.loads(line)
        if row["key"]["weights"] != "random":  # the control
            measured.setdefault((row["key"]["each"], row["key"]["method"]), []).append(row["result"]["accuracy"])
    for each, accuracies in MEASURED.items():
        for method, accuracy in accuracies.items():
            found = measured[each, method]
            assert len(found) == 2 * 4 * 3  # networks, sets and seeds
            assert accuracy == pytest.approx(statistics.mean(found), abs=0.051)


@given(st.integers(1, 10**9), st.integers(1, 20_000), st.booleans())
def test_the_order_is_that_of_the_table_and_two_exceptions(images: int, classes: int, enlarged: bool) -> None:
    seen = Situation(images, classes, enlarged)
    found = expectation(seen)
    assert sorted(found.order) == sorted(METHODS) and found.why and found.source
    if images >= 14_000_000:  # section 4.3
        assert found.order[0] == "from scratch"
    elif enlarged:  # follow-up, Table 5
        assert found.order[0] == "attention-only"
    else:
        nearest = min(MEASURED, key=lambda each: abs(math.log(each * classes / images)))
        accuracy = [MEASURED[nearest][name] for name in found.order[:-1]]
        assert accuracy == sorted(accuracy, reverse=True) and found.order[-1] == "from scratch"
    assert recommend(seen, ALL).recommended.name == found.order[0]
    tuned = next(name for name in expectation(Situation(images, classes)).order if name in TUNES)
    if images < 14_000_000 and images / classes > 0.01:
        assert best_tuned(images / classes) == TUNES[tuned]


def test_what_takes_too_long_makes_room_for_the_next_best() -> None:
    seen = Situation(50_000, 100)
    times = {"full fine-tuning": 3_000.0, "attention-only": 2_000.0, "linear probe": 200.0, "few-shot": 20.0}
    ways = [option(name, times.get(name, 9_000.0)) for name in NAMES]
    for allowed, wanted in (
        (None, "full fine-tuning"),
        (3_000.0, "full fine-tuning"),
        (2_999.0, "attention-only"),
        (600.0, "linear probe"),
        (199.0, "few-shot"),
        (1.0, "few-shot"),  # nothing fits: the quickest
    ):
        found = recommend(seen, ways, seconds=allowed)
        assert found.recommended.name == wanted
        assert sum(way.recommended for way in found.options) == 1
    assert "more than" in recommend(replace(seen, images=500), ways, seconds=1.0).why


def test_a_limit_that_leaves_too_few_steps_is_not_recommended() -> None:
    seen = Situation(50_000, 100)
    for share, wanted in ((0.06, "full fine-tuning"), (0.04, "attention-only")):
        ways = [option("full fine-tuning", 600.0, share=share), option("attention-only", 500.0)]
        found = recommend(seen, ways, seconds=600.0)
        assert found.recommended.name == wanted
        assert f"{share:.0%}" in found.why


def test_what_does_not_fit_into_memory_is_not_recommended() -> None:
    seen = Situation(50_000, 100)
    ways = [option("full fine-tuning", memory=8 * 2**30), option("attention-only", memory=5 * 2**30)]
    assert recommend(seen, ways, memory=9 * 2**30).recommended.name == "full fine-tuning"
    found = recommend(seen, ways, memory=6 * 2**30)
    assert found.recommended.name == "attention-only"
    assert "8.0 GiB" in found.why and "6.0 GiB" in found.why
    with pytest.raises(UsageError, match=r"5\.0 GiB.*2\.0 GiB are free"):
        recommend(seen, ways, memory=2 * 2**30)


def test_a_network_without_attention_is_tuned_otherwise() -> None:
    ways = [way for way in ALL if way.name != "attention-only"]
    found = recommend(Situation(2_040, 102), ways)
    assert found.recommended.name == "full fine-tuning"
    assert [way.expected for way in found.options] == [3, 2, 1, 4]


@pytest.mark.parametrize("seen", [Situation(60, 12), Situation(9_000, 9)])
def test_the_reason_is_two_sentences(seen: Situation) -> None:
    why = recommend(seen, ALL).why
    assert why.endswith(".") and len([part for part in why.split(". ") if part]) == 2
    assert f"{seen.images:,}" in why and time_span(60.0) in why


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.42 s"), (42.4, "42 s"), (185, "3 min 5 s"), (7_380, "2 h 3 min"), (86_400 * 4.1, "4.1 days")],
)
def test_times_are_written_as_people_do(seconds: float, text: str) -> None:
    assert time_span(seconds) == text


# from a few steps to a run


def speeds(*, image: float = 0.01, **more: float) -> Speeds:
    given = dict.fromkeys(("update", "answer", "ready", "checkpoint", "model", "start"), 0.0)
    return Speeds((image,), **{**given, **more})


def planned(run: Run, images: int) -> tuple[Run, Timetable]:
    """The run on so many images, with a batch, as `resolve` decides it, and its plan."""
    batch = min(run.batch_size or default_batch(images), images)
    run = replace(run, batch_size=batch)
    return run, Timetable(run, max(images // batch, 1))


def test_a_run_is_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TRAIN", 7.0)
    run = Run(duration=Epochs(3), batch_size=10, evaluate_every=Steps(40), checkpoint_every=Steps(50))
    plan = Timetable(run, 40)  # 120 steps: evaluated after 40, 80, 120, saved after 50, 100 and at the end
    timed = {"update": 0.04, "answer": 0.001, "ready": 0.5, "checkpoint": 2.0, "model": 1.0, "start": 5.0}
    times = training_seconds(run, CONFIG, plan, speeds(image=0.01, **timed), validation=100, test=200)
    assert times.start == pytest.approx(7 + 5)
    assert times.steps == pytest.approx(120 * (10 * 0.01 + 0.04))
    assert times.evaluations == pytest.approx(3 * (1.0 + 0.5 + 100 * 0.001))
    assert times.checkpoints == pytest.approx(3 * 2.0)
    assert times.end == pytest.approx(0.5 + 200 * 0.001 + timing.PICTURED * 0.01)
    assert times.total == pytest.approx(sum(times.parts().values()))
    assert times.share == 1


@pytest.mark.parametrize(("total", "every"), [(100, 10), (105, 10), (9, 10), (1, 1)])
def test_evaluations_and_checkpoints_are_counted_as_the_loop_does_them(total: int, every: int) -> None:
    run = Run(duration=Steps(total), batch_size=1, evaluate_every=Steps(every), checkpoint_every=Steps(every))
    plan = Timetable(run, 7)
    steps = range(1, total + 1)
    assert timing.evaluations(plan) == sum(plan.evaluates(s) or bool(plan.over(s, 0.0)) for s in steps)
    assert timing.checkpoints(plan) == sum(plan.saves(s) or bool(plan.over(s, 0.0)) for s in steps)


def test_a_time_limit_is_kept() -> None:
    run = Run(duration=Steps(1_000), batch_size=10, evaluate_every=Steps(100), checkpoint_every=Steps(1_000))
    plan = Timetable(replace(run, time_limit=1.0), 40)
    timed = speeds(image=0.01, model=1.0, checkpoint=2.0, start=5.0)
    times = training_seconds(run, CONFIG, plan, timed)
    assert times.end == pytest.approx(1 + 2)  # after the last step: one more evaluation, and the checkpoint
    assert times.share == pytest.approx((60 - timing.TRAIN - 5 - 3) / (100 + 10 + 2))
    assert times.total == pytest.approx(60)
    for minutes in (0.5, 10.0):  # less and more than 1,000 steps take
        whole = Timetable(replace(run, duration=None, time_limit=minutes), 40)
        assert training_seconds(run, CONFIG, whole, timed).total == pytest.approx(60 * minutes)
    generous = Timetable(replace(run, time_limit=10.0), 40)
    free = Timetable(run, 40)
    assert training_seconds(run, CONFIG, generous, speeds()) == training_seconds(run, CONFIG, free, speeds())


def test_growing_images_take_the_time_that_lies_between() -> None:
    run = Run(progressive=Progressive(start=0.25), duration=Steps(800), batch_size=4)
    plan, sizes = Timetable(run, 100), Sizes(run.progressive, CONFIG)
    each = [1e-9 * training_flops(CONFIG, sizes.size(growth)) for growth in timing.GROWTHS]
    found = training_seconds(run, CONFIG, plan, replace(speeds(), images=tuple(each))).steps
    # a step whose time is in proportion to its FLOPs: the sum over all steps, one by one
    exact = sum(4e-9 * training_flops(CONFIG, sizes.size(plan.growth(step, 0.0))) for step in range(plan.total))
    assert found == pytest.approx(exact, rel=0.01)
    assert 800 * 4 * each[0] < found < 800 * 4 * each[-1]


@pytest.mark.parametrize("name", ["finetune", "scratch-small", "scratch-photos"])
def test_more_images_never_take_less_time(name: str) -> None:
    # what each image costs, and each evaluation; steps and epochs are another matter: fewer, larger ones are cheaper
    found = speeds(image=0.01, checkpoint=0.5, model=0.1, answer=0.005, ready=0.1)
    before = 0.0
    for images in sorted(
        {int(value) for value in np.geomspace(30, 3_000_000, 400)} | {19_999, 20_000, 499_999, 500_000}
    ):
        base = finetune_run(finetune(), "w", images) if name == "finetune" else recipe(name)
        run, plan = planned(replace(base, progressive=Progressive()), images)
        times = training_seconds(run, CONFIG, plan, found, validation=images // 10, test=images // 5)
        assert times.total >= before - 1e-6, images
        before = times.total


def test_steps_are_the_papers() -> None:
    for images, steps in ((2_040, 500), (50_000, 10_000), (1_281_167, 20_000)):  # Table 4
        run, plan = planned(finetune_run(finetune(), "w", images), images)
        assert plan.total == steps
        times = training_seconds(run, CONFIG, plan, speeds(image=0.01))
        assert times.steps == pytest.approx(steps * 512 * 0.01)
        assert math.isclose(times.steps, times.total - times.start)


def test_ten_steps_are_timed_and_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which an image takes 0.25 s and an update 0.5 s: found exactly, whatever the number of images."""
    clock, taken = [0.0], list[int]()

    def backward(objective: Any, batch: Any, **_: Any) -> None:
        clock[0] += 0.25 * len(batch.labels)
        taken.append(len(batch.labels))

    def divisor_of_gradients(*_: Any) -> tuple[torch.Tensor, None]:
        clock[0] += 0.5
        return torch.zeros(()), None

    run = Run(data=Data("digits", subset=200), batch_size=32, workers=0, device="cpu", duration=Steps(40), **SMALL)
    rehearsal = Rehearsal(run, open_data(run.data))
    monkeypatch.setattr(timing, "backward", backward)
    monkeypatch.setattr(timing, "divisor_of_gradients", divisor_of_gradients)
    monkeypatch.setattr(timing, "now", lambda device: clock[0])
    monkeypatch.setattr(rehearsal.setup.optimizer, "step", lambda: None)
    for seconds, images in ((1_000.0, 32), (20.0, 8), (0.01, 2)):
        taken.clear()
        found = rehearsal.speeds(seconds, (0.0, 0.0))
        assert found.images == (pytest.approx(0.25),) and found.update == pytest.approx(0.5)
        assert taken[:2] == [2, 2] and set(taken[2:]) == {images}  # warm-up; then steps as large as ten may be
        assert len(taken) == 2 + 1 + timing.STEPS or (seconds < 1 and len(taken) >= 2 + 1 + 1)


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd", "muon"])
def test_the_values_that_an_optimiser_stores_are_counted(name: Literal["adamw", "lamb", "sgd", "muon"]) -> None:
    data = Data("digits", subset=200)
    run = Run(data=data, batch_size=8, workers=0, device="cpu", duration=Steps(4), optim=Optim(name), **SMALL)
    rehearsal = Rehearsal(run, open_data(run.data))
    rehearsal.image_seconds(0.1)
    states = rehearsal.setup.optimizer.state.values()
    assert rehearsal.stored_values() == sum(x.numel() for state in states for x in state.values() if x.dim())
