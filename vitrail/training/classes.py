"""The classes of a pretrained network that gets others (`Run.classes`): which rows of its classifier are kept.

Classes are known by their names. With add, merge and remove, a class that the weights know keeps its row of the
classifier, bit for bit. The other rows begin like this:

* A new class begins as the mean of all rows. Its logit is the mean of the logits, which is near zero in a network that
  learned softmax, and it is never the largest one: at first the network predicts what it predicted. It is also that of
  a class which is as little like an image as the others, so the first images of the class change it at once. A row of
  zeros would do neither, because softmax does not say where the logits of other weights lie.
* A merged class should be as probable as its parts together, so its logit should be the logarithm of the sum of their
  exponentials. No single row gives that. It begins as the mean of the rows plus the logarithm of their number, the
  tangent at equal logits, and `fit_merged` adds what brings it nearest on training images (ridge regression).

Where the images lack classes that stay, the network unlearns them. Against that it learns from the weights that it
starts from, too ("Learning without forgetting", Li and Hoiem 2016): they are its teacher (`Run.teacher`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.item import UNKNOWN, Concatenated, IndexedSource, Relabelled, Subset, ids, is_number
from vitrail.data.labels.sets import class_counts, one_label
from vitrail.data.roles import Splits
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError, UsageError, VitrailError, did_you_mean
from vitrail.model.layers import zero_linear
from vitrail.model.own_part import own_parts
from vitrail.objective.settings import Supervised
from vitrail.tasks.catalog import task_for
from vitrail.tasks.classes import NEW, OLD
from vitrail.training.recorded import held_out, recorded_fingerprint, recorded_run, recorded_splits
from vitrail.training.run import Run
from vitrail.weights.card import Card
from vitrail.weights.load import read_card
from vitrail.words import listing


@dataclass(frozen=True)
class ClassChange:
    """What becomes of the classes of a network."""

    rows: list[list[int]]
    """For each class, the rows of the weights' classifier that it begins with: none for a new class, one for a class
    that is kept, several for a merged one."""
    splits: Splits
    """The images with their labels among these classes. Images of removed classes are left out."""
    unseen: list[str]
    """Names of the classes that the weights know and no training image has."""
    told: str
    """What is done, in words."""
    about: list[str]
    """The part of `told` that is about the validation images."""

    @property
    def unlike(self) -> list[int]:
        """The new and the merged classes, whose row is none of the weights."""
        return [place for place, rows in enumerate(self.rows) if len(rows) != 1]

    def accuracy(self, count: np.ndarray, correct: np.ndarray) -> dict[str, float]:
        """Return `OLD` and `NEW`, each if there are such classes with images.

        count, correct: Number of images of each class, and of those that are right, int64 [classes].
        """
        old = np.array([len(rows) == 1 for rows in self.rows])
        parts = {OLD: old, NEW: ~old} if not old.all() else {}
        return {name: float(correct[of].sum() / count[of].sum()) for name, of in parts.items() if count[of].any()}


def known_classes(run: Run) -> list[str]:
    """Return the classes of the weights if `run` keeps some. Raises WeightsError."""
    return list(read_card(run.weights).class_names) if run.keeps_classes and run.weights else []


def splits_of(run: Run) -> Splits:
    """Return the images of `run`, with the labels that it learns. Raises as `open_data` and `change_classes` do."""
    splits = open_data(run.data, seed=run.seed, labels=run.supervised, known_classes=known_classes(run))
    return splits if not run.keeps_classes else change_classes(run, splits).splits


def change_classes(run: Run, splits: Splits) -> ClassChange:
    """Return what `run.classes` makes of the classes of its weights and of its images.

    splits: From `open_data` with `known_classes`. Raises UsageError for classes that do not go together.
    """
    card = _card(run, splits)
    (kind, *words), old = run.classes, list(card.class_names)
    counts = class_counts(splits.train.labels, len(splits.class_names))
    seen = [name for name, count in zip(splits.class_names, counts, strict=True) if count]
    new = [name for name in seen if name not in old]
    meant = {name: name for name in [*old, *splits.class_names]}
    if kind == "merge":
        meant |= _pairs(words, old)
        if len({meant[name] for name in old}) < 2:
            raise UsageError(
                f"--classes merge makes one class, {meant[old[0]]!r}, of all {len(old)} classes of {run.weights}. At "
                "least two must stay: merge fewer"
            )
        if wrong := [name for name in new if name not in {meant[one] for one in old}]:
            raise UsageError(
                f"--classes merge: {run.data.path} has images of {listing(wrong)}, which {run.weights} does not know. "
                "Add these classes first, with --classes add, or leave out their images"
            )
    elif kind == "remove":
        meant = {name: name for name in _remaining(run, words, old, seen)}
    elif words:
        raise UsageError(
            f"--classes add takes no names, and {listing(words)} follows: the classes of the images are added. Write "
            "the folder of the images in front of --classes"
        )
    names = list(dict.fromkeys([meant[name] for name in old if name in meant]))
    names += new if kind == "add" else []
    rows = [[row for row, one in enumerate(old) if meant.get(one) == name] for name in names]
    changed = _relabelled(splits, names, meant)
    there = class_counts(changed.train.labels, len(names))
    unseen = [name for name, row, count in zip(names, rows, there, strict=True) if row and not count]
    known = [name for name, row in zip(names, rows, strict=True) if row]
    earlier, about = _earlier_images(run, changed, known, meant)
    told = [f"{kind}: {sum(len(row) == 1 for row in rows)} of the {len(old)} classes of {run.weights} keep their rows"]
    told += [f"{_some(new)} are new"] * bool(kind == "add" and new)
    parts = {name: [old[row] for row in row] for name, row in zip(names, rows, strict=True)}
    told += [f"{name!r} is {' + '.join(map(repr, of))}" for name, of in parts.items() if of not in ([], [name])]
    told += [f"without {listing([name for name in old if name not in meant])}"] * (kind == "remove")
    left = len(splits.train) - len(changed.train)
    told += [f"{left} training images of removed classes are left out"] * bool(left)
    told += [f"no training image shows {_some(unseen)}"] * bool(unseen)
    return ClassChange(rows, replace(changed, validation=earlier), unseen, "; ".join([*told, *about]), about)


def _card(run: Run, splits: Splits) -> Card:
    """Return the card of the weights. Raises UsageError unless its classes can be changed by name."""
    asked = f"--classes {run.classes[0]} keeps classes of the starting weights"
    if run.weights is None:
        raise UsageError(f"{asked}. Name the weights with --from RUN")
    card = read_card(run.weights)
    if task_for(splits.train.labels).name != "classes" or card.task != "classes" or not isinstance(
        run.objective, Supervised
    ):  # fmt: skip
        raise UsageError(
            f"{asked}, with one class for each image, and {run.weights} predicts {card.task} and learns "
            f"{task_for(splits.train.labels).name} here. Leave --classes out: the classifier is then replaced"
        )
    if not card.class_names:
        raise UsageError(
            f"{asked} by their names, and {run.weights} has no class names. Give a network that vitrail trained, or "
            "leave --classes out: the classifier is then replaced"
        )
    if own_parts(card.config).get("head") or run.vit.head is not None:
        raise UsageError(f"{asked}: rows of a linear classifier, and this one is your own. Leave --classes out")
    if run.keep_head or run.probe_head:
        flag = "--no-keep-head" if run.keep_head else "--no-probe-head"
        raise UsageError(f"{asked} and begins with their rows: use {flag}, or leave --classes out")
    return card


def _pairs(words: Sequence[str], old: Sequence[str]) -> dict[str, str]:
    """Return the class of the weights -> its new name, of words such as wolf=dog. Raises UsageError."""
    found: dict[str, str] = {}
    for word in words:
        cuts = [place for place, letter in enumerate(word) if letter == "="]  # a name may contain it, too
        name = next((word[:cut] for cut in cuts if word[:cut] in old and word[cut + 1 :]), None)
        if name is None:
            raise UsageError(
                f"--classes merge: {word!r} does not say which class becomes which. Write OLD=NEW, where OLD is a "
                f"class of the weights.{did_you_mean(word.partition('=')[0], old)} Known: {listing(old)}"
            )
        if name in found:
            raise UsageError(f"--classes merge: {name!r} gets two names. Give each class one")
        found[name] = word[len(name) + 1 :]
    if not found:
        raise UsageError("--classes merge says which classes become which: --classes merge wolf=dog fox=dog")
    return found


def _remaining(run: Run, words: Sequence[str], old: Sequence[str], seen: Sequence[str]) -> list[str]:
    """Return the classes of the weights that are left. Raises UsageError."""
    if unknown := [name for name in words if name not in old]:
        raise UsageError(
            f"--classes remove: {run.weights} has no class {unknown[0]!r}.{did_you_mean(unknown[0], old)} "
            f"Known: {listing(old)}"
        )
    if not set(seen) & set(old):
        raise UsageError(
            f"--classes remove: none of the classes of {run.data.path} ({listing(seen)}) is one of {run.weights} "
            f"({listing(old)}). Leave --classes out: the classifier is then replaced"
        )
    if new := [name for name in seen if name not in old]:
        raise UsageError(
            f"--classes remove: {run.data.path} has images of {listing(new)}, which {run.weights} does not know. Leave "
            "out these images, or add these classes with --classes add"
        )
    left = [name for name in old if (name not in words if words else name in seen)]
    if not 2 <= len(left) < len(old):
        raise UsageError(
            f"--classes remove leaves {len(left)} of the {len(old)} classes of {run.weights}; at least one must "
            f"go, and two must stay. Name those to remove, such as --classes remove {old[-1]}"
        )
    return left


def _relabelled(splits: Splits, names: list[str], meant: dict[str, str]) -> Splits:
    """Return the splits with the classes `names`; `meant` has the new name of each class that stays."""
    position = {name: place for place, name in enumerate(names)}
    places = np.array([position.get(meant.get(name, ""), UNKNOWN) for name in splits.class_names])

    def changed(source: IndexedSource) -> IndexedSource:
        found = Relabelled(source, names, places)
        if not len(found):
            raise DataError("no image of the classes that stay is left")
        return found

    held = [None if part is None else changed(part) for part in (splits.validation, splits.test)]
    return replace(splits, train=changed(splits.train), validation=held[0], test=held[1], class_names=list(names))


def _earlier_images(
    run: Run, splits: Splits, old: Sequence[str], meant: Mapping[str, str]
) -> tuple[IndexedSource | None, list[str]]:
    """Return the validation images, where those of the weights' own run stand for the classes of `old`, if necessary.

    They do for classes that have none, because without them the best model would be the one that has forgotten most,
    and for all if the validation images were held out of the training images: the weights may have learned from these,
    and then they favour the start. meant: Class of the weights -> its name here. The second value says which they are,
    or why there are none.
    """
    ours, names = splits.validation, splits.class_names
    if ours is None:
        return None, []
    counts = class_counts(ours.labels, len(names))
    drawn = "ids" in splits.held_out
    wanted = [name for name, count in zip(names, counts, strict=True) if name in old and (drawn or not count)]
    if not wanted:
        return ours, []
    images, shown, told, about, why = ours, set[str](), list[str](), list[str](), ""
    try:
        found, about = _validation_of(run)
    except VitrailError as error:
        why = f", and {str(error).partition('. ')[0]}"
    else:
        position = {name: place for place, name in enumerate(names) if name in wanted}
        places = np.array([position.get(meant.get(name, ""), UNKNOWN) for name in found.class_names])
        every = Relabelled(found, names, places)
        theirs = Subset(every, np.flatnonzero((every.labels != UNKNOWN) & ~_among(every, splits.train)))
        of_ours, of_theirs = (one_label(part.labels, "a change of classes") for part in (ours, theirs))
        shown = {names[label] for label in of_theirs}
        new = Subset(ours, np.flatnonzero(~np.isin(of_ours, of_theirs)))
        images = Concatenated({name: part for name, part in (("new", new), ("old", theirs)) if len(part)})
        some = _some([name for name in wanted if name in shown])
        by = f"are those by which {run.weights} was chosen"
        told += [f"{len(theirs)} validation images, of {some}, {by}"] * bool(shown)
    if lacking := [name for name in wanted if name not in shown and not counts[names.index(name)]]:
        line = f"the accuracy on {_some(lacking)} is not measured: no validation image shows them"
        told += [line + why] * (not any(one.startswith(line) for one in about))
    if len(shown) + len(lacking) < len(wanted):
        told.append(f"if {run.weights} learned from the images of old classes, those held out for validation favour it")
    return images, [*told, *about]


def _among(images: IndexedSource, others: IndexedSource) -> np.ndarray:
    """Return which images are among `others`, bool [N]: with the same id and the same content."""
    place = {name: row for row, name in enumerate(ids(others, np.arange(len(others))))}
    there = [place.get(name) for name in ids(images, np.arange(len(images)))]
    same = [at is not None and np.array_equal(images[row].image, others[at].image) for row, at in enumerate(there)]
    return np.array(same, dtype=bool)


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} classes ({listing(names, 3)})" if len(names) > 3 else listing(names)


def _validation_of(run: Run) -> tuple[IndexedSource, list[str]]:
    """Return the validation images of the run in `run.weights`, and what has changed. Raises VitrailError without any.

    Those that it held out are known by their names. Raises DataError if their names are only numbers, and the images
    have changed.
    """
    assert run.weights is not None
    folder, earlier = Path(run.weights), None
    with suppress(UsageError):  # settings of the user's own, or of a later version
        earlier = recorded_run(folder)
    if earlier is None:
        raise DataError(f"{folder} is not a run folder, which names its images")
    found, notes = recorded_splits(folder, earlier, earlier.data, known_classes(earlier), labels=earlier.supervised)
    held = held_out(folder).get("ids") or []
    unnamed = not held or any(is_number(str(name)) for name in held)
    if unnamed and (held or "ids" in found.held_out) and recorded_fingerprint(folder) != found.fingerprint:
        raise DataError(f"{earlier.data.path} has changed since it was trained on")
    if earlier.keeps_classes:
        change = change_classes(earlier, found)
        found, notes = change.splits, [*notes, *change.about]
    if found.validation is None:
        raise DataError(f"{earlier.data.path} has no validation images")
    return found.validation, [note.removeprefix("warning: ") for note in notes]


def with_classes(run: Run, splits: Splits) -> tuple[Run, Splits, ClassChange | None]:
    """Return run and images with the classes that the run learns, and what becomes of those of its weights, if any.

    If no training image shows some that stay, the weights become the teacher of the run (see the module). Raises what
    `change_classes` raises.
    """
    if not run.keeps_classes:
        return run, splits, None
    change = change_classes(run, splits)
    if change.unseen and run.teacher is None and run.distill.weight:
        run = replace(run, teacher=run.weights)
    return run, change.splits, change


def teacher_columns(run: Run, theirs: Sequence[str], ours: Sequence[str]) -> list[list[int]]:
    """Return `Teacher.columns` of a teacher with the classes `theirs` for a run with the classes `ours`.

    Raises UsageError if no class is in both.
    """
    renamed = _pairs(run.classes[1:], known_classes(run)) if run.classes[0] == "merge" else {}
    columns = [[place for place, one in enumerate(theirs) if renamed.get(one, one) == name] for name in ours]
    if not any(columns):
        raise UsageError(
            f"the teacher {run.teacher} knows none of the classes {listing(ours)}. Give another teacher, or learn its "
            "features: distill.kind features"
        )
    return columns


@torch.no_grad()
def with_rows(model: Any, rows: Sequence[Sequence[int]]) -> None:
    """Give a network that has the classifier of its weights one of these rows, in place (see `ClassChange.rows`)."""
    for name in ("head", "head_dist"):
        if (head := getattr(model, name, None)) is not None:
            every = torch.cat([head.weight, head.bias[:, None]], 1)
            made = torch.stack([_row(every, one) for one in rows])
            changed = zero_linear(head.in_features, len(rows), head.weight)
            changed.weight.copy_(made[:, :-1])
            changed.bias.copy_(made[:, -1])
            setattr(model, name, changed)
    model.config = replace(model.config, classes=len(rows))


def _row(every: Tensor, rows: Sequence[int]) -> Tensor:
    """Return weights and bias, [width + 1], of a class that begins with some of `every` row (see the module)."""
    if len(rows) == 1:
        return every[rows[0]]
    found = every[list(rows)].mean(0) if rows else every.mean(0)
    found[-1] += math.log(max(len(rows), 1))
    return found
