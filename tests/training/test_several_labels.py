"""A run on images with several labels, from the table to the answers of every verb."""

from __future__ import annotations

import csv
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_files import images, table
from references import COLOURS, copy_of, once, result_of

from vitrail import embed, evaluate, export, fit, load, predict, probe
from vitrail.config import from_yaml
from vitrail.data.settings import Augment, Data
from vitrail.durations import Epochs
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.label_scores import LabelScores
from vitrail.evaluation.metric import Metric
from vitrail.objective.settings import Supervised
from vitrail.reports.page import write_report
from vitrail.training.result import Result
from vitrail.training.run import Model, Optim, Run
from vitrail.verbs.train.train import show
from vitrail.weights.load import read_card


@pytest.fixture(scope="module")
def data(labelled_scenes: Path) -> Path:
    """train.csv and test.csv beside their images."""
    return labelled_scenes


@pytest.fixture(scope="module")
def run(data: Path) -> Run:
    return Run(
        name="s",
        out=str(data.parent / "labels-run"),
        data=Data(path=str(data), holdout=0.2),
        model="Ti/16",
        vit=Model(width=32, depth=1, heads=2, mlp_dim=64, patch=4),
        optim=Optim(lr=5e-3),
        augment=Augment(crop="center", mixup=0.2, cutmix=1.0),
        duration=Epochs(12),
        evaluate_every=Epochs(6),
        batch_size=32,
        workers=0,
        device="cpu",
        precision="float32",
    )


@pytest.fixture(scope="module")
def trained(run: Run) -> Result:
    """What a run on them came to; its folder is a reference, which no test changes."""
    return result_of(once("labels-run", lambda place: (place / "result").write_bytes(pickle.dumps(fit(run)))))


def facts(result: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((result.folder / "run.json").read_text())
    return value


@pytest.mark.train
def test_the_decisions_follow_from_the_labels(trained: Result) -> None:
    decisions = facts(trained)["decisions"]
    assert decisions["labels"].startswith("several: ") and "of 3 classes" in decisions["labels"]
    assert decisions["objective.loss"].startswith("sigmoid") and decisions["metric.name"].startswith("map")
    written = from_yaml(trained.folder / "config.yaml", Run())
    assert isinstance(written.objective, Supervised) and written.objective.loss == "sigmoid"
    assert written.metric.name == "map"


def test_it_learns_and_the_test_images_confirm_it(trained: Result) -> None:
    """A random ranking has an mAP of about 0.4 here."""
    assert trained.best["map"] > 0.9 and trained.test is not None and trained.test["map"] > 0.9
    assert trained.test["micro_f1"] > 0.7 and trained.test["count"] == 40
    assert f"mAP {trained.test['map']:.2%} on 40 test images, which had no part in training" in show(trained)


def test_thresholds_are_in_the_card_and_used_by_evaluate(trained: Result) -> None:
    card = read_card(trained.folder)
    assert card.several and len(card.thresholds) == 3 and card.class_names == sorted(COLOURS)
    found = evaluate(trained.folder, precision="float32").results
    assert isinstance(found, LabelScores) and found.thresholds.tolist() == card.thresholds
    assert trained.test is not None
    for name, value in found.metrics().items():
        assert value == pytest.approx(trained.test[name], rel=1e-3), name


def test_evaluate_writes_everything(trained: Result, data: Path, tmp_path: Path) -> None:
    evaluate(trained.folder, data, split="test", out=tmp_path / "e")
    written = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    assert {"map", "micro_f1", "macro_f1", "exact", "ece", "cooccurrence"} <= written.keys()
    assert [one["name"] for one in written["classes"]] == sorted(COLOURS)
    head, *rows = (tmp_path / "e" / "classes.csv").read_text().splitlines()
    assert head.startswith("class,images,predicted,right,average precision") and len(rows) == 3
    assert (tmp_path / "e" / "cooccurrence.csv").read_text().startswith("class,blue,green,red\n")
    assert (tmp_path / "e" / "reliability.png").stat().st_size > 1000


def test_evaluate_reads_labels_as_the_run_did(trained: Result, data: Path, tmp_path: Path) -> None:
    """Other images may have labels with the run's separator, and none: the network predicts several."""
    rows = list(csv.reader((data / "test.csv").open()))[1:]
    found = evaluate(trained.folder, data, split="test").results
    plain = [(data / path, labels) for path, labels in rows]
    commas = [(path, labels.replace("|", ", ")) for path, labels in plain]
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    config = folder / "config.yaml"
    for separator, cells in (("|", plain), (",", commas)):
        config.write_text(config.read_text().replace("label_separator: null", f"label_separator: '{separator}'"))
        assert f"label_separator: '{separator}'" in config.read_text()
        again = evaluate(folder, table(tmp_path / "t.csv", [("path", "label"), *cells])).results
        assert isinstance(again, LabelScores) and again.metrics() == found.metrics()
        config.write_text(config.read_text().replace(f"label_separator: '{separator}'", "label_separator: null"))
    single = [(path, labels.split("|")[0]) for path, labels in plain]
    assert evaluate(trained.folder, table(tmp_path / "t.csv", [("path", "label"), *single])).results.count == 40


def test_predictions_are_lists(trained: Result, data: Path, tmp_path: Path) -> None:
    card = read_card(trained.folder)
    files = sorted((data / "test").glob("*.png"))
    found = predict(trained.folder, *files, top=2)
    network_scores = evaluate(trained.folder, data, split="test").results
    assert isinstance(network_scores, LabelScores)
    for row in found.rows:
        assert row.labels is not None and len(row.classes) == 2
        number = int(Path(row.path).stem)
        at = network_scores.predicted[number]
        assert sorted(name for name, _ in row.labels) == [card.class_names[k] for k in np.flatnonzero(at)]
        assert [share for _, share in row.labels] == sorted((share for _, share in row.labels), reverse=True)
    predict(trained.folder, *files, out=tmp_path / "a.csv")
    predict(trained.folder, *files, out=tmp_path / "a.jsonl")
    head, first, *_ = (tmp_path / "a.csv").read_text().splitlines()
    assert head == "path,labels,probabilities"
    line = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    assert "|".join(one["class"] for one in line["labels"]) == first.split(",")[1] and len(line["top"]) == 3
    again = evaluate(trained.folder, tmp_path / "a.csv").results  # a table of predictions is a table of labels
    assert isinstance(again, LabelScores) and again.exact == 1.0


@pytest.mark.full_size
def test_the_report_shows_what_occurs_together(trained: Result, tmp_path: Path) -> None:
    page = write_report(copy_of(trained.folder, tmp_path)).read_text(encoding="utf-8")
    assert "Which labels occur together" in page and "mean average precision" in page
    assert "Which classes are confused" not in page and "Not in this report" not in page


@pytest.mark.export
def test_an_export_computes_probabilities_of_each_label(trained: Result, tmp_path: Path, data: Path) -> None:
    pytest.importorskip("onnxruntime")
    export(trained.folder, out=tmp_path / "x", to="onnx", output="probabilities")
    program = next((tmp_path / "x").rglob("*.onnx"))
    files = sorted((data / "test").glob("*.png"))[:8]
    theirs, ours = predict(program, *files), predict(trained.folder, *files, precision="float32")
    for one, other in zip(theirs.rows, ours.rows, strict=True):
        assert one.labels is not None and other.labels is not None
        assert [name for name, _ in one.labels] == [name for name, _ in other.labels]
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)


