"""Weight files of every kind, whole, broken and malicious."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import mmap
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vitrail.data import npz
from vitrail.errors import WeightsError
from vitrail.weights import archive as archive_module
from vitrail.weights.archive import open_archive
from vitrail.weights.tensor_file import DTYPES
from vitrail.weights.torchfile import MOST_PICKLED

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.half": torch.tensor([0.5, -1.25], dtype=torch.float16),
    "c": torch.tensor(7.0),
}


def write_npz(path: Path) -> Path:
    with path.open("wb") as file:
        np.savez(file, **{name: tensor.numpy() for name, tensor in TENSORS.items()})
    return path


def write_torch(path: Path) -> Path:
    torch.save(dict(TENSORS), path)
    return path


def write_old_torch(path: Path) -> Path:
    torch.save(dict(TENSORS), path, _use_new_zipfile_serialization=False)
    return path


def write_safetensors(path: Path) -> Path:
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


Writer = Callable[[Path], Path]
KINDS: dict[str, tuple[Writer, str]] = {
    "npz": (write_npz, "npz"),
    "safetensors": (write_safetensors, "safetensors"),
    "torch": (write_torch, "torch"),
    "old torch": (write_old_torch, "torch"),
}


@pytest.mark.parametrize("name", ["weights", "w.safetensors", "w.npz", "w.pth"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_known_by_its_content_and_gives_names_shapes_and_values(
    tmp_path: Path, kind: str, name: str
) -> None:
    write, expected = KINDS[kind]
    with open_archive(write(tmp_path / name)) as archive:
        assert archive.kind == expected
        assert archive.path == tmp_path / name
        assert archive.names == TENSORS.keys() == set(archive)
        assert "a" in archive and "d" not in archive
        for key, tensor in TENSORS.items():
            assert archive.shape(key) == tuple(tensor.shape)
            assert archive[key].dtype == tensor.dtype
            assert torch.equal(archive[key], tensor)
        kept = archive["a"]
    assert torch.equal(kept, TENSORS["a"])  # after closing, too


def test_a_name_that_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    with open_archive(write_npz(tmp_path / "w")) as archive:
        for ask in (archive.__getitem__, archive.shape):
            with pytest.raises(WeightsError, match=r"lacks the tensor 'b\.hallf'\. Did you mean 'b\.half'"):
                ask("b.hallf")


def test_a_common_prefix_can_be_taken_away(tmp_path: Path) -> None:
    save_file({"vit.a": torch.ones(2), "vit.vit.a": torch.zeros(2), "head": torch.ones(3)}, tmp_path / "w")
    with open_archive(tmp_path / "w") as archive:
        inner = archive.without("vit.")
        assert inner.names == {"a", "vit.a"}
        assert torch.equal(inner["a"], torch.ones(2)) and inner.shape("vit.a") == (2,)


def test_numpy_does_not_know_bfloat16_and_calls_it_void(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3.0e38, 0.0, 2.0**-130], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    np.savez(tmp_path / "w.npz", a=bits.view("V2").reshape(5, 1))
    with open_archive(tmp_path / "w.npz") as archive:
        assert archive["a"].dtype == torch.bfloat16
        np.testing.assert_array_equal(archive["a"].float().numpy(), exact.reshape(5, 1))


@pytest.mark.parametrize("array", [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(3, dtype=">f4")])
def test_other_byte_and_memory_orders_are_read(tmp_path: Path, array: np.ndarray) -> None:
    np.savez_compressed(tmp_path / "w.npz", a=array)
    with open_archive(tmp_path / "w.npz") as archive:
        np.testing.assert_array_equal(archive["a"].numpy(), array)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_writing_into_a_tensor_never_reaches_the_file(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind][0](tmp_path / "w")
    before = path.read_bytes()
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED), open_archive(path) as archive:
        tensor = archive["a"]
    tensor += 100
    assert torch.equal(tensor, TENSORS["a"] + 100)
    assert path.read_bytes() == before
    path.chmod(0o400)
    with open_archive(path) as archive:
        assert torch.equal(archive["a"], TENSORS["a"])


@pytest.mark.parametrize("where", [0, 0.5, 0.99])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path, dtype: torch.dtype, where: float) -> None:
    tensors = {name: torch.arange(60_000).remainder(60).reshape(3, 20_000).to(dtype) for name in ("a", "b")}
    tensors |= {"one": torch.ones((), dtype=dtype), "none": torch.ones((2, 0), dtype=dtype)}
    save_file(tensors, tmp_path / "w")
    size = (tmp_path / "w").stat().st_size
    with open_archive(tmp_path / "w") as archive:
        for name, tensor in tensors.items():
            assert torch.equal(archive[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True
            assert archive[name].dtype == dtype and archive[name].shape == tensor.shape
        assert bytes(archive["one"].reshape(1).view(torch.uint8)) == bytes(tensors["one"].reshape(1).view(torch.uint8))
    with open_archive(tmp_path / "w") as archive:
        os.truncate(tmp_path / "w", int(size * where))
        with pytest.raises(WeightsError, match="was cut while it was read"):
            [archive[name] for name in tensors]


# ---- checkpoints around a state dict


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model": TENSORS}, ["the tensors are those under 'model'"]),
        ({"state_dict": TENSORS, "epoch": 3}, ["the tensors are those under 'state_dict'; not epoch"]),
        (
            {"model": {"a": torch.zeros(1)}, "model_ema": TENSORS, "args": argparse.Namespace(lr=0.1)},
            ["the tensors are those under 'model_ema'; not args, model"],
        ),
        ({f"module.{name}": tensor for name, tensor in TENSORS.items()}, ["names without their 'module.'"]),
        (
            {"state_dict": {f"_orig_mod.module.{name}": tensor for name, tensor in TENSORS.items()}},
            [
                "the tensors are those under 'state_dict'",
                "names without their '_orig_mod.'",
                "names without their 'module.'",
            ],
        ),
        ({"model": {"module.a": torch.ones(1), "a": torch.ones(1)}}, None),
    ],
)
def test_state_dicts_inside_checkpoints_are_found_and_the_choice_is_told(
    tmp_path: Path, content: Any, said: list[str] | None
) -> None:
    torch.save(content, tmp_path / "w.pth")
    with open_archive(tmp_path / "w.pth") as archive:
        if said is None:
            assert archive.names == {"module.a", "a"}
        else:
            assert archive.names == TENSORS.keys() and archive.notes == said
            assert torch.equal(archive["a"], TENSORS["a"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds a list rather than named tensors"),
        ({}, "holds no tensors"),
        ({"model": {}}, "holds no tensors"),
        ({"a": torch.ones(1), "epoch": 3}, "'epoch' is a int where a tensor should be"),
        ({"a": torch.ones(1).to_sparse()}, "'a' is no plain tensor"),
        ({"a": torch.empty(2, device="meta")}, "'a' is no plain tensor"),
        ({"a": torch.zeros(1).expand(10**9)}, r"'a' claims \(1000000000,\)"),
    ],
)
def test_pickles_that_hold_no_plain_tensors_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=message):
        open_archive(tmp_path / "w.pth")


# ---- malicious files: nothing is executed


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", ["w.pth", "pytorch_model.bin", "w.npz", "w.safetensors"])
@pytest.mark.parametrize("way", ["zip", "old", "pickle 2", "pickle 4", "nested", "object array"])
def test_code_in_a_pickle_is_not_executed(tmp_path: Path, way: str, name: str) -> None:
    file, target = tmp_path / name, tmp_path / "executed"
    evil: Any = Evil(target)
    if way == "zip":
        torch.save({"a": torch.ones(2), "b": evil}, file)
    elif way == "old":
        torch.save({"a": torch.ones(2), "b": evil}, file, _use_new_zipfile_serialization=False)
    elif way == "nested":
        torch.save({"model": {"a": torch.ones(2)}, "args": argparse.Namespace(hook=evil)}, file)
    elif way == "object array":
        with file.open("wb") as stream:
            np.savez(stream, a=np.ones(2), b=np.array([evil], dtype=object))
    else:
        file.write_bytes(pickle.dumps({"a": evil}, protocol=int(way[-1])))
    with pytest.raises(WeightsError, match=r"run code|refused") as caught:
        open_archive(file)
    assert str(file) in str(caught.value)
    assert "weights_only=False" not in str(caught.value)  # torch's own advice
    assert not target.exists()
    pickle.loads(pickle.dumps(evil))  # it does harm where pickles are trusted
    assert target.exists()


@pytest.mark.full_size
@pytest.mark.parametrize("way", ["zip", "old"])
def test_a_pickle_that_would_fill_the_memory_is_refused_unread(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of it is an empty list, which takes 56 bytes of memory and 8 in the list that holds it."""
    file, lists = tmp_path / "w.pth", b"\x80\x02](" + b"]" * (MOST_PICKLED + 1) + b"e."
    if way == "old":
        file.write_bytes(lists)
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("w/data.pkl", lists)
            archive.writestr("w/version", "3")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the pickle was read"))
    with pytest.raises(WeightsError, match=r"w\.pth has more than 16 MiB beside its tensors"):
        open_archive(file)


