from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.copies.dedup import HashedImages, Pairs, candidates, hashed
from vitrail.data.settings import Preprocess
from vitrail.data.sources.open import open_path
from vitrail.errors import WeightsError
from vitrail.evaluation import duplicates
from vitrail.evaluation.duplicates import cosines
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.card import Card

SIZE = (24, 16)


def network() -> ViT:
    torch.manual_seed(0)
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=8, image_size=SIZE, classes=3)
    model = build(config)
    assert isinstance(model, ViT)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.card = Card(config, ["a", "b", "c"], Preprocess(SIZE, resize="squash"))
    return model.eval()


def picture(number: int) -> Image.Image:
    noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((60, 60), Image.Resampling.BICUBIC)


def write(root: Path, *numbers: int) -> Path:
    (root / "a").mkdir(parents=True)
    (root / "b").mkdir()
    for number in numbers:
        picture(number).resize(SIZE[::-1], Image.Resampling.BILINEAR).save(root / "ab"[number % 2] / f"{number}.png")
    return root


def gathered(*places: Path) -> HashedImages:
    return HashedImages([part for place in places for part in hashed(str(place), open_path(str(place)), [""])])


def seen(model: ViT, image: np.ndarray) -> np.ndarray:
    """What the classifier of `model` is given for one image, in float64."""
    found: list[torch.Tensor] = []
    handle = model.head.register_forward_hook(lambda module, inputs, output: found.append(inputs[0]))
    with torch.no_grad():
        model(torch.from_numpy(image).permute(2, 0, 1)[None])
    handle.remove()
    return found[0][0].double().numpy()


def pairs_of(left: list[int], right: list[int], mirrored: list[bool]) -> Pairs:
    count = len(left)
    flags, unknown = (np.zeros(count, bool), np.array(mirrored)), np.full(count, np.nan, np.float32)
    return Pairs(
        np.array(left), np.array(right), np.zeros(count, np.uint8), unknown, *flags, unknown, np.ones(count, bool)
    )


@pytest.mark.full_size
@pytest.mark.parametrize(("at_a_time", "workers"), [(1 << 14, 0), (2, 2)])
def test_cosines_are_those_of_what_the_classifier_sees(
    tmp_path: Path, at_a_time: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "PAIRS", at_a_time)
    model = network()
    left = gathered(write(tmp_path / "l", 0, 1, 2, 3))
    right = gathered(write(tmp_path / "m", 10, 11), write(tmp_path / "n", 12, 13, 14))
    pairs = pairs_of([3, 0, 0, 2, 3, 1], [0, 4, 4, 1, 3, 2], [False, False, True, False, True, False])
    told: list[tuple[int, int]] = []
    found = cosines(
        model, left, right, pairs,
        batch_size=2, workers=workers, device="cpu", precision="float32",
        progress=lambda *done: told.append(done),
    )  # fmt: skip
    assert found.dtype == np.float32 and told[-1] == (6, 6)
    for place in range(6):
        one, two = (
            np.asarray(Image.open(Path(name.data) / name.id))
            for name in (left.name(int(pairs.left[place])), right.name(int(pairs.right[place])))
        )
        a, b = seen(model, one.copy()), seen(model, two[:, ::-1].copy() if pairs.mirrored[place] else two.copy())
        assert found[place] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-5)


def test_each_image_is_read_once_for_all_its_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    images = gathered(write(tmp_path / "l", *range(5)))
    source, read = images.parts[0].source, []
    inner = type(source).__getitem__
    monkeypatch.setattr(type(source), "__getitem__", lambda self, index: read.append(index) or inner(self, index))
    pairs = pairs_of([0, 0, 0, 0], [1, 2, 3, 3], [False] * 4)
    found = cosines(model, images, images, pairs, device="cpu")
    assert sorted(read) == [0, 1, 2, 3] and found[2] == found[3]


def test_a_network_tells_pictures_apart_that_hashes_do_not(tmp_path: Path) -> None:
    """The same layout in other colours: grey hashes cannot see it."""
    root = tmp_path / "d"
    (root / "a").mkdir(parents=True)
    for number in range(3):
        pixels = np.asarray(picture(number).convert("L"))
        red = np.stack([pixels, pixels // 4, pixels // 4], axis=2)
        Image.fromarray(red).save(root / "a" / f"{number} red.png")
        Image.fromarray(red).resize((50, 50)).save(root / "a" / f"{number} red small.png")
        Image.fromarray(red[:, :, ::-1]).save(root / "a" / f"{number} blue.png")
    images = gathered(root)
    pairs = candidates(images, None)
    assert len(pairs) == 9
    found = cosines(network(), images, images, pairs, device="cpu")
    kept = pairs.confirmed(found, 0.999)
    names = [(images.name(int(i)).id, images.name(int(j)).id) for i, j in zip(kept.left, kept.right, strict=True)]
    assert sorted(names) == [(f"a/{n} red small.png", f"a/{n} red.png") for n in range(3)]
    assert (kept.cosine > 0.999).all()
    everything = pairs.confirmed(found, 0.0)
    assert len(everything) >= len(kept)
    exact = replace(pairs, exact=np.ones(9, bool))
    assert len(exact.confirmed(np.full(9, -1, np.float32), 0.99)) == 9  # the same bytes need no confirmation


def test_an_image_that_is_gone_confirms_nothing(tmp_path: Path) -> None:
    images = gathered(write(tmp_path / "l", *range(4)))
    (tmp_path / "l" / images.name(1).id).unlink()
    pairs = pairs_of([0, 0], [1, 2], [False, False])
    found = cosines(network(), images, images, pairs, device="cpu")
    assert np.isnan(found).tolist() == [True, False]
    assert pairs.confirmed(found, 1e-9).right.tolist() in ([2], [])


def test_a_model_without_a_card_is_refused(tmp_path: Path) -> None:
    model = network()
    model.card = None
    images = gathered(write(tmp_path / "l", 0, 1))
    with pytest.raises(WeightsError, match="no card"):
        cosines(model, images, images, pairs_of([0], [1], [False]))
