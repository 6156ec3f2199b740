"""Run folders that anything may have happened to: they are read, resumed and reported, or refused in words."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changes import changed, changes
from hypothesis import given
from hypothesis import strategies as st
from random_inputs import QUIETLY
from run_folders import answers, run_folder

from vitrail.data.settings import Data
from vitrail.evaluation.label_scores import LabelScores
from vitrail.reports.cost import cost_of
from vitrail.reports.curves import training_curves
from vitrail.reports.run_record import read_run
from vitrail.reports.tables import data_problems, particulars
from vitrail.run_log import fitting
from vitrail.tasks.catalog import save_results
from vitrail.training.folder import RunFolder
from vitrail.training.result import recorded_result

pytestmark = pytest.mark.fuzz

names = st.sampled_from(["kind", "step", "image", "images", "reason", "loss", "lr", "nll", "count", "epoch", "5-shot"])
entries = ["result", "data", "resumed", "out_of_memory", "machine", "versions", "seed", "base", "directory", "steps"]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*entries, "images", "a"]), inner),
    max_leaves=6,
)
lines = st.fixed_dictionaries({"kind": st.sampled_from(["train", "validation", "unreadable"]) | values}).flatmap(
    lambda line: st.dictionaries(names, values | st.integers(0, 100), max_size=6).map(lambda more: {**line, **more})
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    return run_folder(folder / "run-1", Data(path=str(folder)), answers(["a", "b"], 6))


def look(folder: Path) -> None:
    """Read a run as a report and a resume do."""
    record = read_run(folder)
    training_curves(record)
    particulars(record)
    data_problems(record)
    cost_of(record, None)
    run = RunFolder(folder)
    recorded_result(run)
    run.rewind(30)
    run.log("train", 31, loss=1.0)
    last = json.loads(run.metrics.read_bytes().splitlines()[-1])
    assert last["step"] == 31 and not run.lost


@QUIETLY
@given(logged=st.lists(lines, max_size=4))
def test_65_any_lines_of_a_log(whole: Path, logged: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in logged)
    (whole / "metrics.jsonl").write_text(text, encoding="utf-8")
    look(whole)


@QUIETLY
@given(facts=st.dictionaries(st.sampled_from(entries), values))
def test_65_any_facts_of_a_run(whole: Path, facts: dict[str, Any]) -> None:
    (whole / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    look(whole)
    kept, wrong = fitting(facts)
    assert {name for name, value in facts.items() if value is not None} - set(kept) <= set(wrong)


def several(folder: Path) -> None:
    """Results of a network that predicts several labels."""
    target = np.arange(12).reshape(6, 2) % 3 == 0
    share = np.linspace(0, 1, 12, dtype=np.float32).reshape(6, 2)
    found = LabelScores(
        ["a", "b"], np.arange(6), target.astype(np.int8), share, share.sum(1).astype(np.float64), np.full(2, 0.5)
    )
    save_results(folder / "evaluation.npz", found)


WRONG: dict[str, Callable[[np.ndarray], np.ndarray | None]] = {
    "absent": lambda values: None,
    "short": lambda values: values[:-1],
    "empty": lambda values: values[:0],
    "a number": lambda values: np.array(3),
    "nested": lambda values: values[None],
    "flat": lambda values: values.reshape(-1),
    "floats": lambda values: values + 0.5,
    "infinite": lambda values: np.full(values.shape, np.inf),
    "negative": lambda values: np.full(values.shape, -7),
    "huge": lambda values: np.full(values.shape, 2**62),
    "unsigned": lambda values: np.full(values.shape, 2**64 - 1, dtype=np.uint64),
    "bool": lambda values: values.astype(bool),
    "text": lambda values: np.full(values.shape, "x"),
}


@pytest.mark.parametrize("kind", ["one", "several"])
def test_65_arrays_of_results_that_do_not_fit(whole: Path, tmp_path: Path, kind: str) -> None:
    """They are left out with a note, or they are read and a page can be made of them."""
    run = shutil.copytree(whole, tmp_path / "run-1")
    if kind == "several":
        several(run)
    file = run / "evaluation.npz"
    with np.load(file) as stored:
        arrays = dict(stored)
    for name, change in itertools.product(arrays.keys() - {"bad"}, WRONG):
        changed_array = WRONG[change](arrays[name])
        if change == "flat" and arrays[name].ndim == 1:
            continue
        kept = {other: array for other, array in arrays.items() if other != name}
        np.savez(file, **kept, **({} if changed_array is None else {name: changed_array}))
        record = read_run(run)
        noted = any("evaluation.npz cannot be used" in note for note in record.notes)
        if change not in ("floats", "infinite", "bool", "absent"):
            assert noted, (name, change)
        for found in filter(None, [record.results]):
            found.worst(12)
            found.metrics()


@QUIETLY
@given(
    name=st.sampled_from(["metrics.jsonl", "run.json", "config.yaml", "classes.json", "evaluation.npz"]), how=changes
)
def test_65_changed_files_of_a_run(whole: Path, tmp_path: Path, name: str, how: list) -> None:
    folder = tmp_path / "run-1"
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    (folder / name).write_bytes(changed((folder / name).read_bytes(), how))
    look(folder)
