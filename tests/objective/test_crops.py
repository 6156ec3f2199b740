"""Multi-crop: what is drawn, against its distribution and bounds; what is cut and changed, against Pillow, torchvision
and SciPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from masked_cases import images
from PIL import Image, ImageOps
from scipy import stats

from vitrail.objective import crops
from vitrail.objective.crops import cut, draw_crops
from vitrail.objective.settings import DINO

CONFIG = DINO(local_crops=6)
SQUARE = (64, 64)


def drawn(count: int = 200, size: tuple[int, int] = SQUARE, config: DINO = CONFIG, step: int = 3) -> np.ndarray:
    return draw_crops(7, step, list(range(count)), size, config, flip=True)


@pytest.mark.parametrize("size", [SQUARE, (40, 100), (100, 40)])
def test_boxes_have_the_areas_and_shapes_asked_for(size: tuple[int, int]) -> None:
    rows, columns = size
    found = drawn(size=size).astype(np.float64)
    top, left, height, width = found[..., :4].transpose(2, 0, 1)
    assert min(top.min(), left.min()) >= 0 and max((top + height).max(), (left + width).max()) <= 1 + 1e-6
    ratio = width * columns / (height * rows)
    assert ratio.min() >= 3 / 4 - 1e-5 and ratio.max() <= 4 / 3 + 1e-5
    area = height * width
    for part, (low, high) in ((area[:, :2], CONFIG.global_scale), (area[:, 2:], CONFIG.local_scale)):
        fits = np.abs(part - 1) > 0  # where no box of ten fits, a large one has the largest permitted area instead
        assert part[fits].max() <= high + 1e-6
        if size == SQUARE:
            assert part.min() >= low - 1e-6
    local = area[:, 2:].ravel()  # always fits at once: uniform
    if size == SQUARE:
        assert stats.kstest(local, stats.uniform(0.05, 0.35).cdf).pvalue > 1e-3
        assert stats.kstest((top / (1 - height))[:, 2:].ravel(), "uniform").pvalue > 1e-3
        logs = np.log(ratio[:, 2:].ravel())
        assert stats.kstest(logs, stats.uniform(-np.log(4 / 3), 2 * np.log(4 / 3)).cdf).pvalue > 1e-3


def test_where_no_box_fits_it_is_the_largest_permitted() -> None:
    """A strip ten times as wide as high has no part of 90 % of it with a ratio up to 4 to 3."""
    found = drawn(20, (10, 100), replace(CONFIG, global_scale=(0.9, 1.0)))
    np.testing.assert_allclose(
        found[:, :2, :4], np.broadcast_to([0, (1 - 2 / 15) / 2, 1, 2 / 15], (20, 2, 4)), atol=1e-6
    )


def test_crops_are_a_function_of_seed_step_and_image() -> None:
    whole = draw_crops(7, 3, [4, 9, 2, 5], SQUARE, CONFIG, flip=True)
    np.testing.assert_array_equal(draw_crops(7, 3, [2, 4], SQUARE, CONFIG, flip=True), whole[[2, 0]])
    fewer = draw_crops(7, 3, [4, 9, 2, 5], SQUARE, replace(CONFIG, local_crops=2), flip=True)
    np.testing.assert_array_equal(fewer, whole[:, :4])  # more crops change none of the others
    for other in (draw_crops(8, 3, [4], SQUARE, CONFIG, flip=True), draw_crops(7, 4, [4], SQUARE, CONFIG, flip=True)):
        assert np.abs(other[..., :4] - whole[:1, :, :4]).min() > 0


def test_how_often_crops_are_changed_is_the_papers() -> None:
    found = drawn(2000)
    close = dict(abs=4 * 0.5 / np.sqrt(2000))
    assert (found[:, 0, crops.BLUR] > 0).all()
    assert (found[:, 1, crops.BLUR] > 0).mean() == pytest.approx(0.1, **close)
    assert (found[:, 2:, crops.BLUR] > 0).mean() == pytest.approx(0.5, **close)
    blurs = found[:, 0, crops.BLUR]
    assert blurs.min() >= 0.1 - 1e-6 and blurs.max() <= 2.0 and blurs.mean() == pytest.approx(1.05, abs=0.05)
    assert not found[:, [0, *range(2, 8)], crops.SOLARISE].any()
    assert found[:, 1, crops.SOLARISE].mean() == pytest.approx(0.2, **close)
    assert found[..., crops.GREY].mean() == pytest.approx(0.2, **close)
    assert found[..., crops.FLIP].mean() == pytest.approx(0.5, **close)
    for column, most in zip(
        (crops.BRIGHTNESS, crops.CONTRAST, crops.SATURATION, crops.HUE), crops.FACTORS, strict=True
    ):
        values = found[..., column] - (column != crops.HUE)
        assert (values != 0).mean() == pytest.approx(0.8, **close)
        assert stats.kstest(values[values != 0], stats.uniform(-most, 2 * most).cdf).pvalue > 1e-3
    plain = drawn(50, config=replace(CONFIG, jitter=0.0, blur=0.0))
    assert not plain[..., [crops.HUE, crops.GREY, crops.BLUR, crops.SOLARISE]].any()
    assert (plain[..., [crops.BRIGHTNESS, crops.CONTRAST, crops.SATURATION]] == 1).all()
    assert not draw_crops(7, 3, [1, 2], SQUARE, CONFIG, flip=False)[..., crops.FLIP].any()
    orders = {float(draw_crops(7, step, [1], SQUARE, CONFIG, flip=True)[0, 0, crops.ORDER]) for step in range(100)}
    assert len(orders) > 20 and min(orders) >= 0 and max(orders) <= 23
    assert len({*found[..., crops.ORDER].ravel()}) == 1


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize("size", [(24, 24), (16, 12), (80, 80)])
def test_a_crop_is_pillows_resize_of_a_box(cubic: bool, size: tuple[int, int]) -> None:
    pictures = images(2, 48)[:, :, :40]  # 40 x 48
    what = torch.from_numpy(draw_crops(1, 0, [0, 1], (40, 48), CONFIG, flip=True))
    found = cut(pictures, what, size, cubic=cubic)
    assert found.shape == (2, 8, 3, *size) and found.dtype == torch.float32
    how = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    for picture, boxes, ours in zip(pictures, what.double().numpy(), found, strict=True):
        for box, crop in zip(boxes, ours, strict=True):
            top, left, height, width = box[:4] * (40, 48, 40, 48)
            place = (left, top, min(left + width, 48), min(top + height, 40))
            for channel, seen in zip(picture.float().numpy(), crop.numpy(), strict=True):
                theirs = Image.fromarray(channel).resize(size[::-1], how, box=place)  # of floats: it rounds nothing
                theirs = ImageOps.mirror(theirs) if box[crops.FLIP] else theirs
                np.testing.assert_allclose(seen, np.clip(np.asarray(theirs), 0, 255), atol=0.02)


def test_changes_of_colour_are_torchvisions() -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    pictures = images(6, 16, seed=3)
    pictures[0] = 77  # grey, where a hue is not defined
    pictures[1, 1:] = 0
    floats = pictures.float()
    factors = torch.tensor([0.6, 0.8, 1.0, 1.2, 1.4, 1.1])
    turns = torch.tensor([0.1, -0.1, 0.0, 0.05, -0.03, 0.08])
    for ours, theirs, strengths in (
        (crops.brightness, functional.adjust_brightness, factors),
        (crops.contrast, functional.adjust_contrast, factors),
        (crops.saturation, functional.adjust_saturation, factors),
        (crops.hue, functional.adjust_hue, turns),
    ):
        found = ours(floats, strengths) / 255
        for picture, strength, seen in zip(floats / 255, strengths.tolist(), found, strict=True):
            torch.testing.assert_close(
                seen, theirs(picture, strength), rtol=0, atol=2e-3
            )  # their grey: .2989 .587 .114


def test_solarisation_and_grey_are_pillows() -> None:
    pictures = images(3, 16)
    solar = crops.solarise(pictures.float(), torch.tensor([1.0, 0.0, 1.0]))
    for picture, ours, share in zip(pictures, solar, (1, 0, 1), strict=True):
        theirs = ImageOps.solarize(Image.fromarray(picture.permute(1, 2, 0).numpy()), 128 if share else 256)
        np.testing.assert_array_equal(ours.permute(1, 2, 0).numpy(), np.asarray(theirs))
    luma = crops.grey(pictures.float())[:, 0].numpy()
    theirs = np.stack([np.asarray(Image.fromarray(p.permute(1, 2, 0).numpy()).convert("L")) for p in pictures])
    assert np.abs(luma - theirs).max() <= 0.51


def test_a_blur_is_gaussian() -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    pictures = images(3, 20).float()
    deviations = torch.tensor([0.7, 0.0, 1.9])
    found = crops.blur(pictures, deviations).numpy()
    np.testing.assert_array_equal(found[1], pictures[1].numpy())
    ones = np.pad(np.ones((20, 20)), 12)
    for index in (0, 2):
        blurred = [
            ndimage.gaussian_filter(np.pad(channel, 12), float(deviations[index]), truncate=6.0)[12:-12, 12:-12]
            for channel in pictures[index].numpy().astype(np.float64)
        ]
        weight = ndimage.gaussian_filter(ones, float(deviations[index]), truncate=6.0)[12:-12, 12:-12]
        np.testing.assert_allclose(found[index], np.stack(blurred) / weight, atol=2e-3)


def test_changes_come_in_the_order_drawn_and_each_picture_has_its_own() -> None:
    pictures = images(2, 8).float()
    drawn, order, other = torch.zeros(2, crops.ORDER + 1), crops.ORDERS[0], crops.ORDERS[6]
    assert order[:2] == (0, 1) and other[:2] == (1, 0)  # brightness before contrast, and after it
    drawn[:, [crops.BRIGHTNESS, crops.CONTRAST, crops.SATURATION]] = 1.0
    torch.testing.assert_close(crops.recolour(pictures, drawn, order), pictures, rtol=0, atol=1e-3)
    drawn[0, crops.BRIGHTNESS], drawn[0, crops.CONTRAST] = 1.4, 0.6
    first = crops.recolour(pictures, drawn, order)
    expected = crops.contrast(crops.brightness(pictures, drawn[:, crops.BRIGHTNESS]), drawn[:, crops.CONTRAST])
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(first[1], pictures[1], rtol=0, atol=1e-3)
    assert (crops.recolour(pictures, drawn, other)[0] - first[0]).abs().max() > 1
    drawn[:, crops.GREY] = 1
    one = crops.recolour(pictures, drawn, order)
    assert (one[:, 0] - one[:, 2]).abs().max() < 1e-3
