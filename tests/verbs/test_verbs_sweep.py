"""`vitrail sweep`: its grids, its flags, and what it prints."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from references import draw, once

import vitrail
from vitrail import cli
from vitrail.costs.published import published_table
from vitrail.durations import Steps
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.ranges import checked
from vitrail.recipes.bit import hyperrule
from vitrail.recipes.paper_finetune import PAPER_FINETUNE, ROW_OF
from vitrail.training.run import OWN_RATES, Run
from vitrail.transfer.on_ray import OnRay
from vitrail.transfer.processes import Processes, automatic
from vitrail.transfer.trial import here
from vitrail.verbs import sweep as verb


@pytest.fixture(scope="session")
def photos() -> Path:
    """Images to train and to test on."""

    def make(place: Path) -> None:
        for seed, (split, count) in enumerate((("train", 20), ("test", 4))):
            draw(place / split, count=count, side=8, seed=seed)

    return once("photos-8-divided", make)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    vitrail.save(vitrail.create("Ti/4", classes=3, image_size=8, width=16, depth=1, heads=2, mlp_dim=32), folder)
    return folder


SMALL = ["--batch-size", "8", "--workers", "0", "--device", "cpu", "--precision", "float32", "--accumulate", "1"]


# what is tried


def test_the_grids_are_those_of_table_4() -> None:
    rows = {row["dataset"]: row for row in published_table("table4_finetuning")["rows"]}
    assert set(ROW_OF) == set(PAPER_FINETUNE)
    for name, row in ROW_OF.items():
        theirs = next(row_ for dataset, row_ in rows.items() if dataset.split(" (")[0] == row.title.split(" (")[0])
        assert sorted(row.grid) == sorted(np.atleast_1d(theirs["base_lr"]).tolist()), name
        assert name.startswith(row.recipe)


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


@pytest.fixture(scope="module")
def convolutional(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A ResNet and a hybrid."""
    folder = tmp_path_factory.mktemp("convolutional")
    small = {"width": 32, "depth": 1, "heads": 2, "mlp_dim": 32}
    hybrid = ViTConfig.of(**small, patch=8, image_size=(16, 16), classes=3, stem="resnet", stem_units=(1,))
    resnet = ResNetConfig(units=(1, 1), width=32, image_size=(32, 32), classes=3)
    for name, config in (("hybrid", hybrid), ("resnet", resnet)):
        vitrail.save(build(config), folder / name)
    return {"hybrid": folder / "hybrid", "resnet": folder / "resnet"}


@pytest.mark.parametrize("network", ["vit", "hybrid", "resnet"])
def test_what_appendix_b11_adds_for_resnets_and_hybrids(
    network: str, photos: Path, weights: Path, convolutional: dict[str, Path]
) -> None:
    """ "For ResNets and hybrid models [...] ImageNet where we add another value 0.06 to the learning rate sweep.
    Additionally, for ResNets we also run the setup of Kolesnikov et al. (2020) and select the best results." """
    planned = _planned(
        photos, convolutional.get(network, weights), "paper/finetune-imagenet", settings={"image_size": 32}
    )
    trials = [trial.values for trial in planned.search]
    rates = [0.003, 0.01, 0.03] if network == "vit" else [0.003, 0.01, 0.03, 0.06]
    also = [{"recipe": "bit/hyperrule"}] if network == "resnet" else []
    assert trials == [*({"optim.lr": rate} for rate in rates), *also]
    if network == "resnet":
        rule = planned.search[-1].run
        theirs = hyperrule(planned.split.images, side=8)
        assert (rule.optim, rule.schedule.drops, rule.duration) == (theirs.optim, theirs.schedule.drops, Steps(500))
        assert rule.image_size == 32  # as asked for
        assert rule.data == planned.search[0].run.data and rule.weights == planned.search[0].run.weights
        finals = planned.finals(planned.search[-1].values)
        assert [trial.run.seed for trial in finals] == [0, 1, 2]
        assert all(trial.run.optim == theirs.optim and trial.run.data.holdout == 0 for trial in finals)


