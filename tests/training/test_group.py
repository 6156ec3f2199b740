"""Runs of several processes on one machine (gloo): what one process computes, they compute.

Starting a process costs seconds, so each group of processes does everything that is asked of its size.
The processes divide the gradient of a sum by the number of examples of all; noise is that of the whole batch.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import Forked
from PIL import Image
from random_inputs import MANY
from references import once, write_answers
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from tiny_runs import lines
from torch import nn

from tests.properties.every_kind import registered, used, write_masks
from vitrail import cli, world
from vitrail.config import to_yaml
from vitrail.data.settings import Augment, Data
from vitrail.data.sources.open import open_split
from vitrail.durations import Steps
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.objective.base import Objective, Prepared
from vitrail.objective.settings import (
    DINO,
    MAE,
    BEiT,
    DINOv2,
    Distill,
    MaskedPatch,
    Regression,
    Segmentation,
    SeveralAnswers,
    Supervised,
    Tokenizer,
)
from vitrail.objective.tokenizer import ImageTokenizer
from vitrail.training import loop, pixel_head, processes
from vitrail.training import step as stepping
from vitrail.training import validation as evaluation
from vitrail.training.checkpoints import checkpoint
from vitrail.training.parallel import Replicated
from vitrail.training.processes import Failed, in_process_group, launch, process_environment
from vitrail.training.run import Average, Model, Optim, Run, Schedule
from vitrail.weights.load import read_card
from vitrail.weights.save import save

STEPS = 4
WAYS: dict[str, bool | int] = {"whole": False, "sharded": True, "hybrid": 2}
OBJECTIVES: dict[str, Callable[[Run], Run]] = {
    "mixed": lambda run: replace(
        run,
        data=replace(run.data, test=None),
        objective=Supervised(smoothing=0.1),
        augment=replace(run.augment, mixup=0.8, cutmix=1.0),
        vit=replace(run.vit, positions="relative_bias"),
        optim=Optim(lr=0.02, eps=1e-2, clip=0.5, layer_decay=0.7),
        average=Average("ema", decay=0.9),
        accumulate=2,
        knn=3,
    ),
    "masked": lambda run: replace(
        run,
        objective=MaskedPatch(),
        vit=replace(run.vit, depth=1),
        compile=world.size() == 2 and MANY,  # always in test_compile.py
        activation_checkpointing=world.size() == 2,
    ),
    "mae": lambda run: replace(
        run,
        objective=MAE(decoder_width=16, decoder_depth=1, decoder_heads=2),
        optim=Optim(name="lamb", lr=0.02, eps=1e-2),
        average=Average("polyak", start=Steps(2)),
    ),
    "beit": lambda run: replace(
        run, objective=BEiT(tokenizer=str(Path(run.out) / "tokenizer"), smallest_block=1), activation_checkpointing=True
    ),
    "tokenizer": lambda run: replace(
        run, objective=Tokenizer(codes=12, width=8, depth=1, features=8), model="S/4", vit=Model()
    ),
    "sinkhorn": lambda run: replace(
        run,
        objective=DINO(outputs=64, hidden=32, bottleneck=16, local_crops=2, centring="sinkhorn"),
        optim=replace(run.optim, lr=0.01),
    ),
    "dino": lambda run: replace(  # whose last layer begins to learn in the fourth step
        run,
        objective=DINO(outputs=64, hidden=32, bottleneck=16, local_crops=2, freeze_last_layer=Steps(3)),
        optim=replace(run.optim, lr=0.01),
    ),
    "dinov2": lambda run: replace(  # the most similar image may be another process's
        run,
        weights=str(Path(run.out) / "base"),
        vit=Model(),
        objective=DINOv2(
            outputs=64,
            hidden=32,
            bottleneck=16,
            local_crops=2,
            koleo_weight=1.0,
            gram_weight=2.0,
            gram_refresh=Steps(2),
        ),
        optim=replace(run.optim, lr=0.01),
        accumulate=2,
    ),
    "pixels": lambda run: replace(run, objective=MaskedPatch(target="pixels"), accumulate=2),
    "small": lambda run: replace(
        run, objective=MaskedPatch(target="small"), optim=Optim("muon", lr=0.01, eps=1e-2, layer_decay=0.7)
    ),
    "numbers": lambda run: replace(
        run,
        data=replace(run.data, labels_per_image="numbers"),
        objective=Regression(loss="huber"),
        augment=replace(run.augment, mixup=0.2),
    ),
    "several": lambda run: replace(
        run,
        data=few_digits(Path(run.out), several=True),
        objective=Supervised(loss="asymmetric"),
        augment=replace(run.augment, cutmix=0.5),
    ),
    "answers": lambda run: replace(  # of which each process, and each micro-batch, has others
        run,
        data=answers_of_images(Path(run.out)),
        objective=SeveralAnswers(answer_weights=("level=0.5",), smoothing=0.1),
        optim=Optim(lr=0.02, eps=1e-2),
        accumulate=2,
    ),
    "masks": lambda run: replace(  # of different numbers of pixels that count; the main process fits the head
        of_masks(run, "layers"),
        optim=Optim(name="sgd", lr=2.0),
        weights=str(Path(run.out) / "base"),
        vit=Model(segmentation="layers"),
        probe_head=True,
        accumulate=2,
    ),
    "queries": lambda run: replace(of_masks(run, "queries"), optim=Optim(name="sgd", lr=1e-3), accumulate=2),
    "float16": lambda run: replace(run, precision="fp16", optim=Optim(lr=0.02, eps=1e-2, clip=0.5), accumulate=2),
    "teacher": lambda run: replace(
        run,
        teacher=str(Path(run.out) / "base"),
        distill=Distill(kind="features", features="mse"),
        augment=replace(run.augment, scale=(0.5, 1.0)),
    ),
}
"""What is learned, each with another optimiser, average or way to compute."""
PARTS: dict[str, Callable[[Run], Run]] = {
    part: lambda run, part=part: replace(  # type: ignore[misc]
        run,
        weights=str(Path(run.out) / "base"),
        vit=Model(),
        tune=part,
        optim=Optim(lr=0.02, eps=1e-2),
        probe_head=part == "attention",
    )
    for part in ("attention", "head", "lora")
}
"""What of a trained network is tuned, while the rest stays."""


WHOLE = ("mixed", "sinkhorn", "dinov2", "masks", "answers", "float16", "lora", "small")
"""What is always learned by processes that hold all weights, too. The sums over processes are those of shards."""
TOGETHER = [
    *((name, "sharded", 2) for name in (*OBJECTIVES, *PARTS)),
    *((name, "whole", 2) for name in WHOLE),
    *(("mixed", "hybrid", 4), ("small", "hybrid", 4), ("mae", "hybrid", 4), ("small", "whole", 4)),
]
"""What is learned, in which way, by how many processes: each objective and part, sharded."""
GOING_ON = [
    *(("mixed", "sharded-2", "whole", 1), ("mixed", "whole-2", "sharded", 2), ("mae", "sharded-2", "whole", 2)),
    *(("mixed", "sharded-2", "sharded", 4), ("attention", "sharded-2", "sharded", 2)),
    *(("mixed", "sharded-2", "hybrid", 4), ("mixed", "hybrid-4", "hybrid", 4), ("mae", "hybrid-4", "whole", 1)),
    ("float16", "sharded-2", "whole", 2),
]
"""What was begun in one way by so many processes, and ended in another by others."""
if MANY:
    more = [(name, way, size) for name in (*OBJECTIVES, *PARTS) for way in ("whole", "sharded") for size in (2, 4)]
    TOGETHER += [one for one in more if one not in TOGETHER]
    GOING_ON += [("mixed", "whole-2", "whole", 1), ("mixed", "sharded-2", "whole", 2)]
    GOING_ON += [("mixed", "whole-2", "whole", 4), ("mae", "sharded-2", "sharded", 4)]
FEW_STEPS = patch.object(pixel_head, "STEPS", 20)
"""Of a head for masks: after more of them rounding shows."""
CLOSE = {"float16": 2e-3, "queries": 1e-4}
"""Largest difference of losses and other numbers, where it is not 1e-5: float16 rounds sums in another order, and
losses of queries are about 60."""


def few_digits(folder: Path, *, several: bool = False) -> Data:
    """Digits of scikit-learn in numbers that no number of processes divides; several: with several labels each."""
    file = folder / ("several.npz" if several else "digits.npz")
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        digits = load_digits()
        pixels = np.repeat(digits.images[..., None] * 15, 3, axis=-1).astype(np.uint8)
        parts = {"train": slice(0, 120), "val": slice(120, 143), "test": slice(143, 166)}
        arrays = {f"x_{split}": pixels[part] for split, part in parts.items()}
        labels = np.stack([digits.target % each == 0 for each in (2, 3, 5)], 1) if several else digits.target
        arrays |= {f"y_{split}": labels[part] for split, part in parts.items()}
        np.savez(file, **arrays)
    return Data(str(file), subset=103, test="none")


def answers_of_images(folder: Path) -> Data:
    """A table with four answers, some missing: 103 images to train on and 23 to evaluate."""
    if not (table := folder / "answers" / "answers.csv").exists():
        write_answers(folder / "answers", 104, 23)
    return Data(str(table), answers=("colour", "tags", "level", "lit"), validation="test", test="none")


def of_masks(run: Run, head: str) -> Run:
    """The class of each pixel."""
    data = Data(str(Path(run.out) / "masks"), test="none")
    return replace(run, data=data, objective=Segmentation(), vit=replace(run.vit, segmentation=head))


def tiny(out: Path, **changes: Any) -> Run:
    """Without what each process draws for itself (dropout), and with a rule that does not turn rounding into signs."""
    base = Run(
        out=str(out),
        data=few_digits(out),
        model="S/16",
        vit=Model(width=16, depth=2, heads=2, mlp_dim=32, patch=4),
        image_size=8,
        augment=Augment(crop="pad", pad=1),
        optim=Optim(name="sgd", lr=0.2, weight_decay=0.0),
        schedule=Schedule(warmup=Steps(2)),
        duration=Steps(STEPS),
        evaluate_every=Steps(STEPS // 2),
        checkpoint_every=Steps(STEPS // 2),
        batch_size=16,
        accumulate=1,
        precision="float32",
        workers=0,
        device="cpu",
        keep=3,
    )
    return replace(base, **changes)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder, "train")]


def at_half(source: Path, target: Path) -> Path:
    """Copy a finished run as it was when it had saved half of its steps."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "checkpoints" / f"step-{STEPS:06d}")
    if read_card(target / "model" / "best").provenance["step"] > STEPS // 2:  # it was not there yet
        shutil.rmtree(target / "model" / "best")
    facts = json.loads((target / "run.json").read_text())
    (target / "run.json").write_text(json.dumps({name: facts[name] for name in facts if name != "result"}))
    return target


