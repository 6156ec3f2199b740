"""Processes that load images: the same batches as threads, and no process or memory left behind, however it ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from test_loader import SIDE, Numbered, equal, indices, loader, noisy, run

from vitrail.data.images.batched import divided
from vitrail.data.images.device_crop import BYTES
from vitrail.data.images.ops import train_transform
from vitrail.data.item import Item
from vitrail.data.labels.sets import LabelSets, label_at
from vitrail.data.loading.loader import Loader
from vitrail.data.loading.processes import Packed, Ring, Shared
from vitrail.data.loading.reading import ImageReader
from vitrail.data.settings import Augment, Preprocess
from vitrail.data.sources.open import open_data, open_split
from vitrail.errors import DataError, UsageError

pytestmark = pytest.mark.processes


def pids(one: Loader) -> list[int]:
    """The processes of a loader that has delivered a batch."""
    assert one._processes is not None
    while one._processes.starting:
        time.sleep(0.01)
    return one.pids


def gone(pid: int, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


class Sets(Numbered):
    """Images with several labels."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.labels = LabelSets.of_marks(np.random.default_rng(0).random((count, 3)) < 0.5)
        self.class_names = ["a", "b", "c"]

    def __getitem__(self, index: int) -> Item:
        return super().__getitem__(index)._replace(label=label_at(self.labels, index))


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (Numbered(41), {"workers": 1}),
        (Numbered(41), {"workers": 3, "repeats": 2, "drop_last": False}),
        (Numbered(41, frozenset({0, 7, 8, 40})), {"workers": 2}),
        (Numbered(41, frozenset({0, 7, 8, 40})), {"workers": 2, "shuffle": False, "drop_last": False}),
        (Numbered(40), {"workers": 2, "rank": 1, "world": 2, "sampler": "sqrt"}),
        (Sets(23), {"workers": 2}),
        (Numbered(3), {"workers": 2}),
    ],
)
def test_processes_give_the_same_batches_as_this_one(source: Numbered, options: dict) -> None:
    """The same images, labels, stand-ins for bad images, and list of them, from any batch on."""
    alone = loader(source, **(options | {"workers": 0}))
    one = loader(source, worker_kind="processes", **options)
    for epoch, start in ((0, 0), (1, 0), (1, 2)):
        expected = list(alone.epoch(epoch, start))
        assert equal(list(one.epoch(epoch, start)), expected) and (expected or start)
    assert one.bad == alone.bad and one.bad_index == alone.bad_index
    one.close()


@pytest.mark.parametrize("data", ["files", "packed", "tars", "table", "memory-mapped", "remote"])
def test_real_photographs_of_every_kind_of_data(data: str, shared_data: Path, tmp_path: Path) -> None:
    path, preprocess = photographs(data, shared_data, tmp_path), Preprocess(image_size=(32, 48))
    source = open_data(path).train if data == "remote" else open_split(path, "train")
    transform = train_transform(Augment(randaugment=(2, 9), three_augment=True, erasing=0.5), preprocess)
    options = {"transform": transform, "image_size": (32, 48), "batch_size": 16}
    found = run(source, 3, workers=2, worker_kind="processes", **options)
    assert equal(found, run(source, 3, **options)) and len(found) >= 2


def photographs(kind: str, shared_data: Path, folder: Path) -> str:
    """Write 48 photographs of 12 classes as one kind of data, and return their path."""
    from vitrail.data.loading.pack import pack_data

    for file in sorted((shared_data / "flowers12" / "train").glob("*/*.jpg"))[::15]:
        target = folder / "photos" / "train" / file.parent.name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    if kind == "files":
        return str(folder / "photos")
    if kind == "table":
        files = sorted(folder.glob("photos/train/*/*.jpg"))
        rows = [f"{file},{file.parent.name},train" for file in files]
        (folder / "train.csv").write_text("\n".join(["image,label,split", *rows]))
        return str(folder / "train.csv")
    if kind == "memory-mapped":
        images = np.random.default_rng(0).integers(0, 256, (48, 40, 40, 3), dtype=np.uint8)
        np.savez(folder / "set.npz", x_train=images, y_train=np.arange(48) % 4, x_test=images, y_test=np.arange(48) % 4)
        return str(folder / "set.npz")
    pack_data(str(folder / "photos"), folder / "packed")
    if kind == "tars":
        (folder / "packed" / "train" / "index.arrow").unlink()
        return str(folder / "packed" / "train")
    if kind == "remote":
        import fsspec

        fsspec.filesystem("memory").put(str(folder / "packed"), "/photographs", recursive=True)
        return "memory://photographs"
    return str(folder / "packed")