@pytest.mark.full_size
@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_of_many_tensors_is_read(zipped: bool, tmp_path: Path) -> None:
    state = {f"blocks.{number}.attention.projection.weight": torch.ones(2) for number in range(10_000)}
    torch.save({"model": state, "epoch": 3}, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    with open_archive(tmp_path / "w.pth") as archive:
        assert len(archive.names) == 10_000


def test_a_pickle_says_what_it_asked_for(tmp_path: Path) -> None:
    torch.save({"a": Evil(tmp_path / "x")}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"asks for posix\.mkdir, which could run code"):
        open_archive(tmp_path / "w.pth")


# ---- headers that lie, truncated and damaged files


@pytest.mark.parametrize("keep", [0, 3, 9, 60, 0.5, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files_are_refused(tmp_path: Path, kind: str, keep: float) -> None:
    suffix = {"npz": ".npz", "safetensors": ".safetensors"}.get(kind, ".pth")
    path = KINDS[kind][0](tmp_path / f"w{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if keep == 0.5 else int(keep)])
    with pytest.raises(WeightsError, match=r"w\.\w+ (cannot be read|is a pickle that )"):
        open_archive(path)


def test_a_flipped_bit_in_an_npz_is_noticed(tmp_path: Path) -> None:
    path, values = tmp_path / "w.npz", np.arange(4000.0)  # a small one is read as a whole, with its header
    np.savez(path, a=values)
    content = bytearray(path.read_bytes())
    content[bytes(content).index(values.tobytes()) + 20_005] ^= 4
    path.write_bytes(content)
    with open_archive(path) as archive, pytest.raises(WeightsError, match=r"'a' cannot be read: .*CRC"):
        archive["a"]


def _npy(shape: tuple[int, ...], data: bytes, descr: str = "<f4") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue() + data


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (_npy((10**6, 10**6), b"\0" * 64), r"'a' claims float32 of shape \(1000000, 1000000\)"),
        (_npy((10**30,), b"\0" * 64), "'a' claims float32"),
        (_npy((3,), b"\0" * 64), r"'a' claims float32 of shape \(3,\), 12 bytes, but 64 are there"),
        (_npy((-1, -16), b"\0" * 64), r"'a' claims float32 of shape \(-1, -16\)"),
        (_npy((16,), b"\0" * 60), "64 bytes, but 60 are there"),
        (_npy((16,), b"\0" * 64).replace(b"NUMPY", b"NAMPY"), "cannot be read"),
        (_npy((16,), b"\0" * 64).replace(b"<f4", b"<q!"), "cannot be read"),
        (_npy((16,), b"\0" * 64).replace(b"}", b"("), "cannot be read"),
        (_npy((16,), b"\0" * 64)[:20], "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_npz_headers_that_lie_are_refused_before_anything_is_allocated(
    tmp_path: Path, member: bytes, message: str
) -> None:
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("a.npy", member)
    with pytest.raises(WeightsError, match=message):
        open_archive(tmp_path / "w.npz")


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "w.npz", a=np.zeros(1 << 20, np.float32))
    with open_archive(tmp_path / "w.npz") as archive:  # a few megabytes of zeros are a fresh classifier
        assert not archive["a"].any()
    monkeypatch.setattr(npz, "LARGEST_UNPACKED", 1 << 20)
    with pytest.raises(WeightsError, match=r"claims to unpack to 4,194,\d\d\d: no weights compress like that"):
        open_archive(tmp_path / "w.npz")


def test_a_directory_of_a_zip_that_lies_about_a_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    np.savez_compressed(path, a=np.zeros(1000, np.float32))
    content = bytearray(path.read_bytes())
    entry = bytes(content).index(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<I", 0xFFFF0000)
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="claims to unpack to 4,294,901,760"):
        open_archive(path)


@pytest.mark.parametrize("array", [np.array(["cat", "dog"]), np.array(["2020-01-01"], "datetime64[D]")])
def test_arrays_that_are_no_numbers_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.savez(tmp_path / "w.npz", a=array)
    with open_archive(tmp_path / "w.npz") as archive, pytest.raises(WeightsError, match="'a' holds"):
        archive["a"]


@pytest.mark.parametrize("write", [write_torch, write_npz])
def test_a_zip_of_an_unknown_version_or_of_several_disks_is_refused(tmp_path: Path, write: Writer) -> None:
    path = write(tmp_path / "w")
    whole = path.read_bytes()
    for mark, offset in ((b"PK\x01\x02", 6), (b"PK\x06\x07", 16)):  # torch's zips have both
        if mark in whole:
            broken = bytearray(whole)
            broken[whole.index(mark) + offset] = 0xE0
            path.write_bytes(broken)
            with pytest.raises(WeightsError, match="cannot be read"):
                open_archive(path)


def test_what_is_no_array_in_an_npz_is_not_passed_over(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "w.npz")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(WeightsError, match=r"'notes\.txt'.* is not an array"):
        open_archive(path)


def _safetensors(header: Any, data: bytes = b"\0" * 24, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    "content",
    [
        _safetensors({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 2400]}}),
        _safetensors({"a": {"dtype": "F32", "shape": [20, 3], "data_offsets": [0, 24]}}),
        _safetensors({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 0]}}),
        _safetensors({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 24]}}),
        _safetensors(
            {
                "a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]},
                "b": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]},
            }
        ),
        _safetensors({"a": {"dtype": "Q5", "shape": [6], "data_offsets": [0, 24]}}),
        _safetensors(b"{" * 1000),
        _safetensors({}, length=2**39),
        _safetensors({}, length=2**63),
    ],
)
def test_safetensors_headers_that_lie_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="cannot be read"):
        open_archive(tmp_path / "w.safetensors")


