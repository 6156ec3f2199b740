from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.item import IndexedSource, Subset
from vitrail.data.settings import Data
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.sources.open import open_data, open_split
from vitrail.data.split import fingerprint, hold_out, subset
from vitrail.errors import DataError, UsageError


def array_source(labels: list[int], name: str = "s") -> ArraySource:
    images = np.arange(len(labels) * 12, dtype=np.int64).astype(np.uint8).reshape(-1, 2, 2, 3)
    classes = [f"c{index}" for index in range(max(labels, default=-1) + 1)]
    return ArraySource(name, images, np.array(labels, dtype=np.int64), classes)


def write_tree(root: Path, tree: dict[str, int], size: int = 4) -> Path:
    """Write `count` small images, all different, into each folder."""
    number = 0
    for folder, count in tree.items():
        (root / folder).mkdir(parents=True)
        for index in range(count):
            number += 1
            Image.new("RGB", (size, size), (number % 256, number // 256, 7)).save(root / folder / f"{index}.png")
    return root


# the split


@given(labels=st.lists(st.integers(0, 5), min_size=2, max_size=200), share=st.floats(0.02, 0.9), seed=st.integers(0, 9))
def test_hold_out_takes_its_share_of_every_class_and_loses_nothing(labels: list[int], share: float, seed: int) -> None:
    source = array_source(labels)
    kept, out = hold_out(source, share, seed)
    assert sorted([*kept, *out]) == list(range(len(labels)))
    for label in set(labels):
        count = labels.count(label)
        held = int(np.sum(source.labels[out] == label))
        if count == 1:
            assert held == 0
        else:
            assert 1 <= held <= count - 1
            assert abs(held - share * count) <= max(0.5, 1 - share * count, share * count - (count - 1)) + 1e-9


def test_hold_out_depends_on_ids_and_seed_not_on_order() -> None:
    source = array_source([i % 3 for i in range(90)])
    backwards = Subset(source, np.arange(90)[::-1])
    first = {source.id(i) for i in hold_out(source, 0.2, 1)[1]}
    assert first == {backwards.id(i) for i in hold_out(backwards, 0.2, 1)[1]}
    assert first != {source.id(i) for i in hold_out(source, 0.2, 2)[1]}
    # a smaller share is part of a larger one
    assert {source.id(i) for i in hold_out(source, 0.1, 1)[1]} < first


@given(sizes=st.lists(st.integers(1, 120), min_size=2, max_size=2), seed=st.integers(0, 3))
def test_subsets_are_nested_and_in_proportion(sizes: list[int], seed: int) -> None:
    source = array_source([0] * 60 + [1] * 40 + [2] * 20)
    small, large = (set(subset(source, size, seed).tolist()) for size in sorted(sizes))
    assert small <= large and len(large) == max(sizes)
    counts = np.bincount(source.labels[sorted(large)], minlength=3)
    np.testing.assert_allclose(counts, np.array([60, 40, 20]) * len(large) / 120, atol=1)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_hold_out_refuses_impossible_shares(share: float) -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        hold_out(array_source([0, 1]), share, 0)


@pytest.mark.parametrize("count", [0, 3])
def test_subset_refuses_impossible_sizes(count: int) -> None:
    with pytest.raises(UsageError, match=r"valid are 1\.\.2"):
        subset(array_source([0, 1]), count, 0)


def test_fingerprint_ignores_order_and_notices_everything_else() -> None:
    source = array_source([0, 1, 1, 0])
    mark = fingerprint({"train": source})
    assert mark == fingerprint({"train": Subset(source, np.array([2, 0, 3, 1]))})
    others = [
        fingerprint({"test": source}),
        fingerprint({"train": Subset(source, np.arange(3))}),
        fingerprint({"train": array_source([0, 1, 1, 1])}),
        fingerprint({"train": array_source([0, 1, 1, 0], name="t")}),
        fingerprint({"train": source, "test": source}),
    ]
    assert len({mark, *others}) == 6


# views


def test_a_view_counts_labels_in_other_names() -> None:
    source = array_source([0, 1, 2, 1])
    view = Subset(source, np.array([3, 0]), ["c2", "c1", "x", "c0"])
    assert isinstance(view, IndexedSource)
    assert view.labels.tolist() == [1, 3]
    assert [view[i].label for i in range(2)] == [1, 3]
    assert view[0].id == view.id(0) == source.id(3)


def test_a_view_lists_classes_it_does_not_know_but_only_those_that_occur() -> None:
    source = array_source([0, 1, 2, 1])
    with pytest.raises(DataError, match=r"'c2'.*known are 'c0', 'c1'"):
        Subset(source, class_names=["c0", "c1"])
    only = ArraySource("s", np.zeros((2, 1, 1, 3), np.uint8), np.array([0, 0]), ["c0", "unused"])
    assert Subset(only, class_names=["c0"]).labels.tolist() == [0, 0]


# digits and arrays


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    theirs = load_digits()
    splits = open_data(Data("digits", holdout=0.0))
    assert len(splits.train) + len(splits.test or ()) == len(theirs.images) == 1797
    assert splits.class_names == [str(digit) for digit in range(10)]
    assert splits.test is not None and splits.validation is None  # a test split is not there to choose by
    for source in (splits.train, splits.test):
        for index in range(0, len(source), 50):
            item = source[index]
            row = int(item.id[len("digits[") : -1])
            assert item.image.dtype == np.uint8 and item.image.shape == (8, 8, 3)
            np.testing.assert_array_equal(item.image[..., 0], np.rint(theirs.images[row] / 16 * 255))
            assert (item.image == item.image[..., :1]).all()
            assert item.label == theirs.target[row]
    counts = np.bincount(splits.test.labels) / np.bincount(theirs.target)
    assert (abs(counts - 0.2) < 0.01).all()
    assert {splits.train.id(i) for i in range(len(splits.train))}.isdisjoint(
        splits.test.id(i) for i in range(len(splits.test))
    )


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("layout", ["nhw", "nhwc", "nhw1", "nchw"])
def test_npz_in_every_layout(tmp_path: Path, save, layout: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    stored = {
        "nhw": images[..., 0],
        "nhwc": images,
        "nhw1": images[..., :1],
        "nchw": images.transpose(0, 3, 1, 2),
    }[layout]
    labels = np.array([[10], [2], [10], [2], [10], [2]])
    save(tmp_path / "a.npz", x_train=stored, y_train=labels, x_test=stored[:2], y_test=labels[:2])
    splits = open_data(Data(str(tmp_path / "a.npz"), holdout=0.0))
    assert splits.class_names == ["2", "10"]  # by value, not as text
    assert splits.train.labels.tolist() == [1, 0, 1, 0, 1, 0]
    for index in range(6):
        image = splits.train[index].image
        expected = images[index] if layout in ("nhwc", "nchw") else np.repeat(images[index][..., :1], 3, 2)
        np.testing.assert_array_equal(image, expected)
        assert image.flags.c_contiguous
    assert splits.test is not None and len(splits.test) == 2


def test_uncompressed_arrays_are_not_read_into_memory(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 2, 2, 3), np.uint8), labels=np.arange(4))
    source = open_split(tmp_path / "a.npz")
    assert isinstance(source, ArraySource)
    assert isinstance(source._images, np.memmap)


def test_npz_fingerprint_sees_the_pixels(tmp_path: Path) -> None:
    marks = set()
    for value in (0, 1):
        np.savez(tmp_path / "a.npz", images=np.full((9, 2, 2, 3), value, np.uint8), labels=np.arange(9) % 3)
        marks.add(open_data(str(tmp_path / "a.npz")).fingerprint)
    assert len(marks) == 2


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": np.zeros((2, 2, 2), np.uint8)}, "expected images and labels"),
        ({"images": np.zeros((2, 2, 2), complex), "labels": np.arange(2)}, "must be uint8"),
        ({"images": np.zeros((2, 2, 2), np.uint8), "labels": np.arange(3)}, "2 images and labels has 3"),
        ({"images": np.zeros((2, 2, 2, 2, 3), np.uint8), "labels": np.arange(2)}, "valid are"),
        ({"images": np.zeros((2, 2, 2), np.uint8), "labels": np.array([0.5, 1])}, "integers and text"),
        ({"images": np.array([{}, {}]), "labels": np.arange(2)}, "readable|Python objects"),
    ],
)
def test_npz_that_is_no_data_set(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        open_data(str(tmp_path / "a.npz"))


# sniffing and choosing


@pytest.mark.parametrize("path", ["/nowhere/at/all", "phtos/", "flower", "cifr10", "owner/name", "", "a\0b"])
def test_a_missing_path_says_what_was_looked_for_at_once(path: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    asked: list[object] = []
    began = time.process_time()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address) or [])
    with pytest.raises(DataError) as caught:
        open_data(path)
    assert time.process_time() - began < 1
    assert asked == []  # a network that does not answer would be waited for
    assert repr(path) in str(caught.value) and "class folders" in str(caught.value)


