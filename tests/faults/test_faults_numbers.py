"""Fault 61: numbers that are negative, zero, NaN or absurdly large, and names that are not names, in any flag."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest
from commands import run
from scenes import SHORT, snapshot
from writers import Scene, scene_in

from vitrail import cli

MEMORY = 3 * 2**30
"""Bytes of memory that a command may add to those of the process from which it is forked."""

TRAIN = "train {photos}"
PREDICT = "predict {weights} {photos}"
SERVE = "serve {weights} --port 0"
REFUSED = {
    f"{TRAIN} --workers -1": "--workers is -1; it must be from 0 to 1,024",
    f"{PREDICT} --workers -1": "--workers is -1; it must be from 0 to 1,024",
    "data check {photos} --workers -1": "--workers is -1; it must be from 0 to 1,024",
    f"{TRAIN} --batch-size 0": "--batch-size is 0; it must be at least 1",
    f"{PREDICT} --batch-size 0": "--batch-size is 0; it must be at least 1",
    f"{PREDICT} --top 0": "--top is 0; it must be at least 1",
    f"{PREDICT} --top -1": "--top is -1; it must be at least 1",
    f"{TRAIN} --model B/0": "model B/0: patch is 0; valid: 1 to 4,096",
    f"{TRAIN} --image-size -8": "--image-size is -8; it must be from 1 to 4,096",
    f"{TRAIN} --image-size 0": "--image-size is 0; it must be from 1 to 4,096",
    "evaluate {weights} {photos} --image-size 0": "--image-size is 0; it must be from 1 to 4,096",
    f"{TRAIN} --seed {10**22}": f"--seed is {10**22}; it must be from 0 to {2**63 - 1:,}",
    f"{TRAIN} --vit.width 0": "--vit.width is 0; it must be from 1 to 65,536",
    f"{TRAIN} --vit.depth 100000000": "--vit.depth is 100000000; it must be from 1 to 1,000",
    f"{SERVE} --max-mb nan": "--max-mb is nan; it must be ",
    f"{SERVE} --max-megapixels nan": "--max-megapixels is nan; it must be ",
    f"{SERVE} --max-megapixels -1": "--max-megapixels is -1.0; it must be ",
    f"{SERVE} --deadline nan": "--deadline is nan; it must be greater than 0",
    f"{TRAIN} --lr 0": "--lr is 0.0; it must be greater than 0",
    f"{TRAIN} --optim.lr 0": "--optim.lr is 0.0; it must be greater than 0",
    f"{TRAIN} --time-limit nan": "--time-limit is nan; it must be greater than 0",
    f"{TRAIN} --data.holdout nan": "--data.holdout is nan; it must be at least 0 and below 1",
    f"{TRAIN} --data.holdout -0.5": "--data.holdout is -0.5; it must be at least 0 and below 1",
    f"{TRAIN} --data.max-bad 7": "--data.max-bad is 7.0; it must be from 0 to 1",
    f"{TRAIN} --fewshot 1000000": "--fewshot is (1000000,); it must be from 1 to 100,000",
    f"{TRAIN} --checkpoint-every 0_steps": "--checkpoint-every is 0 steps; it must be greater than 0",
    f"{TRAIN} --duration 1e30_steps": "--duration is 1e+30 steps; it must be greater than 0 and at most 1e+12",
    f"{TRAIN} --name a\nb": "a folder name without slashes, line breaks and control characters",
    f"{TRAIN} --name \x1b[31mred": "a folder name without slashes, line breaks and control characters",
    f"{TRAIN} --accumulate 100000": "accumulate is 100000",
}
TOO_LARGE = {
    f"{TRAIN} --vit.width 65536 --vit.heads 1 --vit.depth 12": (2, "GiB of memory are free. Choose a smaller network"),
    f"{TRAIN} --vit.width 1024 --vit.depth 1000": (None, "memory"),  # by the free memory: before or while it is built
    f"{TRAIN} --objective.kind dino --objective.outputs 1048576 --objective.hidden 65536": (1, "out of memory ("),
    "bench Ti/16 --image-size 16 --batch-size 1000000000 --seconds 0.01": (
        2,
        "images fit. Choose a smaller --batch-size",
    ),
}
"""Commands within the ranges that need more memory than there is."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_in(tmp_path_factory.mktemp("scene"))


def bounded() -> None:
    """The memory of this process cannot grow by more than `MEMORY`, and it has a minute of a processor."""
    bound_memory()
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))


def bound_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


@pytest.fixture
def bounded_here() -> Iterator[None]:
    """The memory of this process cannot grow so much until the end of the test."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    bound_memory()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def argv_of(words: str, scene: Scene) -> list[str]:
    """The words of a command; a training run is `SHORT` where they say nothing else."""
    argv = [word.replace("_steps", " steps").format(**vars(scene)) for word in words.split(" ")]
    short = [*SHORT, "2 steps"] if argv[0] == "train" else []
    flags = {flag: value for flag, value in pairwise(short) if flag.startswith("--") and flag not in argv}
    return [*argv, *chain.from_iterable(flags.items())]


@pytest.mark.processes
@pytest.mark.parametrize("words", REFUSED, ids=lambda words: words.encode("unicode_escape").decode())
@pytest.mark.usefixtures("bounded_here")
def test_61_numbers_that_cannot_be_are_refused_with_their_range(
    words: str, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = [snapshot(folder) for folder in (scene.photos, scene.weights)]
    code, (out, err) = cli.main(argv_of(words, scene)), capsys.readouterr()
    assert code == 2, err
    assert REFUSED[words] in err and "Traceback" not in err, err
    assert out == "" and list(tmp_path.iterdir()) == []
    assert [snapshot(folder) for folder in (scene.photos, scene.weights)] == before


@pytest.mark.processes
@pytest.mark.parametrize("words", TOO_LARGE)
def test_61_what_does_not_fit_into_the_memory_is_an_error(words: str, scene: Scene, tmp_path: Path) -> None:
    command = run(*argv_of(words, scene), cwd=tmp_path, before=bounded)
    code, said = TOO_LARGE[words]
    assert command.process.exitcode in ((1, 2) if code is None else (code,)), command.err
    assert said in command.err, command.err
    assert "Traceback" not in command.err and "Choose a smaller" in command.err, command.err
