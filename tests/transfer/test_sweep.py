"""Sweeps: which images are for what, the choice, trials that are never repeated, and a whole one on real files."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.config import from_yaml
from vitrail.costs.published import published_table
from vitrail.data.settings import Augment, Data
from vitrail.data.sources.open import open_data
from vitrail.durations import Steps
from vitrail.errors import TrainingError, UsageError
from vitrail.evaluation.metric import Metric
from vitrail.objective.settings import MAE
from vitrail.training.folder import RunFolder
from vitrail.training.run import Model, Optim, Run, Schedule
from vitrail.transfer.grid import Sweep, Trials
from vitrail.transfer.protocol import DevSplit, arrange, dev_share
from vitrail.transfer.sweep import SweepResult, TrialResult, best_trial, spread, sweep
from vitrail.transfer.trial import OUTCOME, Outcome, Trial, here
from vitrail.verbs.sweep import show
from vitrail.weights.load import weights_fingerprint


def tiny(data: str = "digits", **changes: Any) -> Run:
    """A few steps of a few thousand parameters."""
    run = Run(
        data=Data(path=data),
        model="Ti/4",
        vit=Model(width=16, depth=1, heads=2, mlp_dim=32),
        image_size=8,
        augment=Augment(crop="center", flip=False),
        optim=Optim(name="sgd", lr=0.1, weight_decay=0.0),
        schedule=Schedule("constant", warmup=Steps(0)),
        duration=Steps(6),
        batch_size=8,
        accumulate=1,
        precision="float32",
        workers=0,
        device="cpu",
    )
    return replace(run, **changes)


# which images are for what


@pytest.mark.parametrize(
    ("images", "share"),
    [(1_281_167, 0.01), (50_000, 0.02), (3_680, 0.1), (2_040, 0.1), (1_000, 0.2)],
    ids=["ImageNet", "CIFAR", "Pets", "Flowers", "VTAB: 800 + 200"],
)
def test_the_share_to_choose_by_is_the_papers(images: int, share: float) -> None:
    assert dev_share(images) == share


def test_table_4_has_the_same_shares() -> None:
    rows = published_table("table4_finetuning")["rows"]
    images = {"ImageNet": 1_281_167, "CIFAR": 50_000, "Pets": 3_680, "Flowers": 2_040}
    found = 0
    for row in rows:
        for name, count in images.items():
            if name in row["dataset"]:
                assert dev_share(count) == row["dev_split"]
                found += 1
    assert found == 5


def tree(root: Path, **splits: int) -> Path:
    """Files that are no images: what opens one of them fails."""
    for split, count in splits.items():
        for name in ("a", "b"):
            folder = root / split.removeprefix("flat") / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{split}-{i}.png").write_text(f"{split} {name} {i}")
    return root


def ids(data: Data, seed: int = 0) -> dict[str, set[str]]:
    splits = open_data(data, seed=seed)
    return {
        role: set()
        if source is None
        else {source.id(i).rpartition("/")[2] + str(source.labels[i]) for i in range(len(source))}
        for role, source in (("train", splits.train), ("dev", splits.validation), ("test", splits.test))
    }


@pytest.mark.parametrize(
    ("splits", "share", "dev", "everything", "test"),
    [
        ({"train": 20, "test": 5}, None, 8, 40, 10),  # a fifth of 40
        ({"train": 20, "test": 5}, 0.1, 4, 40, 10),
        ({"train": 20, "val": 3, "test": 5}, None, 6, 46, 10),  # the validation split, which joins
        ({"train": 20, "val": 5, "test": 5}, 0.2, 10, 50, 10),  # Flowers in the paper: 10 % of train and val
        ({"train": 20, "val": 3}, None, 8, 40, 6),  # ImageNet in the paper: the validation split is the test
        ({"flat": 20}, None, 8, 40, 0),
    ],
)
def test_what_is_chosen_by_comes_from_training_and_nothing_is_lost(
    tmp_path: Path, splits: dict[str, int], share: float | None, dev: int, everything: int, test: int
) -> None:
    root = tree(tmp_path / "d", **splits)
    found = arrange(Data(str(root)), share, seed=0)
    search, final = ids(found.search), ids(found.final)
    assert (found.dev, found.test, found.images) == (dev, test, everything - dev)
    assert (len(search["dev"]), len(search["train"])) == (dev, everything - dev)
    assert not search["train"] & search["dev"] and search["train"] | search["dev"] == final["train"]
    assert search["test"] == set() and final["dev"] == set()
    assert len(final["test"]) == test and not final["test"] & final["train"]


@pytest.mark.parametrize(("size", "share", "dev"), [(10, None, 2), (20, 0.4, 8), (0.5, 0.1, 2)])
def test_a_subset_is_the_training_set_of_the_sweep(
    tmp_path: Path, size: int | float, share: float | None, dev: int
) -> None:
    """What is held out is a share of the subset, not of the images that the sweep does not use."""
    root = tree(tmp_path / "d", train=20, test=5)
    found = arrange(Data(str(root), subset=size), share, seed=0)
    search, final = ids(found.search), ids(found.final)
    count = size if isinstance(size, int) else int(size * 40)
    assert (found.dev, found.images) == (dev, count - dev)
    assert search["train"] | search["dev"] == final["train"] and len(final["train"]) == count
    assert not search["train"] & search["dev"]


def test_a_validation_split_can_be_named_and_the_test_split_cannot(tmp_path: Path) -> None:
    root = tree(tmp_path / "d", train=10, val=3)
    named = arrange(Data(str(root), validation="val"), None, seed=0)
    assert (named.dev, named.test) == (6, 0)  # asked for to choose by: then nothing is left to test on
    with pytest.raises(UsageError, match="would no longer be a test"):
        arrange(Data(str(tree(tmp_path / "e", train=10, test=3)), validation="test"), None, seed=0)
    with pytest.raises(UsageError, match="must be between 0 and 1"):
        arrange(Data(str(root)), 1.0, seed=0)


# the choice


def row(lr: float, top1: float, nll: float, status: str = "done", reason: str = "") -> TrialResult:
    run = Run(optim=Optim(lr=lr))
    dev = {"top1": top1, "nll": nll} if status == "done" else None
    outcome = Outcome(status, reason, dev=dev)  # type: ignore[arg-type]
    return TrialResult(Trial.of(run, f"{lr:g}", Path(), {"optim.lr": lr}, final=False), outcome)


@pytest.mark.parametrize(("metric", "best"), [("balanced_accuracy", 0.1), ("nll", 0.3), ("top1", 0.2), ("map", 0.2)])
def test_the_metric_of_the_run_chooses(metric: Any, best: float) -> None:
    """The last one is not among the numbers of these images."""
    numbers = {0.1: (0.7, 0.9, 1.0), 0.2: (0.8, 0.5, 0.9), 0.3: (0.6, 0.4, 0.2)}
    rows = []
    for lr, (top1, balanced, nll) in numbers.items():
        found = row(lr, top1, nll)
        outcome = replace(found.outcome, dev={"top1": top1, "balanced_accuracy": balanced, "nll": nll})
        run = replace(found.trial.run, metric=Metric(metric))
        rows.append(TrialResult(replace(found.trial, run=run), outcome))
    assert best_trial(rows).trial.run.optim.lr == best
    shown = show(SweepResult(Path(), DevSplit(Data(), Data(), 1, 2, 1, 0, "a share"), rows, final=rows[:1])).text(None)
    title = {"balanced_accuracy": "balanced accuracy", "nll": "nll"}.get(metric, "top-1")
    assert f"dev {title}" in shown and f"chosen by {title} on a share" in shown


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([row(0.1, 0.5, 1.0), row(0.2, 0.6, 9.0)], 0.2),
        ([row(0.1, 0.6, 1.0), row(0.2, 0.6, 0.9)], 0.2),  # equal: the smaller loss
        ([row(0.2, 0.6, 1.0), row(0.1, 0.6, 1.0)], 0.1),  # equal again: the smaller rate
        ([row(0.1, 0.6, float("nan")), row(0.2, 0.6, 5.0)], 0.2),
        ([row(0.1, 0, 0, "diverged"), row(0.2, 0.1, 9.0), row(0.3, 0, 0, "failed")], 0.2),
    ],
)
def test_the_choice(rows: list[TrialResult], chosen: float) -> None:
    assert best_trial(rows).trial.values == {"optim.lr": chosen}


def test_no_choice_without_a_trained_setting() -> None:
    with pytest.raises(TrainingError, match=r"(?s)lr 0\.1: diverged: to infinity.*lr 0\.2: failed: a full disk"):
        best_trial([row(0.1, 0, 0, "diverged", "to infinity"), row(0.2, 0, 0, "failed", "a full disk")])


def test_mean_and_standard_deviation_are_numpys() -> None:
    values = [0.61, 0.635, 0.6, 0.622]
    rows = [replace(row(0.1, 0, 0), outcome=Outcome("done", test={"top1": value})) for value in values]
    found = spread(rows)
    assert found is not None and found.count == 4
    assert found.mean == pytest.approx(np.mean(values), abs=1e-15)
    assert found.std == pytest.approx(np.std(values, ddof=1), abs=1e-15)
    single = spread(rows[:1])
    assert single is not None and (single.mean, single.std) == (0.61, None)
    assert spread([row(0.1, 0.5, 1.0)]) is None


# a sweep with a trainer that only pretends


class Pretend:
    """Gives each trial the outcome of a formula, and remembers which it trained."""

    def __init__(self, failing: dict[float, str] | None = None) -> None:
        self.trained: list[Trial] = []
        self.failing = failing or {}

    def __call__(self, trials: Sequence[Trial]) -> Generator[tuple[Trial, Outcome], None, None]:
        for trial in reversed(trials):  # in no particular order
            self.trained.append(trial)
            lr, seed = trial.run.optim.lr, trial.run.seed
            numbers = {"top1": 0.9 - abs(lr - 0.03) + 0.01 * seed, "nll": 1.0}
            outcome = Outcome("done", "", "somewhere", **{"test" if trial.final else "dev": numbers})
            if lr in self.failing and not trial.final:
                outcome = Outcome(self.failing[lr], "because")  # type: ignore[arg-type]
            RunFolder(trial.folder).write_json(OUTCOME, asdict(outcome))
            yield trial, outcome


def test_search_then_choice_then_seeds(tmp_path: Path) -> None:
    plan = Sweep(tiny(), {"optim.lr": (0.001, 0.03, 0.1, 0.03)}, seeds=(4, 5, 6))
    trainer = Pretend()
    result = sweep(Trials.of(plan, tmp_path), trainer)
    assert [trial.final for trial in trainer.trained] == [False] * 3 + [True] * 3  # the same rate twice is one run
    assert [r.trial.values["optim.lr"] for r in result.search] == [0.001, 0.03, 0.1, 0.03]
    assert result.chosen == {"optim.lr": 0.03}
    assert [r.trial.run.seed for r in result.final] == [4, 5, 6]
    assert {r.trial.run.data.holdout for r in result.final} == {0.0}
    assert {r.trial.run.data.test for r in result.search} == {"none"}
    top1 = [0.9 + 0.01 * seed for seed in (4, 5, 6)]
    assert result.top1 is not None
    assert result.top1.mean == pytest.approx(np.mean(top1)) and result.top1.std == pytest.approx(np.std(top1, ddof=1))
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert written == json.loads(json.dumps(result.as_json()))
    assert written["top1"]["std"] == pytest.approx(0.01) and len(written["search"]) == 4


@pytest.mark.full_size
def test_what_is_finished_is_never_trained_again(tmp_path: Path) -> None:
    def again(rates: tuple[float, ...], trainer: Pretend, **changes: Any) -> list[tuple[float, bool]]:
        run = tiny(**changes)
        sweep(Trials.of(Sweep(run, {"optim.lr": rates}, seeds=(0, 1)), tmp_path), trainer)
        return [(trial.run.optim.lr, trial.final) for trial in trainer.trained]

    first = again((0.01, 0.02, 0.5), Pretend({0.5: "diverged", 0.01: "failed"}))
    assert sorted(first) == [(0.01, False), (0.02, False), (0.02, True), (0.02, True), (0.5, False)]
    assert again((0.01, 0.02, 0.5), Pretend()) == [(0.01, False)]  # what failed may be tried again; a divergence not
    assert again((0.02, 0.001), Pretend(), workers=3, out="elsewhere", keep=9) == [(0.001, False)]  # of another sweep
    assert len(again((0.02, 0.001), Pretend(), batch_size=4)) == 4  # another run altogether


def test_one_setting_needs_no_choice(tmp_path: Path) -> None:
    trainer = Pretend()
    result = sweep(Trials.of(Sweep(tiny(), {"optim.lr": (0.01,)}, seeds=(0,)), tmp_path), trainer)
    assert [trial.final for trial in trainer.trained] == [True] and result.search == []
    assert result.chosen == {"optim.lr": 0.01} and result.top1 is not None and result.top1.std is None


def test_several_settings_are_all_combined(tmp_path: Path) -> None:
    plan = Sweep(tiny(), {"optim.lr": (0.01, 0.02), "schedule.shape": ("cosine", "linear")})
    found = {(t.run.optim.lr, t.run.schedule.shape) for t in Trials.of(plan, tmp_path).search}
    assert found == {(0.01, "cosine"), (0.01, "linear"), (0.02, "cosine"), (0.02, "linear")}


def test_settings_that_cannot_be_are_told_before_anything_is_trained() -> None:
    for grid, message in (
        ({"optim.lrr": (1.0,)}, "lrr"),
        ({"optim.lr": ("fast",)}, "a number"),
        ({"optim.lr": (float("nan"),)}, "cannot be nan"),
        ({"seed": (1, 2)}, "the sweep decides"),
        ({"data.holdout": (0.1,)}, "the sweep decides"),
        ({"optim.lr": ()}, "no values"),
    ):
        with pytest.raises(UsageError, match=message):
            Sweep(tiny(), grid)
    with pytest.raises(UsageError, match="none of them twice"):
        Sweep(tiny(), seeds=(1, 1))
    with pytest.raises(UsageError, match="early_stop"):
        Sweep(tiny(early_stop=3))
    with pytest.raises(UsageError, match="objective mae uses no labels"):
        Sweep(tiny(objective=MAE()))


# what makes two runs the same


def keys(run: Run, folder: Path) -> list[str]:
    return [trial.key for trial in Trials.of(Sweep(run, {"optim.lr": (0.1, 0.2)}), folder).search]


def test_the_key_is_what_is_computed_wherever_that_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path / "d", train=10, test=2)
    run = tiny(str(root))
    known = keys(run, tmp_path)
    assert len(set(known)) == 2
    monkeypatch.chdir(tmp_path)
    moved = shutil.copytree(root, tmp_path / "moved")
    for same in (
        replace(run, name="x", out="y", workers=2, keep=1, cache="no", accumulate=2),
        replace(run, data=Data("d")),
        replace(run, data=Data(str(moved))),
        replace(run, evaluate_every=Steps(1)),  # the sweep evaluates once, at the end
    ):
        assert keys(same, tmp_path) == known
    (moved / "train" / "a" / "train-0.png").write_text("another image")
    for other in (
        replace(run, data=Data(str(moved))),
        replace(run, data=Data(str(root), subset=12)),
        replace(run, seed=1),
        replace(run, batch_size=4),
        replace(run, duration=Steps(7)),
        replace(run, augment=Augment(crop="pad")),
        replace(run, vit=replace(run.vit, drop_path=0.1)),
    ):
        assert not set(keys(other, tmp_path)) & set(known)


def test_what_a_run_leaves_open_counts_as_it_is_decided(tmp_path: Path) -> None:
    decided = keys(tiny(image_size=8), tmp_path)
    assert keys(tiny(image_size=None), tmp_path) == decided  # digits have 8 pixels
    assert keys(tiny(image_size=16), tmp_path) != decided


def test_weights_count_by_what_is_in_them(tmp_path: Path) -> None:
    model = vitrail.create("Ti/4", classes=10, image_size=8, width=16, depth=1, heads=2, mlp_dim=32)
    vitrail.save(model, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with torch.no_grad():
        model.norm.weight[0] += 1e-3
    vitrail.save(model, tmp_path / "other")
    marks = [weights_fingerprint(tmp_path / name) for name in ("one", "copy", "other")]
    assert marks[0] == marks[1] != marks[2]
    run = tiny(vit=Model())
    plan = Sweep(run, {"weights": tuple(str(tmp_path / name) for name in ("one", "copy", "other"))})
    found = [trial.key for trial in Trials.of(plan, tmp_path / "s").search]
    assert found[0] == found[1] != found[2]


# a whole sweep, on files


opened: list[str] = []
watched = ""


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and watched and isinstance(arguments[0], str | bytes):
        path = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode()
        if path.startswith(watched):
            opened.append(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep of three rates, one of which diverges, with notes of when which test image was opened."""
    global watched
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 6)):
        for number, name in enumerate(("blue", "red")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (8, 8, 3), dtype=np.uint8)
                pixels[..., 2 - 2 * number] += 100
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    seen: list[int] = []

    def watching(trials: Sequence[Trial]) -> Generator[tuple[Trial, Outcome], None, None]:
        seen.append(len(opened))
        yield from here(trials)
        seen.append(len(opened))

    sys.addaudithook(_note)
    watched = str(root / "test")
    plan = Sweep(tiny(str(root)), {"optim.lr": (0.001, 0.3, 1e38)}, seeds=(0, 1), dev=0.25)
    result = sweep(Trials.of(plan, tmp_path_factory.mktemp("sweep")), watching)
    watched = ""
    return root, result, seen


