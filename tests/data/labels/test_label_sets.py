"""Sets of labels agree with plain Python lists; stratified splits have each label's share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.item import Concatenated, Subset
from vitrail.data.labels.sets import (
    LabelSets,
    class_counts,
    concatenated,
    named,
    names_of_text,
    one_label,
    order_classes,
    stored_texts,
    translated,
)
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.split import fingerprint, hold_out, stratified, stratified_order, subset
from vitrail.errors import DataError

WIDTH = 5
SETS = st.lists(st.one_of(st.none(), st.lists(st.integers(0, WIDTH - 1), max_size=4)), min_size=1, max_size=12)


def plain(labels: LabelSets) -> list[list[int] | None]:
    return [None if isinstance(one := labels.at(row), int) else one.tolist() for row in range(len(labels))]


@given(SETS, st.data())
def test_sets_are_sorted_lists_without_repeats(sets: list[list[int] | None], data: st.DataObject) -> None:
    labels = LabelSets.of(sets, WIDTH)
    expected = [None if one is None else sorted(set(one)) for one in sets]
    assert plain(labels) == expected
    rows = data.draw(st.lists(st.integers(0, len(sets) - 1), max_size=8))
    assert plain(labels[np.array(rows, dtype=np.int64)]) == [expected[row] for row in rows]
    assert plain(labels[1:3]) == expected[1:3]
    both = concatenated([labels, labels[np.array(rows, dtype=np.int64)]])
    assert isinstance(both, LabelSets) and plain(both) == [*expected, *(expected[row] for row in rows)]
    marks = labels.marks()
    for row, one in enumerate(expected):
        assert marks[row].tolist() == ([-1] * WIDTH if one is None else [int(k in one) for k in range(WIDTH)])
    assert class_counts(labels, WIDTH).tolist() == [sum(k in (one or []) for one in expected) for k in range(WIDTH)]
    turned = translated(labels, np.array([4, 3, 2, 1, 0]), WIDTH)
    assert plain(turned) == [None if one is None else sorted(4 - k for k in one) for one in expected]


@given(SETS)
def test_labels_survive_as_texts(sets: list[list[int] | None]) -> None:
    names = ["a", "b|c", "", "0", "none"]
    names[2] = "x y"
    texts = stored_texts(LabelSets.of(sets, WIDTH), names)
    values = [None if text == "" else names_of_text(text) for text in texts]
    assert values == [None if one is None else sorted({names[k] for k in one}) for one in sets]


def test_names_that_are_not_classes_are_refused() -> None:
    with pytest.raises(DataError, match="not among the 2 known classes: 'bird'"):
        named([["cat", "bird"]], ["cat", "dog"])
    with pytest.raises(DataError, match=r"knn needs one label for each image.*1\.5 labels per image of 2 classes"):
        one_label(LabelSets.of([[0], [0, 1]], 2), "knn")


def random_sets(count: int, seed: int = 0) -> LabelSets:
    """Labels of very different frequencies that occur together, and images without any."""
    rng = np.random.default_rng(seed)
    share = np.array([0.4, 0.3, 0.1, 0.02, 0.01])
    marks = rng.random((count, 5)) < share
    marks[:, 1] |= marks[:, 2] & (rng.random(count) < 0.8)
    return LabelSets.of_marks(marks)


def source(labels: LabelSets) -> ArraySource:
    return ArraySource("s", np.zeros((len(labels), 2, 2), np.uint8), labels, list("abcde"))


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_each_label_has_its_share_of_the_held_out_images(share: float) -> None:
    labels = random_sets(800)
    train, out = hold_out(source(labels), share, seed=3)
    assert sorted([*train, *out]) == list(range(800)) and abs(len(out) - share * 800) <= 5
    counts, held = class_counts(labels, 5), class_counts(labels[out], 5)
    assert (np.abs(held - share * counts) <= 1.5).all()  # closer than any random draw: that has deviations of about 10
    assert (held >= 1).all() and (counts - held >= 1).all()


def test_a_label_of_two_images_is_in_both_parts() -> None:
    labels = LabelSets.of([[0]] * 30 + [[1, 0]] * 2 + [[2]] + [[]] * 7, 3)
    chosen = stratified(labels, np.arange(40)[::-1].copy(), 0.1)
    assert class_counts(labels[chosen], 3)[1] == 1
    assert abs(int(chosen.sum()) - 4) <= 1


def test_a_split_depends_on_ids_and_not_on_places() -> None:
    labels = random_sets(300)
    whole = source(labels)
    turn = np.random.default_rng(1).permutation(300)
    turned = Subset(whole, turn)
    _, out = hold_out(whole, 0.2, seed=0)
    _, other = hold_out(turned, 0.2, seed=0)
    assert sorted(turn[other].tolist()) == out.tolist()
    assert fingerprint({"": whole}) == fingerprint({"": turned})
    changed = ArraySource(
        "s", np.zeros((300, 2, 2), np.uint8), LabelSets.of_marks(labels.marks()[:, ::-1] == 1), list("abcde")
    )
    assert fingerprint({"": whole}) != fingerprint({"": changed})


def test_subsets_are_nested_and_in_proportion() -> None:
    labels = random_sets(800)
    small, large = subset(source(labels), 100, seed=1), subset(source(labels), 0.5, seed=1)
    assert len(small) == 100 and len(large) == 400 and set(small) < set(large)
    counts = class_counts(labels, 5)
    assert (np.abs(class_counts(labels[large], 5) - counts / 2) <= 2).all()
    assert (np.abs(class_counts(labels[small], 5) - counts / 8) <= 4).all()
    assert sorted(stratified_order(labels, np.arange(800))) == list(range(800))


def test_splits_with_other_classes_are_joined_by_name() -> None:
    first = source(LabelSets.of([[0, 1], []], 5))
    second = ArraySource("t", np.zeros((1, 2, 2), np.uint8), np.array([1]), ["z", "b"])
    both = Concatenated({"x": first, "y": second})
    assert both.class_names == ["a", "b", "c", "d", "e", "z"]
    assert isinstance(both.labels, LabelSets) and plain(both.labels) == [[0, 1], [], [1]]


def test_an_order_of_images_whose_labels_no_other_image_has() -> None:
    """Nothing can be in proportion, so the images are halved by their number."""
    labels = LabelSets.of([[2 * image, 2 * image + 1] for image in range(50)], 100)
    assert sorted(stratified_order(labels, np.arange(50)).tolist()) == list(range(50))
    assert stratified(labels, np.arange(50), 0.5).sum() == 25
    assert not stratified(labels, np.arange(50), 0.1).any()  # training keeps the only image of a label


def test_classes_that_nobody_has_change_no_split() -> None:
    sets = [[image % 3, 3 + image % 5] for image in range(60)]
    few, many = (LabelSets.of(sets, width) for width in (8, 100_000))
    assert stratified(few, np.arange(60), 0.2).tolist() == stratified(many, np.arange(60), 0.2).tolist()


@pytest.mark.parametrize("name", ["--5", "9" * 5000, "-", "\u00b2", "5-5"])
def test_names_that_only_look_like_numbers_are_sorted_as_text(name: str) -> None:
    assert order_classes({name, "10", "9"}) == sorted([name, "10", "9"])
    assert order_classes({"10", "-9", "9"}) == ["-9", "9", "10"]
