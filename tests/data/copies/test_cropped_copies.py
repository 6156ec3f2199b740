"""Copies that are a part of the picture: found by the hashes of windows, and confirmed by their pixels."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import scipy.fft
from PIL import Image
from sklearn.datasets import load_sample_images

from vitrail.cli import main
from vitrail.data.copies import hashes as hashing
from vitrail.data.copies.confirm import find_copies
from vitrail.data.copies.dedup import HashedImages, Pairs, candidates, hashed
from vitrail.data.copies.hashes import NOTHING, SCALES, WINDOW_SIDE, WINDOWS, hash_windows, near_windows, windows_of
from vitrail.data.item import DataSet, Findings, Subset
from vitrail.data.sources.arrays import ArraySource
from vitrail.errors import DecodeError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def photographs() -> list[Image.Image]:
    """Twelve different parts of scikit-learn's two photographs."""
    found = []
    for pixels in load_sample_images().images:
        found += [pixels[y : y + 200, x : x + 200] for y in (0, 220) for x in (0, 210, 420)]
    return [Image.fromarray(one) for one in found]


def cropped(image: Image.Image, share: float, left: float, top: float) -> Image.Image:
    """Return the image without `share` of its sides; `left` and `top` say how much of that is taken off there."""
    width, height = (side * (1 - share) for side in image.size)
    x, y = (image.width - width) * left, (image.height - height) * top
    return image.resize((round(width), round(height)), Image.Resampling.BICUBIC, box=(x, y, x + width, y + height))


def images_of(*images: Image.Image, name: str = "s") -> HashedImages:
    pixels = np.stack([np.asarray(image.convert("RGB").resize((160, 160))) for image in images])
    source = ArraySource(f"{name}-{pixels.sum()}", pixels, np.zeros(len(pixels), np.int64), ["a", "b"])
    return HashedImages(hashed("d", DataSet({"": source}, Findings("arrays")), [""]))


def pairs_of(pairs: Pairs) -> set[tuple[int, int]]:
    return set(zip(pairs.left.tolist(), pairs.right.tolist(), strict=True))


@pytest.mark.full_size
def test_the_hash_of_a_window_is_the_textbook_s_of_its_pixels() -> None:
    """On a grid of finer pixels, a window is a picture of its own, with scipy's transform of it."""
    small = np.asarray(photographs()[0].convert("L").resize((WINDOW_SIDE, WINDOW_SIDE), Image.Resampling.BILINEAR))
    hashes = hash_windows(small[None])[0]
    assert hashes.shape == (WINDOWS,) and len(set(hashes.tolist())) > WINDOWS // 2
    number = 0
    for scale in SCALES:
        begins = np.linspace(0, 1 - scale, round(np.ceil((1 - scale) / hashing.STEP)) + 1)
        for top in begins:
            for left in begins:
                box = [round(40 * WINDOW_SIDE * edge) for edge in (left, top, left + scale, top + scale)]
                fine = small.repeat(40, axis=0).repeat(40, axis=1)[box[1] : box[3], box[0] : box[2]].astype(np.float64)
                if number % 9 == 0:  # a ninth of them, for time
                    low = scipy.fft.dctn(fine, type=2, norm="ortho")[:8, :8]
                    bits = np.packbits((low > np.median(low)).ravel()).view(np.uint64)[0]
                    assert np.bitwise_count(bits ^ hashes[number]) <= 4
                number += 1
    assert number == WINDOWS


@pytest.mark.full_size
@pytest.mark.parametrize("mirrored", [False, True])
def test_most_crops_are_found_in_either_set_and_nothing_else(mirrored: bool) -> None:
    """Some parts of the two photographs are sky or leaves, whose hashes change with every pixel: not all are found."""
    originals, random, parts, true = photographs(), np.random.default_rng(0), [], set()
    for number, share in itertools.product(range(12), (0.05, 0.1, 0.15, 0.2)):
        one = originals[number].transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else originals[number]
        true.add((number, len(parts)))
        parts.append(cropped(one, share, *random.uniform(size=2)))
    every, crops_of_them = images_of(*originals), images_of(*parts, name="crops")
    whole = pairs_of(candidates(every, crops_of_them, distance=10, mirrored=mirrored))
    found = pairs_of(find_copies(every, crops_of_them, distance=10, mirrored=mirrored, crops=True))
    assert found <= true and len(found) > 0.8 * len(true) and len(whole & true) < 0.3 * len(true)
    turned = pairs_of(find_copies(crops_of_them, every, distance=10, mirrored=mirrored, crops=True))
    assert {(b, a) for a, b in turned} <= true and len(turned) > 0.8 * len(true)