def test_a_torch_file_packed_again_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_torch(tmp_path / "w.pth")) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(tmp_path / "again.pth", "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in members.items():
            new.writestr(name, content)
    with pytest.raises(WeightsError, match="packed again with compression"):
        open_archive(tmp_path / "again.pth")


def test_a_torch_record_shorter_than_the_pickle_says_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(8.0), "b": torch.arange(8.0)}, tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(tmp_path / "short.pth", "w") as new:  # the second record stands where the first should go on
        for name, content in members.items():
            new.writestr(name, content[:16] if "/data/" in name else content)
    with pytest.raises(WeightsError, match=r"'a' claims \(8,\) in 32 bytes, and its record does not hold them"):
        open_archive(tmp_path / "short.pth")


# ---- folders


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "anything.npz", "vit.pth"])
def test_a_folder_gives_its_weights_and_what_stands_beside_them(tmp_path: Path, name: str) -> None:
    {".npz": write_npz, ".safetensors": write_safetensors}.get(Path(name).suffix, write_torch)(tmp_path / name)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "preprocessor_config.json").write_text('{"do_resize": true}')
    with open_archive(tmp_path) as archive:
        assert archive.names == TENSORS.keys()
        assert archive.config == {"hidden_size": 8} and archive.processor == {"do_resize": True}


