"""A network of several answers in every verb that uses one."""

from __future__ import annotations

import csv
import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from documents import ROOT, blocks
from references import write_answers
from tiny_runs import tiny_run

import vitrail
from vitrail.cli import main
from vitrail.data.settings import Augment, Data
from vitrail.errors import DataError
from vitrail.exports.network import compute
from vitrail.exports.parity import compare_outputs
from vitrail.training.loop import fit

NAMES = ("colour", "tags", "level", "lit")
pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with answers.csv, and runs/digits-1, which learned from it."""
    folder = tmp_path_factory.mktemp("used")
    data = Data(str(write_answers(folder)), answers=NAMES, holdout=0.2)
    shutil.move(fit(tiny_run(folder / "out", data=data, augment=Augment(crop="pad", pad=1))).folder, folder / "run")
    return folder


@pytest.fixture(autouse=True)
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def rows() -> list[dict[str, str]]:
    with open("answers.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row["split"] == "test"]


def test_labels_in_python_are_those_of_the_table() -> None:
    table = [{name: row[name] for name in NAMES if row[name]} for row in rows()]
    labels = [{**row, "tags": row["tags"].split("|")} if "tags" in row else row for row in table]
    found = vitrail.evaluate("run", [row["path"] for row in rows()], labels=labels).results.metrics()
    assert found == pytest.approx(vitrail.evaluate("run").results.metrics())
    assert found["tags.count"] == sum(row["tags"] != "" for row in rows())


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("red", "Give a dictionary for each image, with the keys 'colour', 'tags', 'level', 'lit'"),
        ({"color": "red"}, "Give a dictionary for each image"),
        ({"level": "high"}, "labels must be 1 numbers for each"),
        ({"colour": "violet"}, "labels that are not among the 3 known classes: 'violet'"),
        ({"colour": "red", "tags": "red"}, r"the model's answers are colour \(one class\), tags \(several labels\)"),
    ],
)
def test_labels_in_python_that_do_not_fit(label: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        vitrail.evaluate("run", ["images/1.png"], labels=[label])


def test_predictions_in_python_and_in_parquet_are_those_of_the_csv() -> None:
    frame = vitrail.predict("run", *(row["path"] for row in rows())).to_frame()
    columns = [column for column in frame.columns if "probabilit" not in column]
    assert columns == ["path", "colour", "colour_2", "colour_3", "tags", "level", "lit", "lit_2"]
    settings = ["--data.answers", *NAMES]
    assert main(["predict", "run", "answers.csv", *settings, "--out", "results", "--merge", "all.parquet"]) == 0
    table = {row["id"]: row for row in parquet.read_table("all.parquet").to_pylist()}
    for row, (_, ours) in zip(rows(), frame.iterrows(), strict=True):
        one = table[row["path"]]
        assert [one[f"{name}.label"] for name in ("colour", "level", "lit")] == [
            row[name] or None for name in ("colour", "level", "lit")
        ]
        assert one["tags.label"] is None or sorted(one["tags.label"]) == sorted(row["tags"].split("|"))
        assert one["colour.classes"][0] == ours["colour"] and one["tags.labels"] == ours["tags"]
        assert one["level.numbers"] == [pytest.approx(ours["level"], rel=1e-5)]


def test_a_network_knows_the_columns_of_its_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Without settings of the data, with cells that are empty, and with columns that are not there."""
    assert main(["predict", "run", "answers.csv", "--out", "asked", "--data.answers", *NAMES]) == 0
    assert main(["predict", "run", "answers.csv", "--out", "unasked"]) == 0
    asked, unasked = (
        [parquet.read_table(file).to_pylist() for file in sorted(Path(name).rglob("*.parquet"))]
        for name in ("asked", "unasked")
    )
    assert asked == unasked and asked[0][0].keys() >= {"colour.label", "level.label"}
    assert main(["embed", "run", "answers.csv", "--out", "features.npz"]) == 0
    assert np.load("features.npz")["train_features"].shape[0] == 71  # an image has no answer
    table = Path("answers.csv").read_text()
    Path("fewer.csv").write_text(table.replace("level", "other", 1))
    assert main(["predict", "run", "fewer.csv", "--out", "fewer"]) == 0
    assert "level.label" not in parquet.read_table(next(Path("fewer").rglob("*.parquet"))).column_names
    capsys.readouterr()
    assert main(["data", "dedup", "answers.csv", "--data.label-column", "colour"]) == 1
    assert "name them in --data.answers" in capsys.readouterr().err


