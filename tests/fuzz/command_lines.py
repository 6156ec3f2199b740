"""Whole command lines from the grammar of the parser: any verb, flags and subjects of their types, valid or not."""

from __future__ import annotations

import inspect
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from commands import Command, run, start
from grammar import Flag, at_the_ends, flags_of, words
from scenes import SHORT, snapshot
from writers import scene_in

from vitrail.cli import VERBS
from vitrail.config import union_members
from vitrail.durations import Duration

PLACES = [
    *("{photos}", "{photos}/red", "{photos}/red/1.png", "{photos}/*/2.png", "{shards}", "{table}", "digits"),
    *("weights", "weights/model.safetensors", "run", "run/config.yaml", "run/checkpoints", "features.npz"),
    *("new", "new/deep/place", "new.csv", "new.npz", "new.parquet", ".", "..", "/dev/null", "absent", "", " ", "-"),
    *("http://127.0.0.1:9/a.tar", "hf:nobody/nothing", "a\x00b", "a\nb", "x" * 300, "\udcff", "~", "*.png"),
]
"""Paths, and what stands where a path should be. {} is the user's data; the rest lies in the folder of the command."""
TEXTS = [
    "a",
    "Ti/2",
    "S/16",
    "cpu",
    "cuda:7",
    "red",
    "train",
    "10%",
    "1:00:00",
    "\u00fc\n",
    "\x1b[31m",
    "--x",
    "\u00e9" * 400,
]
JUNK = [
    "",
    "abc",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "0x10",
    "1_0",
    "\u0663",
    "1,5",
    "null",
    "-",
    "1 2",
    "9" * 400,
    "-0.0",
    "-1",
    "0",
    "1e308",
    "-1e-9",
    str(10**22),
]
LENGTHS = ["0", "1 step", "2 steps", "1 epochs", "0.5 epochs", "16 examples", "50 %", "101 %", "5 years", "1e12 steps"]
LIKELY = {
    **dict.fromkeys(("path", "paths", "data", "images", "against"), tuple(PLACES[:6])),
    **dict.fromkeys(("model", "source", "weights"), ("weights", "run", "weights/model.safetensors")),
    **dict.fromkeys(("run", "runs", "resume"), ("run",)),
    **dict.fromkeys(
        ("folder", "target", "file", "out", "merge", "keep_list"), ("new", "new.csv", "new.npz", "n/r.html")
    ),
    "models": ("weights", "run", "Ti/16", "a=weights"),
    "command": ("train", "{photos}", "--epochs", "finetune"),
    "sizes": ("4", "50%", "0.5"),
    "config": ("run/config.yaml"),
    "recipe": ("scratch-small", "digits", "finetune", "smoke"),
    "name": ("digits", "smoke", "a"),
    "device": ("cpu"),
    "features": ("features.npz"),
    "repository": ("nobody/nothing"),
    "split": ("train", "validation", "all"),
    "vary": ("seed=1,2", "optim.momentum=0.9"),
}
"""Name of a flag -> texts that mean something to it. Its type says only that it is a text."""
SMALL_RUN = [*SHORT, "2 steps", "--workers", "1", "--image-size", "8"]
ENDLESS = ("serve", "demo")
"""Verbs that do not end by themselves, or not soon."""
PATIENCE = 100.0
"""Seconds after which a command is sent SIGTERM."""
BRIEFLY = 6.0
"""The same for `ENDLESS`."""
MEMORY = 3 * 2**30
"""Bytes of memory that a command may add to those of the process from which it is forked."""
NOT_FINITE = re.compile(r"(?<![\w.-])-?(nan|inf|infinity)(?![\w-])", re.IGNORECASE)
SMALL: dict[Any, list[float]] = {int: [1, 2, 3, 8], float: [0.01, 0.5, 1.0, 2.0]}


