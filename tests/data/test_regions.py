"""Regions of splits: the arithmetic of TensorFlow Datasets, written out by hand and in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.benchmarks.vtab_tasks import TASKS, ImageRange, image_range
from vitrail.errors import DataError, UsageError


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        ("train", ImageRange("train", 0, 1000)),
        ("train[:800]", ImageRange("train", 0, 800)),
        ("train[90%:]", ImageRange("train", 900, 1000)),
        ("train[-10%:]", ImageRange("train", 900, 1000)),
        ("train[10:-5]", ImageRange("train", 10, 995)),
        ("train[20:10]", ImageRange("train", 20, 20)),
        ("train[90%:][:20]", ImageRange("train", 900, 920)),
        ("train[50%:][50%:]", ImageRange("train", 750, 1000)),
        # ties go to the even number, as Python's round, which the library uses: 5 % and 15 % of 10 are 0.5 and 1.5
        ("ten[5%:15%]", ImageRange("ten", 0, 2)),
        ("three[33%:]", ImageRange("three", 1, 3)),
    ],
)
def test_regions_by_hand(region: str, expected: ImageRange) -> None:
    assert image_range(region, {"train": 1000, "test": 30, "ten": 10, "three": 3}) == expected


@given(count=st.integers(1, 10**7), percent=st.integers(0, 100))
def test_a_percentage_is_the_nearest_image(count: int, percent: int) -> None:
    first, rest = image_range(f"a[:{percent}%]", {"a": count}), image_range(f"a[{percent}%:]", {"a": count})
    assert (first.start, rest.stop) == (0, count) and first.stop == rest.start  # nothing lost, nothing twice
    assert abs(100 * first.stop - percent * count) <= 50


@pytest.mark.parametrize("region", ["train[:801]", "train[-801:]", "train[90%:][:81]", "train[:101%]"])
def test_more_images_than_there_are_is_another_data_set(region: str) -> None:
    with pytest.raises(DataError, match="needs more images"):
        image_range(region, {"train": 800})


@pytest.mark.parametrize(
    "region", ["", "train[", "train[800]", "train[a:b]", "train[:8]x", "train[1:2:3]", "tr ain", "train+test"]
)
def test_what_is_no_region_is_refused(region: str) -> None:
    with pytest.raises(UsageError, match="is not a part of a split"):
        image_range(region, {"train": 800})


def test_a_split_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"there are train, test\. Did you mean 'train'"):
        image_range("trian[:5]", {"train": 800, "test": 3})


# the benchmark's regions, on the data sets' published sizes

# 800 and 200 images and the test set: (split, first) and numbers, from the benchmark's code, whose cuts are
# 90 * count // 100 and the like
EXPECTED = {
    "caltech101": (("train", 2_754), ("test", 0)),
    "cifar100": (("train", 45_000), ("test", 0)),
    "dtd": (("validation", 0), ("test", 0)),
    "flowers102": (("validation", 0), ("test", 0)),
    "pets": (("train", 2_944), ("test", 0)),
    "sun397": (("validation", 0), ("test", 0)),
    "svhn": (("train", 65_931), ("test", 0)),
    "camelyon": (("validation", 0), ("test", 0)),
    "eurosat": (("train", 16_200), ("train", 21_600)),
    "resisc45": (("train", 18_900), ("train", 25_200)),
    "retinopathy": (("validation", 0), ("test", 0)),
    "clevr-count": (("train", 63_000), ("validation", 0)),
    "clevr-distance": (("train", 63_000), ("validation", 0)),
    "dmlab": (("validation", 0), ("test", 0)),
    "dsprites-location": (("train", 589_824), ("train", 663_552)),
    "dsprites-orientation": (("train", 589_824), ("train", 663_552)),
    "kitti-distance": (("validation", 0), ("test", 0)),
    "smallnorb-azimuth": (("test", 0), ("test", 12_150)),
    "smallnorb-elevation": (("test", 0), ("test", 12_150)),
}


def test_every_task_has_its_regions() -> None:
    assert set(EXPECTED) == set(TASKS)


@pytest.mark.parametrize("name", EXPECTED)
def test_regions_of_a_task(name: str) -> None:
    task, (validation, test) = TASKS[name], EXPECTED[name]
    counts = CATALOG[task.dataset].splits
    found = {split: image_range(region, counts) for split, region in task.regions.items()}
    assert found["train800"] == ImageRange("train", 0, 800)
    assert found["val200"] == ImageRange(validation[0], validation[1], validation[1] + 200)
    assert found["test"] == ImageRange(*test, test[1] + task.test_images)
    assert found["test"].stop == counts[test[0]]
    images = [(r.split, i) for r in found.values() for i in (r.start, r.stop - 1)]
    assert len(set(images)) == 6  # the parts do not touch
