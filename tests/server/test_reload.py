"""The models are loaded anew while requests are answered."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asgi_client import Answer, call, png
from served_models import of_answers, several
from test_app import PNG, Limits, Service, create_app, saved

pytest.importorskip("fastapi", reason="the server needs vitrail[serve]")

import vitrail
from vitrail.server.hang_ups import HangUps
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.serve import load_served
from vitrail.weights.store import save_model


def change(folder: Path, **card: Any) -> None:
    """Other weights, and other entries of the card, in the same place."""
    model = vitrail.load(folder)
    with torch.no_grad():
        for values in model.parameters():
            values.mul_(1.5)
    save_model(folder, model, replace(model.card, **card))


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])


def under_load(folder: Path, changed: Callable[[], object]) -> tuple[list[Answer], Answer, Answer]:
    """Answers from before a reload until after it, and those of /v1/models before and after."""
    found: list[Answer] = []

    async def scenario() -> tuple[Answer, Answer]:
        def load() -> list[Any]:
            return load_served((folder,), Compute(device="cpu", precision="float32", engine="torch"))

        service = Service(load(), Limits(), load)
        app = create_app(service)
        async with app.app.router.lifespan_context(app.app):
            while not service.ready:
                await asyncio.sleep(0)
            before = await call(app, "GET", "/v1/models")
            found.append(await call(app, "POST", "/v1/predict", png(), headers=PNG))
            await asyncio.to_thread(changed)
            service.reload()
            service.reload()  # a second signal while the first is at work: the files are read once more
            while service._reloading:
                answers = (call(app, "POST", "/v1/predict", png(), headers=PNG) for _ in range(3))
                found.extend(await asyncio.gather(*answers))
            found.append(await call(app, "POST", "/v1/predict", png(), headers=PNG))
            return before, await call(app, "GET", "/v1/models")

    return found, *asyncio.run(scenario())


def test_no_request_is_lost_and_the_new_model_answers(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny")
    answers, before, after = under_load(folder, lambda: change(folder))
    assert {answer.status for answer in answers} == {200} and len(answers) > 4
    old, new = (one.json["models"][0]["weights_sha256"] for one in (before, after))
    sums = [answer.json["weights_sha256"] for answer in answers]
    assert old != new and sums[0] == old and sums[-1] == new
    assert sums == sorted(sums, key=[old, new].index)  # never the old one after the new one
    with torch.no_grad():
        served = load_served((folder,), Compute(device="cpu", precision="float32", engine="torch"))[0]
        (ranked,) = served.rank([served.prepare(png(), 10**6)])
    assert not isinstance(ranked, Exception)
    shares = {old: best(answers[0]), new: [one["probability"] for one in served.top(ranked, 4)]}
    assert shares[old] != pytest.approx(shares[new], rel=1e-3)
    for answer in answers:
        assert best(answer) == pytest.approx(shares[answer.json["weights_sha256"]], rel=1e-4)


def best(answer: Answer) -> list[float]:
    return [one["probability"] for one in answer.json["images"][0]["top"]]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (cut, "damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "which is in service, is gone"),
        (lambda folder: change(folder, class_names=["a", "b", "c", "d"]), "has other classes: class 0 is 'a', not"),
        (lambda folder: several(folder), "the new model predicts several labels, and the old one predicts one class"),
        (lambda folder: of_answers(folder), "predicts several answers classes, labels, numbers, and the old one"),
    ],
    ids=["cut", "gone", "other classes", "several labels", "several answers"],
)
def test_what_cannot_replace_a_model_leaves_the_old_one(
    tmp_path: Path, changed: Callable[[Path], object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vitrail")
    folder = saved(tmp_path / "tiny")
    answers, before, after = under_load(folder, lambda: changed(folder))
    assert {answer.status for answer in answers} == {200} and before.json == after.json
    assert {answer.json["weights_sha256"] for answer in answers} == {before.json["models"][0]["weights_sha256"]}
    (error,) = {record.getMessage() for record in caplog.records if record.levelno == logging.ERROR}
    assert "the previous ones stay" in error and words in error


def test_the_newest_model_of_a_run_does_not_replace_its_best_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("best", "last"):
        saved(tmp_path / "run" / "model" / name)
    change(tmp_path / "run" / "model" / "last")
    answers, before, after = under_load(tmp_path / "run", lambda: shutil.rmtree(tmp_path / "run" / "model" / "best"))
    assert {answer.status for answer in answers} == {200} and before.json == after.json
    assert any("best/model.safetensors, which is in service, is gone" in line for line in caplog.messages)


def test_sighup_while_models_are_read_is_remembered() -> None:
    ends: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: ends.append(number))
    try:
        with HangUps() as hang_ups:
            assert not hang_ups.waiting
            signal.raise_signal(signal.SIGHUP)
            assert hang_ups.waiting and not ends
        signal.raise_signal(signal.SIGHUP)  # the handler from before is back
        assert ends == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)
