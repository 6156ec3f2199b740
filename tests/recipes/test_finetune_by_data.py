"""The rule that decides on a fine-tuning, and what a short time changes in a training from scratch."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vitrail
from vitrail.config import from_yaml, to_yaml
from vitrail.costs.published import published_table
from vitrail.durations import Epochs, Examples, Percent, Steps
from vitrail.evaluation.metric import Metric
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.recipes.asked import Asked
from vitrail.recipes.by_data import TrainingSet, evaluated_in_time, in_time
from vitrail.recipes.decide import decide
from vitrail.recipes.finetune_by_data import FINETUNE_BY_DATA, FineTuning, Pretrained, advise
from vitrail.recipes.known import Known
from vitrail.recipes.registry import recipe
from vitrail.training.run import Run, Schedule
from vitrail.training.timetable import Timetable
from vitrail.transfer import timing
from vitrail.verbs.train.train import Preview

networks = st.builds(
    Pretrained,
    width=st.integers(1, 8192),
    blocks=st.integers(0, 64),
    side=st.integers(1, 1024),
    labelled=st.booleans(),
)
tasks = st.builds(
    FineTuning,
    st.builds(TrainingSet, images=st.integers(1, 20_000_000), side=st.integers(0, 4000)),
    classes=st.integers(0, 30_000),
    network=networks,
    seen=st.none() | st.integers(1, 10**9),
    in_time=st.none() | st.integers(1, 10**10),
)
B16 = Pretrained(768, 12, 224)


@pytest.mark.full_size
@given(tasks)
def test_every_decision_is_a_run_that_can_be_trained(task: FineTuning) -> None:
    run = advise(task).run
    assert from_yaml(to_yaml(run), Run()) == run  # every value is in its range
    assert run.batch_size is not None and 1 <= run.batch_size <= task.data.images
    timetable = Timetable(run, max(task.data.images // run.batch_size, 1))
    assert timetable.total >= 1
    assert timetable.warmup <= 0.1 * timetable.total + 1
    assert run.augment.crop != "pad" or run.augment.pad < (run.image_size or task.network.side)  # what a shift needs
    assert (run.optim.layer_decay is None) == (task.network.blocks == 0)  # layer-wise rates need blocks
    assert task.network.blocks > 0 or run.tune == "all"  # a ResNet has no attention


@given(tasks)
def test_every_reason_names_a_setting_and_says_its_value(task: FineTuning) -> None:
    decided = advise(task)
    assert {"duration", "batch_size", "optim", "augment"} <= set(decided.why)
    assert all(hasattr(decided.run, name) for name in decided.why)
    assert decided.why["batch_size"].startswith(f"{decided.run.batch_size}:")
    assert f"{decided.run.optim.lr:g}" in decided.why["optim"]
    assert decided.run.tune == "all" or decided.why["tune"].startswith(f"{decided.run.tune}:")


@given(tasks, st.integers(1, 10**9))
def test_more_time_never_makes_the_batch_or_the_rate_smaller(task: FineTuning, more: int) -> None:
    short = advise(replace(task, seen=task.seen or 1)).run
    long = advise(replace(task, seen=(task.seen or 1) + more)).run
    assert (short.batch_size or 0) <= (long.batch_size or 0)
    assert short.optim.lr <= long.optim.lr
    assert short.duration == long.duration  # the time limit compresses the schedule


@given(tasks, st.integers(1, 10**6))
def test_more_images_are_seen_in_more_steps_but_not_more_often(task: FineTuning, more: int) -> None:
    few = advise(replace(task, seen=None)).run
    larger = replace(task, data=replace(task.data, images=task.data.images + more), seen=None)
    many = advise(larger).run
    assert few.duration.value >= many.duration.value
    assert (few.batch_size or 0) <= (many.batch_size or 0)


@given(tasks)
def test_wider_networks_learn_more_slowly(task: FineTuning) -> None:
    wide = replace(task, network=replace(task.network, width=2 * task.network.width))
    assert advise(wide).run.optim.lr <= advise(task).run.optim.lr


def test_b16_gets_a_rate_and_a_decay_that_are_published_for_it() -> None:
    run = advise(FineTuning(TrainingSet(50_000, 500), 100, B16)).run
    # MAE, table 9 and its code: 1e-3 or 5e-4 per 256 images for B/16, decay 0.75 or 0.65
    assert run.optim.name == "adamw" and run.optim.layer_decay in (0.65, 0.75)
    assert run.batch_size is not None
    assert 5e-4 * run.batch_size / 256 <= run.optim.lr <= 1e-3 * run.batch_size / 256


def test_the_input_grows_only_if_images_are_larger_and_time_would_be_left() -> None:
    task = FineTuning(TrainingSet(1_000, 224), 10, Pretrained(128, 6, 32), seen=40_000, in_time=10**6)
    assert advise(task).run.image_size == 64
    assert advise(replace(task, data=TrainingSet(1_000, 48))).run.image_size is None
    assert advise(replace(task, in_time=100_000)).run.image_size is None  # 40,000 images take a fifth of 200,000
    assert advise(replace(task, in_time=None)).run.image_size is None


def test_characters_are_not_mirrored() -> None:
    assert not advise(FineTuning(TrainingSet(1_500, 8), 10, B16)).run.augment.flip
    assert advise(FineTuning(TrainingSet(1_500, 32), 10, B16)).run.augment.flip


def test_pre_training_without_labels_needs_more_passes() -> None:
    known, unknown = (
        advise(FineTuning(TrainingSet(3_000, 300), 10, replace(B16, labelled=one))).run for one in (True, False)
    )
    assert unknown.duration.value > known.duration.value


# from a command to its run


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 images of 8 x 8 pixels and 3 classes."""
    path = tmp_path_factory.mktemp("data") / "images.npz"
    labels = np.arange(300) % 3
    pixels = np.random.default_rng(0).integers(0, 255, (300, 8, 8, 3), np.uint8)
    np.savez(path, x_train=pixels, y_train=labels)
    return path


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny network."""
    config = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=5)
    return vitrail.save(build(config), tmp_path_factory.mktemp("weights") / "network").path


def previewed(images: Path, network: Path, **settings: object) -> Run:
    preview = vitrail.finetune(images, weights=network, print_config=True, **settings)  # type: ignore[call-overload]
    assert isinstance(preview, Preview)
    return preview.run


def test_the_default_decides_and_says_so(images: Path, network: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vitrail"):
        run = previewed(images, network)
    expected = advise(FineTuning(TrainingSet(270, 8), 3, Pretrained(16, 2, 8))).run  # a tenth is held out
    assert run == replace(expected, name="finetune", weights=str(network), data=run.data)
    said = caplog.messages[-1]
    assert said.startswith("recipe finetune-by-data for 270 images of 3 classes, of about 8 pixels\n")
    for name in ("duration", "batch_size", "optim", "augment"):
        assert f"\n  {name}: " in said


def test_the_recipe_by_its_name_is_the_default(images: Path, network: Path) -> None:
    named = previewed(images, network, recipe="finetune-by-data")
    assert replace(named, name="finetune") == previewed(images, network)


def test_only_a_new_linear_classifier_begins_as_a_probe(images: Path, network: Path, tmp_path: Path) -> None:
    assert previewed(images, network).probe_head
    same = vitrail.load(network, classes=3)
    assert isinstance(same, vitrail.ViT)
    kept = vitrail.save(same, tmp_path / "same").path
    assert not previewed(images, kept, keep_head=True).probe_head
    assert not previewed(images, network, objective={"kind": "mae"}).probe_head
    assert not previewed(images, network, objective={"head_bias": -7.0}).probe_head
    assert not previewed(images, network, vit={"init": "mae"}).probe_head


@pytest.mark.parametrize("named", [{}, {"recipe": "finetune"}, {"recipe": "finetune-small"}])
def test_the_best_model_with_added_classes_is_chosen_by_the_mean_of_classes(
    images: Path, network: Path, named: dict[str, str]
) -> None:
    given = {"classes": ("add",), **named}
    assert previewed(images, network, **given).metric == Metric("balanced_accuracy")
    assert previewed(images, network, **given, metric={"name": "macro_f1"}).metric == Metric("macro_f1")
    assert previewed(images, network, **named).metric == Metric()
    trained = vitrail.train(images, weights=network, print_config=True, **given)
    assert isinstance(trained, Preview) and trained.run.metric == Metric("balanced_accuracy")


def test_flags_replace_decisions_and_their_reasons(images: Path, network: Path) -> None:
    settings = {"batch_size": 8, "tune": "head", "seed": 3}
    choice = decide(Asked(images, weights=network, settings=settings), Known(), tunes=True)
    run, why = choice.run, str(choice)
    assert (run.batch_size, run.tune, run.seed) == (8, "head", 3)
    assert "batch_size:" not in why and "optim:" in why


def test_a_length_that_is_given_counts_as_time(images: Path, network: Path) -> None:
    run = previewed(images, network, epochs=2)
    assert (run.duration, run.batch_size) == (Epochs(2), 16)
    seen = previewed(images, network, duration="540 examples")
    assert (seen.duration, seen.batch_size, seen.optim.lr) == (Examples(540), 16, run.optim.lr)


def test_the_papers_protocol_is_one_flag_away(images: Path, network: Path) -> None:
    run = previewed(images, network, recipe="finetune")
    rows = published_table("table4_finetuning")["rows"]
    steps = next(row["steps"] for row in rows if row["dataset"] == "Oxford Flowers-102")  # as small as these
    assert run.duration == Steps(steps)
    assert (run.optim.name, run.optim.momentum, run.optim.weight_decay, run.optim.clip) == ("sgd", 0.9, 0.0, 1.0)
    assert (run.schedule.shape, run.batch_size) == ("cosine", 270)  # 512, but there are only 270 images


@pytest.mark.parametrize(("minutes", "batch"), [(1.0, 16), (1_000.0, 32)])
def test_a_time_limit_counts_by_the_measured_speed(
    minutes: float, batch: int, tmp_path: Path, network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = np.arange(800) % 3
    np.savez(tmp_path / "more.npz", x_train=np.zeros((800, 8, 8, 3), np.uint8), y_train=labels)
    monkeypatch.setattr(timing, "seen_in_time", lambda run, splits, seconds: int(600 * run.time_limit))
    choice = decide(
        Asked(tmp_path / "more.npz", weights=network, settings={"time_limit": minutes}), Known(), tunes=True
    )
    run, why = choice.run, str(choice)
    assert run.batch_size == batch and run.time_limit == minutes
    passes = {1.0: "0.83", 1_000.0: "8.3e+02"}[minutes]  # 600 or 600,000 of 720 images
    assert run.duration is None and f"duration: that of the time limit, about {passes} passes over the images" in why
    given = Asked(tmp_path / "more.npz", weights=network, epochs=4, settings={"time_limit": minutes})
    choice = decide(given, Known(), tunes=True)
    run, why = choice.run, str(choice)
    assert run.duration == Epochs(4) and "that of the time limit" not in why


def test_processes_of_torchrun_decide_the_same(images: Path, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(timing, "seen_in_time", lambda *_: pytest.fail("a measurement differs between processes"))
    decide(Asked(images, weights=network, settings={"time_limit": 1.0}), Known(), tunes=True)
    decide(Asked(images, settings={"time_limit": 1.0}), Known())


@pytest.mark.full_size
def test_a_dry_run_shows_what_was_decided(images: Path, network: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vitrail"):
        preview = vitrail.finetune(images, weights=network, dry_run=True, time_limit=0.5, device="cpu", workers=0)
    assert isinstance(preview, Preview)
    assert any(message.startswith("recipe finetune-by-data") for message in caplog.messages)
    assert f"steps of {preview.run.batch_size} images" in preview.checked["length"]


# training from scratch in a short time


@given(st.integers(1, 10**6), st.integers(1, 10**8))
def test_a_short_time_gives_more_steps_of_smaller_images(count: int, seen: int) -> None:
    base = recipe("scratch-photos")
    run, changes = in_time(base, count, seen)
    assert run.image_size is not None and base.image_size is not None
    assert run.image_size <= base.image_size and run.image_size % 8 == 0  # whole patches
    work = seen * (base.image_size / run.image_size) ** 2  # images that the time allows at this size
    steps = work / (run.batch_size or 256)
    assert steps >= 99 or run.batch_size == 16 or run.batch_size is None
    assert (run == base) == (not changes)
    if run.image_size < base.image_size:
        assert seen < 2 * count


@given(st.integers(1, 10**7), st.integers(0, 10**6))
def test_evaluations_leave_the_time_to_training(seen: int, validation: int) -> None:
    base = recipe("finetune-by-data")
    run, why = evaluated_in_time(base, seen, validation)
    assert isinstance(run.evaluate_every, Percent)
    count = round(100 / run.evaluate_every.value)
    assert 2 <= count <= 10 and (run == base) == (count == 10 or why == "")
    assert count == 2 or count * validation / 3 <= 0.2 * seen * 1.0001
    assert count == 10 or (count + 1) * validation / 3 > 0.2 * seen * 0.9999  # no fewer than fit
    assert evaluated_in_time(base, seen, validation, ["evaluate_every"]) == (base, "")


def test_enough_time_changes_nothing() -> None:
    assert in_time(recipe("scratch-photos"), 2_700, 12_800) == (recipe("scratch-photos"), {})


def test_sizes_of_small_images_stay() -> None:
    run, changes = in_time(recipe("scratch-small"), 50_000, 2_000)
    assert run.image_size is None and run.batch_size == 16
    assert changes == {"batch_size": "16, not 256: the time allows about 2,000 images"}


def test_training_in_a_short_time_says_what_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.arange(300) % 3
    np.savez(tmp_path / "photos.npz", x_train=np.zeros((300, 128, 128, 3), np.uint8), y_train=labels)
    monkeypatch.setattr(timing, "seen_in_time", lambda run, splits, seconds: int(run.time_limit * 60 * 400 / 90))
    choice = decide(Asked(tmp_path / "photos.npz", settings={"time_limit": 1.5}), Known())
    run, why = choice.run, str(choice)
    # 400 images of 96 pixels are 1.5 passes over 270 images; of 64 pixels, 3.3
    assert (run.image_size, run.batch_size) == (64, None)
    told = "warning: image_size: 64, not 96: so the time allows about 3.3 passes over the images, not 1.5"
    assert choice.warnings == (told,)  # so that --quiet shows it, too
    choice = decide(
        Asked(tmp_path / "photos.npz", settings={"time_limit": 1.5, "image_size": 96, "batch_size": 32}), Known()
    )
    run, why = choice.run, str(choice)
    assert (run.image_size, run.batch_size) == (96, 32) and "not" not in why.partition("\n")[2]
    assert choice.warnings == ()


@pytest.mark.parametrize("way", ["setting", "epochs", "file"])
def test_a_time_limit_is_the_length_unless_one_is_given(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: Path
) -> None:
    monkeypatch.setattr(timing, "seen_in_time", lambda run, splits, seconds: 10_000)
    free = decide(Asked(images), Known()).run
    limited = decide(Asked(images, settings={"time_limit": 1.0}), Known()).run
    assert free.duration == recipe(free.name).duration and limited.duration is None
    (tmp_path / "mine.yaml").write_text("duration: 7 epochs")
    given = {
        "setting": Asked(images, settings={"time_limit": 1.0, "duration": Epochs(7)}),
        "epochs": Asked(images, epochs=7, settings={"time_limit": 1.0}),
        "file": Asked(images, config=tmp_path / "mine.yaml", settings={"time_limit": 1.0}),
    }
    run = decide(given[way], Known()).run
    assert run.duration == Epochs(7) and run.time_limit == 1.0


def test_a_warmup_keeps_its_share_where_the_time_limit_is_the_length() -> None:
    base = replace(recipe("scratch-small"), duration=Epochs(50), schedule=Schedule(warmup=Epochs(5)))
    limited = Asked(settings={"time_limit": 1.0}).applied_to(base)[0]
    assert limited.duration is None and limited.schedule.warmup == Percent(10)
    asked = Asked(settings={"time_limit": 1.0, "schedule": {"warmup": "2 epochs"}}).applied_to(base)[0]
    assert asked.schedule.warmup == Epochs(2)


def test_a_recorded_run_keeps_its_length_when_it_is_resumed() -> None:
    recorded = replace(recipe("scratch-small"), duration=Epochs(5), time_limit=1.0)
    assert Asked(settings={"time_limit": 2.0}).applied_to(recorded, recorded=True)[0].duration == Epochs(5)


def test_the_default_recipe_is_listed() -> None:
    assert recipe(FINETUNE_BY_DATA.name).name == "finetune-by-data"
    assert FINETUNE_BY_DATA.verb == "finetune"


@pytest.mark.parametrize(
    ("duration", "steps"), [("3 steps", "3 steps"), ("1 step", "1 step"), ("5000 steps", "5,000 steps")]
)
def test_a_length_in_steps_is_told_as_it_is_given(tmp_path: Path, duration: str, steps: str) -> None:
    np.savez(tmp_path / "i.npz", x_train=np.zeros((40, 97, 97, 3), np.uint8), y_train=np.arange(40) % 2)
    choice = decide(Asked(tmp_path / "i.npz", settings={"duration": duration}), Known(), tunes=True)
    assert f"{steps} in all" in choice.why["batch_size"]
