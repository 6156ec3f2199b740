"""Fault 68 for caches: copies of what is at an address or on a hub, on a disk that is full or may not be written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import Command, run
from hub_server import REPOSITORY, FakeHub
from hub_server import serving as serving_hub
from scenes import draw, read_only, small_disk
from web import serving

from vitrail.data.settings import Preprocess
from vitrail.model.variants import variant
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.store import save_model


@dataclass(frozen=True)
class Cached:
    """A command, the variable that says where its cache is, and what else it needs to know."""

    words: list[str]
    variable: str
    env: dict[str, str]

    def run(self, cache: Path, **options) -> Command:
        return run(*self.words, cwd=cache.parent, env={**self.env, self.variable: str(cache)}, **options)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cached]]:
    """The same images as packed shards and as a tar on a web server, and a network on a hub."""
    top = tmp_path_factory.mktemp("served")
    packed, tars = top / "web" / "packed", top / "web" / "tars"
    command = run("data", "pack", draw(top / "photos"), packed, cwd=top)
    assert command.process.exitcode == 0, command.err
    tars.mkdir()
    shutil.copy(packed / "shard-00000.tar", tars / "a.tar")
    config = variant("Ti/16", image_size=(8, 8), patch=2, width=64, depth=1, heads=1, mlp_dim=32, classes=2)
    save_model(top / "network", ViT(config), Card(config, ["blue", "red"], Preprocess((8, 8))))
    files = {path.name: path.read_bytes() for path in (top / "network").iterdir()}
    hub = FakeHub(files, {"model.safetensors"})
    with serving(top / "web") as web, serving_hub(hub):
        online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        yield {
            "packed": Cached(["data", "check", f"{web.address}/packed"], "VITRAIL_CACHE", {}),
            "tars": Cached(["data", "check", f"{web.address}/tars/a.tar"], "VITRAIL_CACHE", {}),
            "hub": Cached(["weights", "info", REPOSITORY], "HF_HUB_CACHE", {**online, "NO_PROXY": "127.0.0.1"}),
        }


KINDS = ("packed", "tars", "hub")


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_68_a_cache_on_a_full_disk(kind: str, served: dict[str, Cached], tmp_path: Path) -> None:
    """The message blames the disk, not the address, and the same command succeeds once there is room."""
    with small_disk(tmp_path / "disk", "4k") as disk:
        (disk / "filling").write_bytes(bytes(4096))
        full = served[kind].run(disk)
        assert full.process.exitcode in (1, 2) and "Traceback" not in full.err, full.err
        assert "No space left on device" in full.err and str(disk) in full.err, full.err
        assert "cannot be read" not in full.err
    fine = served[kind].run(tmp_path / "room")
    assert fine.process.exitcode == 0, fine.err


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_68_a_cache_that_is_read_only(kind: str, served: dict[str, Cached], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    command = served[kind].run(cache, before=read_only, given=(str(cache),))
    if command.process.exitcode == 77:
        pytest.skip("this user may not mount")
    assert command.process.exitcode in (1, 2) and "Traceback" not in command.err, command.err
    assert "Read-only file system" in command.err and str(cache) in command.err, command.err
