from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.copies import confirm
from vitrail.data.copies.confirm import SIDE, certainty, correlations, find_copies, pairs_sheet
from vitrail.data.copies.dedup import HashedImages, candidates, hashed
from vitrail.data.sources.open import open_path
from vitrail.errors import UsageError

NOTHING = np.zeros((SIDE, SIDE), np.float32)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def picture(number: int, cells: int = 12) -> Image.Image:
    noise = np.random.default_rng(number).integers(0, 256, (cells, cells), dtype=np.uint8)
    return Image.fromarray(noise).resize((256, 256), Image.Resampling.BICUBIC)


def scan(number: int) -> Image.Image:
    """A dark body, the same in all scans, with a faint picture as its tissue."""
    body, tissue = (np.asarray(picture(one), np.float64) for one in (99, number))
    return Image.fromarray((10 + 0.2 * body + 0.04 * tissue).astype(np.uint8))


def small(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("F").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def compared(pairs: list[tuple[Image.Image, Image.Image]], common: np.ndarray = NOTHING) -> list[float]:
    left, right = (np.stack([small(pair[place]) for pair in pairs]) for place in (0, 1))
    return correlations(left, right, common, np.full(len(pairs), SIDE)).tolist()


def test_crops_lie_over_their_original_in_both_directions_and_others_do_not() -> None:
    one, other = picture(1), picture(2)
    corner, middle, wide = (one.crop(box) for box in ((0, 0, 230, 230), (26, 26, 230, 230), (0, 20, 256, 236)))
    same = [(crop, one) for crop in (corner, middle, wide)] + [(one, crop) for crop in (corner, middle, wide)]
    assert min(compared(same)) > 0.95
    paler = one.point(lambda value: round(60 + 0.3 * value))
    assert compared([(paler, one)])[0] > 0.99
    assert max(compared([(other, one), (other, corner), (one.transpose(Image.Transpose.FLIP_LEFT_RIGHT), one)])) < 0.6


def test_what_all_images_share_does_not_count() -> None:
    scans = [scan(number) for number in range(8)]
    different = [(scans[number], scans[number - 1]) for number in range(8)]
    copies = [(image.resize((100, 100), Image.Resampling.BILINEAR), image) for image in scans]
    common = np.mean([small(image) for image in scans], axis=0, dtype=np.float32)
    assert min(compared(different)) > 0.8  # the same body
    assert max(compared(different, common)) < 0.5 and min(compared(copies, common)) > 0.9


def test_a_flat_picture_and_one_that_is_not_there_are_like_nothing() -> None:
    flat, gone = np.full((SIDE, SIDE), 7, np.float32), np.full((SIDE, SIDE), np.nan, np.float32)
    one = small(picture(1))
    found = correlations(np.stack([flat, one, gone, one]), np.stack([flat, flat, one, one]), NOTHING, np.full(4, SIDE))
    assert np.abs(found[:2]).max() < 0.1 and np.isnan(found[2]) and found[3] > 0.99


def test_a_copy_of_a_quarter_of_the_size_is_compared_at_its_own_size() -> None:
    one, other = picture(1, cells=24), picture(2, cells=24)
    tiny = [image.resize((16, 16), Image.Resampling.BOX) for image in (one, other)]
    left, right = np.stack([small(image) for image in tiny]), np.stack([small(one)] * 2)
    same, different = correlations(left, right, NOTHING, np.array([16, 16]))
    assert same > 0.9 and different < 0.5
    assert correlations(left, right, NOTHING, np.array([SIDE, SIDE]))[0] < 0.75


def test_certain_is_a_correlation_with_few_pairs_below_it() -> None:
    copies = np.full(100, 0.9995)
    assert certainty(copies) == certainty(np.append(copies, [0.85, 0.9, np.nan])) == 0.97
    neighbours = np.linspace(0.8, 0.975, 200)  # as slices of a scan are
    assert certainty(np.append(copies, neighbours)) == 0.98
    assert certainty(np.append(copies[:3], neighbours)) == 0.99
    assert certainty(np.array([0.971, 0.966])) > 0.971  # two slices of a few: nothing tells them from copies
    exposures = np.linspace(0.9, 0.9999, 2000)  # one tile in several photographs: more and more pairs up to 1
    assert certainty(exposures) == np.inf


def scans_with_copies(root: Path) -> HashedImages:
    (root / "a").mkdir(parents=True)
    for number in range(12):
        scan(number).save(root / "a" / f"{number:02}.png")
    for number in range(3):
        scan(number).resize((200, 200), Image.Resampling.BICUBIC).save(root / "a" / f"{number:02} small.png")
    scan(3).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(root / "a" / "03 mirrored.png")
    found = open_path(str(root), labels=False)
    return HashedImages(hashed(str(root), found, found.splits))


@pytest.mark.full_size
def test_scans_of_one_kind_are_candidates_and_only_copies_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = scans_with_copies(tmp_path / "scans")
    near = candidates(images, None, distance=10, mirrored=True)
    assert len(near) > 20 and np.isnan(near.correlation).all()
    told: list[tuple[int, int]] = []
    pairs = find_copies(images, None, distance=10, mirrored=True, workers=2, progress=lambda *done: told.append(done))
    names = [(images.name(int(i)).id, images.name(int(j)).id) for i, j in zip(pairs.left, pairs.right, strict=True)]
    small = [(f"a/0{number} small.png", f"a/0{number}.png") for number in range(3)]
    assert sorted(names) == [*small, ("a/03 mirrored.png", "a/03.png")]
    assert pairs.mirrored.tolist().count(True) == 1 and (pairs.correlation >= confirm.CORRELATION).all()
    assert told[-1] == (len(near), len(near))
    (tmp_path / "scans" / "a" / "00.png").unlink()
    monkeypatch.setattr(confirm, "PAIRS", 7)  # in many parts
    again = find_copies(images, None, distance=2, mirrored=True)
    assert len(again) == 3  # an image that is gone is no copy
    np.testing.assert_allclose(again.correlation, pairs.correlation[1:], atol=1e-3)
    pairs_sheet(tmp_path / "sheet.png", images, images, pairs)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG" and sheet.width > 800
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        pairs_sheet(tmp_path / "file" / "sheet.png", images, images, pairs)


def test_many_copies_of_one_picture_are_not_what_all_images_share(tmp_path: Path) -> None:
    root = tmp_path / "copies" / "a"
    root.mkdir(parents=True)
    for number in range(6):
        picture(0).save(root / f"{number}.jpg", quality=40 + 10 * number)
    picture(1).save(root / "other.png")
    for most in (6, 7):  # copies alone, and with another picture
        found = open_path(str(tmp_path / "copies"), labels=False)
        images = HashedImages(hashed("d", found, found.splits))
        assert len(find_copies(images, None)) == 15, most
        (root / "other.png").unlink(missing_ok=True)
