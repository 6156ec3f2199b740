"""`fit`: what a run leaves behind, that interruptions do not change it, and that nothing bad is ever kept."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import copy_of
from tiny_runs import SHORT, assert_same_bits, interrupted, lines, tensors, tiny_run

from tests.properties.every_kind import whole
from vitrail.config import from_yaml
from vitrail.data.images.ops import eval_transform
from vitrail.data.settings import Augment, Data
from vitrail.data.sources.open import open_data
from vitrail.durations import Epochs, Steps
from vitrail.errors import CheckpointError, DataError, TrainingError, UsageError
from vitrail.evaluation.metric import Metric
from vitrail.training import loop, validation
from vitrail.training import step as stepping
from vitrail.training.checkpoints import checkpoint
from vitrail.training.checkpoints.state import RunStatus
from vitrail.training.guard import run_lock
from vitrail.training.progress import Progress
from vitrail.training.run import Average, Model, Optim, Run, Schedule
from vitrail.training.step import FinishedStep, StepSums
from vitrail.weights.store import load_model
from vitrail.weights.verify import verify

FILES = {
    *("config.yaml", "run.json", "classes.json", "split.json", "metrics.jsonl", "batch.png", "evaluation.npz"),
    *("checkpoints", "model"),
}


# what a run leaves behind


@pytest.mark.train
def test_the_folder_holds_everything(digits_run: Path) -> None:
    assert {path.name for path in digits_run.iterdir()} >= FILES
    facts = json.loads((digits_run / "run.json").read_text())
    assert facts["data"]["images"]["train"] == 140
    assert facts["data"]["fingerprint"] == open_data(Data(path="digits")).fingerprint
    assert facts["result"]["steps"] == 16 and facts["result"]["ended"] == "all steps done"
    assert facts["started"] <= facts["ended"]
    assert {"command", "versions", "commit", "machine", "seed", "decisions"} <= facts.keys()
    assert json.loads((digits_run / "classes.json").read_text()) == [str(digit) for digit in range(10)]
    assert sorted(path.name for path in (digits_run / "checkpoints").iterdir()) == ["step-000012", "step-000016"]


@pytest.mark.train
def test_the_recorded_run_has_no_open_questions_and_replays(digits_run: Path, tmp_path: Path) -> None:
    recorded = from_yaml(digits_run / "config.yaml", Run())
    assert recorded.image_size == 8 and recorded.preprocess is not None and recorded.cache == "yes"
    again = loop.fit(replace(recorded, out=str(tmp_path)))
    assert_same_bits(digits_run, again.folder)


def test_every_step_is_logged_with_its_schedule(digits_run: Path) -> None:
    steps = lines(digits_run, "train")
    assert [line["step"] for line in steps] == list(range(1, 17))
    rates = [line["lr"] for line in steps]
    assert rates[0] == 0 and rates[1] == max(rates) == 3e-3  # a warmup of 5 % of 16 steps is one step
    assert rates[1:] == sorted(set(rates[1:]), reverse=True)
    assert {"loss", "top1", "images_per_second", "waiting", "memory_gib"} <= steps[0].keys()
    assert [line["step"] for line in lines(digits_run, "validation")] == [4, 8, 12, 16]


def test_the_best_model_is_the_one_that_was_evaluated(digits_run: Path) -> None:
    evaluations = lines(digits_run, "validation")
    best = max(evaluations, key=lambda line: (line["top1"], -line["nll"]))
    model = load_model(digits_run)
    assert model.card.metrics["validation top1"] == best["top1"]
    assert model.card.provenance["step"] == best["step"]
    splits = open_data(Data(path="digits"))
    assert splits.validation is not None
    assert model.card.class_names == splits.class_names
    prepare = eval_transform(model.card.preprocess)
    rng = np.random.default_rng(0)
    images = np.stack([prepare(splits.validation[i].image, rng) for i in range(len(splits.validation))])
    with torch.no_grad():
        answers = model(torch.from_numpy(images).permute(0, 3, 1, 2)).argmax(1).numpy()
    assert (answers == splits.validation.labels).mean() == pytest.approx(best["top1"], abs=0.003)
    with np.load(digits_run / "evaluation.npz") as saved:
        assert (saved["classes"][:, 0] == saved["labels"]).mean() == pytest.approx(best["top1"], abs=1e-12)


@pytest.mark.train
def test_test_images_are_looked_at_once_by_the_best_model(digits_run: Path, tmp_path: Path) -> None:
    splits = open_data(Data(path="digits"))
    result = json.loads((digits_run / "run.json").read_text())["result"]
    assert splits.test is not None
    assert result["test"]["count"] == len(splits.test)
    assert lines(digits_run, "test") == []
    both = loop.fit(tiny_run(tmp_path, data=Data(path="digits", subset=140, validation="test"), duration=Steps(2)))
    assert both.test is None and both.best["count"] == len(splits.test)


def test_the_average_is_what_is_kept(digits_run: Path) -> None:
    everything = tensors(digits_run)
    name = "norm.weight"
    assert torch.equal(everything[f"last {name}"], everything[f"state average/mean/{name}"])
    assert not torch.equal(everything[f"last {name}"], everything[f"model model.{name}"])


@pytest.mark.train
def test_training_learns(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path,
        data=Data(path="digits"),
        vit=Model(width=48, depth=1, heads=4, mlp_dim=96, patch=2),
        augment=Augment(crop="center", flip=False),
        average=Average(),
        duration=Epochs(12),
        batch_size=64,
        accumulate=1,
        evaluate_every=Epochs(12),
    )
    assert loop.fit(run).best["top1"] > 0.75  # a tenth by chance


def test_a_finished_runs_models_know_what_they_compute(digits_run: Path) -> None:
    for kind in ("best", "last"):
        assert verify(digits_run / "model" / kind).passed


# how it is computed, and what it may be resumed as


@pytest.mark.train
@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_threads_does_not_matter(tmp_path: Path, workers: int) -> None:
    assert_same_bits(whole("supervised"), loop.fit(tiny_run(tmp_path, **{**SHORT, "workers": workers})).folder)


@pytest.mark.train
def test_a_finished_run_is_friendly_and_can_be_extended(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **{**SHORT, "duration": Steps(6)})
    first = loop.fit(run)
    before = tensors(first.folder)
    again = loop.fit(run, resume=first.folder)
    assert (again.steps, again.best) == (6, first.best)
    assert (
        "finished" in again.message
        and "larger --epochs, --time-limit or --early-stop (in Python: duration" in again.message
    )
    assert all(torch.equal(value, before[name]) for name, value in tensors(first.folder).items())
    longer = loop.fit(replace(run, duration=Steps(9)), resume=first.folder)
    assert longer.steps == 9
    assert [line["step"] for line in lines(first.folder, "train")] == list(range(1, 10))


def test_another_run_is_refused_with_the_differences(digits_run: Path, tmp_path: Path) -> None:
    folder = copy_of(digits_run, tmp_path)
    other = tiny_run(tmp_path, vit=Model(width=16, depth=3, heads=2, mlp_dim=32), optim=Optim(lr=1e-3), seed=1)
    with pytest.raises(CheckpointError) as error:
        loop.fit(other, resume=folder)
    for difference in ("model.depth: 2 there, 3 here", "optim.lr: 0.003 there, 0.001 here", "seed: 0 there, 1 here"):
        assert difference in str(error.value)
    with pytest.raises(CheckpointError, match=r"splits\.subset: 140 there, 100 here"):
        loop.fit(tiny_run(tmp_path, data=Data(path="digits", subset=100)), resume=folder)


def test_resuming_needs_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        loop.fit(tiny_run(tmp_path), resume=tmp_path / "train-9")
    empty = tmp_path / "train-1"
    empty.mkdir()
    (empty / "run.json").write_text("{}")
    with pytest.raises((CheckpointError, UsageError)):
        loop.fit(tiny_run(tmp_path), resume=empty)


def test_a_folder_in_use_is_refused(digits_run: Path, tmp_path: Path) -> None:
    folder = copy_of(digits_run, tmp_path)
    with run_lock(folder), pytest.raises(UsageError, match="another process"):
        loop.fit(tiny_run(tmp_path, duration=Epochs(5)), resume=folder)


# what is not finite, and what cannot be written


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make loss and gradient of these steps NaN."""
    original = stepping.backward

    def backward(objective: Any, batch: Any, *, step: int, **options: Any) -> StepSums:
        outcome = original(objective, batch, step=step, **options)
        if step not in steps:
            return outcome
        for parameter in objective.parameters():
            parameter.grad.fill_(float("nan"))
        outcome.values[outcome.names.index("loss")] = float("nan")
        return outcome

    monkeypatch.setattr(stepping, "backward", backward)


