"""Fault 28: a command that is killed over and over, each time at a random moment, ends with the bits of one that never
was."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import run, start
from random_inputs import MANY
from safetensors.torch import load_file

from vitrail.config import to_yaml
from vitrail.data.settings import Augment, Data
from vitrail.durations import Steps
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Supervised, Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer
from vitrail.training.checkpoints.checkpoint import latest_valid
from vitrail.training.run import Average, Model, Optim, Run

KILLS = int(os.environ.get("VITRAIL_TEST_KILLS", "2" if MANY else "1"))
"""How often each run is killed."""
WHOLE = Run(
    data=Data(path="digits", subset=140),
    model="Ti/4",
    vit=Model(width=16, depth=2, heads=2, mlp_dim=32, dropout=0.1, drop_path=0.1),
    augment=Augment(crop="pad", pad=1, mixup=0.5, cutmix=0.5, erasing=0.2),
    optim=Optim(lr=3e-3),
    average=Average(kind="ema", decay=0.9),
    evaluate_every=Steps(7),
    checkpoint_every=Steps(1),
    batch_size=16,
    accumulate=2,
    precision="float32",
    device="cpu",
)
PLAIN = Augment(crop="pad", pad=1)
TOKENIZER = Tokenizer(codes=16, width=16, depth=1, features=4, decay=0.9)
POLYAK = Average(kind="polyak", start=Steps(10))
RUNS = {
    "no threads, softmax": replace(WHOLE, workers=0, objective=Supervised(smoothing=0.1)),
    "one thread, sigmoid": replace(WHOLE, workers=1, cache="no", objective=Supervised(loss="sigmoid"), average=POLYAK),
    "two threads, bce": replace(WHOLE, workers=2, cache="no", objective=Supervised(loss="bce", bce_threshold=0.0)),
    "two threads, masked patches": replace(WHOLE, workers=2, cache="no", objective=MaskedPatch(), augment=PLAIN),
    "no threads, masked pixels": replace(WHOLE, workers=0, objective=MaskedPatch(target="pixels"), augment=PLAIN),
    "one thread, mae": replace(
        WHOLE,
        workers=1,
        cache="no",
        objective=MAE(decoder_width=16, decoder_depth=1, decoder_heads=2),
        augment=PLAIN,
        average=POLYAK,
    ),
    "two threads, a tokenizer": replace(WHOLE, workers=2, cache="no", objective=TOKENIZER, augment=PLAIN),
    "no threads, beit": replace(
        WHOLE, workers=0, objective=BEiT(tokenizer="tokenizer", smallest_block=1), augment=PLAIN
    ),
    "one thread, a teacher": replace(
        WHOLE,
        workers=1,
        augment=Augment(crop="random"),
        average=Average(),
        objective=DINO(outputs=64, hidden=32, bottleneck=16, view=2.0, local_crops=2, freeze_last_layer=Steps(9)),
    ),
}
BY_DAY = ("two threads, masked patches", "no threads, beit", "one thread, a teacher")
"""Runs with each number of threads: alone, beside a tokenizer, and with a teacher and all its state."""


def steps(folder: Path) -> int:
    """The newest checkpoint there is."""
    names = [path.name for path in folder.glob("checkpoints/step-*") if path.name[5:].isdecimal()]
    return max((int(name[5:]) for name in names), default=0)


def kept(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last and the best model and of the newest checkpoint."""
    newest = latest_valid(folder / "checkpoints")
    assert newest is not None
    files = [file for name in ("last", "best") for file in sorted((folder / "model" / name).glob("*.safetensors"))]
    assert len(files) == 2
    files += [newest / "model.safetensors", newest / "state.safetensors"]
    return {f"{number} {key}": value for number, file in enumerate(files) for key, value in load_file(file).items()}


@pytest.mark.kill
@pytest.mark.parametrize("name", RUNS if MANY else BY_DAY)
def test_28_killed_over_and_over_and_still_the_same_bits(tmp_path: Path, name: str) -> None:
    whole = replace(RUNS[name], duration=Steps(8 + 5 * KILLS))
    (tmp_path / "run.yaml").write_text(to_yaml(whole))
    torch.manual_seed(0)
    ImageTokenizer(TOKENIZER, 4).save(tmp_path / "tokenizer")  # BEiT's, which knows nothing
    words = ["train", "--config", "run.yaml"]
    calm = run(*words, "--out", "calm", cwd=tmp_path)
    assert calm.process.exitcode == 0, calm.err
    folder, rng, kills = tmp_path / "killed" / "train-1", random.Random(name), 0
    while kills < KILLS:
        begun = steps(folder)
        more = ["--resume", str(folder)] if begun else [*words[1:], "--out", "killed"]
        command = start("train", *more, cwd=tmp_path)
        wanted, deadline = begun + 1, time.monotonic() + 60
        while steps(folder) < wanted:
            assert command.process.exitcode is None and time.monotonic() < deadline, command.err
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.04))  # anywhere in a step, an evaluation or a save
        command.process.kill()
        command.wait()
        kills += command.process.exitcode == -9
    assert steps(folder) < 8 + 5 * KILLS  # the last kill came before the end
    last = run("train", "--resume", folder, cwd=tmp_path)
    assert last.process.exitcode == 0, last.err
    ours, theirs = kept(folder), kept(tmp_path / "calm" / "train-1")
    assert ours.keys() == theirs.keys()
    assert [key for key, value in ours.items() if not value.equal(theirs[key])] == []
