"""Predictions and features of a data set by the workers of a Ray cluster, one of which is killed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch

import vitrail
from vitrail.data.loading.pack import pack
from vitrail.data.sources.arrays import ArraySource
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.save import save

COUNT = 240
CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network, and images in many packed shards."""
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    model = build(CONFIG)
    torch.nn.init.normal_(model.head.weight)
    model.card = Card(CONFIG, ["a", "b"])
    save(model, folder / "model")
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 8, 8, 3), dtype=np.uint8)
    pack(ArraySource("s", images, np.arange(COUNT) % 2, ["a", "b"]), folder / "data", quality=None, shard_bytes=4_000)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a Ray cluster of two nodes with a core each."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    started.add_node(num_cpus=1)
    yield started.address
    started.shutdown()


def kill_one(folder: Path, killed: list[int], done: threading.Event) -> None:
    """Kill a worker when a few parts are there."""
    while not done.wait(0.01):
        if len(list(folder.glob("*.done.json"))) < 3:
            continue
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or [])
            if words.startswith("ray::") and "_Worker" in words:
                process.send_signal(signal.SIGKILL)
                killed.append(process.pid)
                return


def tables(folder: Path) -> dict[str, Any]:
    return {path.name: pq.read_table(path).to_pydict() for path in folder.glob("*.parquet")}


@pytest.mark.kill
@pytest.mark.parametrize("verb", [vitrail.embed, pytest.param(vitrail.predict, marks=pytest.mark.nightly("embed"))])
def test_what_workers_compute_is_what_one_process_computes_even_where_one_is_killed(
    made: Path, tmp_path: Path, cluster: str, verb: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = made / "model", made / "data"
    alone = verb(*given, out=tmp_path / "alone")
    killed, done = list[int](), threading.Event()
    killer = threading.Thread(target=kill_one, args=(tmp_path / "ray", killed, done))
    killer.start()
    monkeypatch.chdir(tmp_path)
    try:
        found = verb(*given, out="ray", merge="all.parquet", ray=cluster, batch_size=4)
    finally:
        done.set()
        killer.join()
    assert killed and found.state.complete and found.state.images == alone.state.images == COUNT
    ours, theirs = tables(tmp_path / "ray"), tables(tmp_path / "alone")
    assert len(ours) > 20 and ours.keys() == theirs.keys()
    for name, table in theirs.items():
        assert ours[name]["id"] == table["id"]
        for column in table.keys() - {"id"}:
            if column in ("features", "probabilities"):
                np.testing.assert_allclose(ours[name][column], table[column], rtol=1e-4, atol=1e-6)
            else:
                assert ours[name][column] == table[column]
    assert len(pq.read_table(tmp_path / "all.parquet")) == COUNT


def test_workers_need_a_folder(made: Path, tmp_path: Path) -> None:
    for verb, out in ((vitrail.embed, tmp_path / "a.npz"), (vitrail.predict, tmp_path / "a.csv")):
        with pytest.raises(UsageError, match="ray is for a folder"):
            verb(made / "model", made / "data", out=out, ray="auto")