def test_a_rate_that_is_asked_for_is_the_only_setting(photos: Path, convolutional: dict[str, Path]) -> None:
    planned = _planned(photos, convolutional["resnet"], lr=(0.02,), settings={"image_size": 32})
    assert [trial.values for trial in planned.search] == [{"optim.lr": 0.02}]


def test_from_scratch_on_imagenet_the_regularisation_is_tuned(photos: Path) -> None:
    """Section 4.3: "we optimize three basic regularization parameters – weight decay, dropout, and label smoothing"."""
    small = {"width": 16, "depth": 1, "heads": 2, "mlp_dim": 32, "patch": 4}
    planned = _planned(photos, None, "paper/vit-b16-imagenet", settings={"image_size": 8, "vit": small})
    tried = [(t.run.optim.weight_decay, t.run.vit.dropout, t.run.objective.smoothing) for t in planned.search]
    assert len(set(tried)) == 12 and (0.3, 0.1, 0.0) in tried  # Table 3's choice is among them


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


@pytest.mark.parametrize("flags", [{"settings": {"optim": {"lr": 0.1}}}, {"lr": (0.1,)}])
def test_a_rate_of_either_flag_is_the_only_one(photos: Path, weights: Path, flags: dict[str, Any]) -> None:
    planned = _planned(photos, weights, **flags)
    assert [trial.run.optim.lr for trial in planned.search] == [0.1]
    assert planned.search[0].asked["optim.lr"] == ("--lr" if "lr" in flags else "--optim.lr")


@pytest.mark.parametrize("other", [{"lr": (0.2,)}, {"vary": ("optim.lr=0.2,0.3",)}])
def test_two_flags_that_set_the_rate_are_refused(photos: Path, weights: Path, other: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"--optim.lr and .* both set the learning rate"):
        _planned(photos, weights, settings={"optim": {"lr": 0.1}}, **other)


def test_a_rate_in_a_file_is_said_to_be_replaced(
    photos: Path, weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "my.yaml").write_text("optim: {lr: 0.1}\n")
    given = verb.Asked(photos, None, (file,), None, None, weights, {})
    planned = verb._trials(given, (), (), 1, None, Path("s"))
    assert len(planned.search) > 1 and 0.1 not in [trial.run.optim.lr for trial in planned.search]
    assert "my.yaml:1: the rate 0.1 is not used" in caplog.text


def test_evaluations_that_a_sweep_does_not_make_are_refused(photos: Path, weights: Path) -> None:
    with pytest.raises(UsageError, match="Remove --evaluate-every"):
        _planned(photos, weights, settings={"evaluate_every": "10 %"})


@pytest.mark.parametrize("setting", [{"knn": 5}, {"early_stop": 2}])
def test_settings_for_validation_images_are_refused_before_any_trial(
    photos: Path, weights: Path, setting: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="final runs of a sweep have none"):
        _planned(photos, weights, settings=setting)


def test_another_optimiser_has_its_own_rate_and_decay_unless_they_are_asked_for(photos: Path, weights: Path) -> None:
    def tried(**asked: Any) -> list[tuple[float, float]]:
        trials = _planned(photos, weights, vary=("optim.name=sgd,adamw",), **asked).search
        assert [trial.run.optim.name for trial in trials] == ["sgd", "adamw"] * (len(trials) // 2)
        return [(trial.run.optim.lr, trial.run.optim.weight_decay) for trial in trials]

    sgd, adamw = tried()
    assert adamw == OWN_RATES["adamw"] != sgd
    decays = {OWN_RATES["adamw"][1], sgd[1]}
    assert tried(lr=(0.5,)) == [(0.5, sgd[1]), (0.5, OWN_RATES["adamw"][1])] and len(decays) == 2
    assert tried(settings={"optim": {"weight_decay": 0.2}}) == [(sgd[0], 0.2), (adamw[0], 0.2)]


def test_a_varied_network_is_exactly_the_one_that_is_named(photos: Path, weights: Path) -> None:
    """The recipe's changes of its own network are not those of another one."""
    planned = _planned(photos, None, "scratch-small", vary=("model=Ti/16,S/14",))
    assert len({trial.key for trial in planned.search}) == 2
    assert [trial.run.vit.changes() for trial in planned.search] == [{}, {}]
    assert [trial.run.data.path for trial in planned.search] == [str(photos)] * 2
    with pytest.raises(UsageError, match="names the network S/16, but the network is that of the weights"):
        _planned(photos, weights, vary=("model=S/16",))


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
    assert verb.values_to_try(text, Run()) == (name, values)


@pytest.mark.parametrize("text", ["optim.lr", "=1", "optim.lr=", "optim.lr=[1", "optim.lrr=1", "optim.lr=fast"])
def test_values_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError):
        verb.values_to_try(text, Run())


