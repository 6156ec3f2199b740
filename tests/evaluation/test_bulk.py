from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitrail import world
from vitrail.data.item import ids
from vitrail.data.loading.pack import pack
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.sources.open import open_path
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import bulk
from vitrail.evaluation.bulk import COMPLETE, JOB, Job

COUNT = 29


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """29 images in several packed shards; the first pixel of image i is i."""
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 8, 8, 3), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(COUNT)
    folder = tmp_path_factory.mktemp("shards") / "data"
    pack(ArraySource("s", images, np.arange(COUNT) % 2, ["a", "b"]), folder, quality=None, shard_bytes=6_000)
    return folder


def first_pixels(source, receive) -> list[tuple[str, str]]:
    """The answer of a very small network: what the first pixel is; every tenth image cannot be read.

    The answers come in batches of two images.
    """
    read = [i for i in range(len(source)) if int(source[i].image[0, 0, 0]) % 10 != 9]
    unread = [(source.id(i), "corrupt") for i in range(len(source)) if i not in read]
    values = [int(source[i].image[0, 0, 0]) for i in read]
    for begin in (len(read), *range(0, len(read), 2)):
        names = [source.id(i) for i in read[begin : begin + 2]]
        receive({"id": pa.array(names, pa.string()), "pixel": pa.array(values[begin : begin + 2], pa.int64())})
    return unread


def job(folder: Path, shards: Path, **about) -> Job:
    return Job(folder, open_path(str(shards)).splits, {"verb": "test", **about})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_shard_has_an_answer_and_a_marker(shards: Path, tmp_path: Path) -> None:
    one = job(tmp_path / "out", shards)
    told: list[tuple[int, int]] = []
    state = one.run(first_pixels, 0, 1, lambda *done: told.append(done))
    assert state.complete and state.images == COUNT and told[-1] == (COUNT, COUNT)
    assert state.parts == sum(1 for _ in shards.glob("*.tar")) > 2
    assert sorted(id for id, _ in state.bad) == sorted(open_path(str(shards)).splits[""].id(i) for i in (9, 19))
    one.merge(tmp_path / "all.parquet")
    assert pq.read_table(tmp_path / "all.parquet")["pixel"].to_pylist() == [i for i in range(COUNT) if i % 10 != 9]
    assert json.loads((tmp_path / "out" / COMPLETE).read_text())["images"] == COUNT


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_processes_share_the_parts_and_the_last_one_finds_all_complete(shards: Path, tmp_path: Path, size: int) -> None:
    answered: list[str] = []

    def noting(source, receive):
        def send(columns):
            answered.extend(columns["id"].to_pylist())
            receive(columns)

        return first_pixels(source, send)

    states = [job(tmp_path / "out", shards).run(noting, rank, size) for rank in range(size)]
    assert [state.complete for state in states[:-1]] == [state.done == state.parts for state in states[:-1]]
    assert states[-1].complete and len(answered) == len(set(answered)) == COUNT - 2
    job(tmp_path / "alone", shards).run(first_pixels, 0, 1)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.evaluation.test_bulk import first_pixels, job
calls, replace = 0, os.replace
def killing(source, target):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        if sys.argv[4] == "after":
            replace(source, target)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killing
job(Path(sys.argv[1]), Path(sys.argv[2])).run(first_pixels, 0, 1)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("call", "when"), [(2, "before"), (3, "after")])
def test_a_killed_job_goes_on_and_answers_no_part_twice(shards: Path, tmp_path: Path, call: int, when: str) -> None:
    """The calls: file and marker of each part, so that a file without a marker is among the cases."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out"), str(shards), str(call), when])
    assert done.returncode == -signal.SIGKILL
    before = len(list((tmp_path / "out").glob("*.done.json")))
    answered: list[int] = []

    def noting(source, receive):
        answered.append(len(source))
        return first_pixels(source, receive)

    state = job(tmp_path / "out", shards).run(noting, 0, 1)
    assert state.complete and len(answered) == state.parts - before and before == {2: 0, 3: 1}[call]
    job(tmp_path / "alone", shards).run(first_pixels, 0, 1)
    shown = {name: data for name, data in contents(tmp_path / "out").items() if not name.startswith(".")}
    assert shown == contents(tmp_path / "alone")


@pytest.mark.full_size
def test_memory_does_not_grow_with_a_part_or_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four parts of 32 MiB each, and the file into which they are merged, are written with less than 16 MiB."""
    monkeypatch.setattr(bulk, "GROUP", 2 * 2**20)
    monkeypatch.setattr(bulk, "CHUNK", 32)
    count, each = 128, 2**18  # values of an image

    def large(source, receive):
        for i in (None, *range(len(source))):
            values = np.full(0 if i is None else each, i or 0, np.float32) + np.random.default_rng(i or 0).random(1)
            column = pa.FixedSizeListArray.from_arrays(pa.array(values.astype(np.float32)), each)
            receive({"id": pa.array([] if i is None else [source.id(i)], pa.string()), "values": column})
        return []

    source = ArraySource("s", np.zeros((count, 2, 2, 3), np.uint8), np.zeros(count, np.int64), ["a"])
    one = Job(tmp_path / "out", {"": source}, {"verb": "test"})
    pa.array(np.zeros(1))  # the first one imports pandas, if it is there
    usual, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counted)
    tracemalloc.start()
    try:
        assert one.run(large, 0, 1).complete and len(one.parts) == 4
        one.merge(tmp_path / "all.parquet")
        assert tracemalloc.get_traced_memory()[1] + counted.max_memory() < 16 * 2**20
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    whole = pq.ParquetFile(tmp_path / "all.parquet")
    assert whole.metadata.num_rows == count and whole.metadata.num_row_groups >= 4 * 16


