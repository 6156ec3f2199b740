"""The catalogue against what the papers print."""

from __future__ import annotations

import pytest

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.sources.open import open_path
from vitrail.errors import DataError

# "Three things", Table 9: images to train on, to test on, classes
TRANSFER = {
    "inaturalist2018": (437_513, 24_426, 8_142),
    "inaturalist2019": (265_240, 3_003, 1_010),
    "flowers102": (2_040, 6_149, 102),
    "cars": (8_144, 8_041, 196),
    "cifar100": (50_000, 10_000, 100),
    "cifar10": (50_000, 10_000, 10),
    "imagenet": (1_281_167, 50_000, 1_000),
}


@pytest.mark.parametrize("name", TRANSFER)
def test_the_follow_ups_transfer_sets(name: str) -> None:
    entry = CATALOG[name]
    test = "test" if "test" in entry.splits else "validation"
    train = sum(count for split, count in entry.splits.items() if split != test)
    assert (train, entry.splits[test], entry.classes) == TRANSFER[name]


def test_what_is_not_on_the_hub_says_where_it_is() -> None:
    with pytest.raises(DataError, match=r"not on the hub.*visipedia/inat_comp/tree/master/2019"):
        open_path("inaturalist2019")
