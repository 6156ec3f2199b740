"""Files that a study, a sweep and the cache of engines have stored: damaged, moved, or of another program."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from random_inputs import EXAMPLES

from vitrail.errors import ExportError, UsageError
from vitrail.exports.engine import Engine
from vitrail.exports.engines import MEASURED, Engines, TimedEngine, _EngineProcess
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.studies.measure import _known
from vitrail.studies.page import write_gallery
from vitrail.studies.training import _has_network
from vitrail.training.batches import batch_picture
from vitrail.transfer.trial import OUTCOME, finished, read_outcome, write_json

# ---- the page of studies

RESULTS: dict[str, Any] = {
    "study": "table7",
    "where": "Table 7",
    "title": "ResNets",
    "data": "photos",
    "scale": "laptop",
    "seeds": [0, 1],
    "tables": {"5-shot": [{"row": "a", "at": 1, "mean": 3.0, "deviation": 0.1}]},
    "claims": [{"claim": "Adam is better.", "verdict": "holds", "difference": 1.0, "deviation": None}],
    "published": [{"table": "t", "row": "r", "at": 1.0, "value": 2.0, "quoted": False}],
    "cells": [{"seed": 0, "score": None, "reason": "absent", "run": "x", "table": "5-shot", "row": "a", "at": 1}],
}
VALUES = [None, True, -1, 10**400, float("nan"), "", "<script>alert(1)</script>", "\ud800", [], {}, [1], {"a": 1}]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a JSON value."""
    if place:
        yield place
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*place, key))


