"""Downloads from a hub on this machine: whole, broken, damaged, refused, offline. No test reaches the network."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import server
from hub_server import COMMIT, REPOSITORY, FakeHub, serving, use

import vitrail
from vitrail.cli import main
from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.weights import download as hub_module
from vitrail.weights.archive import weight_files
from vitrail.weights.card import Card
from vitrail.weights.download import is_hub_name, resolve
from vitrail.weights.store import save_model

ROOT = Path(__file__).resolve().parents[3]
WEIGHTS = "model.safetensors"
BIG = bytes(range(256)) * 4096
"""A megabyte to be interrupted."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    files = {
        WEIGHTS: BIG,
        "config.json": b'{"architecture": "x"}',
        "README.md": b"# A model\n",
        "pytorch_model.bin": b"the same as a pickle",
        "tf_model.h5": b"of no use here",
        "onnx/model.onnx": b"nor this",
    }
    with serving(FakeHub(files, {WEIGHTS, "pytorch_model.bin", "tf_model.h5"})) as fake:
        use(monkeypatch, fake.endpoint, cache)
        yield fake


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def blobs(cache: Path) -> Path:
    return cache / f"models--{REPOSITORY.replace('/', '--')}" / "blobs"


def test_what_is_needed_is_downloaded_and_nothing_else(hub: FakeHub) -> None:
    folder = resolve(REPOSITORY)
    assert names(folder) == ["README.md", "config.json", WEIGHTS]
    assert (folder / WEIGHTS).read_bytes() == BIG
    assert (folder / "config.json").read_bytes() == hub.files["config.json"]
    for other in ("pytorch_model.bin", "tf_model.h5", "onnx/model.onnx"):
        assert not hub.transfers(other)


@pytest.mark.parametrize("revision", ["", "@v1", f"@{COMMIT}"])
def test_a_second_time_nothing_is_downloaded(hub: FakeHub, revision: str) -> None:
    first = resolve(REPOSITORY + revision)
    assert hub.transfers(WEIGHTS) == [None]
    assert resolve(REPOSITORY + revision) == first
    assert hub.transfers(WEIGHTS) == [None] and hub.transfers("config.json") == [None]


def test_a_model_pushed_by_vitrail_is_loaded_by_its_name(tmp_path: Path, hub: FakeHub) -> None:
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=2)
    torch.manual_seed(0)
    model = build(config).eval()
    save_model(tmp_path / "model", model, Card(config, ["cat", "dog"]))
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    loaded = vitrail.load(REPOSITORY)
    images = torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        assert torch.equal(loaded(images), model(images))
    assert loaded.card.class_names == ["cat", "dog"]