def go_on(out: Path, objective: str, began: str, way: str) -> None:
    """Take the second half of what others began."""
    folder = out / f"{objective}-{began}-then-{way}-{world.size()}"
    if world.is_main():
        at_half(out / f"{objective}-{began}-1", folder)
    world.barrier()
    loop.fit({**OBJECTIVES, **PARTS}[objective](tiny(out, shard=WAYS[way])), resume=folder)


def together(out: Path) -> NoReturn:
    """What each process of a group does: every objective, and the second half of what two processes began."""
    # TorchInductor's minutes are those of `test_step`; what it gets to compile is cut by hooks here as there
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")  # type: ignore[assignment]
    with in_process_group(), FEW_STEPS:
        if not world.is_main():
            evaluation.load = None  # as where each machine has a folder of its own
        learned = {**OBJECTIVES, **PARTS}
        for name, way, size in TOGETHER:
            if size == world.size():
                run = tiny(out, name=f"{name}-{way}-{size}", shard=WAYS[way])
                assert loop.fit(learned[name](run)).steps == STEPS
        for name, began, way, size in GOING_ON:
            if size == world.size():
                go_on(out, name, began, way)
        sums_of_all_processes()
    world.leave(0)


def sums_of_all_processes() -> None:
    """Gradients are sums over processes and micro-batches; what nobody uses has none."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(700, 700) for _ in range(3))  # two buckets
    whole = copy.deepcopy(layers)
    images = [torch.randn(4, 700, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size())]

    class Chain(Objective):
        def loss(self, prepared: Any) -> Any:
            return layers[2](layers[0](prepared.images)).square().sum(), 4, {}

    for part in images:
        whole[2](whole[0](part)).square().sum().mul(2).backward()
    network, mine = Replicated(Chain(layers)), images[world.rank()]
    for afterwards in (True, False, False):
        layers.zero_grad(set_to_none=True)
        with network.summed(afterwards=afterwards):
            for last in (False, True):  # in two micro-batches, which are summed once
                with network.last(last):
                    network.loss(Prepared(mine, mine, mine, mine))[0].backward()
        network.mean(1)
        for ours, expected in zip(layers.parameters(), whole.parameters(), strict=True):
            if expected.grad is None:
                assert ours.grad is None
            else:
                torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-5, atol=1e-3)


def ended(members: list[Forked], seconds: float) -> list[int]:
    """Exit codes of the processes; where one does not end, none is left behind."""
    try:
        return [member.wait(seconds) for member in members]
    finally:
        for member in members:
            member.kill()


def make_runs(out: Path) -> None:
    torch.manual_seed(0)
    ImageTokenizer(Tokenizer(codes=12, width=8, depth=1), 4).save(out / "tokenizer")
    save(build(ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=7)), out / "base")
    write_masks(out / "masks", 113)
    with FEW_STEPS:
        for name, change in {**OBJECTIVES, **PARTS}.items():
            loop.fit(change(tiny(out, name=f"{name}-whole-1")))
    for size in (2, 4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        members = [Forked(together, out, env=process_environment(rank, size, port)) for rank in range(size)]
        assert ended(members, 600) == [0] * size
    for name, began, way, size in GOING_ON:
        if size == 1:
            go_on(out, name, began, way)


@pytest.fixture(scope="module")
def runs() -> Path:
    """Runs of one, two and four processes: OBJECTIVE-WAY-PROCESSES-1, and those that others went on with,
    OBJECTIVE-WAY-PROCESSES-then-WAY-PROCESSES. A reference, which no test changes."""
    return once("group-runs", make_runs)


def test_every_objective_that_is_registered_is_learned_by_several_processes(tmp_path: Path) -> None:
    learned = {**OBJECTIVES, **PARTS}
    found = set().union(*(used(learned[name](tiny(tmp_path))) for name, _, _ in TOGETHER))
    wanted = ("objective.kind", "objective.centring", "objective.target", "optim.name", "average.kind", "run.tune lora")
    assert not {choice for choice in registered() if choice.startswith(wanted)} - found


def assert_same_end(many: Path, alone: Path, tested: bool, close: float) -> None:
    """Evaluations, result and models of several processes are those of one."""
    seen = [lines(folder, "validation") for folder in (alone, many)]
    assert [line["step"] for line in seen[0] if line["step"]] == [STEPS // 2, STEPS]
    for mine, theirs in zip(*seen, strict=True):
        assert mine["count"] == theirs["count"]  # none twice and none left out
        measure = "nll" if "nll" in mine else "loss"
        assert theirs[measure] == pytest.approx(mine[measure], abs=close)
    tests = [json.loads((folder / "run.json").read_text())["result"]["test"] for folder in (alone, many)]
    assert tests[1] == (pytest.approx(tests[0], abs=1e-5) if tested else None)
    assert [line["knn"] for line in lines(many, "knn")] == pytest.approx([line["knn"] for line in lines(alone, "knn")])
    for model in ("best", "last"):
        mine, theirs = (load_file(next((folder / "model" / model).glob("*.safetensors"))) for folder in (alone, many))
        torch.testing.assert_close(theirs, mine, rtol=0, atol=10 * close)


@pytest.mark.processes
@pytest.mark.parametrize(("objective", "way", "size"), TOGETHER)
def test_several_processes_have_the_losses_of_one_and_leave_plain_files_behind(
    runs: Path, objective: str, way: str, size: int
) -> None:
    alone, many = runs / f"{objective}-whole-1-1", runs / f"{objective}-{way}-{size}-1"
    assert len(losses(alone)) == STEPS and max(losses(alone)) - min(losses(alone)) > 0.005
    close = CLOSE.get(objective, 1e-5)
    assert losses(many) == pytest.approx(losses(alone), abs=close)
    assert_same_end(many, alone, tested=objective == "mixed", close=close)
    assert all(line["count"] % size for line in lines(many, "validation"))  # they do not come out even


@pytest.mark.processes
@pytest.mark.parametrize(("objective", "began", "way", "size"), GOING_ON)
def test_what_some_processes_saved_goes_on_in_others(
    runs: Path, objective: str, began: str, way: str, size: int
) -> None:
    folder = runs / f"{objective}-{began}-then-{way}-{size}"
    parts = len(list((folder / "checkpoints" / f"step-{STEPS // 2:06d}").glob("part-*")))
    assert parts == int(began[-1])  # of sharded tensors a part each, of others a share each
    assert json.loads((folder / "run.json").read_text())["resumed"][0]["step"] == STEPS // 2
    assert [line["step"] for line in lines(folder, "train")] == list(range(1, STEPS + 1))
    alone = runs / f"{objective}-whole-1-1"
    close = CLOSE.get(objective, 1e-5)
    assert losses(folder) == pytest.approx(losses(alone), abs=close)
    assert_same_end(folder, alone, tested=objective == "mixed", close=close)


@pytest.mark.processes
def test_parts_are_whole_or_refused_and_what_torchs_own_reader_reads(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(runs / "mixed-sharded-2-1" / "checkpoints", folder)
    older, newer = (folder / f"step-{step:06d}" for step in (STEPS // 2, STEPS))
    names = [f"part-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(path.name for path in newer.iterdir()) == ["manifest.json", *names, "state.json"]

    ours = checkpoint.load(newer)["model"]
    theirs = {f"model/{name}": torch.empty_like(tensor) for name, tensor in ours.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(theirs, storage_reader=dcp.HuggingFaceStorageReader(str(newer)), no_dist=True)
    assert all(torch.equal(theirs[f"model/{name}"], tensor) for name, tensor in ours.items())

    for name in names:
        part = newer / name
        content = part.read_bytes()
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert checkpoint.latest_valid(folder) == older
        part.unlink()
        assert checkpoint.latest_valid(folder) == older
        part.write_bytes(content)
        assert checkpoint.latest_valid(folder) == newer


def acting(act: str, pause: float, ranks: tuple[int, ...], at: int, command: list[str]) -> NoReturn:
    """A process of a run. The `ranks` act in step `at`, counted from 0; the first save takes a pause longer."""
    step_of, save, first = stepping.seed_step, checkpoint.save, iter([pause])

    def slow(*arguments: Any, **options: Any) -> Path:
        time.sleep(next(first, 0))
        return save(*arguments, **options)

    def step(seed: int, number: int, rank: int) -> None:
        if number == at and rank in ranks:
            exec(act, globals())
        step_of(seed, number, rank)

    checkpoint.save, stepping.seed_step = slow, step
    world.leave(importlib.import_module(command[3]).main(*command[4:]))


def with_rank_one(
    act: str, monkeypatch: pytest.MonkeyPatch, pause: float = 0.0, ranks: tuple[int, ...] = (1,), at: int = 3
) -> None:
    """Start processes as `acting` says."""

    def started(command: list[str], env: dict[str, str], **options: Any) -> Forked:
        assert command[1:3] == ["-P", "-m"]
        assert options["process_group"] == 0  # out of reach of a terminal's Ctrl-C, which is sent on to it
        return Forked(acting, act, pause, ranks, at, command, env=env)

    monkeypatch.setattr(processes.subprocess, "Popen", started)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("act", "message", "code"),
    [
        ("raise ValueError('the reactor is hot')", "process 1: ValueError: the reactor is hot", 1),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "Process 1 ended without a message, signal SIGKILL. .*memory",
            137,
        ),
    ],
    ids=["raises", "is killed"],
)
def test_when_one_fails_all_end_and_the_first_cause_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, message: str, code: int
) -> None:
    with_rank_one(act, monkeypatch)
    with pytest.raises(Failed, match=message) as caught:
        launch(tiny(tmp_path), None, 2)
    assert caught.value.exit_code == code


LACKS_MEMORY = """
from vitrail.objective.supervised import SupervisedObjective
fitting = getattr(SupervisedObjective, "fitting", SupervisedObjective.loss)
def loss(self, prepared):
    if len(prepared) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return fitting(self, prepared)