def test_a_missing_path_offers_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match="Did you mean 'photos'"):
        open_data(str(tmp_path / "fotos" / "train"))


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"a\.zip is a file of no known kind"):
        open_data(str(tmp_path / "a.zip"))


def test_an_unpublished_set_and_an_offline_hub_say_where_it_could_be(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(DataError, match="not on the hub"):
        open_data("jft300m")
    import datasets

    def offline(name: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"uoft-cs/cifar10.*not in the cache.*no route to host.*hf download"):
        open_data("cifar10")
    with pytest.raises(DataError, match="some/where"):
        open_data("hf://datasets/some/where")


def test_the_hub_is_read_through_its_memory_map(tmp_path: Path, monkeypatch) -> None:
    import datasets

    write_tree(tmp_path / "in", {"train/a": 3, "train/b": 3, "validation/a": 2, "validation/b": 1})
    loaded = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "in"), cache_dir=str(tmp_path / "c"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: loaded)
    splits = open_data("hf://datasets/me/mine")
    assert splits.class_names == ["a", "b"] and splits.report.kind == "hub"
    assert sorted(splits.train.labels.tolist()) == [0, 0, 0, 1, 1, 1]
    assert splits.validation is not None and sorted(splits.validation.labels.tolist()) == [0, 0, 1]
    stored = {path.read_bytes() for path in (tmp_path / "in").rglob("*.png")}
    assert {splits.train[i].image for i in range(6)} | {splits.validation[i].image for i in range(3)} == stored
    # and as it is saved to disk
    loaded.save_to_disk(str(tmp_path / "saved"))
    again = open_data(str(tmp_path / "saved"))
    assert again.train.labels.tolist() == splits.train.labels.tolist()
    assert again.train[0].image == splits.train[0].image


