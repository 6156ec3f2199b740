"""Checkpoints: bit-exact, atomic under SIGKILL at every moment, and refused where a single bit is wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitrail.errors import CheckpointError, UsageError
from vitrail.training.checkpoints import checkpoint
from vitrail.training.checkpoints.checkpoint import DiskFullError, RejectedCheckpoint, latest_valid, load, problem, save
from vitrail.training.checkpoints.flatten import DTYPES
from vitrail.training.optim.optimizer import build_optimizer
from vitrail.training.run import Optim


def state_of(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"a.weight": torch.randn(3, 5, generator=generator)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "lr": 0.1 * step},
        "step": step,
    }


def same(one, other) -> bool:
    """Equal in type, structure and every bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and bits(one) == bits(other)
        )
    if isinstance(one, dict):
        return (
            type(other) is dict
            and list(map(repr, one)) == list(map(repr, other))
            and all(same(a, b) for a, b in zip(one.values(), other.values(), strict=True))
        )
    if isinstance(one, list | tuple):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(same(a, b) for a, b in zip(one, other, strict=True))
        )
    return type(one) is type(other) and repr(one) == repr(other)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    if not size:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


keys = st.text(max_size=4) | st.integers() | st.booleans() | st.sampled_from(["$tensor", "__metadata__", "a/b"])
leaves = tensors() | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)
names = st.text(max_size=4) | st.sampled_from(["model", "__metadata__", "$float", "model/x"])