def test_crops_within_one_set_come_once_with_the_earlier_image_first() -> None:
    originals = photographs()
    everything = images_of(*originals, cropped(originals[2], 0.15, 0.2, 0.7), cropped(originals[5], 0.1, 1, 0))
    assert pairs_of(find_copies(everything, None)) == set()
    found = find_copies(everything, None, crops=True)
    assert list(zip(found.left.tolist(), found.right.tolist(), strict=True)) == [(2, 12), (5, 13)]
    assert (found.correlation > 0.8).all() and not found.exact.any()


def test_windows_of_one_colour_and_images_that_cannot_be_read_are_like_nothing() -> None:
    half = np.zeros((WINDOW_SIDE, WINDOW_SIDE), np.uint8)
    half[-4:] = np.arange(WINDOW_SIDE) * 4  # only windows at the lower edge have something in them
    hashes = hash_windows(np.stack([half, np.full((WINDOW_SIDE, WINDOW_SIDE), 90, np.uint8)]))
    assert (hashes[1] == NOTHING).all() and (hashes[0] == NOTHING).any() and (hashes[0] != NOTHING).any()
    found = list(near_windows(hashes, np.zeros(3, np.uint64), 31))
    assert all((i == 0).all() for i, _, _ in found)


def test_a_second_search_reads_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    images = images_of(*photographs())
    (part,) = images.parts
    first = windows_of(part.source, workers=2)
    monkeypatch.setattr(hashing, "picture", None)
    np.testing.assert_array_equal(windows_of(part.source), first)
    with pytest.raises(TypeError):  # other images do not come from the cache
        windows_of(Subset(part.source, np.array([3, 1])))


@pytest.mark.parametrize(("reason", "read_again"), [("unreadable", True), ("corrupt", False)])
def test_an_image_that_the_disk_could_not_read_is_read_again(
    reason: str, read_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = images_of(*photographs())
    source = images.parts[0].source
    monkeypatch.setenv("VITRAIL_CACHE", f"{os.environ['VITRAIL_CACHE']}/whole")
    whole = windows_of(source)
    monkeypatch.setenv("VITRAIL_CACHE", f"{os.environ['VITRAIL_CACHE']}/broken")
    numbers = itertools.count()
    picture = hashing.picture

    def failing(stored: bytes | np.ndarray, short_side: int) -> np.ndarray:
        if next(numbers) == 3:
            raise DecodeError("Input/output error", reason=reason)
        return picture(stored, short_side=short_side)

    monkeypatch.setattr(hashing, "picture", failing)
    for expected in (False, read_again):
        found = windows_of(source)
        assert (found[3] != NOTHING).any() == expected
    np.testing.assert_array_equal(found if read_again else found[4:], whole if read_again else whole[4:])


def test_the_verb_finds_crops_if_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    originals = photographs()
    for number, image in enumerate(originals):
        (tmp_path / "photos" / "a").mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "photos" / "a" / f"{number:02}.png")
    cropped(originals[7], 0.12, 0.5, 0.5).save(tmp_path / "photos" / "a" / "crop.jpg", quality=90)
    found = []
    for flags in ([], ["--crops"]):
        assert main(["data", "dedup", str(tmp_path / "photos"), "--json", *flags]) in (0, None)
        result = json.loads(capsys.readouterr().out)
        found.append([(pair["id"], pair["other_id"]) for pair in result["pairs"]])
    assert found == [[], [("a/07.png", "a/crop.jpg")]]
