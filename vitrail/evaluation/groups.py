"""Accuracy by groups of classes: dogs and cars, common and rare, whatever a CSV says belongs together."""

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
    """How well the classes of one group are recognised."""

    name: str
    classes: int
    """Classes of the group with images."""
    count: int
    """Labelled images."""
    top1: float
    """Share of the images whose best class is right."""
    top5: float
    class_mean: float
    """Mean over the classes of their top-1, each class counting the same."""


def read_groups(path: Path) -> dict[str, str]:
    """Read a CSV with the columns class and group: class -> group.

    Raises DataError for a file without these columns, or with a class in two groups.
    """
    groups: dict[str, str] = {}
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = {name.strip().lower(): name for name in reader.fieldnames or ()}
            if not {"class", "group"} <= columns.keys():
                there = ", ".join(columns) or "none"
                raise DataError(f"{path} has the columns {there}; groups are a CSV with the columns class and group")
            for row in reader:
                one, its = ((row[columns[name]] or "").strip() for name in ("class", "group"))
                if not one or not its:
                    continue
                if groups.setdefault(one, its) != its:
                    raise DataError(f"{path} puts class {one!r} into two groups: {groups[one]!r} and {its!r}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; groups are a CSV: class,group") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a readable CSV: {error}") from error
    return groups


def misfits(groups: Mapping[str, str], class_names: Sequence[str]) -> list[str]:
    """Return which classes are in no group and which of the groups' are not here, as sentences.

    Raises DataError where no class of `groups` is here.
    """
    alone = [name for name in class_names if name not in groups]
    strangers = sorted(groups.keys() - set(class_names))
    if len(alone) == len(class_names):
        near = did_you_mean(strangers[0], class_names) if strangers else ""
        example = f"{strangers[0]!r} is none of them" if strangers else "it names no class"
        raise DataError(f"the groups are of other classes than the {len(class_names):,} here: {example}.{near}")
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
            seen = accuracy[members & (counts > 0)]
            shares = (float(found.correct[images].mean()), float(among5[images].mean()), float(seen.mean()))
            means.append(Group(group, len(seen), int(images.sum()), *shares))
    return means