@pytest.mark.train
def test_a_step_that_is_not_finite_is_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, {0, 2, 3})
    folder = loop.fit(tiny_run(tmp_path, **SHORT)).folder
    assert all(torch.isfinite(value).all() for value in tensors(folder).values() if value.is_floating_point())
    skipped = lines(folder, "skipped")
    assert [line["step"] for line in skipped] == [0, 2, 3]
    train = open_data(Data(path="digits")).train
    known = {train.id(i) for i in range(len(train))}
    assert len(skipped[0]["images"]) == 16 and set(skipped[0]["images"]) <= known
    said = capsys.readouterr().err
    assert "skipped an update that is not finite" in said


@pytest.mark.train
def test_skipped_updates_are_counted_also_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path, **SHORT)
    poison(monkeypatch, {0, 1})
    folder = interrupted(run, 2)
    monkeypatch.undo()
    poison(monkeypatch, {3})
    result = loop.fit(run, resume=folder)
    assert result.skipped == 3 and "3 updates were skipped because they were not finite" in result.message
    assert json.loads((folder / "run.json").read_text())["result"]["skipped"] == 3
    assert loop.fit(run, resume=folder).skipped == 3


def test_the_progress_line_says_how_many_updates_were_skipped() -> None:
    progress = Progress(4, torch.device("cpu"))
    sums = StepSums(["loss", "count", "norm"], torch.tensor([2.0, 4.0, 1.0]))
    progress.update(FinishedStep(6, torch.arange(4), 0.1, sums), RunStatus(), 0.0, None, 10)
    assert "step 7/10  loss 0.5000" in progress.line() and "skipped" not in progress.line()
    progress.update(FinishedStep(7, torch.arange(4), 0.1, sums), RunStatus(skipped=2), 0.0, None, 10)
    assert "2 updates skipped" in progress.line()