def test_what_is_missing_or_contradicts_is_told(photos: Path, weights: Path) -> None:
    for keywords, message in (
        ({"path": None}, "no images are given"),
        ({"weights": None}, "--from RUN"),
        ({"weights": None, "recipe": "smoke"}, "no learning rates to try are published for recipe smoke"),
        ({"vary": ("optim.lr=1",), "lr": (1.0,)}, "give one of them"),
        ({"seeds": 0}, "seeds is 0; it must be from 1 to 1,000"),
        ({"parallel": -1}, "parallel"),
        ({"parallel": 0, "devices": ["cpu"]}, "--device"),
        ({"ray": "local", "devices": ["cpu"]}, "Ray cluster decides"),
        ({"devices": ["cuda:99"]}, "cuda:99"),
    ):
        with pytest.raises(UsageError, match=message):
            vitrail.sweep(**{"path": photos, "weights": weights, "dry_run": True, **keywords})


def test_where_trials_go(photos: Path) -> None:
    assert verb.executor(None, [], None) is automatic
    assert verb.executor(1, [], None) == Processes([None])
    assert verb.executor(3, [], None) == Processes([None] * 3)
    assert verb.executor(None, ["cpu", "cpu"], None) == Processes(["cpu", "cpu"])
    assert verb.executor(3, ["cpu", "meta"], None) == Processes(["cpu", "meta", "cpu"])
    assert verb.executor(0, [], None) is here
    assert verb.executor(4, [], "auto") == OnRay("auto", 4)


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
    @functools.wraps(inspect.unwrap(verb.sweep))
    def remember(path: Any = None, **keywords: Any) -> None:
        seen.append((path, keywords))

    return checked(remember)


# what it does and prints


@pytest.mark.full_size
def test_dry_run_lists_the_trials_and_their_cost_and_writes_nothing(
    photos: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sweep", str(photos), "--from", str(weights), "--out", str(tmp_path / "s"), "--dry-run", *SMALL]
    assert cli.main([*argv, "--lr", "0.01", "0.1", "--seeds", "2", "--duration", "3 steps"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "lr 0.01",
        "lr 0.1",
        "the best values, seed 1, on all training images",
        "20 % of the training images (8 images)",
    ):
        assert part in shown
    assert "all: 4 trials to train, about" in shown and "32 images of 2 classes to train on, 8 to choose by" in shown
    assert not (tmp_path / "s").exists()
    assert cli.main([*argv, "--lr", "0.01", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trials"] == 5 and found["device_days"] == pytest.approx(5 * found["cost"]["device_days"])


@pytest.mark.train
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


def test_what_is_asked_for_and_cannot_be_is_refused_by_the_trial(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sweep", str(photos), "--recipe", "scratch-small", "--out", str(tmp_path / "s"), "--parallel", "0", *SMALL]
    argv += ["--lr", "0.01", "--seeds", "1", "--duration", "1 step", "--batch-size", "5000"]
    assert cli.main(argv) == 1
    assert "--batch-size asks for 5000, which is not possible here" in capsys.readouterr().err
