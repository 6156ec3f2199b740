"""`vitrail data augment`: the pictures are the images that training gets, and each word's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail import cli
from vitrail.data.contact_sheet import SIDE
from vitrail.data.wording import MEANINGS
from vitrail.errors import DataError, UsageError
from vitrail.recipes.asked import Asked
from vitrail.training.batches import training_loader
from vitrail.verbs.data.augment import _decided, _groups, augment

TINY: dict[str, Any] = dict(
    model="Ti/4",
    vit=dict(width=16, depth=1, heads=2, mlp_dim=32),
    recipe="scratch-small",
    image_size=32,
    batch_size=6,
    workers=0,
    device="cpu",
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for number in range(12):
        folder = root / ("cat", "dog")[number % 2]
        folder.mkdir(exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (40, 50, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    return root


def test_what_is_drawn_is_what_training_gets(photos: Path) -> None:
    settings = {**TINY, "augment": {"also": ["rotate:20", "invert"]}}
    recipe = settings.pop("recipe")
    run, source = _decided(Asked(str(photos), recipe, (), None, None, None, settings))
    names, groups = _groups(run, source, len(source), 2)
    evaluation, training, rotated, inverted = groups
    assert [group.title for group in groups] == ["evaluation", "training", "rotate:20", "invert"]
    loader = training_loader(run, source)
    for epoch, column in enumerate(training.columns):
        seen = {}
        for batch in loader.epoch(epoch):
            seen |= {source.id(int(at)): image for at, image in zip(batch.index, batch.images, strict=True)}
        shown = 0
        for name, picture in zip(names, column, strict=True):
            if name in seen:  # the last batch of an epoch is not whole
                assert torch.equal(seen[name].permute(1, 2, 0), torch.from_numpy(picture))
                shown += 1
        assert shown >= 5
    # alone and always, on the picture of evaluation
    assert np.array_equal(255 - np.array(evaluation.columns[0]), np.array(inverted.columns[0]))
    assert len(inverted.columns) == 1 and inverted.note == "50% of images"
    assert len(rotated.columns) == 2 and rotated.note == ""
    assert not np.array_equal(rotated.columns[0][0], rotated.columns[1][0])


def test_the_title_speaks_of_columns(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr("vitrail.data.contact_sheet.write_columns", lambda file, title, groups: titles.append(title))
    augment(photos, out=tmp_path / "a.png", images=1, draws=1, **TINY)
    assert titles[0].startswith("Columns with a word show this change alone, ")


def test_the_whole_title_is_drawn_on_a_narrow_sheet(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[float, float, str]] = []
    monkeypatch.setattr(
        "PIL.ImageDraw.ImageDraw.text",
        lambda self, at, text, ink, font: drawn.append((at[1], at[0] + font.getlength(text), text)),
    )
    found = augment(photos, out=tmp_path / "a.png", images=2, draws=1, **TINY, augment={"also": ["invert"]})
    first = [text for _, _, text in drawn].index("evaluation")
    assert " ".join(text for _, _, text in drawn[:first]).endswith("From top to bottom: " + ", ".join(found.images))
    heights = [height for height, _, _ in drawn[: first + 1]]
    assert heights == sorted(set(heights)) and max(end for _, end, _ in drawn) <= Image.open(found.written).width


def test_every_word_is_drawn_if_none_is_asked_for(photos: Path, tmp_path: Path, capsys: Any) -> None:
    (photos / "cat" / "0.png").write_bytes(b"no image")  # the next one is drawn
    words = ["data", "augment", str(photos), "--recipe", "scratch-small", "--image-size", "32", "--device", "cpu"]
    assert cli.main([*words, "--images", "2", "--out", str(tmp_path / "all.png"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [word.partition(":")[0] for word in result["alone"]] == [*MEANINGS]
    assert len(result["images"]) == 2 and result["images"][0] != "cat/0.png"
    sheet = np.asarray(Image.open(result["written"]))
    assert sheet.shape[0] > 8 * SIDE and sheet.shape[1] > 12 * SIDE


def test_what_cannot_be_drawn_is_told(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contact sheets are PNG files"):
        augment(photos, out=tmp_path / "sheet.jpg", **TINY)
    with pytest.raises(DataError, match="within"):
        augment(photos, out=photos / "sheet.png", **TINY)
    with pytest.raises(UsageError, match="name their folder"):
        augment()
    with pytest.raises(UsageError, match="no word 'vflop'"):
        augment(photos, out=tmp_path / "sheet.png", **TINY, augment={"also": ["vflop"]})
    assert not (tmp_path / "sheet.png").exists()


def test_mixing_is_not_drawn_but_named(photos: Path, tmp_path: Path) -> None:
    found = augment(photos, out=tmp_path / "sheet.png", **TINY, augment={"also": ["vflip"], "mixup": 0.5})
    assert found.notes == ["mixup then mix the images of a batch, which is not drawn"]