def test_the_progress_line_shows_the_loss_of_each_answer_as_a_number() -> None:
    progress = Progress(4, torch.device("cpu"))
    sums = StepSums(["loss", "count", "norm", "kind.loss"], torch.tensor([8.0, 4.0, 1.0, 6.0]))
    progress.update(FinishedStep(6, torch.arange(4), 0.1, sums), RunStatus(), 0.0, None, 10)
    assert "loss 2.0000  kind.loss 1.5000  lr" in progress.line()


def test_with_a_time_limit_the_number_of_steps_is_an_estimate_or_absent() -> None:
    progress = Progress(4, torch.device("cpu"))
    sums = StepSums(["loss", "count", "norm"], torch.tensor([2.0, 4.0, 1.0]))
    progress.update(FinishedStep(0, torch.arange(4), 0.1, sums), RunStatus(), 0.0, 75.0, None)
    assert progress.line().startswith("step 1  loss") and "1 min 15 s left" in progress.line()
    progress.update(FinishedStep(6, torch.arange(4), 0.1, sums), RunStatus(), 0.0, 30.0, 40)
    assert progress.line().startswith("step 7 of about 40  loss") and "30 s left" in progress.line()


@given(width=st.integers(1, 200))
def test_the_progress_line_fits_the_terminal_as_far_as_it_can(width: int) -> None:
    progress = Progress(4, torch.device("cpu"))
    sums = StepSums(["loss", "count", "norm"], torch.tensor([2.0, 4.0, 1.0]))
    progress.update(FinishedStep(6, torch.arange(4), 0.1, sums), RunStatus(), 0.0, 30.0, 40)
    line = progress.line(width)
    least = [word for word in ("lr 1.00e-01", "GiB", "waiting") if word in line]
    assert len(line) < width or not least
    assert "loss" in line and "images/s" in line and "30 s left" in line
    assert width < 120 or len(least) == 3  # the speed is that of the clock, so the digits_run line has no fixed length