@pytest.mark.parametrize("decodes", [False, True])
def test_the_numbers_for_the_device_are_drawn_after_those_of_the_host(decodes: bool, shared_data: Path) -> None:
    """In threads, in processes and from the cache: the images are those of the whole transform, up to a few levels."""
    source = open_split(shared_data / "flowers12", "train")
    whole = train_transform(Augment(randaugment=(2, 9)), Preprocess(image_size=(32, 32)))
    host, rest = divided(whole, (32, 32), decodes=decodes)  # type: ignore[misc]
    options = {"image_size": 32, "batch_size": 64}
    expected = run(source, 1, 8, transform=whole, **options)
    for how in ({}, {"workers": 2}, {"workers": 2, "worker_kind": "processes"}, {"workers": 1, "cache": True}):
        found = run(source, 1, 8, transform=host, rest=rest, **how, **options)
        assert len(found) == len(expected) == 3
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.index, theirs.index) and ours.plan is not None
            assert ours.plan.crops is not None
            assert ours.plan.crops.rows[:, BYTES].any() == (decodes and not how.get("cache"))
            difference = ours.plan.apply(ours.images, torch.device("cpu")).int() - theirs.images
            assert (difference.abs() > 4).float().mean() < 0.01


class Absent(Numbered):
    """An image that hangs, raises an error or kills its process."""

    def __init__(self, count: int, wrong: int, how: str) -> None:
        super().__init__(count)
        self.wrong, self.how = wrong, how

    def __getitem__(self, index: int) -> Item:
        if index == self.wrong:
            if self.how == "hangs":
                time.sleep(600)
            if self.how == "raises":
                raise RuntimeError("the cable is out")
            if self.how == "ends":
                os._exit(3)
            if self.how == "memory":
                raise MemoryError
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("hangs", r"reading image image-8 \(index 8\) has taken more than 0\.5 s"),
        ("raises", r"image image-8 could not be read: RuntimeError\('the cable is out'\)"),
        ("ends", r"a loading process ended \(exit code 3\) while it read image image-8"),
        ("is killed", r"killed \(SIGKILL\) while it read image image-8\. .*memory.*--workers N.*--worker-kind threads"),
    ],
)
def test_what_goes_wrong_in_a_process_is_an_error_that_names_the_image(how: str, message: str) -> None:
    one = loader(Absent(40, 8, how), shuffle=False, workers=2, worker_kind="processes", timeout=0.5)
    batches = one.epoch(0)
    assert next(batches).index.tolist() == [0, 1, 2, 3, 4]
    began = time.monotonic()
    with pytest.raises(DataError, match=message):
        list(batches)
    processes = pids(one)
    one.close()
    assert time.monotonic() - began < 10  # a read that hangs is not waited for
    assert all(gone(pid) for pid in processes)


class Remote(Numbered):
    """Images at an address that answers or does not."""

    remote = True

    def fetch(self, indices: np.ndarray) -> list:
        if 8 in indices:
            raise OSError("no route to the server")
        return [self[index].image for index in indices.tolist()]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_request_that_fails_names_an_image_and_the_next_epoch_is_read(kind: str) -> None:
    one = loader(Remote(20), shuffle=False, workers=1, worker_kind=kind)
    for _ in range(2):
        batches = one.epoch(0)
        assert next(batches).index.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(DataError, match=r"image image-\d could not be read: OSError\('no route to the server'\)"):
            next(batches)
    one.close()


def cut(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return image[:2]


def broken(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    raise ValueError("bad crop")


def test_an_error_in_a_transform_names_the_image() -> None:
    for transform, message in ((cut, r"became \(2, 4, 3\), expected"), (broken, "could not be transformed.*bad crop")):
        with pytest.raises(DataError, match=f"image image-0 {message}"):
            run(Numbered(4), transform=transform, shuffle=False, workers=1, worker_kind="processes")


def test_an_image_that_takes_too_much_memory_is_listed() -> None:
    one = loader(Absent(10, 3, "memory"), workers=1, worker_kind="processes", shuffle=False, drop_last=False)
    assert indices(list(one.epoch(0))) == [0, 1, 2, *range(4, 10)] and one.bad == [("image-3", "out-of-memory")]
    one.close()


def test_processes_end_with_close_with_the_loader_and_with_an_abandoned_epoch() -> None:
    one = loader(Numbered(100), workers=2, worker_kind="processes")
    next(one.epoch(0))
    assert len(list(one.epoch(1))) == 20  # after an abandoned one
    first = pids(one)
    one.close()
    one.close()
    assert len(first) == 2 and all(gone(pid, 0.0) for pid in first)
    two = loader(Numbered(100), workers=2, worker_kind="processes")
    next(two.epoch(0))
    second = pids(two)
    del two
    gc.collect()
    assert all(gone(pid) for pid in second)
    loader(Numbered(100), workers=2, worker_kind="processes").close()  # while they start


def test_batches_belong_to_the_caller_however_many_are_kept() -> None:
    one = loader(Numbered(100), workers=2, worker_kind="processes")
    kept = list(one.epoch(0))
    copies = [batch.images.clone() for batch in kept]
    for batch in one.epoch(1):
        batch.images.zero_()
    assert all(torch.equal(batch.images, copy) for batch, copy in zip(kept, copies, strict=True))
    assert equal(kept, run(Numbered(100)))
    del kept, batch
    assert one._ring is not None and len(one._ring._free) == one._ring.shape[0]  # every slot is free again
    one.close()


def test_two_epochs_at_the_same_time() -> None:
    one = loader(Numbered(60), workers=2, worker_kind="processes")
    both = list(zip(one.epoch(0), one.epoch(1), strict=True))
    assert equal([left for left, _ in both], run(Numbered(60))) and equal(
        [right for _, right in both], run(Numbered(60), 1)
    )
    one.close()


def test_what_cannot_be_sent_to_a_process_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"cannot be sent to another process .*--worker-kind threads"):
        loader(Numbered(10), transform=lambda image, random: image, workers=1, worker_kind="processes")
    with pytest.raises(UsageError, match="cached images are in the memory of this process"):
        loader(Numbered(10), cache=True, workers=1, worker_kind="processes")


def test_large_arrays_are_shared_and_mapped_files_stay_in_their_file(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 256, (100, SIDE, SIDE, 3), dtype=np.uint8))
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    for images in (mapped, mapped[7:90:2], mapped.transpose(0, 2, 1, 3)):
        source = Numbered(len(images))
        source.images = images  # type: ignore[attr-defined]
        packed = Packed.of(ImageReader(source, noisy, (SIDE, SIDE, 3), 0))
        assert len(packed.pickled) < 2_000 and packed.memory.bytes.nbytes < 2 * 4096 + 16 * len(images)
        assert np.array_equal(packed.reader().source.images, images)  # type: ignore[attr-defined]
    source.labels = np.arange(100_000)
    packed = Packed.of(ImageReader(source, noisy, (SIDE, SIDE, 3), 0))
    assert len(packed.pickled) < 2_000 and packed.memory.bytes.nbytes >= 800_000
    assert np.array_equal(packed.reader().source.labels, source.labels)


