"""`predict` and `embed` into a folder give what they give into a file."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.data.images.ops import eval_transform
from vitrail.data.loading.loader import Loader
from vitrail.data.loading.pack import pack_data
from vitrail.data.settings import Preprocess
from vitrail.data.sources.open import open_path
from vitrail.errors import UsageError
from vitrail.evaluation.bulk import COMPLETE
from vitrail.model.variants import variant
from vitrail.model.vit import ViT
from vitrail.verbs.embed import embed
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

SIDE = 16


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = variant("Ti/16", width=16, depth=1, heads=2, mlp_dim=16, image_size=(SIDE, SIDE), patch=8, classes=10)
    model = ViT(config)
    torch.nn.init.normal_(model.head.weight)
    folder = tmp_path_factory.mktemp("network") / "model"
    save_model(folder, model, Card(config, [f"class {n}" for n in range(10)], Preprocess((SIDE, SIDE))))
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "packed"
    pack_data("digits", folder, shard_bytes=400_000)
    return folder


@pytest.mark.full_size
def test_predictions_of_shards_are_those_of_the_network(network: Path, digits: Path, tmp_path: Path) -> None:
    found = vitrail.predict(network, digits, out=tmp_path / "out", merge=tmp_path / "all.parquet", top=3, workers=0,
                            precision="float32")  # fmt: skip
    assert found.state.complete and found.state.parts > 2 and (tmp_path / "out" / COMPLETE).exists()
    table = pq.read_table(tmp_path / "all.parquet")
    model = vitrail.load(network)
    row = 0
    for split, source in open_path(str(digits)).splits.items():
        loader = Loader(source, transform=eval_transform(model.card.preprocess), image_size=SIDE, batch_size=97,
                        shuffle=False, drop_last=False)  # fmt: skip
        for batch in loader.epoch(0):
            with torch.no_grad():
                shares = model.eval()(batch.images).softmax(1)
            values, classes = shares.topk(3, 1)
            part = table.slice(row, len(classes))
            np.testing.assert_allclose(np.stack(part["probabilities"].to_numpy()), values, rtol=1e-4)
            sure = (values[:, 0] - values[:, 1] > 1e-5).numpy()
            named = np.array([names[0] for names in part["classes"].to_pylist()])
            assert (named == np.array([f"class {n}" for n in classes[:, 0].tolist()]))[sure].all()
            assert part["label"].to_pylist() == [source.class_names[n] for n in batch.labels.tolist()]
            assert part["id"].to_pylist() == [f"{split}/{source.id(n)}" for n in batch.index.tolist()]
            row += len(classes)
    assert row == len(table)


@pytest.mark.full_size
def test_features_of_shards_are_those_in_an_npz(network: Path, digits: Path, tmp_path: Path) -> None:
    embedded = embed(network, digits, out=tmp_path / "f.npz", workers=0, precision="float32")
    found = embed(network, digits, out=tmp_path / "out", merge=tmp_path / "f.parquet", workers=0, precision="float32")
    assert found.state.complete and embedded.width == 16
    table = pq.read_table(tmp_path / "f.parquet")
    with np.load(tmp_path / "f.npz") as arrays:
        sides = [split for split in ("train", "test") if f"{split}_ids" in arrays] or [""]
        ids = np.concatenate([arrays[f"{side}_ids" if side else "ids"] for side in sides])
        features = np.concatenate([arrays[f"{side}_features" if side else "features"] for side in sides])
    place = {id: row for row, id in enumerate(table["id"].to_pylist())}
    assert place.keys() == set(ids.tolist()) and len(place) == len(table)  # one order is by shard, the other by split
    mine = np.stack(table["features"].to_numpy())[[place[id] for id in ids.tolist()]]
    np.testing.assert_allclose(mine, features, rtol=1e-4, atol=1e-5)


def test_what_a_folder_cannot_take(network: Path, digits: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="for the results of one data set"):
        vitrail.predict(network, digits, digits, out=tmp_path / "out")
    with pytest.raises(UsageError, match="merge is for a folder"):
        vitrail.predict(network, digits, out=tmp_path / "x.csv", merge=tmp_path / "y.parquet")
    with pytest.raises(UsageError, match=r"ends in \.parquet"):
        vitrail.predict(network, digits, out=tmp_path / "out", merge=tmp_path / "y.csv", workers=0)
    with pytest.raises(UsageError, match="or to a folder"):
        vitrail.predict(network, digits, out=tmp_path / "x.txt")


@pytest.mark.parametrize(
    "names", [("1.png", "2.png"), ("2021/05/01/1.png", "2022/06/02/2.png"), ("1.png", "more/2.png")]
)
def test_photographs_without_class_folders(names: tuple[str, ...], network: Path, tmp_path: Path) -> None:
    """Every image has a row, whatever the folders are, and no label."""
    for name in (*names, "@eaDir/1.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (SIDE, SIDE), "red").save(tmp_path / "photos" / name)
    vitrail.predict(network, tmp_path / "photos", out=tmp_path / "out", merge=tmp_path / "all.parquet", workers=0)
    rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert sorted(row["id"] for row in rows) == sorted(names) and {row["label"] for row in rows} == {None}


def test_names_that_are_not_utf8(network: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes become escapes in all text, from which the name can be made again; folders of systems are counted.

    In Python names are those of the system, which open.
    """
    name = os.fsdecode(b"caf\xe9")
    for folder in (name, "plain", "@eaDir"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        Image.new("RGB", (SIDE, SIDE), "red").save(tmp_path / "photos" / folder / f"{name}.png")
    with caplog.at_level("WARNING", "vitrail"):
        vitrail.predict(network, tmp_path / "photos", out=tmp_path / "out", merge=tmp_path / "all.parquet", workers=0)
    assert "ignored 1 x hidden or system file: @eaDir" in caplog.messages
    caplog.clear()
    vitrail.predict(network, tmp_path / "photos", out=tmp_path / "one.csv")
    vitrail.embed(network, tmp_path / "photos" / "plain", out=tmp_path / "one.npz")
    assert caplog.messages == [f"ignored 1 x hidden or system file: {tmp_path}/photos/@eaDir"]
    rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert [row["label"] for row in rows] == ["caf\\xe9", "plain"]
    for row in rows:
        assert (
            tmp_path / "photos" / os.fsdecode(row["id"].encode().decode("unicode_escape").encode("latin-1"))
        ).is_file()
    in_python = [row.path for row in vitrail.predict(network, tmp_path / "photos").rows]
    escaped = [path.replace("\udce9", "\\xe9") for path in in_python]
    assert len(in_python) == 2 and all(map(os.path.isfile, in_python))
    for file in ("predicted.csv", "predicted.jsonl"):
        vitrail.predict(network, tmp_path / "photos", out=tmp_path / file)
    with open(tmp_path / "predicted.csv", encoding="utf-8") as lines:
        assert [row["path"] for row in csv.DictReader(lines)] == escaped
    text = (tmp_path / "predicted.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["path"] for line in text.splitlines()] == escaped
    vitrail.embed(network, f"{tmp_path}/photos/*/*.png", out=tmp_path / "features.npz")
    assert np.load(tmp_path / "features.npz")["ids"].tolist() == in_python
    (tmp_path / "like.png").write_bytes(Path(in_python[1]).read_bytes())
    found = vitrail.search(
        network, f"{tmp_path}/photos/*/*.png", like=(tmp_path / "like.png",), out=tmp_path / "found.csv"
    )
    assert sorted(match.image for match in found.matches) == in_python
    with open(tmp_path / "found.csv", encoding="utf-8") as lines:
        assert sorted(row["image"] for row in csv.DictReader(lines)) == escaped
    named = open_path(str(tmp_path / "predicted.csv")).splits[""]  # a table of results leads back to its images
    assert sorted(os.path.join(tmp_path, named.id(row)) for row in range(2)) == in_python


def test_a_folder_without_readable_images_ends_as_a_file_does(network: Path, tmp_path: Path) -> None:
    """Whatever gets the results, the status is 1 if no image could be read, or with --strict if one could not."""
    for name in ("1.png", "2.png"):
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / name).write_bytes(b"no image")
    for out in ("table.csv", "folder"):
        assert vitrail.predict(network, tmp_path / "bad", out=tmp_path / out).exit_code == 1
    Image.new("RGB", (SIDE, SIDE)).save(tmp_path / "bad" / "3.png")
    for out, strict in (("more.csv", False), ("more", False), ("all.csv", True), ("all", True)):
        assert vitrail.predict(network, tmp_path / "bad", out=tmp_path / out, strict=strict).exit_code == strict
