"""VTAB-1k: its table against the paper's, and two tiny tasks from real images to a row each."""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure
from PIL import Image
from prepared import prepare

import vitrail
from vitrail.costs.published import published_table
from vitrail.data.benchmarks.vtab_tasks import GROUPS, TASKS
from vitrail.data.sources.open import open_data
from vitrail.durations import Percent, Steps
from vitrail.errors import DataError, TrainingError, UsageError
from vitrail.recipes.registry import recipe
from vitrail.training.guard import Interrupted
from vitrail.training.run import Run
from vitrail.transfer import trial
from vitrail.transfer import vtab_runs as module
from vitrail.transfer.trial import Outcome
from vitrail.transfer.vtab_means import MEAN, PUBLISHED, QUOTED, QUOTED_MEANS, draw_means, means
from vitrail.transfer.vtab_runs import departures, run_of, vtab

PAPER = recipe("paper/finetune-vtab")
TABLE_9 = published_table("table9_vtab")


# the published table


def test_table_9_is_the_papers() -> None:
    assert [task.title for task in TASKS.values()] == TABLE_9["columns"][:-1]
    ours = {network: list(row.values()) for network, row in PUBLISHED.items()}
    assert ours == {network: row[:-1] for network, row in TABLE_9["rows"].items()}


def test_groups_are_the_papers() -> None:
    groups = {name: [task.title for task in TASKS.values() if task.group == name] for name in GROUPS}
    assert groups == {name.lower(): titles for name, titles in TABLE_9["groups"].items()}
    assert [len(titles) for titles in groups.values()] == [7, 4, 8]


def test_the_mean_is_over_tasks_as_in_the_paper() -> None:
    for network, row in TABLE_9["rows"].items():
        mean, count = means(PUBLISHED[network])[MEAN]
        assert count == 19 and round(mean, 1) == row[-1]


def test_what_figure_2_compares_with() -> None:
    (s4l,) = QUOTED.values()
    assert list(s4l) == list(TASKS)
    assert round(means(s4l)[MEAN][0], 1) == 68.0  # the leaderboard's own mean, of unrounded numbers, is 67.97
    assert QUOTED_MEANS == {"BiT-L, quoted": 76.29, "VIVI-Ex4-Co, quoted": 70.4}


def test_means_of_some_tasks_say_of_how_many() -> None:
    found = means({"dtd": 10.0, "pets": 20.0, "kitti-distance": 90.0})
    assert found == {"natural": (15.0, 2), "structured": (90.0, 1), MEAN: (40.0, 3)}
    assert means({}) == {}


# the setting


def test_the_setting_is_the_papers() -> None:
    """Table 4 and appendix B.1.1: lr 0.01, 2,500 steps, cosine, batch 512, momentum 0.9, no decay, 384 pixels."""
    run = run_of(TASKS["dtd"], PAPER, "data", 3)
    assert (run.optim.name, run.optim.lr, run.optim.momentum, run.optim.weight_decay) == ("sgd", 0.01, 0.9, 0.0)
    assert (run.duration, run.batch_size, run.image_size, run.schedule.shape) == (Steps(2500), 512, 384, "cosine")
    assert run.optim.clip == 1.0 and not run.keep_head and run.seed == 3
    assert (run.data.train, run.data.validation, run.data.test, run.data.holdout) == (
        "train800+val200",
        "none",
        "test",
        0.0,
    )
    assert departures(PAPER, PAPER) == []


def test_what_departs_from_it_is_said() -> None:
    small = replace(PAPER, duration=Steps(2), batch_size=8, optim=replace(PAPER.optim, lr=0.1), seed=5, device="cpu")
    small = replace(small, schedule=replace(PAPER.schedule, warmup=Percent(20)))
    assert departures(small, PAPER) == [
        "optim.lr 0.1, not 0.01",
        "schedule.warmup 20 %, not 500 steps",
        "duration 2 steps, not 2500 steps",
        "batch_size 8, not 512",
    ]


def test_no_crop_or_mirror_image_changes_a_label() -> None:
    augment = {name: run_of(task, PAPER, "data", 0).augment for name, task in TASKS.items()}
    assert augment["pets"] == PAPER.augment and (PAPER.augment.crop, PAPER.augment.flip) == ("random", True)
    # "if the label requires predicting object orientation or coordinates in pixel space" (BiT, section 3.3)
    assert (augment["dsprites-location"].crop, augment["dsprites-location"].flip) == ("center", False)
    assert not augment["dsprites-orientation"].flip and not augment["smallnorb-azimuth"].flip
    assert all(augment[task].crop == "center" for task in ("clevr-count", "clevr-distance", "kitti-distance"))


# two tasks on real images