def test_what_needs_one_label_says_so(trained: Result, run: Run, data: Path, tmp_path: Path) -> None:
    for method in (probe.linear, probe.knn, probe.fewshot):
        with pytest.raises(DataError, match=r"several labels|sets of labels"):
            method(trained.folder, data)
    with pytest.raises(UsageError, match="groups"):
        table(tmp_path / "groups.csv", [("class", "group"), ("red", "warm")])
        evaluate(trained.folder, groups=tmp_path / "groups.csv")
    with pytest.raises(DataError, match="knn needs one label for each image"):
        fit(Run(**{**vars(run), "out": str(tmp_path), "knn": 5}))
    rare: tuple[dict[str, Any], ...] = (
        {"objective": Supervised(class_weights="balanced")},
        {"objective": Supervised(logit_adjustment=1.0)},
        {"data": Data(path=str(data), holdout=0.2, sampler="sqrt")},
    )
    for change in rare:
        with pytest.raises(UsageError, match=r"counts images by their one class, and these images have several labels"):
            fit(Run(**{**vars(run), "out": str(tmp_path), **change}))
    images(tmp_path / "one", ["cat/1.png", "cat/2.png", "dog/3.png", "dog/4.png"])
    with pytest.raises(UsageError, match=r"metric\.name is map, which needs images with other labels"):
        fit(
            Run(
                **{**vars(run), "out": str(tmp_path), "data": Data(path=str(tmp_path / "one")), "metric": Metric("map")}
            )
        )


def test_features_come_with_all_labels(trained: Result, data: Path, tmp_path: Path) -> None:
    embed(trained.folder, data, out=tmp_path / "f.npz")
    with np.load(tmp_path / "f.npz") as file:
        assert file["test_labels"].shape == (40, 3) and set(np.unique(file["test_labels"])) == {0, 1}


def test_a_network_for_several_labels_keeps_them_when_its_classes_stay(trained: Result) -> None:
    assert load(trained.folder).card.several
    assert not load(trained.folder, classes=7).card.several