@pytest.mark.train
def test_training_gives_up_after_a_few_and_keeps_no_poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {1, 2, 3})
    with pytest.raises(TrainingError, match="3 consecutive steps"):
        loop.fit(tiny_run(tmp_path, **SHORT))
    folder = tmp_path / "train-1"
    newest = checkpoint.latest_valid(folder / "checkpoints")
    assert newest is not None and newest.name == "step-000002"  # step 1 changed nothing
    assert all(torch.isfinite(value).all() for value in tensors(folder).values() if value.is_floating_point())


@pytest.mark.train
def test_poisoned_weights_are_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = stepping.divisor_of_gradients

    def divisor_of_gradients(parameters: Any, *rest: Any) -> Any:  # an optimiser that breaks the weights itself
        parameters = list(parameters)
        with torch.no_grad():
            parameters[0].view(-1)[0] = float("inf")
        return original(parameters, *rest)

    monkeypatch.setattr(stepping, "divisor_of_gradients", divisor_of_gradients)
    with pytest.raises(TrainingError, match="not finite"):
        loop.fit(tiny_run(tmp_path, **{**SHORT, "max_nonfinite": 100, "evaluate_every": Steps(9)}))
    assert checkpoint.latest_valid(tmp_path / "train-1" / "checkpoints") is None