SupervisedObjective.fitting, SupervisedObjective.loss = fitting, loss
"""
"""From now on a process has memory for half of its 8 images."""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shard", "at", "resumed"), [(False, 0, None), (False, 3, 2), (True, 0, 0)], ids=["at first", "later", "sharded"]
)
def test_memory_that_one_process_lacks_cuts_the_batches_of_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shard: bool,
    at: int,
    resumed: int | None,
) -> None:
    """In the first steps at once. Later, and with shards, the others wait for it: then the launcher resumes the run."""
    with_rank_one(LACKS_MEMORY, monkeypatch, at=at)
    began = time.monotonic()
    result = launch(tiny(tmp_path / "both", shard=shard), None, 2)
    assert time.monotonic() - began < 120  # nobody waits for the timeout, which is half an hour
    said = [line["accumulate"] for line in lines(result.folder, "out of memory")]
    assert said == ([2] if resumed is None else [])
    assert "accumulate: 2" in (result.folder / "config.yaml").read_text()
    expected = {None: [], 2: [f"resuming {result.folder} from step 2 with accumulate: 2"], 0: ["starting again with"]}
    assert all(text in caplog.text for text in expected[resumed]) and bool(caplog.records) == (resumed is not None)
    monkeypatch.undo()
    assert losses(result.folder) == pytest.approx(losses(loop.fit(tiny(tmp_path / "alone")).folder), abs=1e-5)


@pytest.mark.processes
def test_batches_that_cannot_be_cut_end_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_rank_one(LACKS_MEMORY.replace("> 4", "> 0"), monkeypatch, at=0)
    with pytest.raises(Failed, match=r"out of memory .*Resume with --activation-checkpointing"):
        launch(tiny(tmp_path), None, 2)


@pytest.mark.processes
def test_what_a_watchdog_ends_is_explained_by_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's ends a process by SIGABRT, without a message of ours, while the one that it waited for hangs."""
    act = "import threading; threading.Timer(3, os.abort).start() if world.rank() == 0 else time.sleep(600)"
    with_rank_one(act, monkeypatch, ranks=(0, 1), at=2)
    monkeypatch.setattr(processes, "GRACE", 1.0)
    message = (
        "Process 0 ended without a message, signal SIGABRT.*NCCL.*--timeout; it waited for process 1, which may be "
        "stuck. At the end, process 0 in step 2, process 1 in step 2"
    )
    with pytest.raises(Failed, match=message) as caught:
        launch(tiny(tmp_path), None, 2)
    assert caught.value.exit_code == 128 + signal.SIGABRT


