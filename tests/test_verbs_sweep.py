"""`vitrail sweep`: its grids, its flags, and what it prints."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.config import Steps
from vitrail.costs.published import published
from vitrail.errors import UsageError
from vitrail.recipes.paper_finetune import PAPER_FINETUNE, ROW_OF
from vitrail.training.run import Run
from vitrail.transfer.on_ray import OnRay
from vitrail.transfer.processes import Processes
from vitrail.transfer.trial import here
from vitrail.verbs import sweep as verb


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 4)):
        for number, name in enumerate(("blue", "red")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (8, 8, 3), dtype=np.uint8)
                pixels[..., 2 - 2 * number] += 100
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    vitrail.save(vitrail.create("Ti/4", classes=3, image_size=8, width=16, depth=1, heads=2, mlp_dim=32), folder)
    return folder


SMALL = ["--batch-size", "8", "--workers", "0", "--device", "cpu", "--precision", "float32", "--accumulate", "1"]


# what is tried


def test_the_grids_are_those_of_table_4() -> None:
    rows = {row["dataset"]: row for row in published("table4_finetuning")["rows"]}
    assert set(ROW_OF) == set(PAPER_FINETUNE)
    for name, row in ROW_OF.items():
        theirs = next(row_ for dataset, row_ in rows.items() if dataset.split(" (")[0] == row.title.split(" (")[0])
        assert sorted(row.grid) == sorted(np.atleast_1d(theirs["base_lr"]).tolist()), name
        assert name.startswith(row.recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "dev", "how"),
    [
        ("paper/finetune-cifar100", 2, "2 % of the training images"),
        ("paper/finetune-flowers-big-vision", 4, "10 % of the training images"),
        ("paper/finetune-vtab", 8, "20 % of the training images"),
        (None, 8, "20 % of the training images"),  # 40 images are as few as VTAB's
    ],
)
def test_a_recipe_brings_its_share(photos: Path, weights: Path, recipe: str | None, dev: int, how: str) -> None:
    planned = _planned(photos, weights, recipe=recipe, settings={"image_size": 8})
    assert (planned.split.dev, planned.split.how) == (dev, how)
    rates = [trial.run.optim.lr for trial in planned.search]
    assert rates == ([0.01] if recipe == "paper/finetune-vtab" else [0.001, 0.003, 0.01, 0.03])
    if recipe is None:
        assert planned.sweep.base.duration == Steps(500)  # the paper's for so few images


def _planned(photos: Path, weights: Path | None, recipe: str | None = None, **asked: Any) -> Any:
    given = verb.Asked(photos, recipe, (), None, None, weights, asked.pop("settings", {}))
    values = {"lr": (), "vary": (), "seeds": 3, "dev": None, **asked}
    return verb._trials(given, *values.values(), Path("runs/sweep"))


def test_what_is_asked_for_goes_first(photos: Path, weights: Path) -> None:
    planned = _planned(
        photos,
        weights,
        lr=(0.5,),
        vary=("optim.momentum=0.8, 0.9", "schedule.shape=linear"),
        seeds=2,
        dev=0.25,
        settings={"seed": 7},
    )
    assert planned.split.dev == 10
    found = [(t.run.optim.lr, t.run.optim.momentum, t.run.schedule.shape, t.run.seed) for t in planned.search]
    assert found == [(0.5, 0.8, "linear", 7), (0.5, 0.9, "linear", 7)]
    assert planned.sweep.seeds == [7, 8]


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("optim.momentum=0.8,0.9", "optim.momentum", (0.8, 0.9)),
        ("duration=500 steps, 2 epochs", "duration", (Steps(500), vitrail.Epochs(2))),
        ("optim.clip=null,1", "optim.clip", (None, 1.0)),
        ("optim.betas=[0.9, 0.99],[0.8, 0.9]", "optim.betas", ((0.9, 0.99), (0.8, 0.9))),
        ("model=S/16,B/16", "model", ("S/16", "B/16")),
    ],
)
def test_values_are_read_as_in_a_configuration(text: str, name: str, values: tuple[Any, ...]) -> None:
    assert verb.values_of(text, Run()) == (name, values)


@pytest.mark.parametrize("text", ["optim.lr", "=1", "optim.lr=", "optim.lr=[1", "optim.lrr=1", "optim.lr=fast"])
def test_values_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError):
        verb.values_of(text, Run())


def test_what_is_missing_or_contradicts_is_told(photos: Path, weights: Path) -> None:
    for keywords, message in (
        ({"path": None}, "which images"),
        ({"weights": None}, "--from RUN"),
        ({"weights": None, "recipe": "smoke"}, "no learning rates to try are published for recipe smoke"),
        ({"vary": ("optim.lr=1",), "lr": (1.0,)}, "give one of them"),
        ({"seeds": 0}, "at least one"),
        ({"parallel": -1}, "parallel"),
        ({"parallel": 0, "devices": ["cpu"]}, "--device"),
        ({"ray": "local", "devices": ["cpu"]}, "Ray cluster decides"),
        ({"devices": ["cuda:99"]}, "cuda:99"),
    ):
        with pytest.raises(UsageError, match=message):
            vitrail.sweep(**{"path": photos, "weights": weights, "dry_run": True, **keywords})


def test_where_trials_go(photos: Path) -> None:
    assert verb._executor(None, [], None) == Processes([None])
    assert verb._executor(3, [], None) == Processes([None] * 3)
    assert verb._executor(None, ["cpu", "cpu"], None) == Processes(["cpu", "cpu"])
    assert verb._executor(3, ["cpu", "meta"], None) == Processes(["cpu", "meta", "cpu"])
    assert verb._executor(0, [], None) is here
    assert verb._executor(4, [], "auto") == OnRay("auto", 4)


@pytest.mark.slow
def test_the_command_line_is_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(verb, "show", lambda result: "")
    monkeypatch.setattr(verb, "sweep", _remembering(seen))
    argv = "sweep photos/ --from w --lr 0.001 3e-3 --devices cuda:0 cuda:1 --vary optim.momentum=0.8,0.9 --ray"
    assert cli.main([*argv.split(), "--dry-run"]) == 0
    ((path, keywords),) = seen
    assert path == "photos/" and keywords["weights"] == "w"
    assert tuple(keywords["lr"]) == (0.001, 0.003) and list(keywords["devices"]) == ["cuda:0", "cuda:1"]
    assert keywords["vary"] == ("optim.momentum=0.8,0.9",) and keywords["ray"] == "local"


def _remembering(seen: list[Any]) -> Any:
    @functools.wraps(verb.sweep)
    def remember(path: Any = None, **keywords: Any) -> None:
        seen.append((path, keywords))

    return remember


# what it does and prints


@pytest.mark.slow
def test_dry_run_lists_the_trials_and_their_cost_and_writes_nothing(
    photos: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sweep", str(photos), "--from", str(weights), "--out", str(tmp_path / "s"), "--dry-run", *SMALL]
    assert cli.main([*argv, "--lr", "0.01", "0.1", "--seeds", "2", "--duration", "3 steps"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "lr 0.01",
        "lr 0.1",
        "the best of them, seed 1, on everything",
        "20 % of the training images (8 images)",
    ):
        assert part in shown
    assert "all: 4 trials to train: about" in shown and "32 images of 2 classes to train on, 8 to choose by" in shown
    assert not (tmp_path / "s").exists()
    assert cli.main([*argv, "--lr", "0.01", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trials"] == 5 and found["device_days"] == pytest.approx(5 * found["cost"]["device_days"])


@pytest.mark.slow
def test_a_sweep_from_weights_to_the_table(
    photos: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sweep", str(photos), "--from", str(weights), "--out", str(tmp_path / "s"), "--parallel", "0", *SMALL]
    argv += ["--lr", "0.01", "0.3", "--seeds", "2", "--duration", "4 steps"]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["values"] for row in found["search"]] == [{"optim.lr": 0.01}, {"optim.lr": 0.3}]
    tests = [row["test"]["top1"] for row in found["final"]]
    assert found["top1"] == {
        "mean": pytest.approx(np.mean(tests)),
        "std": pytest.approx(np.std(tests, ddof=1)),
        "count": 2,
    }
    assert all(row["test"]["count"] == 8 for row in found["final"])
    assert found == json.loads((tmp_path / "s" / "sweep.json").read_text())

    assert cli.main(argv) == 0  # the same command again: nothing is trained
    out, err = capsys.readouterr()
    assert err.count("2 of 2 trials are finished already") == 2 and "run folder" not in err
    assert f"test top-1 {100 * np.mean(tests):.2f} % ± {100 * np.std(tests, ddof=1):.2f}" in out
    assert out.count("chosen") >= 2 and "sample standard deviation" in out
    model = vitrail.load(found["final"][0]["run"])
    assert model.card.class_names == ["blue", "red"]