def test_the_validation_split_is_the_one_there_is_or_part_of_train(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "d", {"train/a": 10, "train/b": 10, "dev/a": 1, "dev/b": 1, "test/b": 2})
    splits = open_data(str(root))
    assert splits.held_out == {"validation": "dev"} and len(splits.validation) == 2 and len(splits.test) == 2
    assert open_data(Data(str(root), validation="test")).held_out == {"validation": "test"}
    assert open_data(Data(str(root), validation="val")).held_out == {"validation": "dev"}  # another usual name
    held = open_data(Data(str(root / "train"), holdout=0.2), seed=3)
    assert len(held.train) == 16 and len(held.validation) == 4 and held.test is None
    ids = [held.validation.id(index) for index in range(4)]
    assert json.loads(json.dumps(held.held_out)) == {"seed": 3, "share": 0.2, "from": "", "ids": ids}
    assert open_data(Data(str(root / "train"), holdout=0.0)).validation is None
    with pytest.raises(UsageError, match=r"no split 'tset'.*'dev', 'test', 'train'.*Did you mean 'test'"):
        open_data(Data(str(root), validation="tset"))
    with pytest.raises(UsageError, match="no split 'extra'"):
        open_data(Data(str(root), train="extra"))


def test_splits_are_joined_left_out_and_measured_by_name(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "d", {"train/a": 4, "train/b": 4, "val/b": 3, "val/c": 2, "test/a": 1})
    both = open_data(Data(str(root), train="train+val", holdout=0.0))
    assert both.validation is None and len(both.train) == 13 and both.class_names == ["a", "b", "c"]
    parts = {name: open_split(root, name, both.class_names) for name in ("train", "val")}
    expected = {(item.label, item.image) for part in parts.values() for item in (part[i] for i in range(len(part)))}
    items = [both.train[i] for i in range(13)]
    assert {(item.label, item.image) for item in items} == expected
    assert [item.label for item in items] == both.train.labels.tolist()
    assert [item.id for item in items] == [both.train.id(i) for i in range(13)] and len({i.id for i in items}) == 13
    assert sorted(both.train.sizes.tolist()) == sorted(len(image) for _, image in expected)
    held = open_data(Data(str(root), train="val+train", holdout=0.25))
    assert len(held.validation) == 4 and len(held.train) == 9  # 1 of 4, 2 of 7 and 1 of 2
    assert both.fingerprint == open_data(Data(str(root), validation="none")).fingerprint

    usual = write_tree(tmp_path / "e", {"train/a": 10, "train/b": 10, "val/a": 2, "test/a": 1})
    none = open_data(Data(str(usual), validation="none", test="none"))
    assert none.test is None and len(none.validation) == 2 and len(none.train) == 18  # held out, the split unopened
    as_test = open_data(Data(str(usual), test="val"))
    assert len(as_test.test) == 2 and as_test.held_out["share"] == 0.1
    for data, message in (
        (Data(str(usual), train="train+train"), "twice"),
        (Data(str(usual), train="train+more"), "no split 'more'"),
        (Data(str(usual), train="train+val", test="val"), r"is also used for training \(data\.train\)"),
        (Data(str(usual), validation="train"), r"is also used for training \(data\.train\)"),
    ):
        with pytest.raises(UsageError, match=message):
            open_data(data)


