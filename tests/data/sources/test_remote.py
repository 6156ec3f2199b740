from __future__ import annotations

import io
import os
import pickle
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from forked import server
from PIL import Image
from web import Web, serving

from vitrail.data.cache import read_arrow, write_arrow
from vitrail.data.images.ops import eval_transform
from vitrail.data.item import Item, Subset
from vitrail.data.loading.loader import Loader
from vitrail.data.loading.pack import pack_data
from vitrail.data.settings import Data, Preprocess
from vitrail.data.sources.open import open_data, open_path
from vitrail.data.sources.shard_files import expand
from vitrail.data.sources.shards import INDEX
from vitrail.data.split import fingerprint
from vitrail.errors import DataError, DecodeError

SIDE = 8


def needs_web() -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads the web with it")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("vitrail.data.sources.shard_files._PAUSE", 0.001)


def picture(number: int) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train (24 images in several shards) and val (5), of two classes."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 24), ("val", 5)):
        for number in range(count):
            path = root / split / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(number))
    folder = tmp_path_factory.mktemp("packed") / "data"
    pack_data(str(root), folder, shard_bytes=8_000, shuffle=True)
    return folder


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train-0000.tar to train-0002.tar of 6 images each, and val-0000.tar of 3."""
    folder = tmp_path_factory.mktemp("tars")
    number = 0
    for name, count in (("train-0000", 6), ("train-0001", 6), ("train-0002", 6), ("val-0000", 3)):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for _ in range(count):
                for suffix, data in (("jpg", picture(number)), ("cls", str(number % 3).encode())):
                    info = tarfile.TarInfo(f"{number:04d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                number += 1
    return folder


@pytest.fixture(params=["memory", "http"])
def served(request: pytest.FixtureRequest, packed: Path, tars: Path, tmp_path: Path) -> Iterator[str]:
    """An address below which `data/` is the packed set and `tars/` the tars."""
    if request.param == "http":
        needs_web()
        os.symlink(packed, tmp_path / "data")
        os.symlink(tars, tmp_path / "tars")
        with serving(tmp_path) as web:
            yield web.address
        return
    system = fsspec.filesystem("memory")
    for folder, name in ((packed, "data"), (tars, "tars")):
        system.put(str(folder), f"/set/{name}", recursive=True)
    yield "memory://set"
    system.rm("/set", recursive=True)


@pytest.fixture
def web(packed: Path, tars: Path, tmp_path: Path) -> Iterator[Web]:
    needs_web()
    os.symlink(packed, tmp_path / "data")
    os.symlink(tars, tmp_path / "tars")
    with serving(tmp_path) as web:
        yield web


def same(mine, theirs) -> bool:
    assert mine.class_names == theirs.class_names
    assert mine.labels.tolist() == theirs.labels.tolist() and mine.sizes.tolist() == theirs.sizes.tolist()
    return [mine[i] for i in range(len(mine))] == [theirs[i] for i in range(len(theirs))]


def batches(source, **options) -> list[tuple[bytes, list[int]]]:
    transform = eval_transform(Preprocess((SIDE, SIDE)))
    loader = Loader(source, transform=transform, image_size=SIDE, **{"batch_size": 4, "workers": 2, **options})
    try:
        return [(batch.images.numpy().tobytes(), batch.index.tolist()) for batch in loader.epoch(1)]
    finally:
        loader.close()


# the same data, wherever they lie


def test_packed_shards_at_an_address_are_what_they_are_on_disk(served: str, packed: Path) -> None:
    there, here = open_path(f"{served}/data"), open_path(str(packed))
    assert list(there.splits) == list(here.splits) == ["train", "val"]
    assert all(same(there.splits[name], here.splits[name]) for name in here.splits)
    assert fingerprint(there.splits) == fingerprint(here.splits)
    assert there.findings.kind == "packed"
    assert same(open_path(f"{served}/data/train").splits[""], here.splits["train"])
    assert list(open_path(f"{served}/data/{{train,val}}").splits) == ["train", "val"]


def test_tars_at_an_address_are_what_they_are_on_disk(served: str, tars: Path) -> None:
    here = open_path(str(tars))
    for address in (f"{served}/tars", f"{served}/tars/{{train-{{0000..0002}},val-0000}}.tar", f"{served}/tars/*.tar"):
        there = open_path(address)
        assert set(there.splits) == {"train", "val"}
        assert all(same(there.splits[name], here.splits[name]) for name in here.splits)
        assert fingerprint(there.splits) == fingerprint(here.splits)
    assert len(open_path(f"{served}/tars/train-{{0001..0002}}.tar").splits["train"]) == 12


@pytest.mark.parametrize("options", [{}, {"together": 2}, {"rank": 1, "world": 2}, {"cache": True}, {"workers": 0}])
def test_batches_from_an_address_are_those_from_disk(served: str, packed: Path, options: dict[str, int]) -> None:
    near, far = open_data(str(packed)), open_data(f"{served}/data")
    assert isinstance(far.train.remote, bool) and far.train.remote and not near.train.remote
    assert batches(far.train, **options) == batches(near.train, **options)


def test_joined_splits_and_parts_of_them_are_fetched_too(served: str, packed: Path) -> None:
    address = f"{served}/data"
    far, near = (
        open_data(Data(path=path, train="train+val", validation="none", holdout=0.2)) for path in (address, str(packed))
    )
    assert len(far.train) + len(far.validation) == 29
    assert batches(far.train) == batches(near.train) and same(far.validation, near.validation)


# what goes wrong


def test_an_answer_that_fails_is_asked_for_again(web: Web, packed: Path) -> None:
    source = open_path(f"{web.address}/data/train").splits[""]
    web.failures = 3
    assert source[0] == open_path(str(packed / "train")).splits[""][0] and web.failures == 0
    web.failures = 4
    with pytest.raises(DecodeError, match=r"shard-0000\d\.tar: 503") as caught:
        source[0]
    assert caught.value.reason == "unreadable"


def test_a_server_without_ranges_is_told_apart(web: Web) -> None:
    source = open_path(f"{web.address}/data/train").splits[""]
    web.ranges = False
    with pytest.raises(DecodeError, match="does not answer with ranges"):
        source[0]


def test_a_shard_that_is_missing_or_short_is_named(web: Web, tmp_path: Path, packed: Path) -> None:
    import shutil

    shutil.copytree(packed / "train", tmp_path / "copy")
    os.truncate(tmp_path / "copy" / "shard-00001.tar", 1_000)
    with pytest.raises(DataError, match=r"http://.*/copy/shard-00001\.tar has 1000 bytes instead of"):
        open_path(f"{web.address}/copy")
    (tmp_path / "copy" / "shard-00001.tar").unlink()
    with pytest.raises(DataError, match=r"shard-00001\.tar is missing"):
        open_path(f"{web.address}/copy")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("{web}/nothing", "there are no shards at"),
        ("{web}/tars/train-{{0000..0004}}.tar", r"there is nothing at http://.*/tars/train-0003\.tar"),
        ("{web}/tars/train-{{4..0}}.tar", "counts down"),
        ("memory://nowhere", "there are no shards at memory://nowhere"),
        ("smoke://signals/1.tar", "smoke"),
        ("http://127.0.0.1:9/1.tar", r"http://127\.0\.0\.1:9/1\.tar"),
    ],
)
def test_what_is_not_there_is_said(web: Web, address: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_path(address.format(web=web.address))


def test_a_file_system_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(DataError, match=r"s3fs.*pip install .*fsspec\[.*\(vitrail's extra remote\)"):
        open_path("s3://bucket/photos")


def test_an_unreadable_image_is_replaced_and_listed(web: Web, tmp_path: Path, packed: Path) -> None:
    source = open_path(f"{web.address}/data/train").splits[""]
    web.failures = 10**6
    loader = Loader(source, transform=lambda image, _: image, image_size=(12, 16), batch_size=4, drop_last=False,
                    shuffle=False)  # fmt: skip
    assert list(loader.epoch(0)) == [] and len(loader.bad) == 24
    assert loader.bad[0] == (source.id(0), "unreadable")
    loader.close()


def test_more_bytes_than_any_image_has_are_not_fetched(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_path(f"{web.address}/data/train").splits[""]
    middle = int(np.median(source.sizes))
    for module in ("folder", "shards"):
        monkeypatch.setattr(f"vitrail.data.sources.{module}.MAX_BYTES", middle)
    fetched = source.fetch(np.arange(24))
    too_large = [isinstance(data, DecodeError) and data.reason == "too-large" for data in fetched]
    assert too_large == (source.sizes > middle).tolist() and any(too_large) and not all(too_large)


# how it is read


def test_the_index_is_copied_once_and_again_when_it_changes(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = fsspec.filesystem("memory")
    system.put(str(packed / "val"), "/once", recursive=True)
    copied: list[str] = []
    opened = type(system).open
    monkeypatch.setattr(
        type(system), "open", lambda self, path, *a, **k: (copied.append(path), opened(self, path, *a, **k))[1]
    )
    for _ in range(2):
        assert len(open_path("memory://once").splits[""]) == 5
    assert copied == ["/once/index.arrow"]
    system.rm("/once", recursive=True)
    system.put(str(packed / "train"), "/once", recursive=True)
    assert len(open_path("memory://once").splits[""]) == 24
    system.rm("/once", recursive=True)


def ids_and_images(address: str, cache: Path, said: Path) -> None:
    """Read all images at an address in a process of its own with the cache folder `cache`."""
    os.environ["VITRAIL_CACHE"] = str(cache)
    splits = open_path(address).splits
    said.write_bytes(pickle.dumps({name: [source[i] for i in range(len(source))] for name, source in splits.items()}))


@pytest.mark.processes
@pytest.mark.parametrize("place", ["data", "tars/{train,val}-0000.tar"])
def test_processes_that_fill_one_cache_at_once_read_the_same(place: str, web: Web, tmp_path: Path) -> None:
    """Each copies or makes the index, at the same moment; one of the copies stays, and all of them are whole."""
    address, cache = f"{web.address}/{place}", tmp_path / "of-all"
    ids_and_images(address, tmp_path / "of-one", tmp_path / "alone")
    web.together = threading.Barrier(3)
    processes = [
        server().Process(target=ids_and_images, args=(address, cache, tmp_path / f"{number}")) for number in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    alone = pickle.loads((tmp_path / "alone").read_bytes())
    assert [pickle.loads((tmp_path / f"{number}").read_bytes()) for number in range(3)] == [alone] * 3
    names = [
        sorted(file.name for file in folder.rglob("*") if file.is_file()) for folder in (cache, tmp_path / "of-one")
    ]
    assert names[0] == names[1] and names[0]


def test_indexing_tars_goes_on_where_it_was_interrupted(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = fsspec.filesystem("memory")
    system.put(str(tars), "/tars", recursive=True)
    opened: list[str] = []
    original = type(system).open

    def failing(self, path: str, *arguments, **options):
        opened.append(path)
        if path == "/tars/train-0002.tar" and opened.count(path) == 1:
            raise OSError("the line went dead")
        return original(self, path, *arguments, **options)

    monkeypatch.setattr(type(system), "open", failing)
    monkeypatch.setattr("vitrail.data.sources.remote._AT_ONCE", 1)
    with pytest.raises(DataError, match=r"train-0002\.tar cannot be read: the line went dead"):
        open_path("memory://tars")
    assert len(open_path("memory://tars").splits["train"]) == 18
    assert sorted(opened) == sorted([f"/tars/{path.name}" for path in tars.iterdir()] + ["/tars/train-0002.tar"])
    system.rm("/tars", recursive=True)


def test_neighbours_are_one_request(web: Web, packed: Path) -> None:
    source = open_path(f"{web.address}/data/train").splits[""]
    web.asked.clear()
    data = source.fetch(np.arange(24))
    assert data == [item.image for item in map(open_path(str(packed / "train")).splits[""].__getitem__, range(24))]
    shards = sum(1 for _ in (packed / "train").glob("*.tar"))
    assert shards > 1 and len(web.asked) == shards  # one request each, not one for each image
    web.asked.clear()
    batches(Subset(source), batch_size=8, together=8)  # 3 batches of 8 neighbours, which lie in a few shards
    together = len(web.asked)
    web.asked.clear()
    batches(Subset(source), batch_size=8)
    assert together < len(web.asked)


class Far:
    """A source that notes what is fetched, and holds back its answers until enough has been asked for."""

    remote = True

    def __init__(self, count: int, at_once: int) -> None:
        self.labels = np.zeros(count, dtype=np.int64)
        self.sizes = np.ones(count, dtype=np.int64)
        self.class_names = ["all"]
        self.fetched = 0
        self._meet = threading.Barrier(at_once)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        raise AssertionError("read one by one")

    def id(self, index: int) -> str:
        return str(index)

    def fetch(self, indices: np.ndarray) -> list[np.ndarray]:
        with self._lock:
            self.fetched += len(indices)
        self._meet.wait(timeout=20)  # breaks unless so many fetches are on their way at the same time
        return [np.full((SIDE, SIDE, 3), index % 256, np.uint8) for index in indices.tolist()]


def test_round_trips_overlap_with_one_another_and_with_decoding() -> None:
    source = Far(2048, at_once=4)
    loader = Loader(source, transform=lambda image, _: image, image_size=SIDE, batch_size=32, shuffle=False, workers=1)
    seen = 0
    for batch in loader.epoch(0):
        assert batch.images[:, 0, 0, 0].tolist() == [index % 256 for index in batch.index.tolist()]
        seen += len(batch.labels)
        # memory stays bounded: what is asked for, or waits to be decoded, is a few batches more than 512 images
        assert source.fetched <= seen + 512 + 5 * 32
    assert seen == source.fetched == 2048
    loader.close()


def test_what_was_asked_for_ends_with_the_epoch() -> None:
    source = Far(4096, at_once=1)
    loader = Loader(source, transform=lambda image, _: image, image_size=SIDE, batch_size=32, shuffle=False)
    epoch = loader.epoch(0)
    next(epoch)
    epoch.close()
    loader.close()
    assert source.fetched < 1024


# addresses, and older indexes


def test_patterns_stand_for_addresses() -> None:
    assert expand("s3://b/{train,val}-{08..11}.tar") == [
        f"s3://b/{split}-{number}.tar" for number in ("08", "09", "10", "11") for split in ("train", "val")
    ]
    assert expand("s3://b/x.tar") == ["s3://b/x.tar"]


def test_an_index_without_digests_has_the_same_fingerprint(packed: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(packed / "val", tmp_path / "old")
    table = read_arrow(packed / "val" / INDEX).drop_columns(["digest"])
    write_arrow(tmp_path / "old" / INDEX, table.schema, lambda writer: writer.write_table(table))
    assert pa.ipc.open_file(pa.memory_map(str(tmp_path / "old" / INDEX))).schema.names[-1] == "id"
    assert fingerprint(open_path(str(tmp_path / "old")).splits) == fingerprint(open_path(str(packed / "val")).splits)