@given(st.dictionaries(names, nested, max_size=4))
@settings(deadline=None, max_examples=60)
def test_any_state_comes_back_bit_for_bit(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("checkpoints")
    assert same(load(save(folder, 1, state)), state)
    shutil.rmtree(folder)


def test_weights_are_an_ordinary_safetensors_file(tmp_path):
    """Any tool can read them: the library's own reader finds names, values and alignment in order."""
    weights = {
        "half": torch.randn(3, dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "whole": torch.arange(5),
    }
    path = save(tmp_path, 7, {"model": weights, "other": torch.ones(3)})
    read = safetensors.torch.load_file(path / "model.safetensors")
    assert set(read) == set(weights) and all(torch.equal(read[name], weights[name]) for name in weights)
    assert set(safetensors.torch.load_file(path / "state.safetensors")) == {"other"}


def test_tied_weights_stay_tied_and_views_are_separate(tmp_path):
    base = torch.arange(6.0)
    state = {"model": {"a": base, "b": base}, "head": base[:3], "tail": base[1:], "row": base.view(2, 3)}
    loaded = load(save(tmp_path, 0, state))
    assert same(loaded, state)
    assert loaded["model"]["a"] is loaded["model"]["b"]
    assert len(safetensors.torch.load_file(tmp_path / "step-000000" / "model.safetensors")) == 1


def test_a_real_optimiser_continues_exactly(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = build_optimizer(model, Optim())
    model(torch.randn(16, 4)).square().sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert isinstance(state["model"], OrderedDict)
    loaded = load(save(tmp_path, 1, state))
    twin = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    twin.load_state_dict(loaded["model"])
    other = build_optimizer(twin, Optim())
    other.load_state_dict(loaded["optimizer"])
    images = torch.randn(16, 4)
    for net, opt in ((model, optimizer), (twin, other)):
        opt.zero_grad()
        net(images).square().sum().backward()
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (Path("x"), "PosixPath"),
        ({(1, 2): 3}, "tuple as a key"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (object(), "object"),
    ],
)
def test_what_cannot_be_stored_is_named_by_its_path(tmp_path, value, word):
    with pytest.raises(TypeError, match=f"a/0.*{word}"):
        save(tmp_path, 1, {"a": [value]})
    assert not list(tmp_path.iterdir())


def test_nothing_saved_is_none(tmp_path):
    assert latest_valid(tmp_path / "nowhere") is None
    assert latest_valid(tmp_path) is None
    (tmp_path / "step-000003.tmp-1").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest_valid(tmp_path) is None


def test_newest_is_by_number_not_by_name(tmp_path):
    for step in (999_999, 1_000_000):
        save(tmp_path, step, state_of(step))
    assert latest_valid(tmp_path).name == "step-1000000"


def test_only_the_newest_are_kept(tmp_path):
    for step in range(5):
        save(tmp_path, step, state_of(step), keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003", "step-000004"]
    with pytest.raises(UsageError, match="keep"):
        save(tmp_path, 9, state_of(9), keep=0)


FILES = ("model.safetensors", "state.safetensors", "state.json", "manifest.json")


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1 << bit
    path.write_bytes(content)


@given(name=st.sampled_from(FILES), position=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=60)
def test_one_flipped_bit_anywhere_is_refused(tmp_path_factory, name, position, bit):
    folder = tmp_path_factory.mktemp("flip")
    good = save(folder, 1, state_of(1))
    bad = save(folder, 2, state_of(2))
    flip(bad / name, position, bit)
    rejected: list[RejectedCheckpoint] = []
    assert latest_valid(folder, rejected.append) == good
    assert [reject.path for reject in rejected] == [bad]
    with pytest.raises(CheckpointError):
        load(bad)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["truncated", "missing", "empty", "longer", "folder"])
def test_damage_falls_back_and_says_which_and_why(tmp_path, name, how):
    good = save(tmp_path, 1, state_of(1))
    bad = save(tmp_path, 2, state_of(2))
    file = bad / name
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "longer":
        file.write_bytes(file.read_bytes() + b"}")
    else:
        file.unlink()
        if how == "folder":
            file.mkdir()
    rejected: list[RejectedCheckpoint] = []
    assert latest_valid(tmp_path, rejected.append) == good
    assert len(rejected) == 1 and rejected[0].path == bad and name in rejected[0].reason
    assert same(load(good), state_of(1))


def test_a_later_format_is_refused_by_number(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "SCHEMA", 2)
        path = save(tmp_path, 1, state_of(1))
    assert "number 2" in problem(path)


def test_all_damaged_is_an_error_that_lists_them(tmp_path):
    for step in (1, 2):
        flip(save(tmp_path, step, state_of(step)) / "state.json", 5, 0)
    with pytest.raises(CheckpointError, match=r"step-000002: (.|\n)*step-000001: "):
        latest_valid(tmp_path)


def test_load_of_nothing_names_the_path(tmp_path):
    with pytest.raises(CheckpointError, match="typo"):
        load(tmp_path / "typo")


def test_going_on_after_a_damaged_one_replaces_it(tmp_path):
    """Steps 2 and 3 are damaged, the run resumed from 1: what it saves next must be found first, and 1 kept."""
    for step in (1, 2, 3):
        save(tmp_path, step, state_of(step), keep=3)
    for step in (2, 3):
        flip(tmp_path / f"step-00000{step}" / "state.json", 5, 0)
    assert latest_valid(tmp_path).name == "step-000001"
    new = save(tmp_path, 2, {"again": 2}, keep=2)
    assert latest_valid(tmp_path) == new
    assert load(new) == {"again": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_valid_later_one_is_never_removed(tmp_path):
    later = save(tmp_path, 9, state_of(9))
    save(tmp_path, 5, state_of(5), keep=1)
    assert problem(later) is None


@contextmanager
def counted(module, name: str, call: int, action):
    """Within, `module.name` runs `action` instead at its call number `call`."""
    original, calls = getattr(module, name), 0

    def replacement(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            action()
        return original(*args, **kwargs)

    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


def in_a_child(work) -> int:
    """Run `work` in a process of its own; return the signal that ended it, 0 if none did."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# mkdir: folder, temporary; cpu: before each tensor's bytes; fsync: three data files, manifest, temporary, folder;
# rename: into place, then the old one out; rmtree: the old one
MOMENTS = [
    *((os, "mkdir", n) for n in (1, 2)),
    *((torch.Tensor, "cpu", n) for n in (1, 2)),
    *((os, "fsync", n) for n in range(1, 7)),
    *((os, "rename", n) for n in (1, 2)),
    (shutil, "rmtree", 1),
]


@pytest.mark.kill
@pytest.mark.parametrize(("module", "name", "call"), MOMENTS, ids=lambda value: getattr(value, "__name__", value))
def test_killed_at_any_moment_a_whole_checkpoint_is_left(tmp_path, module, name, call):
    save(tmp_path, 1, state_of(1), keep=1)

    def work():
        with counted(module, name, call, kill_self):
            save(tmp_path, 2, state_of(2), keep=1)

    assert in_a_child(work) == signal.SIGKILL
    found = latest_valid(tmp_path)
    step = int(found.name[-1])
    assert same(load(found), state_of(step))
    save(tmp_path, 3, state_of(3), keep=1)  # the next save cleans up
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


@pytest.mark.kill
@pytest.mark.parametrize("call", [1, 2])
def test_killed_while_replacing_the_only_one(tmp_path, call):
    """Saving a step again: between the two renames the old one is still found."""
    save(tmp_path, 1, {"old": 1})

    def work():
        with counted(os, "rename", call, kill_self):
            save(tmp_path, 1, {"new": 1}, keep=1)

    assert in_a_child(work) == signal.SIGKILL
    assert load(latest_valid(tmp_path)) == {"old": 1}
    save(tmp_path, 1, {"new": 1}, keep=1)
    assert load(latest_valid(tmp_path)) == {"new": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.kill
def test_killed_from_outside_at_random_moments(tmp_path):
    """A process that saves without pause, killed by the clock: what it leaves always loads."""
    program = (
        "import sys, itertools, pathlib, torch\n"
        "from vitrail.training.checkpoints.checkpoint import save\n"
        "for step in itertools.count(1):\n"
        "    save(pathlib.Path(sys.argv[1]), step, {'model': {'w': torch.full((300_000,), float(step))}})\n"
        "    print(step, flush=True)\n"
    )
    for round_ in range(3):
        folder = tmp_path / str(round_)
        child = subprocess.Popen([sys.executable, "-c", program, folder], stdout=subprocess.PIPE, text=True)
        for _ in range(2 + 3 * round_):
            line = child.stdout.readline()
        child.kill()
        reported = int((child.stdout.read().split() or [line])[-1])
        child.wait()
        found = latest_valid(folder)
        step = int(found.name.removeprefix("step-"))
        assert step >= reported
        assert torch.equal(load(found)["model"]["w"], torch.full((300_000,), float(step)))


def test_a_living_process_keeps_its_unfinished_save(tmp_path):
    alive, dead = tmp_path / f"step-000001.tmp-{os.getppid()}", tmp_path / "step-000001.tmp-999999999999"
    mine = tmp_path / f"step-000001.tmp-{os.getpid()}"
    for path in (alive, dead, mine):
        path.mkdir()
    save(tmp_path, 2, state_of(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.name, "step-000002"])


def test_no_room_is_said_before_writing(tmp_path, monkeypatch):
    good = save(tmp_path, 1, state_of(1), keep=1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000))
    with pytest.raises(DiskFullError, match=r"disk full: need 40.*MB, have 1 KB") as caught:
        save(tmp_path, 2, {"model": {"w": torch.zeros(10**7)}}, keep=1)
    assert caught.value.need >= 4 * 10**7 and caught.value.have == 1_000
    assert list(tmp_path.iterdir()) == [good]


@pytest.mark.parametrize(
    ("need", "have", "words"),
    [
        (3_784_000, 3_780_500, "need 3,784,000 B, have 3,780,500 B"),
        (3_744_000, 3_784_000, "the space ended while a checkpoint of 3.74 MB .* where 3.78 MB are free now"),
    ],
)
def test_the_numbers_of_a_full_disk_explain_it(need, have, words):
    """The larger number is what is needed, or the text says why it is not."""
    with pytest.raises(DiskFullError, match=words):
        raise DiskFullError(Path("checkpoints"), need, have)


@pytest.mark.parametrize("call", range(1, 7))
@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EIO, CheckpointError)])
def test_an_error_at_any_sync_leaves_the_old_one_and_nothing_else(tmp_path, call, code, kind):
    good = save(tmp_path, 1, state_of(1), keep=1)

    def fail():
        raise OSError(code, os.strerror(code))

    with counted(os, "fsync", call, fail), pytest.raises(kind):
        save(tmp_path, 2, state_of(2), keep=1)
    assert problem(good) is None
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]
    save(tmp_path, 3, state_of(3), keep=1)  # and the run goes on
    assert load(latest_valid(tmp_path))["step"] == 3


@pytest.mark.processes
def test_a_really_full_disk(tmp_path, monkeypatch):
    """A file system of 1 MB that runs full in the middle of the write, its size having been misreported."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("this test mounts a file system, which this user may not")
    try:
        good = save(disk, 1, state_of(1))
        usage = shutil.disk_usage(disk)
        state = {"model": {"w": torch.zeros(2**20)}}
        with pytest.raises(DiskFullError, match="disk full: need 4"):
            save(disk, 2, state)  # seen beforehand
        sizes = iter([usage._replace(free=10**12), usage])
        monkeypatch.setattr(shutil, "disk_usage", lambda _: next(sizes))
        with pytest.raises(DiskFullError, match=r"disk full: need 4.* MB, have 1") as caught:
            save(disk, 2, state)  # found out the hard way
        assert caught.value.__cause__.errno == errno.ENOSPC
        monkeypatch.undo()
        assert list(disk.iterdir()) == [good] and problem(good) is None
        save(disk, 2, state_of(2))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_read_only_folder_is_an_error_that_names_it(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*Permission denied"):
        save(tmp_path / "x", 1, state_of(1))


def test_interrupted_from_the_keyboard_leaves_no_debris(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    with counted(os, "fsync", 2, interrupt), pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, state_of(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_manifest_tells_what_was_written(tmp_path):
    path = save(tmp_path, 120, state_of(120))
    manifest = json.loads((path / "manifest.json").read_text())
    assert path.name == "step-000120" and manifest["step"] == 120 and manifest["torch"] == torch.__version__
    for name, written in manifest["files"].items():
        assert written["bytes"] == (path / name).stat().st_size
        expected = subprocess.run(["sha256sum", path / name], capture_output=True, text=True, check=True).stdout
        assert written["sha256"] == expected.split()[0]
