"""Accuracy by groups of classes, such as animals and vehicles, or common and rare. A CSV file defines the groups."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.data.spreadsheet import unescape_formula
from vitrail.errors import DataError, did_you_mean
from vitrail.evaluation.classify import Classification

FORMAT = "A file of groups is a CSV with the columns class and group."


@dataclass(frozen=True)
class GroupAccuracy:
    """Accuracy on the classes of one group."""

    name: str
    classes: int
    """Number of classes of the group that have images."""
    count: int
    """Number of labelled images."""
    top1: float
    """Share of the images whose best class is correct."""
    top5: float
    """Share of the images whose class is among the five best."""
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
                raise DataError(f"{path} has the columns {', '.join(columns) or 'none'}. {FORMAT}")
            for row in reader:
                cells = (row[columns[column]] or "" for column in ("class", "group"))
                name, group = (unescape_formula(cell.strip(" ")).strip() for cell in cells)
                if name and group and groups.setdefault(name, group) != group:
                    both = f"{groups[name]!r} and {group!r}"
                    raise DataError(f"{path} puts class {name!r} into two groups: {both}. Give it one group.")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {FORMAT}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a readable CSV: {error}. {FORMAT}") from error
    return groups


def group_warnings(groups: Mapping[str, str], class_names: Sequence[str]) -> list[str]:
    """Return warnings about classes without a group, and about names in `groups` that are not classes.

    Raises DataError if none of the names is a class.
    """
    ungrouped = [name for name in class_names if name not in groups]
    unknown = sorted(groups.keys() - set(class_names))
    if len(ungrouped) == len(class_names):
        example = f" It names {unknown[0]!r}.{did_you_mean(unknown[0], class_names)}" if unknown else " It is empty."
        raise DataError(f"The file of groups names none of the {len(class_names):,} classes.{example}")
    warnings = []
    if ungrouped:
        warnings.append(f"classes in no group: {len(ungrouped):,}, such as {ungrouped[0]!r}")
    if unknown:
        warnings.append(f"names in the file of groups that are not classes: {len(unknown):,}, such as {unknown[0]!r}")
    return warnings


def group_accuracies(evaluation: Classification, groups: Mapping[str, str]) -> list[GroupAccuracy]:
    """Return the accuracy of each group that has images, in the order in which `groups` names them first."""
    accuracy, counts = evaluation.class_accuracy, evaluation.class_count
    rows = []
    for group in dict.fromkeys(groups.values()):
        members = np.array([groups.get(name) == group for name in evaluation.class_names])
        images = evaluation.known & members[evaluation.label]
        if images.any():
            per_class = accuracy[members & (counts > 0)]
            parts = (evaluation.correct[images], evaluation.among_best[images], per_class)
            shares = [float(part.mean()) for part in parts]
            rows.append(GroupAccuracy(group, len(per_class), int(images.sum()), *shares))
    return rows