def test_what_changed_or_does_not_hold_its_images_is_not_complete(shards: Path, tmp_path: Path) -> None:
    one = job(tmp_path / "out", shards)
    one.run(first_pixels, 0, 1)
    (tmp_path / "out" / COMPLETE).unlink()
    file = next((tmp_path / "out").glob("*.parquet"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=rf"{file.name} has changed"):
        one.check()
    file.write_bytes(data[:-1])  # another size: not done, so it is made again
    assert one.state().done == len(one.parts) - 1
    with pytest.raises(DataError, match="is not done"):
        one.merge(tmp_path / "all.parquet")
    assert one.run(first_pixels, 0, 1).complete

    def forgetful(source, receive):
        return first_pixels(source, lambda columns: receive({name: column[1:] for name, column in columns.items()}))

    with pytest.raises(DataError, match="does not hold each image of its part once"):
        job(tmp_path / "other", shards).run(forgetful, 0, 1)


def test_another_question_in_the_same_folder_is_refused(shards: Path, tmp_path: Path) -> None:
    job(tmp_path / "out", shards, top=5)
    with pytest.raises(UsageError, match="top: 5 there, 1 now"):
        job(tmp_path / "out", shards, top=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match=r"other files \(thesis\.tex\)"):
        job(tmp_path / "full", shards)


@pytest.mark.full_size
@pytest.mark.parametrize("link", [os.link, None])
def test_processes_that_begin_at_once_have_one_job(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Callable[..., None] | None
) -> None:
    """The same job is begun by all of them; of two jobs one is refused, and the folder holds the other."""

    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link or no_links)
    with ThreadPoolExecutor(4) as pool:
        for number in range(50):
            folder, start = tmp_path / str(number), Barrier(4)

            def begin(top: int, folder: Path = folder, start: Barrier = start) -> int | None:
                start.wait()
                try:
                    job(folder, shards, top=top)
                except UsageError as error:
                    assert "another job" in str(error)
                    return None
                return top

            asked = [1, 1, 2, 2] if number % 2 and link else [1] * 4
            begun = {*pool.map(begin, asked)} - {None}
            assert begun == {json.loads((folder / JOB).read_text())["top"]} and os.listdir(folder) == [JOB]


def test_data_without_shards_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bulk, "CHUNK", 4)
    source = ArraySource("s", np.zeros((10, 2, 2, 3), np.uint8), np.zeros(10, np.int64), ["a"])
    found = bulk.parts({"train": source, "test": source})
    assert [len(part.indices) for part in found] == [4, 4, 2, 4, 4, 2]
    assert len({part.name for part in found}) == 6


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (3, 8)),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "3"}, (2, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
    ],
)
def test_a_process_knows_its_share(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert world.share() == expected


def test_ids_of_splits_open_below_the_data_and_are_unique(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("training_set/a/1.png", "training_set/b/1.png", "test_set/x/a/1.png", "test_set/x/b/1.png"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(name.encode())

    def lengths(source, receive) -> list[tuple[str, str]]:
        receive({"id": pa.array(ids(source, np.arange(len(source)))), "length": pa.array(source.sizes)})
        return []

    one = Job(tmp_path / "out", open_path(str(data)).splits, {"verb": "test"}, data)
    assert one.run(lengths, 0, 1).complete
    one.merge(tmp_path / "all.parquet")
    rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert len({row["id"] for row in rows}) == 4
    for row in rows:
        assert (data / row["id"]).read_bytes() == row["id"].encode() and len(row["id"]) == row["length"]
        assert row["id"].startswith(f"{row['split']}/")
