"""A run that was interrupted and goes on ends with the bits of one that never stopped, whatever it trains, and how."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from references import copy_of
from tiny_runs import SHORT, assert_same_bits, assert_same_log, interrupted, lines, newest, tiny_run

from tests.properties.every_kind import ROWS, registered, used, whole
from vitrail.data.settings import Data
from vitrail.tasks import classes as evaluation
from vitrail.training import loop
from vitrail.training.checkpoints import checkpoint
from vitrail.training.guard import Interrupted
from vitrail.training.run import Model

AT = 2
"""Step within which the signal comes: in the middle of an epoch, between two evaluations."""


def test_everything_that_is_registered_has_a_row(tmp_path: Path) -> None:
    found = set()
    for name, row in ROWS.items():
        with row.modules():
            found |= used(row.run(name, tmp_path))
    assert registered() - found == set(), "add it to a row of tests/properties/every_kind.py"


@pytest.mark.train
@pytest.mark.parametrize("name", ROWS)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    with row.modules():
        run = row.run(name, tmp_path)
        folder = interrupted(run, AT, **row.given())
        assert newest(folder).name == f"step-{AT + 1:06d}"
        assert loop.fit(run, resume=folder, **row.given()).steps == 4
    assert_same_bits(folder, whole(name))
    assert_same_log(folder, whole(name))


# where it stops, and what happens meanwhile; the row "supervised" is the plainest run


@pytest.mark.train
@pytest.mark.parametrize("step", [0, 3], ids=["first", "last"])
def test_a_run_may_stop_in_any_step(tmp_path: Path, step: int) -> None:
    run = tiny_run(tmp_path, **SHORT)
    folder = interrupted(run, step)
    assert newest(folder).name == f"step-{step + 1:06d}"
    result = loop.fit(run, resume=folder)
    assert (result.folder, result.steps) == (folder, 4)
    assert_same_bits(folder, whole("supervised"))
    assert_same_log(folder, whole("supervised"))
    assert [entry["step"] for entry in json.loads((folder / "run.json").read_text())["resumed"]] == [step + 1]


@pytest.mark.train
def test_a_run_may_stop_twice_within_an_epoch(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **SHORT)
    folder = interrupted(run, 2, resume=interrupted(run, 1))
    loop.fit(run, resume=folder)
    assert_same_bits(folder, whole("supervised"))


@pytest.mark.train
def test_a_signal_inside_an_evaluation_is_obeyed_and_the_evaluation_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path, **SHORT)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        original = evaluation.classify

        def classify(predict: Callable[..., Any], loader: Any, *options: Any) -> Any:
            seen = iter(range(1000))

            def noisy(images: torch.Tensor) -> torch.Tensor:
                if next(seen) == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                return predict(images)

            return original(noisy, loader, *options)

        patch.setattr(evaluation, "classify", classify)
        loop.fit(run)
    folder = tmp_path / "train-1"
    assert lines(folder, "validation") == []
    assert lines(folder, "train")[-1]["step"] == 2
    loop.fit(run, resume=folder)
    assert_same_bits(folder, whole("supervised"))


@pytest.mark.train
def test_a_kill_during_a_save_loses_only_what_came_after_the_save_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    run = tiny_run(tmp_path, **SHORT)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        original, saves = os.rename, iter(range(100))

        def rename(source: Any, target: Any) -> None:
            if "step-" in str(target) and next(saves) == 1:
                raise Killed
            original(source, target)

        patch.setattr(checkpoint.os, "rename", rename)
        loop.fit(run)
    folder = tmp_path / "train-1"
    assert newest(folder).name == "step-000002"
    loop.fit(run, resume=folder)
    assert_same_bits(folder, whole("supervised"))


@pytest.mark.train
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(tmp_path, **SHORT)
    folder = interrupted(run, 2)
    file = folder / "checkpoints" / "step-000003" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    loop.fit(run, resume=folder)
    said = capsys.readouterr().err
    assert "skipping step-000003" in said and "step-000002" in said
    assert_same_bits(folder, whole("supervised"))
    assert_same_log(folder, whole("supervised"))


PRETRAINING = ("masked-patch", "mae", "beit", "dino")


@pytest.mark.train
@pytest.mark.parametrize("name", PRETRAINING)
def test_a_run_that_another_began_goes_on_without_it(name: str, tmp_path: Path) -> None:
    """Its own checkpoint has everything, also what the objective owns beside the network."""
    first = copy_of(whole(name), tmp_path)
    run = replace(ROWS[name].run(name, tmp_path), weights=str(first), vit=Model(dropout=0.1))
    never = loop.fit(replace(run, out=str(tmp_path / "never stopped"))).folder
    folder = interrupted(run, AT)
    shutil.rmtree(first)
    loop.fit(run, resume=folder)
    assert_same_bits(folder, never)


MOMENTS = {
    "a save": ("vitrail.training.checkpoints.checkpoint", "write_durably", 1),
    "the test at the end": ("vitrail.training.saved_network", "load", 2),
}
"""Where Ctrl-C comes: a function, and at which of its calls."""


@pytest.mark.train
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_outside_of_a_step_saves_too(tmp_path: Path, moment: str) -> None:
    """What the command says, and Ctrl-C before there is a run and after it: tests/faults/test_faults_running.py."""
    module, name, number = MOMENTS[moment]
    place = importlib.import_module(module)
    original, calls = getattr(place, name), itertools.count(1)

    def signalled(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **options)

    run = tiny_run(tmp_path, **{**SHORT, "data": Data(path="digits", subset=64)})
    with patch.object(place, name, signalled), pytest.raises(Interrupted) as caught:
        loop.fit(run)
    assert caught.value.exit_code == 130
    result = loop.fit(run, resume=tmp_path / "train-1")
    assert result.steps == 4 and result.test is not None
    assert_same_log(result.folder, whole("supervised"))