@pytest.fixture(scope="module")
def data(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-100 as TensorFlow Datasets prepares it, its size apart, and flowers with index lists."""
    root = tmp_path_factory.mktemp("vtab")
    table = pq.read_table(next((shared_data / "cifar100" / "data").glob("test-*")), columns=["img", "fine_label"])
    feature = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]["fine_label"]
    rows = []
    for image, label in zip(table["img"][:2020].to_pylist(), table["fine_label"][:2020].to_pylist(), strict=True):
        stream = io.BytesIO()
        Image.open(io.BytesIO(image["bytes"])).crop((8, 8, 16, 16)).save(stream, "PNG", compress_level=1)
        rows.append({"image": stream.getvalue(), "label": label})
    splits = {"train": rows[:2000], "test": rows[2000:]}
    prepare(root / "cifar100" / "3.0.2", "cifar100", splits, shards=2, labels={"label": feature["names"]})
    flowers = root / "oxford_flowers102"
    flowers.mkdir()
    (flowers / "images").symlink_to(shared_data / "flowers12")
    for name, split, count in (("train800", "train", 2), ("val200", "train", 3), ("test", "test", 1)):
        folders = sorted((shared_data / "flowers12" / split).iterdir())
        files = [(sorted(folder.iterdir())[-count:], label) for label, folder in enumerate(folders)]
        chosen = [(file, label) for found, label in files for file in found[: 2 if name == "train800" else 1]]
        lines = [f"images/{split}/{file.parent.name}/{file.name} {label}\n" for file, label in chosen]
        (flowers / f"{name}.txt").write_text("".join(lines))
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    vitrail.save(vitrail.create("Ti/4", classes=3, image_size=8, width=16, depth=1, heads=2, mlp_dim=32), folder)
    return folder


@pytest.fixture(scope="module")
def small(weights: Path) -> Run:
    assert PAPER.preprocess is not None
    return replace(
        PAPER,
        weights=str(weights),
        image_size=8,
        preprocess=replace(PAPER.preprocess, image_size=(8, 8)),
        duration=Steps(2),
        schedule=replace(PAPER.schedule, warmup=Percent(20)),
        batch_size=16,
        accumulate=1,
        workers=0,
        device="cpu",
        precision="float32",
    )


TASKS_TRIED = [TASKS["cifar100"], TASKS["flowers102"], TASKS["kitti-distance"]]


@pytest.fixture(scope="module")
def ran(small: Run, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return vtab(small, PAPER, TASKS_TRIED, str(data), [0, 1], tmp_path_factory.mktemp("out") / "vtab")


@pytest.mark.train
def test_two_tasks_are_measured_and_the_third_says_where_it_comes_from(ran: Any, data: Path) -> None:
    assert [score.task.name for score in ran.scores] == ["cifar100", "flowers102"]
    cifar, flowers = ran.scores
    assert (cifar.images, flowers.images) == (20, 12)
    for score in ran.scores:
        assert len(score.top1) == len(score.runs) == 2
        assert all(round(top1 * score.images) == pytest.approx(top1 * score.images) for top1 in score.top1)
        assert score.mean == statistics.mean(score.top1) and score.std == statistics.stdev(score.top1)
    assert cifar.notes == ["20 test images, not 10,000"]
    assert flowers.notes == ["36 training images, not 1,000", "12 test images, not 6,149", "12 classes, not 102"]
    assert ran.absent == {"kitti-distance": "tfds build kitti (kitti:3.1.0); http://www.cvlibs.net/datasets/kitti/"}


@pytest.mark.train
def test_accuracies_are_those_of_the_models_that_were_kept(ran: Any, data: Path) -> None:
    """The model each run kept, evaluated on the test images by itself, gives the number in the table."""
    for score in ran.scores:
        found = vitrail.evaluate(score.runs[0], f"vtab:{score.task.name}:{data}", workers=0, device="cpu")
        assert found.results.top1 == score.top1[0] and found.results.count == score.images


@pytest.mark.train
def test_runs_train_on_all_that_is_not_tested(ran: Any, data: Path) -> None:
    for score, images in zip(ran.scores, (1000, 36), strict=True):
        facts = json.loads((Path(score.runs[0]) / "run.json").read_text())
        assert facts["data"]["images"] == {"train": images, "test": score.images}
        assert facts["result"]["steps"] == 2
        run = vitrail.from_yaml(Path(score.runs[0]) / "config.yaml", Run())
        splits = open_data(run.data, seed=run.seed)
        assert len(splits.train) == images and splits.validation is None


@pytest.mark.train
def test_the_table_is_kept(ran: Any) -> None:
    kept = json.loads((ran.folder / "vtab.json").read_text())
    assert kept == json.loads(json.dumps({**ran.as_json(), "absent": kept["absent"]}))
    assert not kept["papers_setting"] and "duration 2 steps, not 2500 steps" in kept["departures"]
    assert kept["tasks"][0]["published"] == {"ViT-H/14 (JFT)": 85.5, "ViT-L/16 (JFT)": 81.9, "ViT-L/16 (I21k)": 84.1}
    tops = [100 * score.mean for score in ran.scores]
    assert kept["means"]["natural"] == {"top1": pytest.approx(statistics.mean(tops)), "tasks": 2}
    assert (ran.folder / "vtab.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.train
def test_nothing_finished_is_trained_again(
    ran: Any, small: Run, data: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trained: list[Path] = []
    folder = shutil.copytree(ran.folder, tmp_path / "vtab")

    def counting(folder: Path) -> Outcome:
        trained.append(folder)
        return Outcome("done", "", str(folder), None, {"top1": 0.5, "nll": 1.0}, 2, 1.0)

    monkeypatch.setattr(trial, "run_trial", counting)
    monkeypatch.setattr(module, "draw_means", lambda rows, path: None)
    again = vtab(small, PAPER, TASKS_TRIED, str(data), [0, 1], folder)
    assert trained == [] and again.percent == ran.percent
    # the same weights and data elsewhere are the same run; another seed, setting or data set is another
    (tmp_path / "moved").symlink_to(data)
    monkeypatch.chdir(data.parent)
    vtab(replace(small, weights=os.path.relpath(weights)), PAPER, TASKS_TRIED, str(tmp_path / "moved"), [1], folder)
    assert trained == []
    vtab(small, PAPER, TASKS_TRIED[:1], str(data), [2], folder)
    vtab(replace(small, optim=replace(small.optim, lr=0.02)), PAPER, TASKS_TRIED[:1], str(data), [0], folder)
    assert [path.name.rpartition("-")[0] for path in trained] == ["cifar100-seed-2", "cifar100-seed-0"]


@pytest.mark.full_size
def test_the_runs_of_all_tasks_are_given_out_together_and_may_end_in_any_order(
    small: Run, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a cluster trains them (`vitrail.transfer.on_ray`)."""
    given = list[Any]()

    def execute(trials: Any) -> Any:
        given.append(len(trials))
        for number, each in enumerate(reversed(trials)):
            yield each, Outcome("done", "", str(each.folder), None, {"top1": number / 4, "nll": 1.0})

    monkeypatch.setattr(module, "draw_means", lambda rows, path: None)
    found = vtab(small, PAPER, TASKS_TRIED, str(data), [0, 1], tmp_path, execute=execute)
    assert given == [4] and [score.top1 for score in found.scores] == [[0.75, 0.5], [0.25, 0.0]]
    assert [score["seeds"] for score in json.loads((tmp_path / "vtab.json").read_text())["tasks"]] == [
        [75, 50],
        [25, 0],
    ]


@pytest.mark.full_size
def test_a_task_that_fails_is_a_row_with_its_reason(
    small: Run, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcomes = iter([Outcome("diverged", "loss is nan"), Outcome("done", "", "r", None, {"top1": 0.25, "nll": 1.0})])
    monkeypatch.setattr(trial, "run_trial", lambda folder: next(outcomes))
    found = vtab(small, PAPER, TASKS_TRIED[:2], str(data), [0], tmp_path)
    assert found.scores[0].mean is None and found.scores[0].notes[-1] == "seed 0 diverged: loss is nan"
    assert found.percent == {"flowers102": 25.0} and means(found.percent)[MEAN] == (25.0, 1)
    monkeypatch.setattr(trial, "run_trial", lambda folder: Outcome("failed", "out of memory"))
    with pytest.raises(TrainingError, match=r"cifar100: .*seed 0 failed: out of memory"):
        vtab(small, PAPER, TASKS_TRIED[:1], str(data), [0], tmp_path / "b")


def test_a_signal_says_that_the_same_command_goes_on(
    small: Run, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stopped(folder: Path) -> Outcome:
        raise Interrupted("stopped by SIGTERM after step 1: go on with --resume", 15)

    monkeypatch.setattr(trial, "run_trial", stopped)
    with pytest.raises(Interrupted, match=r"cifar100-seed-0-\w+, which is saved\. Repeat the command") as error:
        vtab(small, PAPER, TASKS_TRIED[:1], str(data), [0], tmp_path)
    assert error.value.exit_code == 143


def test_what_cannot_be_run_is_refused(small: Run, data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of these tasks.*\n  kitti-distance: tfds build kitti"):
        vtab(small, PAPER, TASKS_TRIED[2:], str(data), [0], tmp_path)
    with pytest.raises(UsageError, match="which network"):
        vtab(replace(small, weights=None), PAPER, TASKS_TRIED, str(data), [0], tmp_path)
    for setting in ({"early_stop": 2}, {"knn": 5}):
        with pytest.raises(UsageError, match="no images to choose by"):
            vtab(replace(small, **setting), PAPER, TASKS_TRIED, str(data), [0], tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full_size
def test_the_figure_compares_the_same_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("vitrail.transfer.vtab_means.means", lambda scores: seen.append(scores) or means(scores))
    draw_means({**PUBLISHED, "ours": {"dtd": 50.0, "kitti-distance": 20.0}}, tmp_path / "a.png")
    assert [set(scores) for scores in seen] == [{"dtd", "kitti-distance"}] * 4
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    for rows in (PUBLISHED, {**PUBLISHED, "ours": {"dtd": 50.0}}):
        draw_means(rows, tmp_path / "b.png")
    assert [len(figure.axes[0].patches) for figure in figures] == [3 + len(QUOTED_MEANS), 4]
    with Image.open(tmp_path / "a.png") as picture:
        assert np.asarray(picture.convert("RGB")).std() > 10