@pytest.mark.train
def test_no_test_image_is_opened_before_the_choice(whole: Any) -> None:
    """Then each seed opens each twice: to count copies of training images, and to ask the finished network."""
    root, _, seen = whole
    assert len(seen) == 4 and seen[:3] == [0, 0, 0] and seen[3] == 2 * 2 * 12
    assert Counter(opened) == {str(path): 2 * 2 for path in (root / "test").rglob("*.png")}


@pytest.mark.train
def test_a_diverging_setting_is_a_row_with_its_reason(whole: Any) -> None:
    _, result, _ = whole
    slow, fast, wild = result.search
    assert [row.outcome.status for row in result.search] == ["done", "done", "diverged"]
    assert "not finite" in wild.outcome.reason
    assert result.chosen == {"optim.lr": 0.3} and fast.outcome.dev["top1"] >= slow.outcome.dev["top1"]
    assert (wild.trial.folder / "run-1" / "config.yaml").is_file()


@pytest.mark.train
def test_the_numbers_are_those_of_the_models_that_are_kept(whole: Any) -> None:
    root, result, _ = whole
    for row in result.final:
        found = vitrail.evaluate(row.outcome.run, root, split="test", workers=0)
        assert (found.results.top1, found.results.count) == (row.outcome.test["top1"], 12)
    assert result.top1.mean == pytest.approx(np.mean([row.outcome.test["top1"] for row in result.final]))
    assert result.top1.mean > 0.9  # red is not blue