@pytest.mark.processes
def test_a_signal_to_one_process_saves_the_same_step_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_rank_one("os.kill(os.getpid(), signal.SIGTERM)", monkeypatch, at=2)
    run = tiny(tmp_path / "stopped")
    with pytest.raises(Failed, match="stopped by SIGTERM after step 3, saved at step 3") as caught:
        launch(run, None, 2)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    monkeypatch.undo()
    folder = tmp_path / "stopped" / "train-1"
    assert loop.fit(run, resume=folder).steps == STEPS
    whole = loop.fit(tiny(tmp_path / "whole"))
    assert losses(folder) == pytest.approx(losses(whole.folder), abs=1e-5)


def uneven(out: Path, **changes: Any) -> Run:
    """A run in which two processes have different numbers of batches in every evaluation.

    Each has two images in a batch. Of 17 training images the first process has 9, and 8 are the other's; the same for 5
    validation images. The first two test images of the second process cannot be read.
    """
    source = random.Random(0)
    for split, count in (("train", 17), ("val", 5), ("test", 8)):
        for number in range(count):
            path = out / "images" / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.frombytes("RGB", (8, 8), source.randbytes(8 * 8 * 3)).save(path)
    images = open_split(out / "images", "test")
    for number in (1, 3):
        (out / "images" / "test" / images.id(number)).write_bytes(b"torn")
    short: dict[str, Any] = {"duration": Steps(4), "schedule": Schedule(warmup=Steps(1)), "evaluate_every": Steps(2)}
    return tiny(out, data=Data(str(out / "images")), batch_size=4, accumulate=2, **short, **changes)


