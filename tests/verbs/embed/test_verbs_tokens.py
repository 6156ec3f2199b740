"""`vitrail embed --tokens`: the tokens of timm's network, in files that memory does not limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image
from timm_peers import hub, peer, randomised, rebuilt

import vitrail
from vitrail import cli
from vitrail.data.sources.open import open_path
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.feature_files import growing_npz
from vitrail.verbs.bulk import BulkProgress


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny network of timm's with registers, as a folder of the hub."""
    return hub(peer("registers"), tmp_path_factory.mktemp("timm"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten photos of two kinds to train and to test on, one of them broken."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("test", 2)):
        for kind in ("cat", "dog"):
            place = tmp_path / "photos" / split / kind
            place.mkdir(parents=True)
            for number in range(count):
                picture = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(picture).save(place / f"{number}.png")
    (tmp_path / "photos/train/dog/1.png").write_bytes(b"no picture")
    return tmp_path / "photos"


def theirs(folder: Path, files: list[str], layers: Any, norm: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What timm's network makes of the files, with vitrail's preprocessing."""
    transform = vitrail.load(folder).card.transform()
    batch = torch.stack([transform(Image.open(file)) for file in files])
    with torch.no_grad():
        return rebuilt(folder).get_intermediate_layers(
            batch, layers, norm=norm, reshape=True, return_prefix_tokens=True
        )


@pytest.mark.parametrize("layers", [(), (-1,), (0, 1), (1, -2)])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_tokens_of_files_are_timms(folder: Path, photos: Path, tmp_path: Path, layers: Any, batch_size: int) -> None:
    files = sorted(map(str, photos.glob("test/*/*.png")))
    out = tmp_path / "f.npz"
    written = vitrail.embed(folder, *files, out=out, tokens=True, layers=layers, batch_size=batch_size, workers=0,
                            precision="float32")  # fmt: skip
    numbers = sorted({layer % 2 for layer in layers or (1,)})
    expected = theirs(folder, files, numbers)
    with np.load(out) as file:
        names = [f"{kind}_{number}" for number in numbers for kind in ("tokens", "prefix")]
        assert set(file) == {*names, "ids"} and file["ids"].tolist() == files
        for number, (grid, front) in zip(numbers, expected, strict=True):
            found = file[f"tokens_{number}"]
            assert found.shape == (4, 4, 4, 32) and found.dtype == np.float32
            np.testing.assert_allclose(found, grid.permute(0, 2, 3, 1), rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(file[f"prefix_{number}"], front, rtol=1e-3, atol=1e-4)
        assert written.tokens == {name: file[name].shape for name in names}
    assert written.images == {"": 4} and written.width == 32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.npz", "photos"]


def test_half_precision_without_the_last_norm_is_timms(folder: Path, photos: Path, tmp_path: Path) -> None:
    files = sorted(map(str, photos.glob("test/*/*.png")))
    settings: dict[str, Any] = dict(tokens=True, layers=(0, 1), norm=False, dtype="float16", workers=0)
    settings |= dict(batch_size=3, precision="float32")
    vitrail.embed(folder, *files, out=tmp_path / "f.npz", **settings)
    vitrail.embed(folder, photos, out=tmp_path / "parquet", merge=tmp_path / "all.parquet", **settings)
    assert "halffloat" in str(pq.read_schema(tmp_path / "all.parquet").field("tokens_0").type)
    first = pq.read_table(tmp_path / "all.parquet").to_pylist()[:4]  # the split test comes first
    with np.load(tmp_path / "f.npz") as file:
        for number, (grid, front) in enumerate(theirs(folder, files, [0, 1], norm=False)):
            expected = grid.permute(0, 2, 3, 1)
            assert file[f"tokens_{number}"].dtype == file[f"prefix_{number}"].dtype == np.float16
            np.testing.assert_allclose(file[f"tokens_{number}"], expected, rtol=2e-3, atol=1e-3)
            np.testing.assert_allclose(file[f"prefix_{number}"], front, rtol=2e-3, atol=1e-3)
            columns = np.array([row[f"tokens_{number}"] for row in first])
            assert (columns == file[f"tokens_{number}"]).all()
    with pytest.raises(UsageError, match="another job"):
        vitrail.embed(folder, photos, out=tmp_path / "parquet", **settings | {"norm": True})


@pytest.mark.full_size
def test_a_folder_of_npy_files_has_the_arrays_of_the_npz(folder: Path, photos: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(tokens=True, layers=(0, 1), workers=0, batch_size=2)
    with_npz = vitrail.embed(folder, photos, out=tmp_path / "f.npz", **settings)
    (tmp_path / "empty").mkdir()
    for out in ("npy", "empty", "deep/er"):
        written = vitrail.embed(folder, photos, out=tmp_path / out, format="npy", **settings)
        assert written.tokens == with_npz.tokens and written.images == with_npz.images
        with np.load(tmp_path / "f.npz") as file:
            assert {path.name for path in (tmp_path / out).iterdir()} == {f"{name}.npy" for name in file}
            for name in file:
                array = np.load(tmp_path / out / f"{name}.npy", mmap_mode="r")
                assert isinstance(array, np.memmap) and array.dtype == file[name].dtype and (array == file[name]).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "empty", "f.npz", "npy", "photos"]
    with pytest.raises(UsageError, match="npy holds other files"):
        vitrail.embed(folder, photos, out=tmp_path / "npy", format="npy", **settings)
    with pytest.raises(DataError, match="lies within the data set"):
        vitrail.embed(folder, photos, out=photos / "npy", format="npy", **settings)
    assert not (photos / "npy").exists()


def test_values_that_float16_cannot_hold(folder: Path, photos: Path, tmp_path: Path) -> None:
    model = vitrail.load(folder)
    with torch.no_grad():
        model.blocks[0].mlps[0].mlp.fc2.bias.fill_(1e5)
    vitrail.save(model, tmp_path / "m")
    settings: dict[str, Any] = dict(tokens=True, layers=(0,), norm=False, workers=0, precision="float32")
    with pytest.raises(DataError, match=r"a token after layer 0 holds 100,\d+, and float16 ends at 65,504"):
        vitrail.embed(tmp_path / "m", photos, out=tmp_path / "f.npz", dtype="float16", **settings)
    assert not (tmp_path / "f.npz").exists()
    vitrail.embed(tmp_path / "m", photos, out=tmp_path / "f.npz", **settings)


def test_splits_labels_and_unreadable_images(
    folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "f.npz"
    words = [
        "embed",
        folder,
        photos,
        "--out",
        out,
        "--tokens",
        "--layers",
        "-2",
        "1",
        "--workers",
        "0",
        "--precision",
        "float32",
        "--json",
    ]
    assert cli.main([str(word) for word in words]) in (0, None)
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == {"train": 5, "test": 4} and len(found["unreadable"]) == 1
    assert found["tokens"]["train_tokens_0"] == [5, 4, 4, 32] and found["tokens"]["test_prefix_1"] == [4, 4, 32]
    splits = open_path(str(photos)).splits
    with np.load(out) as file:
        assert file["class_names"].tolist() == ["cat", "dog"]
        assert file["train_labels"].tolist() == [0, 0, 0, 1, 1] and file["test_labels"].tolist() == [0, 0, 1, 1]
        for split in ("train", "test"):
            ids = [f"{split}/{splits[split].id(n)}" for n in range(len(splits[split]))]
            broken = [id for id in ids if split == "train" and id.endswith("dog/1.png")]
            assert file[f"{split}_ids"].tolist() == [id for id in ids if id not in broken]
            paths = [str(photos / split / kind / f"{n}.png") for kind, n in [("cat", 0), ("dog", 0)]]
            expected = theirs(folder, paths, [1])[0][0].permute(0, 2, 3, 1)
            rows = file[f"{split}_tokens_1"][[0, 3 if split == "train" else 2]]
            np.testing.assert_allclose(rows, expected, rtol=1e-3, atol=1e-4)


def test_the_pooled_tokens_are_the_features(photos: Path, tmp_path: Path) -> None:
    model = vitrail.load(hub(peer("average"), tmp_path / "timm"))
    vitrail.save(model, tmp_path / "m")
    for name, tokens in (("pooled", False), ("tokens", True)):
        vitrail.embed(
            tmp_path / "m", photos, out=tmp_path / f"{name}.npz", tokens=tokens, workers=0, precision="float32"
        )
    with np.load(tmp_path / "pooled.npz") as pooled, np.load(tmp_path / "tokens.npz") as tokens:
        assert not any("prefix" in name for name in tokens)
        found = tokens["train_tokens_1"].mean((1, 2))
        np.testing.assert_allclose(found, pooled["train_features"], rtol=1e-3, atol=1e-4)
        for name in ("train_ids", "train_labels", "test_ids", "class_names"):
            assert (tokens[name] == pooled[name]).all()


@pytest.mark.full_size
def test_stages_of_a_resnet_have_different_shapes(photos: Path, tmp_path: Path) -> None:
    network = hub(randomised(timm.create_model("resnetv2_50x1_bit", num_classes=5)), tmp_path / "timm")
    files = sorted(map(str, photos.glob("test/cat/*.png")))
    found = vitrail.embed(network, *files, out=tmp_path / "f.npz", tokens=True, layers=(0, 2), image_size=64, workers=0)
    assert found.tokens == {"tokens_0": (2, 32, 32, 64), "tokens_2": (2, 8, 8, 512)} and found.width == 512


@pytest.mark.parametrize("layers", [(), (0, -1)])
def test_a_folder_gets_timms_tokens(folder: Path, photos: Path, tmp_path: Path, layers: tuple[int, ...]) -> None:
    for file in (photos / "train" / "cat").iterdir():
        file.write_bytes(b"no picture")
    settings: dict[str, Any] = dict(tokens=True, layers=layers, workers=0, precision="float32", batch_size=3)
    found = vitrail.embed(folder, photos, out=tmp_path / "out", merge=tmp_path / "all.parquet", **settings)
    assert isinstance(found, BulkProgress) and found.state.complete and len(found.unreadable) == 4
    table = pq.read_table(tmp_path / "all.parquet")
    files = [str(file) for split in open_path(str(photos)).splits for file in sorted((photos / split).glob("*/*.png"))]
    files = [file for file in files if Path(file).read_bytes() != b"no picture"]
    assert table["id"].to_pylist() == ["/".join(Path(file).parts[-3:]) for file in files]
    numbers = sorted({layer % 2 for layer in layers or (1,)})
    names = [f"{kind}_{number}" for number in numbers for kind in ("tokens", "prefix")]
    assert table.column_names == ["id", "split", "label", *names] and len(files) == 6
    for number, (grid, front) in zip(numbers, theirs(folder, files, numbers), strict=True):
        tokens = np.array(table[f"tokens_{number}"].to_pylist(), np.float32)
        assert tokens.shape == (6, 4, 4, 32)
        np.testing.assert_allclose(tokens, grid.permute(0, 2, 3, 1), rtol=1e-3, atol=1e-4)
        prefix = np.array(table[f"prefix_{number}"].to_pylist(), np.float32)
        np.testing.assert_allclose(prefix, front, rtol=1e-3, atol=1e-4)
    again = vitrail.embed(folder, photos, out=tmp_path / "out", **{**settings, "batch_size": 1})
    assert again.state == found.state
    with pytest.raises(UsageError, match="holds the results of another job"):
        vitrail.embed(folder, photos, out=tmp_path / "out", **{**settings, "layers": (0,)})


def test_a_part_without_readable_images_has_the_columns(folder: Path, photos: Path, tmp_path: Path) -> None:
    for file in photos.glob("test/*/*.png"):
        file.write_bytes(b"no picture")
    vitrail.embed(folder, photos, out=tmp_path / "out", merge=tmp_path / "all.parquet", tokens=True, workers=0)
    schemas = [pq.read_schema(file) for file in sorted((tmp_path / "out").glob("*.parquet"))]
    assert len(schemas) == 2 and schemas[0] == schemas[1] and "tokens_1" in schemas[0].names
    assert pq.read_table(tmp_path / "all.parquet").num_rows == 5


@pytest.mark.parametrize("verb", ["fewshot", "knn", "linear"])
def test_probes_say_that_they_need_vectors(folder: Path, photos: Path, tmp_path: Path, verb: str) -> None:
    out = tmp_path / "f.npz"
    vitrail.embed(folder, photos, out=out, tokens=True, workers=0)
    with pytest.raises(DataError, match=r"f.npz holds the tokens of images .* one vector per image is needed"):
        getattr(vitrail.probe, verb)(features=out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (2,), "tokens": True}, "there is no layer 2: this model has 2, numbered 0 to 1"),
        ({"layers": (-3,), "tokens": True}, "there is no layer -3"),
        ({"layers": (1,)}, "--layers, --no-norm, --dtype and --format choose how --tokens are written"),
        ({"norm": False}, "--tokens are written"),
        ({"dtype": "float16"}, "--tokens are written"),
        ({"format": "npy"}, "--tokens are written"),
        ({"tokens": True, "dtype": "int8"}, "dtype is 'int8'. Valid: float32, float16"),
        ({"tokens": True, "format": "csv"}, "format is 'csv'. Valid: parquet, npy"),
        ({"tokens": True, "format": "npy"}, "writes a folder of .npy files. Give a folder"),
    ],
)
def test_wrong_layers(folder: Path, photos: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        vitrail.embed(folder, photos, out=tmp_path / "f.npz", workers=0, **change)
    assert not (tmp_path / "f.npz").exists()


def test_nothing_is_left_of_a_failure(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="no image could be read"):
        vitrail.embed(folder, tmp_path / "in", out=tmp_path / "f.npz", tokens=True, workers=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_growing_arrays_are_those_that_were_given(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = [{"a": rng.normal(size=(n, 3, 4)).astype(np.float32), "b": rng.integers(0, 9, (n,))} for n in (5, 1, 0, 7)]
    with growing_npz(tmp_path / "deep" / "f.npz") as arrays:
        for part in parts:
            arrays.append("x_", part)
        arrays.save({"names": np.array(["ä", "b"])})
    with np.load(tmp_path / "deep" / "f.npz", allow_pickle=False) as file:
        assert set(file) == {"x_a", "x_b", "names"} and file["names"].tolist() == ["ä", "b"]
        for name in ("a", "b"):
            assert (file[f"x_{name}"] == np.concatenate([part[name] for part in parts])).all()
            assert file[f"x_{name}"].dtype == parts[0][name].dtype
    with pytest.raises(ValueError, match="rows of x_a"), growing_npz(tmp_path / "g.npz") as arrays:
        arrays.append("x_", parts[0])
        arrays.append("x_", {"a": np.zeros((1, 4, 3), np.float32)})
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


@pytest.mark.full_size
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A file of 200 MiB is written with less than 20 MiB."""
    import tracemalloc

    rows = {"a": np.ones((10, 1 << 18), np.float32)}
    tracemalloc.start()
    with growing_npz(tmp_path / "f.npz") as arrays:
        for _ in range(20):
            arrays.append("", rows)
        arrays.save({})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "f.npz").stat().st_size > 200 * 2**20 > 10 * peak