class Event:
    """One of CUDA, which is over when the test says so."""

    over = False

    def record(self, stream: str) -> None:
        assert stream == "the caller's"

    def query(self) -> bool:
        return Event.over


def test_pinned_memory_is_registered_once_and_given_back_after_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append(("register", size)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unregister", address)),
    )
    reader = ImageReader(Numbered(5), noisy, (SIDE, SIDE, 3), 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: calls.append(("device", device.index)) or nullcontext())
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    ring = Ring(2, 5, reader)
    ring.pin(torch.device("cpu"))
    assert calls == []
    ring.pin(torch.device("cuda:3"))
    images, first = ring.take(4)
    del images
    images, second = ring.take(4)
    assert {first, second} == {0, 1} and ring.take(4)[1] == -1  # the device may still read the first
    monkeypatch.setattr(Event, "over", True)
    assert ring.take(4)[1] == first
    tensor = torch.from_numpy(images)
    del ring, images
    gc.collect()
    assert calls == [("device", 3), ("register", 2 * 5 * SIDE * SIDE * 3)]
    del tensor
    gc.collect()
    assert [name for name, _ in calls] == ["device", "register", "unregister"]


def test_shared_memory_has_no_name_that_could_stay_behind() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    memory = Shared(1_000)
    memory.bytes[:] = 7
    assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) <= before


class Slow(Numbered):
    def __getitem__(self, index: int) -> Item:
        time.sleep(0.05)
        return super().__getitem__(index)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_loader import Numbered, noisy
from test_loader_processes import Slow
from vitrail.data.loading.loader import Loader
class Own(Numbered):
    pass
print("begun", flush=True)
one = Loader({source}(400), transform=noisy, image_size=4, batch_size=5, workers=2, worker_kind="processes")
for number, batch in enumerate(one.epoch(0)):
    if number == 0:
        print(*one.pids, flush=True)
print("read", flush=True)
"""
Started = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Started]:
    """Starts a script without a guard, in a process group of its own, that loads 400 images of a source."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(SCRIPT.format(tests=str(Path(__file__).parent), source=source))
        command, pipe = [sys.executable, str(tmp_path / "script.py")], subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_script_without_a_guard_runs_once_and_leaves_no_process(script: Started) -> None:
    process = script("Numbered")
    out, err = process.communicate(timeout=120)
    assert out.count("begun") == 1 and out.endswith("read\n") and process.returncode == 0, err
    assert err == "" and all(gone(int(pid)) for pid in out.splitlines()[1].split())


def test_a_script_whose_own_classes_are_needed_says_that_it_lacks_a_guard(script: Started) -> None:
    process = script("Own")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "if __name__ == '__main__':" in err
    assert "a loading process ended (exit code 1) before it read an image" in err


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_stays_when_the_program_is_killed_or_interrupted(script: Started, signum: int) -> None:
    process = script("Slow")
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    workers = [int(pid) for pid in process.stdout.readline().split()]
    children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(workers) == 2 and set(workers) <= set(children) and not any(gone(pid, 0.0) for pid in workers)
    if signum == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, signum)  # as a terminal and Slurm do
    process.wait(30)
    assert all(gone(pid) for pid in children)


def test_a_signal_to_the_group_does_not_end_the_processes() -> None:
    """The training process saves its state after SIGTERM, and needs batches until then."""
    one = loader(Numbered(200), workers=2, worker_kind="processes")
    batches = one.epoch(0)
    next(batches)
    for pid in pids(one):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
    time.sleep(0.1)
    assert len(list(batches)) == 39
    one.close()
