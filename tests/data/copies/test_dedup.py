from __future__ import annotations

import csv
import hashlib
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.fft
from gathered import failures
from PIL import Image, ImageFilter

from vitrail.data.copies import dedup, hashes
from vitrail.data.copies.confirm import find_copies
from vitrail.data.copies.dedup import (
    HashedImages,
    hashed,
    remaining,
    shared,
    split_apart,
    splits_to_clean,
    staying,
    write_pairs,
)
from vitrail.data.copies.hashes import SIDE, bands, hash_thumbnails, hashes_of, near_pairs, thumbnail
from vitrail.data.images.decode import decode
from vitrail.data.item import DataSet, Findings, IndexedSource, Subset
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.sources.indexed import data_set
from vitrail.data.sources.open import open_path
from vitrail.errors import DataError, UsageError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def picture(number: int, size: int = 96) -> Image.Image:
    """A picture of its own: soft blots of colour, as photographs have, not noise."""
    noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC)


def save(image: Image.Image, path: Path, **how: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **how)
    return path


def as_array(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def source_of(*images: Image.Image, name: str = "s") -> ArraySource:
    stack = np.stack([as_array(image) for image in images])
    return ArraySource(f"{name}-{stack.sum()}", stack, np.zeros(len(stack), np.int64), ["a", "b"])


def gathered(**splits: IndexedSource) -> HashedImages:
    return HashedImages(hashed("d", DataSet(dict(splits), Findings("arrays")), splits))


def named(left: HashedImages, right: HashedImages, pairs: dedup.Pairs) -> set[tuple[str, str, str, str]]:
    return {tuple(map(str, (*row[1:3], *row[4:6]))) for row in dedup.pair_rows(left, right, pairs)}


# the hashes


def test_the_hashes_are_the_textbooks() -> None:
    images = [picture(number) for number in range(6)] + [Image.effect_noise((50, 70), 60).convert("RGB")]
    small = np.stack([thumbnail(as_array(image)) for image in images])
    frequencies, gradients, flat = hash_thumbnails(small)
    assert not flat.any()
    for way, pixels in ((0, small), (1, small[:, :, ::-1])):
        for number, one in enumerate(pixels.astype(np.float64)):
            low = scipy.fft.dctn(one, type=2)[:8, :8]
            assert unpacked(frequencies[number, way]) == (low > np.median(low)).ravel().tolist()
            # 288 is divisible by 32 pixels, by 8 rows and by 9 columns of cells
            cells = np.kron(one, np.ones((9, 9))).reshape(8, 36, 9, 32).sum((1, 3))
            assert unpacked(gradients[number, way]) == (cells[:, 1:] > cells[:, :-1]).ravel().tolist()


def unpacked(value: np.uint64) -> list[bool]:
    return np.unpackbits(np.array([value], np.uint64).view(np.uint8)).astype(bool).tolist()


def test_a_thumbnail_is_pillows_luma_and_resize() -> None:
    image = picture(3, 90)
    theirs = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(thumbnail(as_array(image)), np.asarray(theirs))


def test_a_hash_is_a_function_of_its_image_alone() -> None:
    small = np.random.default_rng(0).integers(0, 256, (50, SIDE, SIDE), dtype=np.uint8)
    small[::3] = (small[::3] + small[::3, ::-1, ::-1]) // 2  # symmetric: half of the frequencies are 0
    together = hash_thumbnails(small)
    alone = [hash_thumbnails(one[None]) for one in small]
    for column, whole in enumerate(together):
        np.testing.assert_array_equal(np.concatenate([one[column] for one in alone]), whole)


def reencoded(image: Image.Image) -> dict[str, Image.Image]:
    def jpeg(picture: Image.Image, quality: int) -> Image.Image:
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=quality)
        return Image.open(stream)

    width, height = image.size
    return {
        "quality 90": jpeg(image, 90),
        "quality 30": jpeg(image, 30),
        "half size": image.resize((width // 2, height // 2), Image.Resampling.LANCZOS),
        "larger": image.resize((round(1.5 * width), round(1.5 * height)), Image.Resampling.BICUBIC),
        "squashed": image.resize((width // 2, height), Image.Resampling.BILINEAR),
        "brighter": image.point(lambda value: min(255, round(1.15 * value))),
        "blurred": image.filter(ImageFilter.GaussianBlur(1)),
    }


@pytest.mark.full_size
def test_flowers_are_found_again_however_they_were_encoded_and_not_taken_for_each_other(
    shared_data: Path, tmp_path: Path
) -> None:
    found = open_path(str(shared_data / "flowers12")).splits["test"]
    chosen = [found[index] for index in range(0, len(found), 20)]
    for number, item in enumerate(chosen):
        with Image.open(io.BytesIO(item.image)) as image:
            image.load()
            save(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), tmp_path / f"mirror/a/{number:02}.bmp")
            for way, copy in reencoded(image).items():
                save(copy, tmp_path / f"{way}/a/{number:02}.bmp")
        (tmp_path / "originals" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"originals/a/{number:02}.jpg").write_bytes(item.image)
    originals = gathered(train=open_path(str(tmp_path / "originals")).splits[""])
    assert len(find_copies(originals, None)) == 0  # all different
    count = len(chosen)
    for way in [path.name for path in tmp_path.iterdir() if path.name not in ("originals", "mirror")]:
        copies = gathered(test=open_path(str(tmp_path / way)).splits[""])
        pairs = find_copies(originals, copies)
        assert pairs.left.tolist() == pairs.right.tolist() == list(range(count)), way
        assert not pairs.exact.any() and np.isnan(pairs.cosine).all()
    mirror = gathered(test=open_path(str(tmp_path / "mirror")).splits[""])
    assert len(find_copies(originals, mirror)) == 0
    pairs = find_copies(originals, mirror, mirrored=True)
    assert pairs.left.tolist() == pairs.right.tolist() == list(range(count)) and pairs.mirrored.all()


# the search


@pytest.mark.parametrize("distance", [0, 1, 6, 11, 12, 20])
@pytest.mark.parametrize("tile", [1 << 17, 50])
def test_the_search_finds_what_comparing_all_finds_each_pair_once(
    distance: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "TILE", tile)
    random = np.random.default_rng(distance)
    left = random.integers(0, 2**63, 120, dtype=np.uint64)
    right = np.concatenate([left[:90], random.integers(0, 2**63, 40, dtype=np.uint64), left[:3]])
    for number in range(90):  # of every distance up to 30, the bits anywhere or side by side
        bits = random.permutation(64)[: number // 3] if number % 2 else (np.arange(number // 3) + number) % 64
        right[number] ^= np.bitwise_or.reduce(np.uint64(1) << bits.astype(np.uint64), initial=np.uint64(0))
    found = [tuple(map(int, row)) for block in near_pairs(left, right, distance) for row in zip(*block, strict=True)]
    all_pairs = [(i, j, (int(a) ^ int(b)).bit_count()) for i, a in enumerate(left) for j, b in enumerate(right)]
    assert sorted(found) == [pair for pair in all_pairs if pair[2] <= distance]


def test_bands_cover_every_bit_once() -> None:
    assert failures(range(0, 32), cover_every_bit_once) == []


def cover_every_bit_once(distance: int) -> None:
    masks = [int(band) for band in bands(distance)]
    if masks == [0]:
        assert 64 // (distance + 1) < 5
    else:
        assert len(masks) == distance + 1 and sum(masks) == 2**64 - 1
        assert np.bitwise_or.reduce([np.uint64(mask) for mask in masks]) == np.uint64(2**64 - 1)


# the cache


class Counting(ArraySource):
    """Notes which images are read, and breaks off at one of them."""

    def __init__(self, images: list[Image.Image], stop: int = -1) -> None:
        stack = np.stack([as_array(image) for image in images])
        super().__init__("counted", stack, np.zeros(len(stack), np.int64), ["a"])
        self.read: list[int] = []
        self.stop = stop

    def __getitem__(self, index: int):
        if index == self.stop:
            raise KeyboardInterrupt
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_image_is_read_once_and_a_scan_goes_on_where_it_stopped(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "CHUNK", 4)
    images = [picture(number, 32) for number in range(10)]
    with pytest.raises(KeyboardInterrupt):
        hashes_of(Counting(images, stop=6), workers=workers)
    told: list[tuple[int, int]] = []
    again = Counting(images)
    first = hashes_of(again, workers=workers, progress=lambda *done: told.append(done))
    assert sorted(again.read) == [4, 5, 6, 7, 8, 9]
    assert told == [(4, 10), (5, 10), (6, 10), (7, 10), (8, 10), (9, 10), (10, 10)]
    third = Counting(images)
    second = hashes_of(third, workers=workers)
    assert third.read == []
    monkeypatch.setattr(hashes, "CHUNK", 1 << 15)
    whole = hashes_of(Counting(images))
    for name in ("digest", "frequencies", "gradients", "flat", "reason"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
        np.testing.assert_array_equal(getattr(first, name), getattr(whole, name))


def test_a_file_that_was_changed_is_read_again_and_nothing_is_written_beside_it(tmp_path: Path) -> None:
    for number in range(4):
        save(picture(number), tmp_path / "photos" / "ab"[number % 2] / f"{number}.bmp")
    before = contents(tmp_path)
    first = hashes_of(open_path(str(tmp_path / "photos")).splits[""])
    assert contents(tmp_path) == before
    file = tmp_path / "photos" / "a" / "0.bmp"
    save(picture(9), file)  # of the same length
    os.utime(file, ns=(1, 1))
    second = hashes_of(open_path(str(tmp_path / "photos")).splits[""])
    changed = (first.frequencies != second.frequencies).any(axis=1)
    assert changed.tolist() == [True, False, False, False]


@pytest.mark.parametrize("kind", ["tar", "parquet", "paths in parquet", "in memory"])
def test_images_of_the_same_names_and_sizes_elsewhere_have_hashes_of_their_own(kind: str, tmp_path: Path) -> None:
    found = []
    for first in (0, 4):  # two data sets, alike but for the pixels
        folder = tmp_path / str(first)
        files = [save(picture(first + number), folder / "images" / f"{number}.bmp") for number in range(4)]
        if kind == "tar":
            with tarfile.open(folder / "x.tar", "w") as tar:
                for file in files:
                    tar.add(file, file.name)
        elif kind == "in memory":
            split = [(np.asarray(Image.open(file).convert("RGB")), 0) for file in files]
            found.append(hashes_of(data_set({"train": split}).splits["train"]))
            continue
        else:
            rows = [file.read_bytes() for file in files] if kind == "parquet" else [
                {"bytes": None, "path": f"images/{file.name}"} for file in files]  # fmt: skip
            pq.write_table(pa.table({"image": rows, "label": [0, 1, 0, 1]}), folder / "x.parquet")
        (path,) = folder.glob("x.*")
        found.append(hashes_of(open_path(str(path)).splits[""]))
    assert (found[0].frequencies != found[1].frequencies).any(axis=1).all()
    assert (found[0].digest != found[1].digest).any(axis=1).all()


def contents(root: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(DataError, match=r"cannot keep the hashes of images in .*VITRAIL_CACHE"):
        hashes_of(source_of(picture(0)))


# copies


def test_copies_across_sets_by_kind(tmp_path: Path) -> None:
    one, two, three = picture(1), picture(2), picture(3)
    train, test = tmp_path / "train", tmp_path / "test"
    save(one, train / "a/same.png")
    save(one, train / "a/same again.png")
    save(two, train / "a/other quality.jpg", quality=40)
    save(three, train / "b/mirrored.png")
    save(picture(4), train / "b/own.png")
    save(one, test / "a/one.png")
    save(two, test / "b/two.png")
    save(three.transpose(Image.Transpose.FLIP_LEFT_RIGHT), test / "b/three.png")
    left = gathered(train=open_path(str(train)).splits[""])
    right = gathered(test=open_path(str(test)).splits[""])
    pairs = find_copies(left, right, mirrored=True)
    assert named(left, right, pairs) == {
        ("train", "a/same.png", "test", "a/one.png"),
        ("train", "a/same again.png", "test", "a/one.png"),
        ("train", "a/other quality.jpg", "test", "b/two.png"),
        ("train", "b/mirrored.png", "test", "b/three.png"),
    }
    ids = [left.name(int(number)).id for number in pairs.left]
    kinds = dict(zip(ids, zip(pairs.exact.tolist(), pairs.mirrored.tolist(), strict=True), strict=True))
    assert kinds["a/same.png"] == kinds["a/same again.png"] == (True, False)
    assert kinds["a/other quality.jpg"] == (False, False) and kinds["b/mirrored.png"] == (False, True)
    assert [left.name(int(i)).id for i in np.flatnonzero(staying(left, right, pairs))] == ["b/own.png"]
    (counts,) = shared(left, right, pairs)
    assert (counts.exact, counts.near, counts.others) == (2, 2, 3)
    write_pairs(tmp_path / "out.csv", left, right, pairs)
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["id"], row["other_id"]) for row in rows} == {row[1::2] for row in named(left, right, pairs)}
    assert {row["exact"] for row in rows if row["other_id"] == "a/one.png"} == {"1"}
    assert {row["distance"] for row in rows if row["exact"] == "1"} == {"0"} and {row["cosine"] for row in rows} == {""}


def test_within_one_set_the_held_out_splits_stay_and_of_the_others_the_first(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    pictures = [picture(number) for number in range(6)]
    for number, image in enumerate(pictures):
        save(image, root / f"train/a/{number}.png")
        save(image, root / f"train/b/{number}.jpg", quality=60)  # a near copy of each
        save(picture(50 + number), root / f"train/b/own {number}.png")
    save(pictures[0], root / "train/b/z.png")  # an exact copy
    save(pictures[1], root / "test/a/exact.png")
    save(pictures[2].resize((50, 50)), root / "val/a/smaller.png")
    save(pictures[2].resize((60, 60)), root / "test/a/smaller, too.png")
    found = open_path(str(root))
    images = HashedImages(hashed("photos", found, found.splits))
    pairs = find_copies(images, None)
    assert (pairs.left < pairs.right).all()
    stays = staying(images, None, pairs)
    left = remaining(found, images, stays)
    kept = {name: {source.id(index) for index in range(len(source))} for name, source in left.items()}
    own = {f"b/own {number}.png" for number in range(6)}
    assert kept == {
        "test": {"a/exact.png", "a/smaller, too.png"},
        "val": {"a/smaller.png"},
        "train": {"a/0.png", "a/3.png", "a/4.png", "a/5.png"} | own,
    }
    # what remains has no copies but those between held-out splits
    again = HashedImages(hashed("photos", DataSet(left, found.findings), left))
    assert named(again, again, find_copies(again, None)) == {("test", "a/smaller, too.png", "val", "a/smaller.png")}
    counts = {(one.split, one.other_split): (one.exact, one.near, one.others) for one in shared(images, None, pairs)}
    assert counts[("train", "test")] == (1, 3, 2)
    assert counts[("val", "test")] == (0, 1, 1)


def test_many_exact_copies_make_few_pairs_and_all_go() -> None:
    same, near = picture(0), Image.fromarray(np.clip(as_array(picture(0)).astype(int) + 3, 0, 255).astype(np.uint8))
    images = gathered(train=source_of(*[same] * 30, *[near] * 30), test=source_of(near, picture(1), name="t"))
    pairs = find_copies(images, None)
    assert len(pairs) <= 4 * 62
    assert np.flatnonzero(staying(images, None, pairs)).tolist() == [0, 1]
    train, test = gathered(train=images.parts[1].source), gathered(test=images.parts[0].source)
    pairs = find_copies(train, test)
    assert set(pairs.left.tolist()) == set(range(60)) and set(pairs.right.tolist()) == {0}
    assert pairs.exact.tolist() == (pairs.left >= 30).tolist()


def test_pictures_of_one_colour_are_copies_only_if_they_are_equal() -> None:
    def plain(level: int) -> Image.Image:
        return Image.new("RGB", (40, 40), (level, level, level))

    images = gathered(train=source_of(plain(0), plain(90), plain(91), plain(0), picture(0, 40)))
    pairs = find_copies(images, None, distance=20)
    assert list(zip(pairs.left.tolist(), pairs.right.tolist(), strict=True)) == [(0, 3)]


def test_images_that_cannot_be_read_are_listed_and_stay(tmp_path: Path) -> None:
    save(picture(0), tmp_path / "a/good.png")
    (tmp_path / "a/bad.png").write_bytes(b"nothing")
    (tmp_path / "a/bad too.png").write_bytes(b"nothing")
    images = gathered(train=open_path(str(tmp_path)).splits[""])
    pairs = find_copies(images, None)
    assert len(pairs) == 0 and staying(images, None, pairs).all()
    assert {(bad.id, bad.reason) for bad in images.bad} == {
        ("a/bad.png", "not-an-image"),
        ("a/bad too.png", "not-an-image"),
    }


def test_too_many_pairs_are_refused_and_so_is_an_impossible_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "MOST", 20)
    shades = [Image.fromarray(np.clip(as_array(picture(0)) // 2 + level, 0, 255)) for level in range(9)]
    images = gathered(train=source_of(*shades))
    with pytest.raises(DataError, match=r"more than 20 pairs.*at most 6 bits.*Choose a smaller distance"):
        find_copies(images, None)
    for distance in (-1, 32):
        with pytest.raises(UsageError, match="valid are 0"):
            find_copies(images, None, distance=distance)


def test_which_splits_are_trained_on_and_which_are_kept_apart() -> None:
    def found(*names: str) -> DataSet:
        return DataSet({name: source_of(picture(0)) for name in names}, Findings("arrays"))

    assert splits_to_clean(found("train", "extra", "val", "test")) == ["train", "extra"]
    assert splits_to_clean(found("")) == [""] and splits_to_clean(found("test")) == ["test"]
    assert split_apart(found("train", "dev", "testing")) == "testing"
    assert split_apart(found("train", "dev")) == "dev" and split_apart(found("")) == ""


# CIFAR-100


ALIKE = ((1544, 25359), (3328, 30749), (4999, 3127), (5383, 36978), (6024, 41856), (7205, 3485), (7443, 36558))
"""(test, train): the nearest pairs by their pixels, as an exhaustive search of both splits gives them, that are not
equal: at most 8 levels apart (root mean square), while the next nearest are 12 apart."""


@pytest.mark.full_size
def test_copies_in_cifar100(shared_data: Path) -> None:
    splits = open_path(str(shared_data / "cifar100")).splits
    stored = {splits["train"][index].image: index for index in range(len(splits["train"]))}
    same = [
        (index, stored[image])
        for index in range(len(splits["test"]))
        if (image := splits["test"][index].image) in stored
    ]
    assert len(same) == 10  # a property of the set
    for one, two in ALIKE:
        difference = decode(splits["test"][one].image) - decode(splits["train"][two].image).astype(float)
        assert 0 < np.sqrt((difference**2).mean()) < 8
    known = same + list(ALIKE)
    test = Subset(splits["test"], np.array([one for one, _ in known] + list(range(300))))
    train = Subset(splits["train"], np.array([two for _, two in known] + list(range(300))))
    found = find_copies(gathered(train=train), gathered(test=test))
    assert list(zip(found.left.tolist(), found.right.tolist(), strict=True)) == [(n, n) for n in range(len(known))]
    assert found.exact.tolist() == [True] * len(same) + [False] * len(ALIKE)