def test_images_without_labels_in_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "run", "images", "--out", "unlabelled"]) == 0
    (file,) = Path("unlabelled").rglob("*.parquet")
    found = parquet.read_table(file)
    assert found.num_rows == 96 and set(found["label"].to_pylist()) == {None} and "lit.classes" in found.column_names


def test_a_comparison_of_two_runs(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("run", "other")
    assert main(["report", "run", "other"]) == 0
    said = capsys.readouterr()
    assert "colour: top-1" in said.out + said.err and "this test needs one class for each image" in said.out + said.err
    assert "level: R2" in Path("comparison.html").read_text()


def test_probes_need_one_of_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("knn", "linear", "fewshot"):
        assert main(["probe", verb, "run"]) == 1
        assert f"probe {verb} needs one class for each image, and these images have several answers" in (
            capsys.readouterr().err
        )
    assert main(["probe", "knn", "run", "answers.csv", "--data.answers", "colour", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == 3


def test_a_plan_times_the_ways_to_train(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "answers.csv", "--data.answers", *NAMES, "--from", "run", "--seconds", "0.2", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert {option["name"] for option in found["options"]} == {"full fine-tuning", "attention-only", "from scratch"}


@pytest.mark.export
def test_the_example_of_the_page_reads_each_answer_of_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", "run", "--to", "onnx", "--output", "probabilities", "--out", "fish-onnx"]) == 0
    page = blocks(ROOT / "docs" / "tasks" / "several-answers.md")
    (example,) = (block.text for block in page if block.language == "python")
    with redirect_stdout(io.StringIO()) as said:
        exec(example.replace("1.jpg", "images/1.png"), {})
    printed = dict(line.split(" ", 1) for line in said.getvalue().splitlines())
    (row,) = vitrail.predict("run", "images/1.png", precision="float32").rows
    assert row.answers is not None and [*printed] == list(NAMES)
    for name, text in printed.items():
        one, shares = row.answers[name], json.loads(text.replace("'", '"'))
        theirs = one.numbers or dict(zip(one.classes, one.probabilities, strict=True))
        assert shares == {key: pytest.approx(value, rel=1e-3) for key, value in theirs.items()}
    session = onnxruntime.InferenceSession("fish-onnx/model.onnx")
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 8), dtype=np.uint8)
    whole, *each = session.run(None, {"images": images})
    assert len(each) == len(NAMES) and np.array_equal(np.concatenate(each, 1), whole)


@pytest.mark.parametrize(("name", "error"), [("level", 0.01), ("lit", 0.01), (None, 0.0)])
def test_the_outputs_of_each_answer_are_compared_by_their_own_size(name: str | None, error: float) -> None:
    """A number in thousands hides no error of a probability, and the best class is that of every answer."""
    network: Any = vitrail.load("run")
    whole = network.card.of_answers()
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)

    def run(batch: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            found = compute(network, torch.from_numpy(batch), "probabilities", network.card).numpy()
        if name is not None:
            found[:, whole[name][0]] *= 1 + error
        return found

    parity = compare_outputs(run, network, images, "probabilities", "float32", runtime="ours")
    assert parity.passed == (name is None) and parity.relative == pytest.approx(error, rel=1e-2)
    assert parity.agreement == 1

    def swapped(batch: np.ndarray) -> np.ndarray:
        found = run(batch)
        found[:, whole["lit"][0]] = found[:, whole["lit"][0]][:, ::-1]
        return found

    parity = compare_outputs(swapped, network, images, "probabilities", "float32", runtime="ours")
    assert parity.agreement == 0 and not parity.passed
