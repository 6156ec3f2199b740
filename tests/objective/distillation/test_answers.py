"""A teacher's outputs that are kept in a file: the same numbers, asked once, whatever happens to the file."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.data.settings import Augment
from vitrail.objective.distillation import CHECKSUM, TeacherAnswers

WIDTH = 3


class Asked:
    """Answers with three sums of an image, and counts the images that it is asked about."""

    def __init__(self) -> None:
        self.images = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.images += len(images)
        flat = images.flatten(1).long()  # whole numbers, so that the sums do not depend on the size of the batch
        places = torch.arange(flat.shape[1])
        return torch.stack([flat.sum(1), (flat * places).sum(1), (flat * (places % 5)).sum(1)], dim=1).float()


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 4, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_each_image_is_asked_about_once_and_in_a_later_run_not_at_all(tmp_path: Path) -> None:
    pixels, ask = images(10), Asked()
    answers, expected = TeacherAnswers(tmp_path / "deep" / "rows", WIDTH), Asked()(pixels)
    for order in (torch.arange(6), torch.tensor([9, 0, 3, 8, 7, 6]), torch.randperm(10), torch.tensor([4, 4])):
        assert torch.equal(answers(pixels[order], order, ask), expected[order])
    assert ask.images == 10
    assert (
        torch.equal(TeacherAnswers(answers.path, WIDTH)(pixels, torch.arange(10), ask), expected) and ask.images == 10
    )


def test_a_row_of_other_pixels_is_not_used(tmp_path: Path) -> None:
    before, now, ask = images(5), images(5, seed=1), Asked()
    now[2] = before[2]
    answers, index = TeacherAnswers(tmp_path / "rows", WIDTH), torch.arange(5)
    answers(before, index, ask)
    assert torch.equal(answers(now, index, ask), Asked()(now)) and ask.images == 5 + 4


@pytest.mark.parametrize("damage", ["checksum", "values", "cut", "empty"])
def test_damaged_rows_are_asked_about_again(tmp_path: Path, damage: str) -> None:
    pixels, ask, index = images(4), Asked(), torch.arange(4)
    answers = TeacherAnswers(tmp_path / "rows", WIDTH)
    expected = answers(pixels, index, ask)
    stored = bytearray(answers.path.read_bytes())
    size = CHECKSUM + 4 * WIDTH
    assert len(stored) == 4 * size
    lost = {"checksum": 1, "values": 1, "cut": 2, "empty": 4}[damage]
    if damage in ("checksum", "values"):
        stored[size + (2 if damage == "checksum" else CHECKSUM + 2)] ^= 1
    else:
        del stored[2 * size + 5 if damage == "cut" else 0 :]
    answers.path.write_bytes(stored)
    assert torch.equal(answers(pixels, index, ask), expected) and ask.images == 4 + lost
    assert torch.equal(answers(pixels, index, ask), expected) and ask.images == 4 + lost


def test_without_a_place_to_write_every_image_is_asked_about_and_a_warning_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    answers, ask, pixels = TeacherAnswers(tmp_path / "file" / "rows", WIDTH), Asked(), images(4)
    for _ in range(2):
        assert torch.equal(answers(pixels, torch.arange(4), ask), Asked()(pixels))
    assert ask.images == 8
    [record] = caplog.records
    assert record.message.startswith(f"cannot keep the teacher's outputs in {answers.path}: ")
    assert record.message.endswith("to a folder that can be written to keep them")


def test_a_full_disk_ends_the_keeping_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ask, pixels = TeacherAnswers(tmp_path / "rows", WIDTH), Asked(), images(4)
    answers(pixels[:2], torch.arange(2), ask)
    opened = Path.open

    def full(self: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "r+b":
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return opened(self, mode, **options)

    monkeypatch.setattr(Path, "open", full)
    assert torch.equal(answers(pixels, torch.arange(4), ask), Asked()(pixels)) and ask.images == 4
    assert torch.equal(answers(pixels, torch.arange(4), ask), Asked()(pixels)) and ask.images == 8
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("changes", "random"),
    [
        ({}, False),
        ({"repeats": 3, "scale": (0.3, 1.0)}, False),
        ({"crop": "pad"}, True),
        ({"flip": True}, True),
        ({"mixup": 0.1}, True),
        ({"cutmix": 0.1}, True),
        ({"erasing": 0.1}, True),
        ({"color_jitter": 0.1}, True),
        ({"three_augment": True}, True),
        ({"randaugment": (2, 5.0)}, True),
    ],
)
def test_which_augmentation_is_random(changes: Any, random: bool) -> None:
    assert Augment(**{"crop": "center", "flip": False, **changes}).random is random
    assert Augment().random