@pytest.mark.kill
def test_processes_may_have_different_numbers_of_evaluation_batches(tmp_path: Path) -> None:
    """Validation, its probes and the test; each process alone would stop in the middle of what the other one does."""
    run = uneven(tmp_path, timeout=20.0, knn=3, fewshot=(1,))
    single = loop.fit(replace(run, name="single"))
    both = launch(run, None, 2)
    assert both.steps == 4 and both.test is not None and both.test["count"] == 6
    for kind in ("validation", "knn", "fewshot"):
        ours, expected = (
            [{name: value for name, value in line.items() if name != "time"} for line in lines(result.folder, kind)]
            for result in (both, single)
        )
        assert len(ours) == 2 and "error" not in ours[0]
        assert [line.keys() for line in ours] == [line.keys() for line in expected]
        for mine, theirs in zip(ours, expected, strict=True):
            assert [mine[name] for name in mine if name != "kind"] == pytest.approx(
                [theirs[name] for name in theirs if name != "kind"], abs=1e-4
            )


@pytest.mark.processes
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_during_an_evaluation_ends_it_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    act = f"""
if world.rank() == {rank}:
    ask = evaluation.predictor
    def predictor(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return ask(*arguments, **options)
    evaluation.predictor = predictor
"""
    with_rank_one(act, monkeypatch, ranks=(rank,), at=1)
    run = uneven(tmp_path, timeout=20.0)
    with pytest.raises(Failed, match="stopped by SIGTERM after step 2, saved at step 2") as caught:
        launch(run, None, 2)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    folder = tmp_path / "train-1"
    assert lines(folder, "validation") == []
    monkeypatch.undo()
    assert loop.fit(run, resume=folder).steps == 4
    assert [line["step"] for line in lines(folder, "validation")] == [2, 4]


