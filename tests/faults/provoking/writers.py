"""Every verb that writes, with the smallest command that writes, and what it may leave behind when it fails."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import Command, run
from random_inputs import MANY
from references import once
from scenes import SHORT, capped, draw

from vitrail.data.settings import Preprocess
from vitrail.model.variants import variant
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

NOTHING = r"(?!)"


@dataclass(frozen=True)
class Writer:
    """A command with {photos}, {weights}, {run} and {out} in its words; `out` is the name of what it writes."""

    words: str
    out: str
    folder: bool = False
    kept: str = NOTHING
    """Pattern of the files that a failed call keeps, because the next call continues from them."""

    def argv(self, scene: Scene, out: str | Path) -> list[str]:
        """Return the words of the command."""
        beside = {name: scene.weights.with_name(name) for name in ("tanh", "tasks")}
        places: dict[str, Any] = {**beside, **vars(scene), "out": out}
        places["spare"] = scene.cache.parent / f"spare-{self.words.split()[0]}-{time.monotonic_ns()}"
        words = [word.format(**places) for word in self.words.split()]
        return [*words, *SHORT, "2 steps"] if words[0] == "train" and "--resume" not in words else words


LONG = ("export onnx", "report", "bench", "vtab")
"""Writers that take half a second or more, and write as `export`, `search`, `evaluate` and `sweep` do."""


ALIKE = ("dedup list", "audit", "next", "predict jsonl", "embed merge", "convert timm", "finetune")
"""Writers that write as `dedup`, `predict`, `predict merge`, `convert torch` and `train` do."""


def by_turns(turn: int, of: int, *cases: str) -> list[tuple[str, str]]:
    """Return every `of`th writer that is not `LONG`, from number `turn` on, with one of the cases each.

    All writers with all cases if VITRAIL_TEST_EXAMPLES asks for more.
    """
    if MANY:
        return [(name, case) for name in WRITERS for case in cases]
    names = [name for name in WRITERS if name not in LONG][turn::of]
    return [(name, cases[number % len(cases)]) for number, name in enumerate(names)]


RUN = r"r/.*"
TUNED = "--epochs 1 --batch-size 4 --image-size 8 --device cpu"
SWEPT = "--parallel 0 --lr 0.01 --seeds 1 --dev 0.3"
TASK = "--batch-size 4 --image-size 8 --device cpu"
WRITERS: dict[str, Writer] = {
    "check": Writer("data check {photos} --out {out}", "r.csv"),
    "pack": Writer("data pack {photos} {out} --workers 1", "r", True, r"r/shard-\d+\.(tar|part)"),
    "augment": Writer(
        "data augment {photos} --image-size 8 --images 1 --draws 1 --augment.also vflip --out {out}", "r.png"
    ),
    "dedup": Writer("data dedup {photos} --out {out}", "r.csv"),
    "dedup list": Writer("data dedup {photos} --keep-list {out}", "r.csv"),
    "audit": Writer("data audit {photos} --from {weights} --folds 2 --device cpu --out {out}", "r.csv"),
    "next": Writer("data next {photos}/red --from {weights} --count 3 --device cpu --out {out}", "r.csv"),
    "predict": Writer("predict {weights} {photos} --out {out}", "r.csv", False, r"\.r\.csv\.part"),
    "predict jsonl": Writer("predict {weights} {photos} --out {out}", "r.jsonl", False, r"\.r\.jsonl\.part"),
    "predict folder": Writer("predict {weights} {photos} --out {out}", "r", True, RUN),
    "embed": Writer("embed {weights} {photos} --out {out}", "r.npz"),
    "embed folder": Writer("embed {weights} {photos} --out {out}", "r", True, RUN),
    "search": Writer("search {weights} {photos} --like {photos}/red/1.png --out {out}", "r.csv"),
    "evaluate": Writer("evaluate {weights} {photos} --out {out}", "r", True, RUN),
    "evaluate outputs": Writer("evaluate {weights} {photos} --out {out}", "r.npz"),
    "inspect": Writer("inspect {weights} --out {out} --format svg", "r", True, RUN),
    "report": Writer("report {run} --out {out}", "r.html"),
    "export": Writer("export {weights} --to program --out {out}", "r", True),
    "convert": Writer("weights convert {weights} {out}", "r", True, RUN),
    "convert hf": Writer("weights convert {weights} {out} --format hf", "r", True),
    "convert timm": Writer("weights convert {weights} {out} --format timm", "r.safetensors"),
    "convert torch": Writer("weights convert {weights} {out} --format timm", "r.pth"),
    "convert google": Writer("weights convert {tanh} {out} --format google", "r.npz"),
    "recipe": Writer("recipes cp digits {out}", "r.yaml"),
    "bench": Writer(
        "bench Ti/16 --image-size 16 --batch-size 1 --mode inference --seconds 0.01 --out {out}", "r", True, RUN
    ),
    "export onnx": Writer("export {weights} --out {out}", "r", True),
    "predict merge": Writer("predict {weights} {photos} --out {spare} --merge {out}", "r.parquet"),
    "embed merge": Writer("embed {weights} {photos} --out {spare} --merge {out}", "r.parquet"),
    "finetune": Writer(f"finetune {{photos}} --from {{weights}} {TUNED} --out {{out}}", "r", True, RUN),
    "sweep": Writer(f"sweep {{photos}} --from {{weights}} {TUNED} {SWEPT} --out {{out}}", "r", True, RUN),
    "train": Writer("train {photos} --out {out}", "r", True, RUN),
    "vtab": Writer(
        f"vtab --from {{weights}} --data {{tasks}} --tasks dtd --steps 2 {TASK} --out {{out}}", "r", True, RUN
    ),
}
EACH_WAY = [name for name in WRITERS if MANY or name not in (*LONG, *ALIKE)]
"""One writer of each way to write, or all if a long run is asked for."""


@dataclass(frozen=True)
class Scene:
    """Photographs, a network, a finished run, and the cache of all commands."""

    photos: Path
    weights: Path
    run: Path
    cache: Path


def scene_in(folder: Path) -> Scene:
    """Return the scene, which is a reference, with a cache and a current folder of their own in `folder`."""
    made = once("writers-scene", _draw_scene)
    return Scene(made / "photos", made / "weights", made / "runs" / "done-1", folder / "c")


def _draw_scene(folder: Path) -> None:
    photos = draw(folder / "photos", count=6)
    for name, gelu in (("weights", "erf"), ("tanh", "tanh")):
        shape = dict(image_size=(8, 8), patch=2, width=64, depth=1, heads=1, mlp_dim=32, classes=2, gelu=gelu)
        config = variant("Ti/16", **shape)
        save_model(folder / name, ViT(config), Card(config, ["blue", "red"], Preprocess((8, 8))))
    task = draw(folder / "tasks" / "dtd", count=2)
    rows = [f"{path.relative_to(task)} {path.parent.name}\n" for path in sorted(task.rglob("*.png"))]
    for name in ("train800", "val200", "test"):
        (task / f"{name}.txt").write_text("".join(rows))
    words = ["train", photos, *SHORT, "2 steps", "--name", "done"]
    done = run(*words, cwd=folder, env={"VITRAIL_CACHE": str(folder / "c")})
    assert done.process.exitcode == 0, done.err


def written_alone(name: str, scene: Scene) -> Path:
    """Return the folder in which a writer has written with no other beside it; it is a reference, and was missing."""

    def make(place: Path) -> None:
        command = write(WRITERS[name], scene, place / "missing" / "deep")
        assert command.process.exitcode == 0, command.err

    return once(f"written-{name.replace(' ', '-')}", make) / "missing" / "deep"


def write(writer: Writer, scene: Scene, place: Path, **options: Any) -> Command:
    """Run a writer with its output in the folder `place`."""
    env = {"VITRAIL_CACHE": str(scene.cache)}
    return run(*writer.argv(scene, place / writer.out), cwd=scene.cache.parent, env=env, **options)


def write_capped(writer: Writer, scene: Scene, place: Path, most: int) -> tuple[int, str]:
    """Run a writer that can write at most `most` bytes into a file; return the exit code and what it said."""
    pipe = scene.cache.parent / f"said-{os.getpid()}"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        command = write(writer, scene, place, before=capped, given=(most, str(pipe)))
        return int(command.process.exitcode), _read(reader)
    finally:
        os.close(reader)
        pipe.unlink()


def _read(descriptor: int) -> str:
    said = b""
    try:
        while part := os.read(descriptor, 1 << 16):
            said += part
    except BlockingIOError:
        pass
    return said.decode("utf-8", "replace")


def files(place: Path) -> dict[str, int]:
    """Name -> size of every file below a folder; a folder's name ends with a slash, and its size is 0."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        found |= {f"{name}/": 0} if path.is_dir() else {name: path.lstat().st_size}
    return found


HIDDEN = re.compile(r"(^|/)\.[^/]*(tmp|saving)[^/]*")


def debris(writer: Writer, place: Path) -> list[str]:
    """Return what a failed call left in `place` and should not have left."""
    kept = rf"{writer.kept}|{re.escape(writer.out)}/" if writer.kept != NOTHING else NOTHING
    return [name for name in files(place) if HIDDEN.search(name) or not re.fullmatch(kept, name)]