@pytest.mark.parametrize("how", ["variable", "nobody listens", "server error", "another server"])
def test_without_the_network_the_cache_answers(
    hub: FakeHub, cache: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve(REPOSITORY)
    hub.asked.clear()
    if how == "variable":
        use(monkeypatch, hub.endpoint, cache, offline=True)
    elif how == "nobody listens":
        use(monkeypatch, closed_port(), cache)
    elif how == "server error":
        hub.refuse = (503, "")
    else:
        hub.page = "<html>please log in to this network</html>"
    caplog.set_level("INFO", logger="vitrail")
    assert resolve(REPOSITORY) == folder
    assert "comes from the cache" in caplog.text
    if how == "variable":
        assert not hub.asked


def closed_port() -> str:
    """An address of this machine at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("how", ["variable", "nobody listens", "server error"])
def test_without_network_and_cache_the_error_says_what_to_do(
    hub: FakeHub, cache: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "variable":
        use(monkeypatch, hub.endpoint, cache, offline=True)
    elif how == "nobody listens":
        use(monkeypatch, closed_port(), cache)
    else:
        hub.refuse = (503, "")
    with pytest.raises(WeightsError) as error:
        resolve(REPOSITORY)
    for part in (str(cache), "HF_HOME", f"hf download {REPOSITORY} --local-dir ", "copy its folder"):
        assert part in str(error.value)
    assert str(error.value).startswith(f"there is no file or folder {REPOSITORY} in {Path.cwd()}")


def test_half_a_snapshot_does_not_count_as_cached(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve(REPOSITORY)
    (folder / WEIGHTS).unlink()
    use(monkeypatch, hub.endpoint, cache, offline=True)
    with pytest.raises(WeightsError, match="not in the cache"):
        resolve(REPOSITORY)


def test_a_broken_transfer_goes_on_where_it_stopped(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)  # what is written at once, and so what can be lost
    hub.break_once = {WEIGHTS}
    assert (resolve(REPOSITORY) / WEIGHTS).read_bytes() == BIG
    first, second = hub.transfers(WEIGHTS)
    assert first is None and second is not None
    start = int(second.removeprefix("bytes=").removesuffix("-"))
    assert 0 < start <= len(BIG) // 2


def described(endpoint: str, cache: Path, said: Path) -> None:
    """`vitrail weights info` in a process of its own, whose answer goes into the file `said`."""
    use(pytest.MonkeyPatch(), endpoint, cache)
    with said.open("w") as file, redirect_stdout(file):
        code = main(["weights", "info", REPOSITORY, "--json"])
    sys.exit(code)


@pytest.mark.processes
def test_processes_that_download_at_once_have_one_file(tmp_path: Path, cache: Path, hub: FakeHub) -> None:
    """All of them have seen that the file is missing before the first of them asks for it."""
    config = ViTConfig(width=256, depth=4, heads=2, mlp_dim=512, patch=4, image_size=(8, 8), classes=2)
    save_model(tmp_path / "model", build(config), Card(config, ["cat", "dog"]))
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    hub.lfs, hub.together = {WEIGHTS}, Barrier(2)
    texts = [tmp_path / f"{number}.json" for number in range(2)]
    processes = [server().Process(target=described, args=(hub.endpoint, cache, text)) for text in texts]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len({text.read_text() for text in texts}) == 1 and not hub.together.broken
    assert hub.transfers(WEIGHTS) == [None]
    assert (blobs(cache) / hub.sha256(WEIGHTS)).read_bytes() == hub.files[WEIGHTS]
    assert not [file for file in blobs(cache).iterdir() if "incomplete" in file.name]


def test_a_process_that_was_killed_is_gone_on_from(hub: FakeHub, cache: Path) -> None:
    """The file it left is what a download that is broken off leaves behind."""
    hub.refuse_files = (500, "")
    with pytest.raises(WeightsError):
        resolve(REPOSITORY)
    (partial,) = blobs(cache).iterdir()
    assert hub.sha256(WEIGHTS) in partial.name
    partial.write_bytes(BIG[:1000])
    hub.refuse_files = None
    hub.asked.clear()
    assert (resolve(REPOSITORY) / WEIGHTS).read_bytes() == BIG
    assert hub.transfers(WEIGHTS) == ["bytes=1000-"]
    assert not partial.exists()


def test_a_part_that_is_too_long_is_thrown_away(hub: FakeHub, cache: Path) -> None:
    blobs(cache).mkdir(parents=True)
    (blobs(cache) / f"{hub.sha256(WEIGHTS)}.vitrail-incomplete").write_bytes(BIG + b"more")
    assert (resolve(REPOSITORY) / WEIGHTS).read_bytes() == BIG
    assert hub.transfers(WEIGHTS) == [None]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_wrong_checksum_is_an_error_and_leaves_nothing(hub: FakeHub, cache: Path, name: str) -> None:
    hub.tampered = {name}
    with pytest.raises(WeightsError, match=rf"{name} of {REPOSITORY} was damaged on the way: .*{hub.etag(name)}"):
        resolve(REPOSITORY)
    left = [path.name for path in blobs(cache).iterdir()]
    assert not [file for file in left if hub.etag(name) in file]
    hub.tampered = set()
    assert (resolve(REPOSITORY) / name).read_bytes() == hub.files[name]


def test_a_damaged_part_is_not_built_upon(hub: FakeHub, cache: Path) -> None:
    blobs(cache).mkdir(parents=True)
    (blobs(cache) / f"{hub.sha256(WEIGHTS)}.vitrail-incomplete").write_bytes(b"\xff" * 1000)
    with pytest.raises(WeightsError, match="was damaged on the way"):
        resolve(REPOSITORY)
    assert (resolve(REPOSITORY) / WEIGHTS).read_bytes() == BIG


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, "RepoNotFound", f"no repository '{REPOSITORY}'.*check the name"),
        (401, "RepoNotFound", "it is private.*hf auth login"),
        (401, "GatedRepo", "is gated: accept its conditions at .*hf auth login"),
        (403, "GatedRepo", "is gated"),
        (403, "", "refuses access.*HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_said_in_words(hub: FakeHub, status: int, code: str, said: str) -> None:
    hub.refuse = (status, code)
    with pytest.raises(WeightsError, match=said):
        resolve(REPOSITORY)


def test_gated_files_of_a_repository_that_can_be_seen(hub: FakeHub) -> None:
    hub.refuse_files = (403, "GatedRepo")
    with pytest.raises(WeightsError, match="is gated"):
        resolve(REPOSITORY)


def test_what_is_in_the_cache_stays_usable_when_access_is_lost(hub: FakeHub) -> None:
    folder = resolve(REPOSITORY)
    hub.refuse = (401, "GatedRepo")
    assert resolve(REPOSITORY) == folder


def test_an_unknown_revision(hub: FakeHub) -> None:
    with pytest.raises(WeightsError, match=f"{REPOSITORY} has no revision 'v7'"):
        resolve(f"{REPOSITORY}@v7")


def test_a_full_disk_is_not_taken_for_a_lost_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_module.os, "replace", full)
    with pytest.raises(WeightsError, match="No space left on device; make room"):
        resolve(REPOSITORY)


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin", "flax_model.msgpack"], ["pytorch_model.bin"]),
        (
            ["model.safetensors.index.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors", "other.bin"],
            ["model.safetensors.index.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors"],
        ),
        (["pytorch_model.bin.index.json", "pytorch_model-1-of-1.bin"], None),
        (["ViT-B_16.npz", "README.md", "old/ViT-B_16.npz"], ["ViT-B_16.npz"]),
    ],
)
def test_weights_are_chosen_as_from_a_folder(there: list[str], chosen: list[str] | None) -> None:
    assert weight_files(there, "a/b", "") == (chosen or there)


@pytest.mark.parametrize(
    ("there", "said"), [(["a.npz", "b.pth"], r"holds 2 weight files \(a.npz, b.pth\)"), (["a.h5"], "holds no weights")]
)
def test_a_repository_must_hold_one_model(there: list[str], said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        weight_files(there, "a/b", "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "https://storage.googleapis.com/vit_models/augreg/B_16.npz",
            "download it first .*curl -LO 'https://storage.googleapis.com/vit_models/augreg/B_16.npz'.* give B_16.npz",
        ),
        ("gs://vit_models/augreg/B_16.npz", "curl -LO 'https://storage.googleapis.com/vit_models/augreg/B_16.npz'"),
        ("just-a-name", "owner/name"),
        ("a/b/c", "owner/name"),
        ("../up", "owner/name"),
    ],
)
def test_what_is_no_name(name: str, said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        resolve(name)


def test_paths_are_told_from_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("google/vit-base-patch16-224-in21k") and is_hub_name("timm/vit_base@v1")
    (tmp_path / "runs").mkdir()
    for path in ("runs/typo", "google/vit.npz", "/google/vit", "./google/vit", "google", "a/b/c", "~/vit"):
        assert not is_hub_name(path), path
    (tmp_path / "google").mkdir()
    assert not is_hub_name("google/vit")


@pytest.mark.processes
def test_the_environment_says_where_the_cache_is_and_keeps_from_the_network(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "vitrail", "weights", "info", "google/vit-base-patch16-224-in21k"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "google/vit-base-patch16-224-in21k" in done.stderr and str(tmp_path / "home" / "hub") in done.stderr
    assert "Traceback" not in done.stderr


def test_huggingface_hub_still_has_the_names_it_does_not_document(tmp_path: Path) -> None:
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import WeakFileLock

    assert repo_folder_name(repo_id="owner/name", repo_type="model") == "models--owner--name"
    assert {"resume_size", "headers", "expected_size", "displayed_filename"} <= inspect.signature(
        http_get
    ).parameters.keys()
    with WeakFileLock(tmp_path / "lock"):
        assert (tmp_path / "lock").exists()
