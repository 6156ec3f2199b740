"""All 18 rows of Table 6 against the published exaFLOPs, and against MACs in closed form."""

from __future__ import annotations

import closed_form
import pytest

from vitrail.costs.estimate import JFT_IMAGES, ROWS, Table6Row
from vitrail.costs.published import published_table
from vitrail.model.variants import variant


def tolerance(name: str) -> float:
    """How far the published figures are from their own convention, by family."""
    if name == "ViT-B/32":
        return 0.025
    return 0.01 if name.startswith("ViT") else 0.05 if name.startswith("ResNet") else 0.035


def test_the_rows_are_the_papers() -> None:
    theirs = [(row[0], row[1], row[-1]) for row in published_table("table6_scaling")["rows"]]
    assert [(row.name, row.epochs, row.published) for row in ROWS] == theirs


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.epochs}")
def test_exaflops(row: Table6Row) -> None:
    assert abs(row.difference) <= tolerance(row.name)
    assert row.exaflops == pytest.approx(row.published, rel=tolerance(row.name))


@pytest.mark.parametrize("row", [row for row in ROWS if row.epochs == 7], ids=lambda row: row.name)
def test_exaflops_in_closed_form(row: Table6Row) -> None:
    """2 FLOPs a MAC, 3 forward passes, 303 million images an epoch (protocols, 3.6)."""
    macs = closed_form.macs(variant(row.variant, classes=0))
    assert 2 * macs * 3 * row.epochs * JFT_IMAGES / 1e18 == pytest.approx(row.exaflops, rel=1e-9)