def test_a_config_belongs_to_the_weights_that_libraries_put_beside_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with open_archive(write_safetensors(tmp_path / "model.safetensors")) as archive:
        assert archive.config == {"hidden_size": 8}
    with open_archive(write_npz(tmp_path / "B_16.npz")) as archive:
        assert archive.config == {}


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    write_safetensors(tmp_path / "model.safetensors")
    with open_archive(tmp_path) as archive:
        assert archive.kind == "safetensors"


def test_links_as_the_hub_cache_has_them_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_safetensors(tmp_path / "blobs" / "0a1b")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0a1b")
    with open_archive(tmp_path / "snapshot") as archive:
        assert archive.names == TENSORS.keys()


def test_links_in_a_circle_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to("b.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    with pytest.raises(WeightsError, match="is a broken link"):
        open_archive(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    (tmp_path / "folder").symlink_to(".")
    with pytest.raises(WeightsError, match="holds no weights"):
        open_archive(tmp_path / "folder" / "folder")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, r"holds no weights. Looked for model\.safetensors"),
        (lambda folder: os.mkfifo(folder / "model.safetensors"), "holds no weights"),
        (lambda folder: [write_npz(folder / f"{name}.npz") for name in "ab"], r"2 weight files \(a\.npz, b\.npz\)"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"<html>no such file</html>"), "of another kind"),
    ],
)
def test_folders_without_one_model_are_refused(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path)
    with pytest.raises(WeightsError, match=message):
        open_archive(tmp_path)


