"""The walk from the command to the loss: five files, seven calls; and data that are opened once."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail import cli
from vitrail.data.sources import open as opening
from vitrail.objective.supervised import SupervisedObjective

ROOT = Path(vitrail.__file__).parent
TINY = ("--duration", "1 steps", "--schedule.warmup", "0 steps", "--vit.width", "16", "--vit.depth", "1")
SMALL = (
    *TINY,
    "--vit.heads",
    "2",
    "--vit.mlp-dim",
    "16",
    "--device",
    "cpu",
    "--workers",
    "0",
    "--average.kind",
    "none",
)


@pytest.mark.train
def test_from_the_command_to_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is each Python function of ours between `cli.main` and the objective's loss, both included."""
    loss = SupervisedObjective.loss
    walks: list[list[tuple[str, str]]] = []

    def watched(self: SupervisedObjective, prepared: Any) -> Any:
        frames = inspect.stack()[1:]
        ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)]
        walks.append([(str(Path(frame.filename).relative_to(ROOT)), frame.function) for frame in reversed(ours)])
        return loss(self, prepared)

    monkeypatch.setattr(SupervisedObjective, "loss", watched)
    words = ("train", "digits", "--recipe", "digits", "--accumulate", "1", "--out", str(tmp_path), *SMALL)
    assert cli.main([*words, "--quiet"]) == 0
    here = (str(Path(inspect.getfile(SupervisedObjective)).relative_to(ROOT)), "loss")
    walk = [*walks[0], here]
    assert walk[0] == ("cli.py", "main")
    assert len(walk) == 7, walk
    assert len({file for file, _ in walk}) == 5, walk


@pytest.mark.train
@pytest.mark.page
@pytest.mark.parametrize("dry", [True, False])
def test_data_are_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry: bool) -> None:
    """The recipe is chosen by a look at the images; the same images are then trained on."""
    opened: list[str] = []
    find = opening.open_path

    def counting(path: str, *columns: Any, **options: Any) -> Any:
        opened.append(path)
        return find(path, *columns, **options)

    monkeypatch.setattr(opening, "open_path", counting)
    words = ["train", "digits", "--out", str(tmp_path), *SMALL, "--quiet"]
    assert cli.main([*words, "--dry-run"] if dry else words) == 0
    assert opened.count("digits") == 1 + (not dry), opened  # the report opens them again: it can be written alone
