"""`vitrail vtab`: its list, its flags, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vitrail import cli
from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.benchmarks.vtab_tasks import TASKS
from vitrail.durations import Percent, Steps
from vitrail.training.run import Run
from vitrail.transfer import vtab_runs as over
from vitrail.transfer.vtab_means import PUBLISHED
from vitrail.transfer.vtab_runs import TaskScore, VtabTable


def test_the_tasks_are_listed_with_where_they_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vtab", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["task"] for row in listed] == list(TASKS)
    assert all(row["comes_from"].count("http") == 1 and "tfds build" in row["comes_from"] for row in listed)
    assert listed[1] == {
        "task": "cifar100",
        "group": "natural",
        "classes": 100,
        "test_images": 10_000,
        "regions": {"train800": "train[:800]", "val200": "train[90%:][:200]", "test": "test"},
        "place": None,
        "comes_from": "the hub as uoft-cs/cifar100; tfds build cifar100 (cifar100:3.*.*); "
        "https://www.cs.toronto.edu/~kriz/cifar.html",
    }
    assert cli.main(["vtab", "--tasks", "kitti-distance", "dtd"]) == 0
    shown = capsys.readouterr().out
    assert "kitti-distance" in shown and "dtd" in shown and "svhn" not in shown


def test_what_is_there_is_told_from_what_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dtd").mkdir()
    (tmp_path / "dtd" / "train800.txt").write_text("a.jpg 0\n")
    assert cli.main(["vtab", "--list", "--data", str(tmp_path), "--tasks", "dtd", "pets", "--json"]) == 0
    places = {row["task"]: row["place"] for row in json.loads(capsys.readouterr().out)}
    assert places == {"dtd": str(tmp_path / "dtd"), "pets": None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tasks cifar10", "VTAB-1k has no task 'cifar10'. Did you mean 'cifar100'?"),
        ("--from runs/x", "no data are given"),
        ("--from runs/x --data d --seeds 0", "seeds is 0"),
        ("--from runs/x --data d --steps 0", "steps is 0"),
    ],
)
def test_mistakes_exit_with_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vtab", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_flags_change_the_papers_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def recording(
        run: Run, paper: Run, tasks: Any, root: str, seeds: Any, folder: Path, by: Any, execute: Any
    ) -> VtabTable:
        asked.update(
            by=by, run=run, paper=paper, tasks=[task.name for task in tasks], root=root, seeds=seeds, folder=folder
        )
        return VtabTable(folder, "w", [], [])

    monkeypatch.setattr(over, "vtab", recording)
    (tmp_path / "more.yaml").write_text("optim: {momentum: 0.8}\n")
    words = (
        "--from w --data d --tasks dtd pets --seeds 2 --image-size 32 --steps 10 --batch-size 4 --lr 0.1 --device cpu"
    )
    assert cli.main(["vtab", *words.split(), "--config", str(tmp_path / "more.yaml"), "--out", str(tmp_path)]) == 0
    run = asked["run"]
    assert (asked["tasks"], asked["root"], asked["seeds"], asked["folder"]) == (["dtd", "pets"], "d", [0, 1], tmp_path)
    assert (run.weights, run.image_size, run.duration, run.batch_size) == ("w", 32, Steps(10), 4)
    assert (run.preprocess.image_size, run.schedule.warmup) == ((32, 32), Percent(20))
    assert (run.optim.lr, run.optim.momentum, run.device) == (0.1, 0.8, "cpu")
    assert asked["by"]["batch_size"] == "--batch-size" and asked["by"]["optim.momentum"].startswith(str(tmp_path))
    assert asked["paper"].image_size == 384
    assert cli.main(["vtab", "--from", "w", "--data", "d"]) == 0
    assert over.departures(asked["run"], asked["paper"]) == [] and asked["tasks"] == list(TASKS)


def test_the_table_stands_beside_the_papers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    scores = [
        TaskScore(TASKS["dtd"], [0.5, 0.6], 1880),
        TaskScore(TASKS["kitti-distance"], [], 711, ["seed 0 failed: why"]),
    ]
    table = VtabTable(tmp_path, "runs/net", ["duration 2 steps, not 2500 steps"], scores, {"pets": "tfds build pets"})
    monkeypatch.setattr(over, "vtab", lambda *_: table)
    assert cli.main(["vtab", "--from", "runs/net", "--data", "d"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["dtd", "55.0", "7.1", "75.2", "74.3", "74.1", "69.5"] in lines  # 0.1 / sqrt(2) is the sample deviation
    assert ["kitti-distance", "failed", "84.5", "82.2", "79.9", "77.1"] in lines
    for group in ("natural", "mean"):
        assert [group, "(1)", "55.0", "75.2", "74.3", "74.1", "69.5"] in lines
    text = "\n".join(" ".join(line) for line in lines)
    assert "not the paper's setting: duration 2 steps, not 2500 steps" in text
    assert "skipped: pets (tfds build pets)" in text and "kitti-distance: seed 0 failed: why" in text


def test_a_complete_table_has_the_papers_means(tmp_path: Path) -> None:
    """With the published numbers for ours, the means are the published ones."""
    for network, row in PUBLISHED.items():
        scores = [TaskScore(task, [row[name] / 100], task.test_images) for name, task in TASKS.items()]
        means = VtabTable(tmp_path, "w", [], scores).as_json()["means"]
        assert means["mean"]["tasks"] == 19
        assert round(means["mean"]["top1"], 1) == {"ViT-H/14 (JFT)": 77.6, "ViT-L/16 (JFT)": 76.3}.get(network, 72.7)


def test_every_task_has_a_data_set_that_says_where_it_comes_from() -> None:
    for task in TASKS.values():
        assert task.entry.url and task.entry.tfds and task.entry.tfds.count(":") == 1
        assert task.entry.classes in (0, task.classes)
    assert {"inaturalist2018", "inaturalist2019", "cars"} <= set(CATALOG)
    assert CATALOG["jft300m"].source == "never published"