def test_nothing_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"nowhere does not exist. Give a weight file"):
        open_archive(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeightsError, match=r"pipe is neither a folder nor a regular file. Give a weight file"):
        open_archive(tmp_path / "pipe")


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, "\ud83d"])
def test_an_unreadable_config_is_told(tmp_path: Path, text: str) -> None:
    write_safetensors(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(WeightsError, match=r"config\.json"):
        open_archive(tmp_path)


def _sharded(folder: Path, places: Any) -> Path:
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.zeros(3), "c": torch.ones(1)}, folder / "two.safetensors")
    save_file({"a": torch.ones(2)}, folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


GOOD = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}


def test_a_model_in_several_files(tmp_path: Path) -> None:
    folder = _sharded(tmp_path, GOOD)
    (folder / "config.json").write_text('{"x": 1}')
    for place in (folder, folder / "model.safetensors.index.json"):
        with open_archive(place) as archive:
            assert archive.names == {"a", "b", "c"} and archive.config == {"x": 1}
            assert archive.shape("b") == (3,) and torch.equal(archive["a"], torch.ones(2))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({**GOOD, "a": "../outside.safetensors"}, "only files of its own folder"),
        ({**GOOD, "a": "/etc/passwd"}, "only files of its own folder"),
        ({**GOOD, "a": ".."}, "only files of its own folder"),
        ({**GOOD, "a": "one.safetensors\0"}, "only files of its own folder"),
        ({**GOOD, "a": 3}, "places 'a' in 3"),
        ({**GOOD, "a": "three.safetensors"}, r"names the file 'three\.safetensors', which is not there"),
        ({**GOOD, "a": "two.safetensors"}, r"two\.safetensors lacks the tensor 'a'"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, r"two\.safetensors holds the tensor 'c'"),
        ([], 'lacks "weight_map"'),
        ({}, 'lacks "weight_map"'),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, places: Any, message: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(WeightsError, match=message):
        open_archive(_sharded(tmp_path / "folder", places))


class Bomb:
    """An object whose pickle calls a function with arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("bomb", "named"),
    [
        (Bomb(bytearray, 4 << 30), "asks for (builtins|__builtin__).bytearray"),
        (Bomb(codecs.encode, "x" * 5000, "latin1"), "asks for _codecs.encode"),
        (Bomb(torch.FloatTensor, 1 << 26), r"'b' claims|claims 268,435,464 bytes of tensors"),
    ],
)
def test_pickles_that_allocate_what_they_name_are_refused(tmp_path: Path, bomb: Bomb, named: str, zipped: bool) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.zeros(2), "b": bomb}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightsError, match=named), peak_below(1 << 29):
        open_archive(path)


def test_a_compressed_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "plain.pth")
    with zipfile.ZipFile(tmp_path / "plain.pth") as plain, zipfile.ZipFile(tmp_path / "w.pth", "w") as packed:
        for info in plain.infolist():
            kind = zipfile.ZIP_DEFLATED if info.filename.endswith(".pkl") else zipfile.ZIP_STORED
            packed.writestr(info.filename, plain.read(info) + b"\0" * (1 << 20), compress_type=kind)
    with pytest.raises(WeightsError, match="packed again with compression"):
        open_archive(tmp_path / "w.pth")


def test_names_of_any_number_of_wrappers_are_not_unwrapped(tmp_path: Path) -> None:
    torch.save({"module." * 9000 + "a": torch.zeros(2)}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="at most 8 dimensions and 1,000 letters are read"):
        open_archive(tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x" * 5000: torch.zeros(1)}, "with 5,000 letters"),
        ({"a": torch.zeros((1,) * 9)}, "'a' of 9 dimensions"),
    ],
)
def test_names_and_shapes_have_a_length(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=message) as error:
        open_archive(tmp_path / "w.safetensors")
    assert len(str(error.value)) < 500


def test_tensors_have_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "MOST_TENSORS", 2)
    save_file({str(i): torch.zeros(1) for i in range(3)}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="holds 3 tensors; at most 2 are read"):
        open_archive(tmp_path / "w.safetensors")


@contextlib.contextmanager
def peak_below(room: int) -> Iterator[None]:
    """Let the process grow by `room` bytes within the block."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