@pytest.mark.kill
def test_the_main_process_may_take_its_time_and_one_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save takes longer than processes wait for each other, and costs nothing; then one hangs."""
    with_rank_one("time.sleep(600)", monkeypatch, pause=8.0, at=5)
    monkeypatch.setattr(processes, "GRACE", 1.0)
    run = tiny(tmp_path, timeout=6.0, duration=Steps(6), checkpoint_every=Steps(2), evaluate_every=Steps(1000))
    folder = tmp_path / "train-1"
    message = (
        rf"Process 1 did not respond within 6 s \(--timeout\).* step 4. Resume with vitrail train --resume {folder}"
    )
    with pytest.raises(Failed, match=message):
        launch(run, None, 2)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [f"step-{n:06d}" for n in (2, 4)]


def what_torchrun_starts(words: list[str], said: Path) -> NoReturn:
    """One process of torchrun, which speaks into a file."""
    descriptor = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
    world.leave(cli.main(words))


def config_of(folder: Path, **changes: Any) -> list[str]:
    """Write settings in a file, and return the words that train with it."""
    (folder / "run.yaml").write_text(to_yaml(tiny(folder, **changes)))
    return ["train", "--config", str(folder / "run.yaml")]


@pytest.mark.processes
@pytest.mark.page
def test_torchruns_variables_and_nproc_are_the_same_command_and_speak_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = config_of(tmp_path, duration=Steps(3), schedule=Schedule(warmup=Steps(1)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    members = [
        Forked(what_torchrun_starts, words, tmp_path / "said", env=process_environment(rank, 2, port))
        for rank in range(2)
    ]
    assert ended(members, 120) == [0, 0]
    with_rank_one("pass", monkeypatch)
    assert cli.main([*words, "--nproc", "2"]) == 0
    assert_they_spoke_once(tmp_path, (tmp_path / "said").read_text(), "".join(capfd.readouterr()))


@pytest.mark.processes
@pytest.mark.page
@pytest.mark.nightly("test_torchruns_variables_and_nproc_are_the_same_command_and_speak_once, without torchrun itself")
def test_torchrun_and_nproc_are_the_same_command_and_speak_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = config_of(tmp_path, duration=Steps(3), schedule=Schedule(warmup=Steps(1)))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        torchrun += ["--master-port", str(probe.getsockname()[1]), "-m", "vitrail", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run([sys.executable, *torchrun], env=environment).returncode == 0
    said = "".join(capfd.readouterr())
    with_rank_one("pass", monkeypatch)
    assert cli.main([*words, "--nproc", "2"]) == 0
    assert_they_spoke_once(tmp_path, said, "".join(capfd.readouterr()))


def assert_they_spoke_once(folder: Path, *said: str) -> None:
    for number, text in enumerate(said, start=1):
        assert text.count("all steps done after 3 steps") == 1 and text.count("report:") == 1
        assert text.count("run.yaml") == 1 and (folder / f"train-{number}" / "report.html").is_file()
    torch.testing.assert_close(losses(folder / "train-1"), losses(folder / "train-2"), rtol=0, atol=1e-6)


@pytest.mark.kill
def test_ctrl_c_is_sent_on_to_every_process_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_rank_one(f"os.kill({os.getpid()}, signal.SIGINT)", monkeypatch, at=STEPS // 2)
    with pytest.raises(Failed, match=r"stopped by Ctrl-C after step \d+, saved at step \d+") as caught:
        launch(tiny(tmp_path, duration=Steps(100_000), checkpoint_every=Steps(100_000)), None, 2)
    assert caught.value.exit_code == 130
    assert list((tmp_path / "train-1" / "checkpoints").glob("step-*"))


@pytest.mark.kill
@pytest.mark.nightly("test_ctrl_c_is_sent_on_to_every_process_and_saves, without a terminal's group of processes")
def test_ctrl_c_in_a_terminal_reaches_every_process_once_and_saves(tmp_path: Path) -> None:
    """A terminal sends it to everything that runs in it; a second one would end the processes without a save."""
    words = config_of(tmp_path, duration=Steps(100_000), checkpoint_every=Steps(100_000))
    command = [sys.executable, "-m", "vitrail", *words, "--nproc", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert run.stderr is not None
    said = []
    for line in run.stderr:
        said.append(line)
        if line.startswith(f"step {STEPS // 2}:"):
            os.killpg(run.pid, signal.SIGINT)
    assert run.wait(60) == 130, said
    assert "saved" in said[-1] and list((tmp_path / "train-1" / "checkpoints").glob("step-*")), said


def reading(data: Path, out: Path) -> NoReturn:
    """Train on images some of which cannot be read, and write down which ones this process has met."""
    setups, set_up = [], loop.set_up

    def kept(*arguments: Any, **options: Any) -> Any:
        setups.append(set_up(*arguments, **options))
        return setups[-1]

    loop.set_up = kept
    with in_process_group(), open(out / f"stderr-{world.rank()}", "w") as said, redirect_stderr(said):
        loop.fit(tiny(out, data=Data(str(data), holdout=0.0, max_bad=0.9), batch_size=8, duration=Steps(6)))
        (out / f"unreadable-{world.rank()}.json").write_text(json.dumps(setups[0].loader.bad))
    world.leave(0)


@pytest.mark.processes
def test_unreadable_images_of_all_processes_are_counted(tmp_path: Path) -> None:
    for number in range(24):
        path = tmp_path / "images" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(path)
        if number < 5:
            path.write_bytes(path.read_bytes()[:40])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (tmp_path / "images", tmp_path)
    members = [Forked(reading, *arguments, env=process_environment(rank, 2, port)) for rank in range(2)]
    assert ended(members, 120) == [0, 0]
    main, other = (json.loads((tmp_path / f"unreadable-{rank}.json").read_text()) for rank in range(2))
    assert main and other and len({name for name, _ in main + other}) == 5
    logged = lines(tmp_path / "train-1", "unreadable")
    assert [line["image"] for line in logged if "image" in line] == [name for name, _ in main]
    counts = [line["count"] for line in logged if "count" in line]
    assert counts == sorted(set(counts)) and counts[-1] == len(main) + len(other)
    said = (tmp_path / "stderr-0").read_text()
    assert f"unreadable images so far: {counts[-1]}, summed over the 2 processes" in said