@pytest.mark.train
def test_a_full_disk_is_told_and_survived_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, calls = checkpoint.save, iter(range(100))

    def save(folder: Path, step: int, state: Any, **options: Any) -> Path:
        if next(calls) in (1, 2):
            raise checkpoint.DiskFullError(folder, 10**9, 10)
        return original(folder, step, state, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    result = loop.fit(tiny_run(tmp_path, **{**SHORT, "checkpoint_every": Steps(1)}))
    assert result.steps == 4
    assert capsys.readouterr().err.count("disk full: need 1 GB, have 10 B") == 2


@pytest.mark.train
def test_a_disk_that_stays_full_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(folder: Path, step: int, state: Any, **options: Any) -> Path:
        raise checkpoint.DiskFullError(folder, 10**9, 10)

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(TrainingError, match="last 3 checkpoints"):
        loop.fit(tiny_run(tmp_path, **{**SHORT, "checkpoint_every": Steps(1)}))


# when a run ends


@pytest.mark.train
def test_a_time_limit_ends_the_run_on_time_and_annealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: a step takes a tenth of a second, and nothing else takes any."""
    now, seed_step = [1000.0], stepping.seed_step

    def look() -> float:
        now[0] += 1e-4
        return now[0]

    def step(*arguments: Any) -> None:
        now[0] += 0.1
        seed_step(*arguments)

    monkeypatch.setattr(stepping, "seed_step", step)
    monkeypatch.setattr(time, "monotonic", look)
    monkeypatch.setattr(time, "thread_time", look)
    rare = dict(time_limit=15 / 60, evaluate_every=Steps(10**5), checkpoint_every=Steps(10**5), accumulate=1)
    plan = dict(duration=Steps(20_000), schedule=Schedule(warmup=Steps(2000)))
    result = loop.fit(tiny_run(tmp_path, **{**SHORT, **rare, **plan}))
    # the limit is one for everything, so what the end may take is kept back
    assert result.ended == "time limit" and 50 < result.steps < 150 and result.seconds < 15
    rates = [line["lr"] for line in lines(result.folder, "train")]
    assert result.best["step"] == result.steps >= len(rates)
    peak = rates.index(max(rates))
    assert max(rates) > 0.8 * 3e-3 and rates[-1] < 0.1 * 3e-3
    # the warmup is compressed like the rest: a tenth of the time, though no 2,000 steps of it
    # the end is predicted anew while training, so the schedule may step back a little
    assert all(later > 0.8 * rate for rate, later in pairwise(rates[: peak + 1]))
    assert all(later < 1.2 * rate + 1e-4 for rate, later in pairwise(rates[peak:]))
    assert peak < 0.5 * len(rates)


@pytest.mark.train
def test_the_best_model_of_steps_that_are_lost_is_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = iter([0.1, 0.9, 0.05, 0.6, 0.04])
    monkeypatch.setattr(Metric, "measured", lambda metric, found: next(scores))
    run = tiny_run(tmp_path, **{**SHORT, "data": Data(path="digits", subset=128, test="none"), "calibrate": False})
    folder = loop.fit(run).folder
    assert load_model(folder / "model" / "best").card.provenance["step"] == 4
    newest = max((folder / "checkpoints").iterdir())
    (newest / "manifest.json").unlink()
    result = loop.fit(replace(run, duration=Steps(6)), resume=folder)
    assert "is that of step 4, which is trained again" in capsys.readouterr().err
    assert load_model(folder / "model" / "best").card.provenance["step"] == result.best["step"] == 4
    assert result.best[run.metric.key] == 0.6  # not the 0.9 of the steps that are lost
    assert [line["step"] for line in lines(folder, "validation")] == [2, 4, 6]
    with pytest.raises(StopIteration):
        next(scores)


@pytest.mark.train
def test_the_loss_chooses_among_models_whose_accuracies_differ_by_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of 100 images: 95 % is at least 91.4 % with a probability of nine tenths, so 93 % may be as good, and 91 % is not
    measured = [(0.90, 0.9), (0.95, 0.8), (0.91, 0.1), (0.93, 0.3), (0.91, 0.1)]
    found = iter([{"top1": top1, "top5": 1.0, "nll": loss, "count": 100.0} for top1, loss in measured])
    monkeypatch.setattr(validation, "numbers_of", lambda results, metric, change: next(found))
    run = tiny_run(
        tmp_path,
        **{**SHORT, "data": Data(path="digits", subset=128, test="none"), "calibrate": False, "duration": Steps(8)},
    )
    result = loop.fit(run)
    assert (result.best["step"], result.best["top1"]) == (8, 0.93)
    resumed = loop.fit(replace(run, duration=Steps(10)), resume=result.folder)  # the highest accuracy is still known
    assert (resumed.best["step"], resumed.best["top1"]) == (8, 0.93)


@pytest.mark.train
def test_early_stopping_counts_evaluations_without_improvement(tmp_path: Path) -> None:
    still = dict(optim=Optim(lr=1e-30), average=Average(), early_stop=2, duration=Steps(50))
    run = tiny_run(tmp_path, **{**SHORT, **still})
    result = loop.fit(run)
    assert (result.ended, result.steps) == ("early stop", 6)  # the first evaluation improves, two do not
    assert loop.fit(run, resume=result.folder).steps == 6
    assert loop.fit(replace(run, early_stop=4), resume=result.folder).steps == 10


def test_early_stopping_needs_something_to_decide_by(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="early_stop is 0"):
        loop.fit(tiny_run(tmp_path, early_stop=0))
    assert list(tmp_path.iterdir()) == []


def test_errors_come_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="duration is 0 steps; it must be greater than 0"):
        loop.fit(tiny_run(tmp_path / "runs", duration=Steps(0)))
    with pytest.raises(UsageError, match="warmup"):
        loop.fit(tiny_run(tmp_path / "runs", schedule=Schedule(warmup=Steps(100))))
    assert not (tmp_path / "runs").exists()


def photographs(folder: Path, broken: int) -> Path:
    """40 training images of two classes, the first few of them no images, and 4 to validate on."""
    from PIL import Image

    noise = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 4)):
        for number in range(count):
            place = folder / split / "ab"[number % 2] / f"{number:02}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(place)
    for number in range(broken):
        (folder / "train" / "ab"[number % 2] / f"{number:02}.png").write_bytes(b"no image")
    return folder


@pytest.mark.train
def test_an_unreadable_image_is_told_once_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Data(path=str(photographs(tmp_path / "data", broken=1)))
    result = loop.fit(tiny_run(tmp_path / "runs", data=data, augment=Augment(), batch_size=8, duration=Epochs(2)))
    assert capsys.readouterr().err.count("00.png") == 1
    (line,) = lines(result.folder, "unreadable")
    assert line["image"].endswith("00.png") and line["reason"]


@pytest.mark.train
def test_many_unreadable_images_end_the_run(tmp_path: Path) -> None:
    data = Data(path=str(photographs(tmp_path / "data", broken=4)))  # 10 %
    run = tiny_run(tmp_path / "runs", data=data, augment=Augment(), batch_size=8, duration=Epochs(2))
    with pytest.raises(DataError, match=r"of 40 training images cannot be read, more than data.max_bad, 5.0%"):
        loop.fit(run)
    result = loop.fit(replace(run, data=replace(data, max_bad=0.2)))
    assert result.ended == "all steps done"
