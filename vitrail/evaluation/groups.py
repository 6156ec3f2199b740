"""Accuracy by groups of classes, such as animals and vehicles, or common and rare. A CSV file defines the groups."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.errors import DataError, did_you_mean
from vitrail.evaluation.classify import Classification


@dataclass(frozen=True)
class Group:
    """Accuracy on the classes of one group."""

    name: str
    classes: int
    """Number of classes of the group that have images."""
    count: int
    """Number of labelled images."""
    top1: float
    """Share of the images whose best class is correct."""
    top5: float
    class_mean: float
    """Mean of the top-1 accuracies of the classes, with equal weight for each class."""


def read_groups(path: Path) -> dict[str, str]:
    """Read a CSV with the columns class and group, and return class -> group.

    Raises DataError for a file without these columns, or with a class in two groups.
    """
    groups: dict[str, str] = {}
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = {name.strip().lower(): name for name in reader.fieldnames or ()}
            if not {"class", "group"} <= columns.keys():
                there = ", ".join(columns) or "none"
                raise DataError(
                    f"{path} has the columns {there}. A file of groups is a CSV with the columns class and group"
                )
            for row in reader:
                one, its = ((row[columns[name]] or "").strip() for name in ("class", "group"))
                if not one or not its:
                    continue
                if groups.setdefault(one, its) != its:
                    raise DataError(f"{path} puts class {one!r} into two groups: {groups[one]!r} and {its!r}")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. A file of groups is a CSV with the columns class and group"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a readable CSV: {error}") from error
    return groups


def misfits(groups: Mapping[str, str], class_names: Sequence[str]) -> list[str]:
    """Return sentences about classes that are in no group, and about classes of the groups that do not exist.

    Raises DataError if `class_names` has no class of `groups`.
    """
    alone = [name for name in class_names if name not in groups]
    strangers = sorted(groups.keys() - set(class_names))
    if len(alone) == len(class_names):
        near = did_you_mean(strangers[0], class_names) if strangers else ""
        example = f"{strangers[0]!r} is none of them" if strangers else "it names no class"
        raise DataError(f"the file of groups has none of the {len(class_names):,} classes: {example}.{near}")
    notes = []
    if alone:
        notes.append(f"classes in no group: {len(alone):,}, the first of them {alone[0]!r}")
    if strangers:
        notes.append(f"classes of the groups that are not here: {len(strangers):,}, the first of them {strangers[0]!r}")
    return notes


def group_means(found: Classification, groups: Mapping[str, str]) -> list[Group]:
    """Return the groups that have images, in the order in which `groups` names them first."""
    accuracy, counts = found.class_accuracy, found.class_count
    among5 = found.known & (found.top == found.label[:, None]).any(axis=1)
    means = []
    for group in dict.fromkeys(groups.values()):
        members = np.array([groups.get(name) == group for name in found.class_names])
        images = found.known & members[found.label]
        if images.any():
            per_class = accuracy[members & (counts > 0)]
            shares = (float(found.correct[images].mean()), float(among5[images].mean()), float(per_class.mean()))
            means.append(Group(group, len(per_class), int(images.sum()), *shares))
    return means
