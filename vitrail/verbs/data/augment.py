"""`vitrail data augment`: a picture of what training does to images, and of each augmentation in words alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from vitrail.config import plain
from vitrail.data.wording import Worded, vocabulary
from vitrail.errors import DataError, DecodeError, UsageError
from vitrail.ranges import EpochCount, Positive, Range, checked
from vitrail.recipes.asked import Asked
from vitrail.verbs.data.outputs import output_files
from vitrail.verbs.flags.keywords import TrialKeywords
from vitrail.words import counted, one_line

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.contact_sheet import ColumnGroup
    from vitrail.data.images.geometry import Op
    from vitrail.data.images.pixels import Pixels
    from vitrail.data.item import IndexedSource
    from vitrail.training.run import Run

ALONE = 2
"""Number of pictures of an augmentation alone."""


@one_line
@dataclass(frozen=True)
class Drawn:
    """What was drawn."""

    written: str
    """The PNG file."""
    images: list[str]
    """Names of the images, from top to bottom."""
    alone: list[str]
    """Augmentations that have columns of their own."""
    augment: dict[str, Any]
    """The settings of the whole augmentation."""
    notes: list[str]
    """What happens to training images besides."""


@checked
def augment(
    path: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    recipe: str | None = None,
    config: tuple[str | Path, ...] = (),
    epochs: EpochCount | None = None,
    lr: Positive | None = None,
    images: Annotated[int, Range(1, 32)] = 4,
    draws: Annotated[int, Range(1, 8)] = 4,
    out: str | Path = "augment.png",
    **settings: Unpack[TrialKeywords],
) -> Drawn:
    """Draw training images as the network sees them: in evaluation, in training, and with each change in words alone.

    The flags are those of `vitrail train`, or with --from those of `vitrail finetune`. So are the recipe and the random
    numbers: the pictures are the images of the first epochs. Then come columns for each change in --augment.also; if
    there is none, for every word that the flag knows. They show the change on every image, whatever its share.

    Args:
        path: The images, in any form that `vitrail train` takes.
        weights: Weights to start from, as for `vitrail finetune` (default: none, as for `vitrail train`).
        recipe: Recipe whose augmentation is drawn (default: the one that training would choose).
        config: A YAML file of settings, such as the config.yaml of a run. May be repeated.
        epochs: Length of the training in epochs, on which a recipe's augmentation may depend.
        lr: Peak learning rate, which changes no picture.
        images: Number of images, evenly spaced among the training images.
        draws: Number of epochs to draw.
        out: The PNG file to write.
        settings: Any field of `Run`.
    """
    from vitrail.data.contact_sheet import write_columns

    (file,) = output_files({".png": (out,)}, [] if path is None else [str(path)])
    assert file is not None
    run, source = _decided(Asked(path, recipe, config, epochs, lr, weights, settings))
    names, groups = _groups(run, source, images, draws)
    title = "Columns with a word show this change alone, on the picture of evaluation. From top to bottom: "
    write_columns(file, title + ", ".join(names), groups)
    return Drawn(str(file), names, [group.title for group in groups[2:]], plain(run.augment), _notes(run))


def _decided(asked: Asked) -> tuple[Run, IndexedSource]:
    """Return the run as training would decide it, and its training images."""
    from vitrail.recipes.decide import decide
    from vitrail.recipes.known import Known
    from vitrail.training.decide import decide as decide_all
    from vitrail.training.facts import Facts

    known = Known()
    choice = decide(asked, known, tunes=asked.weights is not None)
    splits = known.splits_of(choice.run)
    return decide_all(choice.run, Facts.of(choice.run, splits.train, splits.class_names)).run, splits.train


def _groups(run: Run, source: IndexedSource, images: int, draws: int) -> tuple[list[str], list[ColumnGroup]]:
    """Return the names of the images that are drawn, and their pictures."""
    import numpy as np

    from vitrail.data.contact_sheet import ColumnGroup
    from vitrail.data.images.geometry import Compose
    from vitrail.data.images.native import picture
    from vitrail.data.images.ops import shown_transform, train_transform
    from vitrail.data.images.worded import operation
    from vitrail.data.loading.order import stream
    from vitrail.training.batches import loaded

    preprocess = loaded(run)
    seen, trained = shown_transform(preprocess), train_transform(run.augment, preprocess)
    chosen, pixels = _readable(source, images, seen.pixels), seen.pixels

    def drawn(transform: Op, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        made = transform(image, rng)
        return pixels.shown(picture(made) if transform is trained and preprocess.resize == "native" else made)

    def columns(transform: Op, epochs: int) -> list[list[np.ndarray]]:
        return [
            [drawn(transform, image, stream(run.seed, epoch, index)) for index, image in chosen.items()]
            for epoch in range(epochs)
        ]

    groups = [
        ColumnGroup("evaluation", "", columns(seen, 1)),
        ColumnGroup("training", f"the first {counted(draws, 'epoch')}", columns(trained, draws)),
    ]
    for one in run.augment.worded or map(Worded.of, vocabulary()):
        try:
            op = operation(replace(one, share=1.0), preprocess, pixels)
        except UsageError:  # such images cannot have the word, and it was not asked for
            continue
        first, *others = columns(Compose((seen, op), pixels), ALONE)
        differing = [other for other in others if not all(map(np.array_equal, first, other))]
        note = "" if one.share == 1 else f"{one.share:.0%} of images"
        groups.append(ColumnGroup(one.text, note, [first, *differing]))
    return [source.id(index) for index in chosen], groups


def _readable(source: IndexedSource, count: int, pixels: Pixels) -> dict[int, np.ndarray]:
    """Return evenly spaced images by their index, each the next one that can be read. Raises DataError for none."""
    found: dict[int, np.ndarray] = {}
    for place in range(min(count, len(source))):
        for index in range(place * len(source) // count, len(source)):
            try:
                found.setdefault(index, pixels.read(source[index].image))
                break
            except DecodeError:
                continue
    if not found:
        raise DataError("none of the images can be read. `vitrail data check` says why")
    return found


def _notes(run: Run) -> list[str]:
    """Return what happens to training images besides what is drawn."""
    from vitrail.objective.settings import DINO

    mixing = [name for name in ("mixup", "cutmix") if getattr(run.augment, name)]
    notes = [f"{' and '.join(mixing)} then mix the images of a batch, which is not drawn"] if mixing else []
    if isinstance(run.objective, DINO):
        notes.append(f"objective {run.objective.kind} then cuts crops from these images, which is not drawn")
    return notes


def show(result: Drawn) -> str:
    """Return the result as text for a terminal."""
    return "\n".join(
        [f"{counted(len(result.images), 'image')}, each in a row, written to {result.written}", *result.notes]
    )
