from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vitrail.errors import DataError
from vitrail.evaluation.classify import Classification
from vitrail.evaluation.groups import group_accuracies, group_warnings, read_groups

NAMES = ["ant", "bee", "car", "bus", "fog", "ice"]
GROUPS = {"car": "vehicle", "ant": "insect", "bus": "vehicle", "bee": "insect", "ice": "weather"}


def answers(images: int = 80) -> Classification:
    """Made-up answers; no image is of ice, and one in ten has no label."""
    rng = np.random.default_rng(0)
    label = np.where(rng.random(images) < 0.1, -1, rng.integers(0, 5, images))
    top = np.argsort(rng.random((images, 6)), axis=1)[:, :5]
    top[::2, 0] = label[::2]
    nothing = np.full(images, np.nan)
    return Classification(NAMES, np.arange(images), label, top, nothing[:, None], nothing, nothing)


def test_means_of_groups_are_those_of_their_images_and_classes() -> None:
    found = answers()
    insect, vehicle = sorted(group_accuracies(found, GROUPS), key=lambda group: group.name)
    for group, members in ((insect, (0, 1)), (vehicle, (2, 3))):
        rows = [i for i in range(80) if found.label[i] in members]
        first = [found.top[i, 0] == found.label[i] for i in rows]
        assert (group.count, group.classes) == (len(rows), 2)
        assert group.top1 == pytest.approx(np.mean(first))
        assert group.top5 == pytest.approx(np.mean([found.label[i] in found.top[i] for i in rows]))
        each = [np.mean([found.top[i, 0] == k for i in rows if found.label[i] == k]) for k in members]
        assert group.class_mean == pytest.approx(np.mean(each))
    # in the order of the file, without the group that has no images
    assert [group.name for group in group_accuracies(found, GROUPS)] == ["vehicle", "insect"]


def test_what_does_not_fit_is_said() -> None:
    assert group_warnings(GROUPS, NAMES) == ["classes in no group: 1, such as 'fog'"]
    assert group_warnings({**GROUPS, "fog": "weather", "tar": "street"}, NAMES) == [
        "names in the file of groups that are not classes: 1, such as 'tar'"
    ]
    with pytest.raises(DataError, match=r"names none of the 6 classes. It names 'Ant'. Did you mean 'ant'"):
        group_warnings({"Ant": "insect"}, NAMES)
    with pytest.raises(DataError, match=r"names none of the 6 classes\. It is empty\."):
        group_warnings({}, NAMES)


def test_groups_are_read_from_a_table(tmp_path: Path) -> None:
    path = tmp_path / "groups.csv"
    path.write_text('\ufeffGroup,note,Class\ninsect,x, ant\ninsect,,bee\n,,\nvehicle,,"car, red"\n', encoding="utf-8")
    assert read_groups(path) == {"ant": "insect", "bee": "insect", "car, red": "vehicle"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name,group\nant,insect\n",
            "has the columns name, group. A file of groups is a CSV with the columns class and group",
        ),
        ("", "has the columns none"),
        ("class,group\nant,insect\nant,pest\n", "puts class 'ant' into two groups: 'insect' and 'pest'"),
    ],
)
def test_tables_that_are_none_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "groups.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_groups(path)


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.csv cannot be read"):
        read_groups(tmp_path / "no.csv")