def test_a_subset_is_taken_after_the_hold_out(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "d", {"a": 20, "b": 20})
    full, part = open_data(str(root)), open_data(Data(str(root), subset=8))
    assert np.bincount(part.train.labels).tolist() == [4, 4]
    assert [full.validation.id(i) for i in range(4)] == [part.validation.id(i) for i in range(4)]
    assert {part.train.id(i) for i in range(8)} < {full.train.id(i) for i in range(36)}


def test_validation_classes_are_matched_by_name(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "d", {"train/a": 2, "train/b": 2, "train/c": 2, "val/c": 3})
    splits = open_data(str(root))
    assert splits.validation.labels.tolist() == [2, 2, 2]  # the folder alone would say 0
    write_tree(root, {"val/zebra": 1})
    with pytest.raises(DataError, match=r"split 'val' has classes.*'zebra'"):
        open_data(str(root))


def test_a_test_split_that_does_not_fit_is_left_out_and_said_so(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "d", {"train/a": 2, "train/b": 2, "val/a": 1, "test/unknown": 3})
    splits = open_data(str(root))
    assert splits.test is None
    assert any("'test' left out" in line and "'unknown'" in line for line in splits.report.lines())


def test_one_class_is_refused_with_the_expected_tree(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)one class only, 'a'.*photos/cat/1\.jpg"):
        open_data(str(write_tree(tmp_path / "d", {"a": 3})))


def test_open_split_matches_the_names_of_a_model(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "d", {"train/a": 1, "train/b": 1, "val/b": 2, "test/a": 3})
    assert len(open_split(root)) == 3
    assert len(open_split(root, "validation")) == 2
    assert open_split(root / "val", class_names=["x", "b"]).labels.tolist() == [1, 1]  # one class is enough here
    with pytest.raises(DataError, match="'b'"):
        open_split(root, "val", class_names=["a"])
    with pytest.raises(UsageError, match="no split 'nope'"):
        open_split(root, "nope")


# real data


def test_cifar100_from_the_hub_layout(shared_data: Path, tmp_path: Path, monkeypatch) -> None:
    import datasets

    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    splits = open_data(Data(str(shared_data / "cifar100"), holdout=0.0))
    assert (len(splits.train), len(splits.test)) == (50_000, 10_000)
    assert len(splits.class_names) == 100 and splits.class_names == sorted(splits.class_names)
    assert "train" in splits.class_names
    assert np.bincount(splits.train.labels).tolist() == [500] * 100
    theirs = datasets.Dataset.from_parquet(
        str(shared_data / "cifar100" / "data" / "test-00000-of-00001.parquet"), cache_dir=str(tmp_path / "hf")
    ).cast_column("img", datasets.Image(decode=False))
    assert theirs["fine_label"][:] == splits.test.labels.tolist()
    for index in (0, 1, 511, 512, 9_999):
        assert splits.test[index].image == theirs[index]["img"]["bytes"]
        assert splits.test.sizes[index] == len(theirs[index]["img"]["bytes"])


def test_cifar100_as_folders_has_a_class_called_train(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "d", {"train/train": 3, "train/bus": 3, "test/train": 1, "test/bus": 1})
    splits = open_data(Data(str(root), holdout=0.0))
    assert splits.class_names == ["bus", "train"] and len(splits.train) == 6
    flat = open_data(Data(str(root / "train"), holdout=0.4))
    assert flat.class_names == ["bus", "train"]


@given(st.text(alphabet="abc/._- é\\", min_size=1, max_size=20))
def test_any_text_is_a_path_or_a_data_error(text: str) -> None:
    with pytest.raises((DataError, UsageError)):
        open_data(f"/nowhere/{text}")