class Grammar:
    """Command lines of any verb, one for each number; half of them have only words of the right types."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        self.tame = self.random.random() < 0.5

    def command_line(self) -> list[str]:
        """Return the words of a command."""
        verb = self.random.choice([*VERBS])
        argv = verb.split()
        keywords = [flag for flag in flags_of(verb) if flag.kind is inspect.Parameter.KEYWORD_ONLY]
        for flag in flags_of(verb):
            if flag not in keywords:
                many = flag.kind is inspect.Parameter.VAR_POSITIONAL
                argv += [word for _ in range(self.random.randrange(4) if many else 1) for word in self.value(flag)]
        chosen = self.random.choices(keywords, k=self.random.choice([0, 1, 1, 2, 3, 6]))
        chosen += [flag for flag in keywords if flag.name == "weights" and flag not in chosen]
        return argv + [word for flag in dict.fromkeys(chosen) for word in self.given(flag)]

    def given(self, flag: Flag) -> list[str]:
        """Return a flag with its value."""
        wild = not self.tame and self.random.random() < 0.2
        if flag.hint is bool:
            return [
                self.random.choice([f"--no-{flag.word[2:]}", flag.word[:-1], f"{flag.word}=1"]) if wild else flag.word
            ]
        found = self.value(flag)
        return [f"{flag.word}={' '.join(found)}"] if wild else [flag.word, *found]

    def value(self, flag: Flag) -> list[str]:
        """Return the words of a value."""
        likely = LIKELY.get(flag.name.rpartition(".")[2], (*PLACES, *TEXTS))
        kind = 0.0 if self.tame else self.random.random()
        if kind > 0.75:
            return self.random.choice([[], *([text] for text in (*JUNK, *PLACES, *TEXTS))])
        return self.of(flag.hint, likely if kind < 0.5 else (*PLACES, *TEXTS))

    def of(self, hint: Any, texts: Sequence[str]) -> list[str]:
        """Return the words of a value of a type."""
        hint = self.random.choice([part for part in union_members(hint) if part not in (type(None), Path)])
        kind, parts = get_origin(hint), [part for part in get_args(hint) if part is not ...]
        if kind is Literal:
            return [str(self.random.choice(parts))]
        if kind in (tuple, list):
            many = kind is list or get_args(hint)[1:] == (...,)
            each = parts * self.random.randint(1, 3) if many else parts
            return [word for part in each for word in self.of(part, texts)]
        base = parts[0] if kind is Annotated else hint
        if base is Duration:
            return [self.random.choice(LENGTHS)]
        if base in (int, float):
            return words(self.random.choice([*(at_the_ends(hint) if kind is Annotated else []), *SMALL[base]]))
        return [self.random.choice(texts)]


@dataclass(frozen=True)
class World:
    """The user's data, and a folder that is copied for each command."""

    data: Path
    own: Path


def world_in(folder: Path) -> World:
    """Write images as a folder, as shards and as a table; weights, a run and features."""
    scene = scene_in(folder / "scene")
    data, own = folder / "data", folder / "own"
    shutil.copytree(scene.photos, data / "photos")
    shutil.copytree(scene.weights, own / "weights")
    shutil.copytree(scene.run, own / "run")
    assert run("data", "pack", data / "photos", data / "shards", cwd=folder).process.exitcode == 0
    argv = ["embed", own / "weights", data / "photos", "--out", own / "features.npz"]
    assert run(*argv, cwd=folder).process.exitcode == 0
    rows = [f"{file},{file.parent.name}" for file in sorted((data / "photos").rglob("*.png"))]
    (data / "table.csv").write_text("\n".join(["path,label", *rows]))
    return World(data, own)


def attempt(world: World, argv: list[str]) -> Command:
    """Run a command in a folder of its own, and check what holds for every command."""
    places = {name: str(world.data / name) for name in ("photos", "shards")} | {"table": str(world.data / "table.csv")}
    before = snapshot(world.data)
    place = Path(tempfile.mkdtemp(prefix="any-"))
    try:
        shutil.copytree(world.own, place / "own")
        argv = [filled(word, places) for word in [*bounded_by(argv)]]
        command = start(
            *argv,
            cwd=place / "own",
            before=alone,
            given=[BRIEFLY if argv[0] in ENDLESS else PATIENCE],
            env={"VITRAIL_CACHE": str(place / "cache")},
        )
        code = command.wait()
        said = command.out + command.err
        assert code in (0, 1, 2) or (code in (143, -15) and argv[0] in ENDLESS), (code, argv, said)
        assert "Traceback" not in said or "--traceback" in argv, (argv, said)
        assert "Exception" not in said, (argv, said)
        assert code == 0 or "vitrail" in command.err or "could not be" in said, (argv, said)
        assert not NOT_FINITE.search(command.out) or NOT_FINITE.search(" ".join(argv)), (argv, said)
        now = snapshot(world.data)
        assert {file: now.get(file) for file in before} == before, argv
        return command
    finally:
        shutil.rmtree(place, ignore_errors=True)


def filled(word: str, places: dict[str, str]) -> str:
    for name, path in places.items():
        word = word.replace(f"{{{name}}}", path)
    return word


def bounded_by(argv: list[str]) -> list[str]:
    """Put small sizes in front of the flags, and the end of a training behind them."""
    verb = next(verb for verb in (" ".join(argv[:2]), argv[0]) if verb in VERBS)
    names = {flag.name for flag in flags_of(verb) if flag.kind is inspect.Parameter.KEYWORD_ONLY}
    typed = {word.partition("=")[0] for word in argv}
    front = {flag: word for flag, word in pairwise(SMALL_RUN) if flag.startswith("--") and flag not in typed}
    front = {flag: word for flag, word in front.items() if flag[2:].replace("-", "_") in names}
    if "weights" in names:
        front = {flag: word for flag, word in front.items() if "model" not in flag and "vit" not in flag}
    behind = {"time_limit": "0.02", "seconds": "0.01", "steps": "2", "minutes": "0.1"}
    ends = [word for name, most in behind.items() if name in names for word in (f"--{name.replace('_', '-')}", most)]
    ends += ["--no-compile"] * ("compile" in names)
    count = len(verb.split())
    return [*argv[:count], *chain.from_iterable(front.items()), *argv[count:], *ends]


def alone(patience: float) -> None:
    """This process has no network and little memory, and it is asked to end after a while."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    os.environ |= {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HOME": os.getcwd()}
    pid = os.getpid()
    threading.Timer(patience, lambda: os.kill(pid, signal.SIGTERM)).start()