@pytest.mark.full_size
def test_74_a_page_of_studies_with_any_value_in_their_files(tmp_path: Path) -> None:
    """One whole study stays on the page; nothing of a damaged one runs in a browser."""
    for name in ("table7", "table8"):
        Image.new("L", (2, 2)).save(tmp_path / f"{name}.png")
    (tmp_path / "table8.json").write_text(json.dumps({**RESULTS, "title": "whole"}))
    cases = list(itertools.product(places(RESULTS), [*VALUES, KeyError]))
    for place, value in random.sample(cases, min(EXAMPLES, len(cases))):
        changed = copy.deepcopy(RESULTS)
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        if value is KeyError:
            del inner[place[-1]]
        else:
            inner[place[-1]] = value
        (tmp_path / "table7.json").write_text(json.dumps(changed))
        page = write_gallery(tmp_path).read_text()
        assert "Table 7: whole" in page and "<script>alert" not in page


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, "", "pipe"])
def test_74_a_page_without_a_readable_study(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "table7.json"
    os.mkfifo(file) if content == "pipe" else file.write_text(content)
    with caplog.at_level(logging.WARNING, logger="vitrail"), pytest.raises(UsageError, match="has no finished study"):
        write_gallery(tmp_path)
    assert f"{file} is left out of the page" in caplog.text


# ---- outcomes and measurements

DONE: dict[str, Any] = {
    "status": "done", "reason": "", "run": "elsewhere/run-1", "dev": {"top1": 0.5}, "test": None, "steps": 3,
    "seconds": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("name", [*DONE, "more"])
def test_74_an_outcome_that_is_damaged_is_trained_again(name: str, tmp_path: Path) -> None:
    file = tmp_path / OUTCOME
    file.write_text(json.dumps(DONE))
    assert finished(tmp_path) is not None
    for wrong in ([1], {"top1": "high"}, "x", -1, 10**30):
        file.write_text(json.dumps({**DONE, name: wrong}))
        if isinstance(wrong, type(DONE.get(name))) and name in ("reason", "run", "steps"):
            continue  # a possible value
        assert finished(tmp_path) is None or (name in ("seconds", "steps") and wrong == -1), wrong


def test_74_a_sweep_that_was_moved_finds_its_runs(tmp_path: Path) -> None:
    """The folder was given relative to another working directory, too."""
    old, new = tmp_path / "old" / "trial", tmp_path / "new" / "trial"
    (old / "run-1").mkdir(parents=True)
    (old / OUTCOME).write_text(json.dumps(DONE | {"run": str(old / "run-1")}))
    shutil.copytree(old, new)
    for there in (str(old / "run-1"), "runs/sweep/trial/run-1"):
        (new / OUTCOME).write_text(json.dumps(DONE | {"run": there}))
        outcome = read_outcome(new)
        assert outcome is not None and outcome.run == str(new / "run-1")
    assert not _has_network(outcome)  # a study trains it again
    (new / "run-1" / "model" / "last").mkdir(parents=True)
    assert _has_network(outcome)


@pytest.mark.parametrize("content", ["[", "[]", '{"a": "x"}', '{"a": NaN}', '{"a": 1' + "0" * 400 + "}", "[" * 100_000])
def test_74_damaged_measurements_are_made_again(content: str, tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text(content)
    assert _known(tmp_path / "measured.json") == {}


def test_74_names_that_are_not_utf8_are_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"data": os.fsdecode(b"ph\xff")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"data": "ph\udcff"}


# ---- engines

TINY = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=2)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    found = Engines(ViT(TINY).eval(), "float32")
    found.remember([TimedEngine("torch", "float32", 10.0, 1.0, 1, 0.0)])
    assert [row.engine for row in found.measurements()] == ["torch"]
    return found


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"engines": null}', '{"engines": [5]}', '{"engines": [{"engine": "torch"}]}', "[" * 100_000),
        *(
            json.dumps({"engines": [{**vars(TimedEngine("torch", "float32", 10.0, 1.0, 1, 0.0)), name: value}]})
            for name, value in (("more", 1), ("engine", [1]), ("engine", "x"), ("images_per_second", "x"))
        ),
    ],
)
def test_74_damaged_measurements_of_engines_are_not_used(
    content: str, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    (engines.folder / MEASURED).write_text(content)
    with caplog.at_level(logging.WARNING, logger="vitrail"):
        assert engines.fastest() == "torch"
    assert f"{engines.folder / MEASURED} is not used" in caplog.text and "vitrail bench MODEL --engines" in caplog.text


@pytest.mark.full_size
def test_74_a_damaged_program_in_the_cache_is_written_again(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("onnxruntime")
    file = engines.program("onnx").path
    file.write_bytes(file.read_bytes()[:1000])
    images = torch.zeros(1, 3, *engines.network.config.image_size, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, logger="vitrail"), torch.no_grad():
        found = engines.program("onnx")(images)
        torch.testing.assert_close(found, engines.network(images), rtol=1e-3, atol=1e-5)
    assert "is written again" in caplog.text


def test_74_an_engine_whose_process_is_killed_is_an_error() -> None:
    context = multiprocessing.get_context("fork")
    process = _EngineProcess.__new__(_EngineProcess)
    process.pipe, process._theirs = context.Pipe()
    process.process = context.Process(target=os._exit, args=(9,))  # type: ignore[assignment]
    with pytest.raises(ExportError, match="ended with exit code 9"), process:
        process.measure(0.1)


@pytest.mark.parametrize("name", ["model.xml", "model.bin", "model.onnx", "model.onnx.data"])
@pytest.mark.parametrize("kind", ["pipe", "loop", "folder"])
def test_74_what_took_the_place_of_a_program_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    """A runtime would wait for a pipe, and a loop of links would end the process."""
    program = tmp_path / ("model.onnx" if "onnx" in name else "model.xml")
    program.write_text("program")
    file = tmp_path / name
    file.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "loop": lambda place: place.symlink_to(place.name), "folder": os.mkdir}[kind](file)
    with pytest.raises(ExportError, match=f"{name} cannot be read"):
        Engine(program)


# ---- pictures


@pytest.mark.parametrize("caption", ["two\nlines", "\r", "x" * 1_000_000, "\udcff", ""])
def test_75_the_picture_of_a_batch_with_any_name(caption: str) -> None:
    """Names of classes may have line breaks, and those of an image with many labels are long together."""
    picture = batch_picture(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), [caption])
    assert picture.startswith(b"\x89PNG") and np.frombuffer(picture, np.uint8).size < 10_000