@pytest.mark.train
def test_each_half_trains_on_what_it_should(whole: Any) -> None:
    _, result, _ = whole
    for row in result.search[:2]:
        facts = json.loads((Path(row.outcome.run) / "run.json").read_text())
        assert facts["data"]["images"] == {"train": 30, "validation": 10}
        assert facts["result"]["test"] is None and row.outcome.test is None
    for row in result.final:
        facts = json.loads((Path(row.outcome.run) / "run.json").read_text())
        assert facts["data"]["images"] == {"train": 40, "test": 12}
        assert row.outcome.dev is None and facts["result"]["best"] == {"step": 6}  # the last weights
        recorded = from_yaml(Path(row.outcome.run) / "config.yaml", Run())
        assert recorded.optim.lr == 0.3 and recorded.seed == row.trial.run.seed


@pytest.mark.train
def test_a_finished_sweep_is_only_read(whole: Any, tmp_path: Path) -> None:
    root, result, _ = whole
    runs = sorted(result.folder.glob("*/run-*"))
    assert len(runs) == 5 and not list(result.folder.glob("*/run-*/checkpoints/step-000006"))

    def refuse(trials: Sequence[Trial]) -> Generator[tuple[Trial, Outcome], None, None]:
        raise AssertionError(f"{len(trials)} trials again")
        yield

    plan = Sweep(tiny(str(root)), {"optim.lr": (0.001, 0.3, 1e38)}, seeds=(0, 1), dev=0.25)
    assert sweep(Trials.of(plan, result.folder), refuse).as_json() == result.as_json()
    assert sorted(result.folder.glob("*/run-*")) == runs


@pytest.mark.parametrize("best", ["all", "attention"])
def test_a_sweep_tunes_what_the_adviser_has_first(best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = {"few-shot": 1.0, "linear probe": 2.0, "attention-only": 4.0, "full fine-tuning": 3.0}
    if best == "all":
        accuracies["full fine-tuning"] = 5.0
    monkeypatch.setattr("vitrail.transfer.recommend.MEASURED", {5: accuracies})
    vitrail.save(vitrail.create("Ti/4", image_size=8, width=16, depth=1, heads=2, mlp_dim=32), tmp_path / "vit")
    asked = {"weights": tmp_path / "vit", "image_size": 8, "workers": 0, "device": "cpu", "dry_run": True}
    assert vitrail.sweep("digits", **asked).trials.sweep.base.tune == best
    assert vitrail.sweep("digits", **asked, tune="head").trials.sweep.base.tune == "head"
